"""One module a hop: capture, bronze, silver, gold. Layers meet in tables."""
