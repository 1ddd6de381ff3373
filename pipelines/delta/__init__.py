"""Delta tables: `writer` claims and commits, `local_log` and `live_files` read without a query, `tables` creates and removes."""
