"""The bronze table: `log` writes and reads it, `survey` and `batch_rows` are how silver and history see it."""
