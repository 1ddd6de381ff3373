"""One package per layer (capture, bronze, silver, gold) and per outside system.

Layers communicate through tables; `run` starts them together.
"""
