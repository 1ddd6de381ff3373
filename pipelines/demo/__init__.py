"""`medallion demo`: a shop in an embedded MongoDB; start at `run`."""
