"""Debezium's options: each one's name, type, default and meaning. `source` has those of a connector, `unwrap` those of the SMT."""
