"""Suites of expectations: `suite` parses their files."""
