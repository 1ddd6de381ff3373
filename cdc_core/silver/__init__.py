"""Silver without a table: one row per key from a batch's events (`reduce`), updates folded onto documents (`fold`), the
MERGE (`merge`).
"""
