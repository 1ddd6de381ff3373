"""Silver: `run` is the way in, `ranges` cuts the work into batches, its `STEPS` take each into the table; `in_process` is the short way."""
