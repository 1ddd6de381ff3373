"""Spark's session, its settings and its JVM."""
