"""`medallion verify`: compares the source with bronze, silver or gold, and repairs differences through bronze."""
