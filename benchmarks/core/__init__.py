"""What the core costs: passes, gradients, memory, compilation. Run `python -m benchmarks.core`."""
