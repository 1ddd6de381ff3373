"""MongoDB's Extended JSON in its dialects: text of a document, and the text that a Debezium connector would write."""
