"""MongoDB Extended JSON in its dialects: the type-exact text of a document, and the texts that Debezium writes."""
