"""Change stream rules without a server: captured events (`filters`), their fields (`fields`), their resume tokens."""
