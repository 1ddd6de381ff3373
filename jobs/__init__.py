"""Entry points: arguments, then settings, then one pipeline, then an exit code."""
