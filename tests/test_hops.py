"""How many files a call visits on its way to the answer: what a reader has to open, at the most.

The numbers are those of docs/architecture.md. They may fall; a change that raises one should have a
reason that a reader of the walk would accept.
"""

import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagecert
from stagecert import networks

SOURCES = str(Path(stagecert.__file__).parent.parent) + "/"
MOST = {"ibp": 15, "backward": 23}


def visited(call) -> list[str]:
    """The files below src of which a function ran, in any thread."""
    seen = set()

    def look(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES) and code.co_name != "<module>":
            seen.add(code.co_filename.removeprefix(SOURCES))

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sorted(seen)


@pytest.mark.parametrize("method", MOST)
def test_a_bound_visits_few_files(method):
    size = 11  # of no other test: what is traced already is not visited again
    network = networks.from_jax(lambda x: jax.nn.relu(x) @ jnp.ones(size), np.zeros(size))
    low, high = np.full((1, size), -1.0), np.ones((1, size))
    files = visited(lambda: networks.bound(network, low, high, method=method))
    assert "stagecert/networks/bounding/bounds.py" in files
    assert len(files) <= MOST[method], files
