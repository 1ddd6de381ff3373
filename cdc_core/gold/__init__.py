"""Gold without a table: the versions of a document, and where a cut is consistent. Start at `versions`."""
