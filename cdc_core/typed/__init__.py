"""Documents as Arrow columns, fast: start at `plan`; `decoding` does the work, `exact` is the reference."""
