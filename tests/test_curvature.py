"""Proofs of convexity: what is convex by composition is proven, and nothing that is not."""

import jax
import jax.numpy as jnp
import jax.scipy.special as js
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import stagecert as sc
from stagecert.curvature import CONCAVE, CONVEX, follow, variable

RNG = np.random.default_rng(0)
A = RNG.normal(size=(4, 3))
P = np.array([[2.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 1.0]])
W = np.array([0.5, 1.0, 2.0])


def proven(function, low, high, wanted=CONVEX) -> bool:
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(function)(jnp.zeros(3))
        (out,) = follow(closed, [variable(np.full(3, low), np.full(3, high))])
    return bool(out.has(wanted).all())


def violated(function, low, high) -> float:
    """The worst relative failure of Jensen's inequality at the middles of random segments."""
    a, b = RNG.uniform(low, high, size=(2, 4000, 3))
    each = jax.jit(jax.vmap(lambda s: jnp.sum(function(s))))
    at_a, at_b, middle = (np.asarray(each(x)) for x in (a, b, (a + b) / 2))
    scale = 1 + np.abs(at_a) + np.abs(at_b)
    return float(np.nanmax((middle - (at_a + at_b) / 2) / scale))


def scanned(s):
    return jax.lax.scan(lambda c, x: (jnp.maximum(c, x) + jnp.abs(x), c), jnp.zeros(()), s)[0]


# name: (function, low, high) on the box [low, high]^3
CONVEX_ONES = {
    "linear": (lambda s: A @ s - 1, -1, 1),
    "square": (lambda s: jnp.sum(s**2), -1, 1),
    "fourth power of affine": (lambda s: (A @ s + 1) ** 4, -1, 1),
    "cube where positive": (lambda s: s**3, 0, 1),
    "weighted squares": (lambda s: W @ s**2, -1, 1),
    "exp": (lambda s: jnp.exp(A @ s), -1, 1),
    "exp of convex": (lambda s: jnp.exp(s @ s), -1, 1),
    "minus log": (lambda s: -jnp.log(s), 0.1, 2),
    "minus log of concave": (lambda s: -jnp.log(4 - s @ s), -1, 1),
    "minus root": (lambda s: -jnp.sqrt(1 + s), 0, 1),
    "abs": (lambda s: jnp.abs(A @ s), -1, 1),
    "norm": (lambda s: jnp.linalg.norm(A @ s - 1), -1, 1),
    "norm to the fourth": (lambda s: jnp.linalg.norm(s) ** 4, -1, 1),
    "Huber-like root": (lambda s: jnp.sqrt(1 + jnp.sum(s**2)), -1, 1),
    "hypot": (lambda s: jnp.hypot(s[0], s[1] - s[2]), -1, 1),
    "logsumexp": (lambda s: jax.nn.logsumexp(A @ s), -1, 1),
    "logsumexp of convex, by rows": (
        lambda s: jax.nn.logsumexp(np.abs(A) * s**2, axis=1), -1, 1),
    "plain logsumexp": (lambda s: jnp.log(jnp.sum(W * jnp.exp(s))), -1, 1),
    "softplus": (lambda s: jax.nn.softplus(A @ s), -1, 1),
    "log(1 + exp)": (lambda s: jnp.log1p(jnp.exp(s)), -1, 1),
    "logaddexp": (lambda s: jnp.logaddexp(s[0] ** 2, s[1]), -1, 1),
    "log-sigmoid": (lambda s: -jax.nn.log_sigmoid(s), -1, 1),
    "quadratic form": (lambda s: s @ P @ s, -1, 1),
    "quadratic form by einsum": (lambda s: jnp.einsum("i,ij,j", s, P, s), -1, 1),
    "shifted quadratic form": (lambda s: (s - 1) @ P @ (s - 1) + W @ s, -1, 1),
    "quadratic form as a sum": (lambda s: jnp.sum((P @ s) * s), -1, 1),
    "variance": (lambda s: jnp.var(s), -1, 1),
    "maximum": (lambda s: jnp.max(A @ s), -1, 1),
    "maximum of convex": (lambda s: jnp.maximum(s**2, jnp.exp(s)), -1, 1),
    "relu": (lambda s: jax.nn.relu(s - 0.5), -1, 1),
    "pieces": (lambda s: sc.abs(s) + sc.max(A @ s) + sc.piecewise_linear(s[0], [-1.0, 2], [0.0, 1]),
               -1, 1),
    "entropy": (lambda s: -jnp.sum(js.entr(s)), 0, 1),
    "x log x": (lambda s: s * jnp.log(s), 0, 1),
    "xlogy": (lambda s: js.xlogy(s, s), 0, 1),
    "relative entropy": (lambda s: js.rel_entr(s[0], s[1]), 0, 1),
    "Kullback-Leibler": (lambda s: js.kl_div(s, W), 0, 1),
    "inverse": (lambda s: 1 / s, 0.1, 1),
    "inverse of concave": (lambda s: 1 / (5 - s @ s), -1, 1),
    "square over linear": (lambda s: s[0] ** 2 / (s[1] + 2), -1, 1),
    "power 1.5": (lambda s: s**1.5, 0, 1),
    "minus power 0.3": (lambda s: -(s**0.3), 0, 1),
    "total variation": (lambda s: jnp.sum(jnp.abs(jnp.diff(s))), -1, 1),
    "running sums": (lambda s: jnp.cumsum(s) ** 2, -1, 1),
    "convolution": (lambda s: jnp.convolve(s, np.array([1.0, -1.0])) ** 2, -1, 1),
    "gathered": (lambda s: s[np.array([0, 2, 2])] ** 4, -1, 1),
    "written into": (lambda s: s.at[0].set(2.0) ** 2, -1, 1),
    "loop": (scanned, -1, 1),
    "product of exponentials": (lambda s: jnp.exp(s[0]) * jnp.exp(s[1] ** 2), -1, 1),
    "cosh": (lambda s: jnp.cosh(A @ s), -1, 1),
    "logistic left of zero": (lambda s: jax.nn.sigmoid(s - 1), -1, 1),
}  # fmt: skip

