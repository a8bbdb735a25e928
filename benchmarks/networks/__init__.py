"""Benchmarks of bounds on neural networks."""
