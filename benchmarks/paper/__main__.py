"""The paper's experiments: `python -m benchmarks.paper --help`."""

import sys

try:
    from benchmarks.paper.command import main
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}; install what the benchmark needs: pip install -e '.[paper]'")

if __name__ == "__main__":
    sys.exit(main())