OTHERS = {
    "minus square": (lambda s: -jnp.sum(s**2), -1, 1),
    "product": (lambda s: s[0] * s[1], -1, 1),
    "product of positive": (lambda s: s[0] * s[1], 0, 1),
    "cube": (lambda s: s**3, -1, 1),
    "sine": (lambda s: jnp.sin(3 * s), -1, 1),
    "cosine": (lambda s: jnp.cos(3 * s), -1, 1),
    "log": (lambda s: jnp.log(s), 0.1, 1),
    "root": (lambda s: jnp.sqrt(s), 0, 1),
    "minus exp": (lambda s: -jnp.exp(s), -1, 1),
    "tanh": (lambda s: jnp.tanh(2 * s), -1, 1),
    "logistic": (lambda s: jax.nn.sigmoid(4 * s), -1, 1),
    "erf": (lambda s: jax.scipy.special.erf(s), -1, 1),
    "arctangent": (lambda s: jnp.arctan(s), 0, 1),
    "minimum": (lambda s: jnp.minimum(s[0], s[1]), -1, 1),
    "minus abs": (lambda s: -jnp.abs(s), -1, 1),
    "minus norm": (lambda s: -jnp.linalg.norm(s), -1, 1),
    "clipped": (lambda s: jnp.clip(s, -0.5, 0.5), -1, 1),
    "square of convex below zero": (lambda s: (s**2 - 0.5) ** 2, -1, 1),
    "difference of squares": (lambda s: s[0] ** 2 - s[1] ** 2, -1, 1),
    "indefinite form": (lambda s: s @ np.diag([1.0, 1.0, -0.1]) @ s, -1, 1),
    "indefinite by one entry": (lambda s: s @ (P + 3 * np.eye(3)[[1, 0, 2]]) @ s, -1, 1),
    "form of two vectors": (lambda s: s @ P @ s[::-1], -1, 1),
    "negative weights": (lambda s: -W @ s**2, -1, 1),
    "mixed weights": (lambda s: np.array([1.0, -0.1, 1.0]) @ s**2, -1, 1),
    "exp of concave": (lambda s: jnp.exp(-2 * s @ s), -1, 1),
    "logsumexp of concave": (lambda s: jax.nn.logsumexp(-(s**2)), -1, 1),
    "log of sum with minus": (lambda s: jnp.log(4 + s @ s - 2 * s[0] ** 2), -1, 1),
    "logsumexp with another shift": (
        lambda s: jnp.log(jnp.sum(jnp.exp(s - 3 * s[0] ** 2))) + 2 * s[0] ** 2, -1, 1),
    "entropy": (lambda s: jnp.sum(js.entr(s)), 0, 1),
    "x log y": (lambda s: js.xlogy(s[0], s[1]), 0.1, 1),
    "relative entropy, minus": (lambda s: -js.rel_entr(s[0], s[1]), 0.1, 1),
    "inverse, minus": (lambda s: -1 / s, 0.1, 1),
    "ratio": (lambda s: s[0] / (s[1] + 2), -1, 1),
    "square over convex": (lambda s: s[0] ** 2 / (1 + 3 * s[1] ** 2), -1, 1),
    "power 0.5": (lambda s: s**0.5, 0, 1),
    "geometric mean": (lambda s: jnp.sqrt(s[0] * s[1]), 0.1, 1),
    "median": (lambda s: jnp.sort(s)[1], -1, 1),
    "step": (lambda s: jnp.where(s > 0, 1.0, 0.0), -1, 1),
    "slope that falls": (lambda s: jnp.where(s > 0, s, 2 * s), -1, 1),
    "loop": (lambda s: jax.lax.scan(lambda c, x: (c * x, c), 1.0, s)[0], -1, 1),
    "swish": (lambda s: jax.nn.silu(4 * s), -2, 2),
    "distance to a ball, signed": (lambda s: jnp.abs(s @ s - 1), -1, 1),
    "branch": (lambda s: jax.lax.cond(s[0] > 0, lambda: -s[0], lambda: s[0]), -1, 1),
    "floor": (lambda s: jnp.floor(3 * s), -1, 1),
}  # fmt: skip


