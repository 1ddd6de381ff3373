"""Gold without tables: versions of a document (`versions`), consistent cuts (`cut`), ranges of keys (`key_ranges`)."""
