"""Benchmarks of the applications beside their peers."""