def test_there_are_enough_of_them():
    assert len(CONVEX_ONES) >= 40
    assert len(OTHERS) >= 40


@pytest.mark.parametrize("name", CONVEX_ONES)
def test_what_is_convex_by_composition_is_proven(name):
    function, low, high = CONVEX_ONES[name]
    assert violated(function, low, high) < 1e-9
    assert proven(function, low, high)
    assert proven(lambda s: -function(s), low, high, CONCAVE)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_convex_is_not_proven(name):
    function, low, high = OTHERS[name]
    assert violated(function, low, high) > 1e-4  # the truth, by sampling
    assert not proven(function, low, high)


REFUTED = ("minus square", "product", "indefinite by one entry", "form of two vectors", "entropy")


@pytest.mark.parametrize("name", REFUTED)
def test_solve_refutes_what_is_not_convex_with_a_witness(name):
    function, low, high = OTHERS[name]
    box = sc.Box(np.full(3, float(low)), np.full(3, float(high)))
    with pytest.raises(sc.ProblemError, match=r"The objective: it is not convex.*inputs"):
        sc.solve(sc.Problem(box, (), lambda s, z: jnp.sum(function(s))))


def test_a_namesake_of_a_known_function_is_not_taken_for_it():
    @jax.jit
    def logaddexp(x, y):
        return -jnp.hypot(x, y)

    @jax.jit
    def hypot(x, y):
        return -jnp.sqrt(1 + x**2 + y**2)

    assert not proven(lambda s: logaddexp(s[0], s[1]), -1, 1)
    assert not proven(lambda s: hypot(s[0], s[1]), -1, 1)


def test_a_stopped_gradient_proves_nothing():
    # The value is convex, but its slope is not one: a bound from it would be wrong.
    assert not proven(lambda s: jax.lax.stop_gradient(s) ** 2, -1, 1)


# -- random compositions ---------------------------------------------------------------------------

