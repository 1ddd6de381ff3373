"""Entry points: read arguments and settings, run one pipeline, return an exit code."""
