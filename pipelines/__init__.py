"""A package a hop (capture, bronze, silver, gold) and one for each edge. Hops meet in tables, and `run` starts them side by side."""
