"""Benchmarks: one module per hop, each with a baseline measured in the same run."""
