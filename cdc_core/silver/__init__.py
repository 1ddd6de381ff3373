"""Silver without a table: one row a key out of a batch's events (`reduce`), updates folded onto documents (`fold`), the MERGE (`merge`)."""
