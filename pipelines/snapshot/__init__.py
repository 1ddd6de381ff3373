"""Snapshots: `snapshot` reads collections in chunks, `queue` runs one snapshot after the other."""
