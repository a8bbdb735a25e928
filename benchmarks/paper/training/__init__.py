"""Training the paper's networks: `python -m benchmarks.paper.train --help`."""
