"""Suites of expectations: how a file of them is read, and which rows each of them is about."""
