"""SQL models over gold's tables: how a file of one is read, and in which order they are made."""
