"""`medallion verify`: the source compared with silver or gold, and repaired through bronze."""
