"""The channels of signals and notifications: files, Kafka, Delta tables, the log."""