# Trees of operations, evaluated by JAX for the proof and by NumPy, on many points, for the truth.
UNARY = {
    "neg": lambda xp, x: -x,
    "exp": lambda xp, x: xp.exp(0.5 * x),
    "log": lambda xp, x: xp.log(x),
    "log1p": lambda xp, x: xp.log1p(x),
    "sqrt": lambda xp, x: xp.sqrt(x),
    "square": lambda xp, x: xp.square(x),
    "cube": lambda xp, x: x**3,
    "fourth": lambda xp, x: x**4,
    "inverse": lambda xp, x: 1 / x,
    "inverse square": lambda xp, x: x**-2,
    "power 1.5": lambda xp, x: xp.power(x, 1.5),
    "power 0.3": lambda xp, x: xp.power(x, 0.3),
    "power -0.7": lambda xp, x: xp.power(x, -0.7),
    "abs": lambda xp, x: xp.abs(x),
    "relu": lambda xp, x: xp.maximum(x, 0.0),
    "cap": lambda xp, x: xp.minimum(x, 0.3),
    "tanh": lambda xp, x: xp.tanh(x),
    "sinh": lambda xp, x: xp.sinh(x),
    "cosh": lambda xp, x: xp.cosh(x),
    "arctan": lambda xp, x: xp.arctan(x),
    "sine": lambda xp, x: xp.sin(x),
    "shift": lambda xp, x: x + 0.7,
    "double": lambda xp, x: 2 * x,
    "minus half": lambda xp, x: -0.5 * x,
    "softplus": lambda xp, x: xp.logaddexp(x, 0.0),
    "x log x": lambda xp, x: x * xp.log(x),
    "softened": lambda xp, x: xp.log(1 + xp.exp(x)),
    "norm with one": lambda xp, x: xp.sqrt(1 + x * x),
}
BINARY = {
    "add": lambda xp, x, y: x + y,
    "subtract": lambda xp, x, y: x - y,
    "multiply": lambda xp, x, y: x * y,
    "divide": lambda xp, x, y: x / y,
    "maximum": lambda xp, x, y: xp.maximum(x, y),
    "minimum": lambda xp, x, y: xp.minimum(x, y),
    "logaddexp": lambda xp, x, y: xp.logaddexp(x, y),
    "hypot": lambda xp, x, y: xp.sqrt(x**2 + y**2),
    "exponentials": lambda xp, x, y: xp.exp(0.3 * x) * xp.exp(0.3 * y),
    "shifted logsumexp": lambda xp, x, y: xp.log(xp.exp(x - y) + xp.exp(2 * x - y)) + y,
    "square over": lambda xp, x, y: x**2 / y,
    "select": lambda xp, x, y: xp.where(x > y, x, y),
}
LEAVES = {
    "s0": lambda xp, s: s[0],
    "s1": lambda xp, s: s[1],
    "s2": lambda xp, s: s[2],
    "mix": lambda xp, s: 0.6 * s[0] - 0.8 * s[1] + 0.1,
    "constant": lambda xp, s: 0.4 + 0 * s[0] if xp is np else 0.4,
}
TREES = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(sorted(UNARY)), inner),
        st.tuples(st.sampled_from(sorted(BINARY)), inner, inner),
    ),
    max_leaves=6,
)


def evaluated(tree, xp, s):
    """(value, largest magnitude on the way)."""
    if isinstance(tree, str):
        value = LEAVES[tree](xp, s)
        return value, xp.abs(value)
    name, *inner = tree
    values, sizes = zip(*(evaluated(t, xp, s) for t in inner), strict=True)
    value = (UNARY if len(inner) == 1 else BINARY)[name](xp, *values)
    size = xp.abs(value)
    for other in sizes:
        size = xp.maximum(size, other)
    return value, size


@settings(max_examples=400)
@given(TREES, st.sampled_from([(-1.0, 1.0), (0.0, 1.0), (0.2, 1.5), (-1.0, 0)]), st.integers(0, 9))
def test_nothing_is_proven_that_sampling_refutes(tree, ends, seed):
    low, high = ends
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(lambda s: jnp.asarray(evaluated(tree, jnp, s)[0], float))(
            jnp.zeros(3)
        )
        (known,) = follow(closed, [variable(np.full(3, low), np.full(3, high))])
    rng = np.random.default_rng(seed)
    a, b = rng.uniform(low, high, size=(2, 3, 400))
    # The corners, where most rules end, and segments along the edges between them.
    a[:, :100] = rng.choice([low, high], size=(3, 100))
    b[:, 50:150] = rng.choice([low, high], size=(3, 100))
    share = rng.uniform(0.05, 0.95, size=400)
    with np.errstate(all="ignore"):
        (at_a, size_a), (at_b, size_b), (between, size) = (
            evaluated(tree, np, s) for s in (a, b, share * a + (1 - share) * b)
        )
        excess = between - (share * at_a + (1 - share) * at_b)
    both = np.isfinite(at_a) & np.isfinite(at_b)
    size = 1 + np.maximum(np.maximum(size_a, size_b), np.nan_to_num(size, nan=0, posinf=0))
    room = 1e-9 * size
    both &= np.isfinite(room)
    excess, room = excess[both], room[both]
    # A value that is missing between two that are there is a violation as well.
    if known.has(CONVEX):
        assert (excess <= room).all()
    if known.has(CONCAVE):
        assert (excess >= -room).all()
    for value in (at_a, at_b, between):
        held = value[np.isfinite(value)]
        slack = 1e-9 * (1 + np.abs(held))
        assert (held >= known.lo - slack).all()
        assert (held <= known.hi + slack).all()
