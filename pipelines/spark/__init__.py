"""Spark's session, settings and JVM, and the errors that these raise."""
