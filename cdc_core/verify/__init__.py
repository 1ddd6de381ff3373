"""Whether a table matches the source: the rules of "source equals gold", without a table or a source."""
