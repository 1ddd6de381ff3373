"""Gold: start with `publish` and `run`; `current` publishes a collection's documents, `history` their versions, `models` the user's SQL."""
