"""Benchmarks: one module a hop, each rate beside a baseline measured in the same run."""
