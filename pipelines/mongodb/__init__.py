"""The source: connections, change streams, and snapshot reads of collections at a known cluster time."""
