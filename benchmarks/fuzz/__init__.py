"""Mutated files for the readers, and written graphs for all else; `python -m benchmarks.fuzz`."""
