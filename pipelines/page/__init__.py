"""`medallion status --html`: a pipeline on one page that needs no network."""
