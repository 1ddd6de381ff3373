"""The source: connections, change streams, and chunks of collections read at a known cluster time."""
