"""Whether a table holds what the source holds: the rule of "source equals gold", without a table and without a source."""
