"""The log of document schemas: what a batch adds to a collection's columns, and the record of it."""
