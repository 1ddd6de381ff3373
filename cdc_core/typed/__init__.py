"""Documents as Arrow columns, fast: `plan` is the way in, `decoding` does it, `exact` is what it has to agree with."""
