"""Signals and notifications in Debezium's shapes; where they come from and go to is `pipelines.channels`."""
