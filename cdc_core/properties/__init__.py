"""Debezium's options, each with name, type, default and meaning: those of the connector (`source`) and of the SMT (`unwrap`)."""
