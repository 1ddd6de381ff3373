"""Snapshots without a server: when a start takes one (`mode`), and how far it is (`state`)."""
