"""Bronze without a table: events as rows (start at `event_rows`), and which files go when some are lost (`repair`)."""
