"""`medallion demo`: a shop on a MongoDB of its own; start at `run`."""
