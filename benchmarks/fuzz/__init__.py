"""Mutated inputs for the parsers; `python -m benchmarks.fuzz`."""
