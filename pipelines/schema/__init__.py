"""Document schemas: inferred from batches, kept in `ops/schemas`, and used to type documents."""
