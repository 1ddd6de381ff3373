"""Snapshots without a server: when a start takes one (`mode`), and its progress (`state`)."""
