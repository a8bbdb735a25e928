"""The zoo of the tests, and larger instances for costs that small ones cannot show."""

import functools
import importlib.util
import sys

import jax.numpy as jnp
import numpy as np

import stagecert as sc
from benchmarks.core.records import ROOT


@functools.cache
def zoo():
    """The cases of tests/zoo.py by name."""
    spec = importlib.util.spec_from_file_location("zoo", ROOT / "tests" / "zoo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module
    spec.loader.exec_module(module)
    return {case.name: case for case in module.CASES}


# -- the triangle relaxation of a ReLU network ----------------------------------------------------


def _before(s, z):
    return z[-1] if z else s


def _relu_lower(p, s, z):
    return sc.relu(p["W"] @ _before(s, z) + p["b"])


def _relu_upper(p, s, z):
    return p["slope"] * (p["W"] @ _before(s, z) + p["b"]) + p["shift"]


def _last_block(c, s, z):
    return c @ z[-1]


def relu_layers(n_in: int, sizes: tuple, eps: float = 0.05, seed: int = 0):
    """(lowest inputs, highest inputs, layers, objective), with interval bounds, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    middle = rng.normal(size=n_in)
    low, high = lowest, highest = middle - eps, middle + eps
    layers = []
    for size in sizes:
        W = rng.normal(size=(size, low.size)) * np.sqrt(2 / low.size)
        b = 0.1 * rng.normal(size=size)
        centre, radius = W @ (low + high) / 2 + b, np.abs(W) @ (high - low) / 2
        l, u = centre - radius, centre + radius
        low, high = np.maximum(l, 0), np.maximum(u, 0)
        slope = (high - low) / (u - l)
        layers.append({"W": W, "b": b, "slope": slope, "shift": low - slope * l})
    return lowest, highest, layers, rng.normal(size=sizes[-1])


def relu_network(n_in=512, sizes=(512, 512, 512), eps: float = 0.05, seed: int = 0) -> sc.Problem:
    """Dense layers between relu and its chord."""
    lowest, highest, layers, c = relu_layers(n_in, sizes, eps, seed)
    stages = tuple(sc.Stage(_relu_lower, _relu_upper, params=layer) for layer in layers)
    return sc.Problem(sc.Box(lowest, highest), stages, sc.Objective(_last_block, params=c))


# -- a long horizon -------------------------------------------------------------------------------


def _band_lower(p, u, x):
    A, B, width = p
    return A @ x + B @ u - width


def _band_upper(p, u, x):
    A, B, width = p
    return A @ x + B @ u + width


def _feed(s, z):
    return s


def _tracking(p, s, z):
    return 0.5 * jnp.sum((z[0] - p) ** 2) + 0.05 * jnp.sum(s**2)


def scan_band(steps=1000, states=20, controls=5, seed: int = 0) -> sc.Problem:
    """Linear dynamics with room in every step, following a target."""
    rng = np.random.default_rng(seed)
    A = rng.normal(size=(states, states))
    A *= 0.8 / np.linalg.norm(A, 2)
    B = rng.normal(size=(states, controls)) / np.sqrt(controls)
    params = tuple(
        np.broadcast_to(x, (steps, *x.shape)).copy() for x in (A, B, np.full(states, 0.02))
    )
    stage = sc.ScanStage(
        _band_lower,
        _band_upper,
        length=steps,
        initial=rng.normal(size=states),
        feed=_feed,
        params=params,
    )
    time = np.arange(steps)[:, None] / 50
    target = np.sin(time + rng.uniform(0, 6, size=states))
    objective = sc.Objective(
        _tracking, params=target, curvature_inputs=0.1, curvature_blocks=(1.0,)
    )
    limits = np.ones((steps, controls))
    return sc.Problem(sc.Box(-limits, limits), (stage,), objective)


# -- one wide level of a partial order ------------------------------------------------------------


def _level_lower(p, s, z):
    return sc.max(s[p["below"]], axis=1)


def _level_upper(p, s, z):
    return jnp.broadcast_to(p["high"], p["below"].shape[:1])


def _level_objective(p, s, z):
    return 0.5 * jnp.sum((s - p["first"]) ** 2) + 0.5 * jnp.sum((z[0] - p["second"]) ** 2)


def isotonic_level(width=4096, degree=3, seed: int = 0) -> sc.Problem:
    """Two levels; each node of the second lies above a few of the first."""
    rng = np.random.default_rng(seed)
    below = rng.integers(width, size=(width, degree))
    stage = sc.Stage(_level_lower, _level_upper, params={"below": below, "high": np.array(4.0)})
    objective = sc.Objective(
        _level_objective,
        params={"first": rng.normal(size=width), "second": rng.normal(size=width)},
        curvature_inputs=1.0,
        curvature_blocks=(1.0,),
    )
    limits = np.full(width, 4.0)
    return sc.Problem(sc.Box(-limits, limits), (stage,), objective)


LARGE = {
    "relu network, 512 inputs, 3 x 512 units": relu_network,
    "scan, 1000 steps, 20 states, 5 controls": scan_band,
    "isotonic level, 4096 + 4096 nodes": isotonic_level,
}


# -- the chain (eq. 3) ----------------------------------------------------------------------------


def _chain_lower(feed, x):
    return -jnp.ones_like(x)


def _chain_upper(feed, x):
    return x


def _chain_objective(s, z):
    return -z[0][-1]


def chain(n: int) -> sc.Problem:
    """minimise -x_n, with x_1 in [0, 1] and -1 <= x_i <= x_(i-1): scalar stages, scanned."""
    stage = sc.ScanStage(_chain_lower, _chain_upper, length=n - 1, initial=_feed)
    return sc.Problem(sc.Box(0.0, 1.0), (stage,), _chain_objective)
