"""The bronze table: `log` writes it and reads its position, `survey` and `batch_rows` read its rows for silver and history."""
