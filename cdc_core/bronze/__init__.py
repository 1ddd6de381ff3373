"""Bronze without a table: an event as a row, and what of bronze goes when files are lost. Start at `event_rows`."""
