"""Peers of `stagecert` on neural networks; each script runs in an environment of its own."""
