"""The paper's experiments, beside baselines: `python -m benchmarks.paper --help`."""
