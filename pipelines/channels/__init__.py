"""Where signals come from and notifications go to: files, Kafka, Delta tables, the log."""
