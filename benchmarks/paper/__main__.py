"""The paper's experiments: `python -m benchmarks.paper --help`."""

import os
import sys

# Threads of OpenBLAS, which JAX calls for small matrices, wait for each other on a busy machine.
# It reads this when it is loaded.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

try:
    from benchmarks.paper.command import main
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}; install what the benchmark needs: pip install -e '.[paper]'")

if __name__ == "__main__":
    sys.exit(main())
