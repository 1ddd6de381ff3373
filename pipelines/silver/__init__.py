"""Silver: start with `run`. `ranges` cuts work into batches; its `STEPS`, or `in_process` for plain events, apply them to the table."""
