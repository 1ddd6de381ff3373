"""Settings files and secrets, read."""
