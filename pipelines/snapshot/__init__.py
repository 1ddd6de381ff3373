"""Snapshots: `snapshot` reads a collection in chunks on executors, `queue` has those that wait."""
