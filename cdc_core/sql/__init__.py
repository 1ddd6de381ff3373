"""Spark SQL's names, literals, types, and MERGE."""
