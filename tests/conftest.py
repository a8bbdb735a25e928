"""Float64 for all tests (a test may ask for float32 itself), and hypothesis without deadlines."""

import gc
import os
import tempfile
from pathlib import Path

import hypothesis
import jax
import pytest

jax.config.update("jax_enable_x64", True)
# Two types that meet are an error, so that nothing becomes float64, or float32, unseen. This binds
# the library and these tests; users keep the setting of JAX that they have.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Many tests trace the same program anew; each process keeps what it has compiled, and nothing else.
_PROGRAMS = tempfile.TemporaryDirectory()
jax.config.update("jax_compilation_cache_dir", _PROGRAMS.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

# Compilation makes the first example slow, so a deadline would only measure JAX.
hypothesis.settings.register_profile("new", deadline=None, print_blob=True)
# The same examples in every run, for runs that judge a change.
hypothesis.settings.register_profile("same", deadline=None, print_blob=True, derandomize=True)
hypothesis.settings.load_profile(os.environ.get("STAGECERT_EXAMPLES", "new"))


# Folders and files of tests that have not been gone through yet: there, JAX promotes as it does for
# users by default. None may be added.
PROMOTING = (
    "interop/", "paper/", "properties/", "rigor/", "sweeps/",
    "networks/test_attention", "networks/test_bounds_", "networks/test_exporters",
    "networks/test_from_torch", "networks/test_fuzz_", "networks/test_importer_truth",
    "networks/test_inspect", "networks/test_onnx", "networks/test_unrolled",
    "verify/test_agreement", "verify/test_i", "verify/test_l", "verify/test_m", "verify/test_r",
    "verify/test_s", "verify/test_verify_",
    "applications/test_isotonic_estimator", "applications/test_mdp_resources",
    "test_assumptions", "test_cli", "test_demo", "test_documentation", "test_examples", "test_hops",
    "test_jaxprs", "test_theory", "test_zoo_truth",
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def promotion(request):
    """Strict promotion, but where it is still to come."""
    name = request.path.relative_to(Path(__file__).parent).as_posix()
    late = name.startswith(PROMOTING) and name != "networks/test_bounds_api.py"
    with jax.numpy_dtype_promotion("standard" if late else "strict"):
        yield


# Tests that are slow by measurement; see scripts/list_slow_tests.py.
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """Python need not look for garbage among what was imported, nor after every few objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


# Bytes that a worker may take, and memory maps, before it forgets compiled programs.
MEMORY, MAPS = 3 << 29, 20_000
_limit = MEMORY


def resident() -> int:
    """Bytes of this process that are in memory; zero where that is not told."""
    told = Path("/proc/self/statm")
    return int(told.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if told.exists() else 0


@pytest.fixture(autouse=True)
def few_programs():
    """Forgets compiled programs before there are too many.

    One worker runs hundreds of tests with programs of their own. Each one takes memory, and several
    memory maps, of which Linux allows a process 65,530; beyond that, XLA's compiler crashes.
    """
    global _limit
    yield
    maps = Path("/proc/self/maps")
    many = maps.exists() and maps.read_bytes().count(b"\n") > MAPS
    if many or resident() > _limit:
        jax.clear_caches()
        gc.collect()
        # What cannot be given back must not make every test forget.
        _limit = max(MEMORY, resident() + MEMORY // 4)
