"""Where the data of benchmarks are."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("STAGECERT_DATA") or ROOT.parent / "shared" / "data")
