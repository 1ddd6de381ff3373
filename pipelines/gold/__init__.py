"""Gold: `run` is the way in, `current` one collection's documents, `history` their versions, `models` the user's SQL."""
