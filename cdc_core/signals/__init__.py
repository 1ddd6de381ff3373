"""Signals and notifications in Debezium's formats; `pipelines.channels` receives and sends them."""
