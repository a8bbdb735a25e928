"""Each primitive with a truth of its own: rationals, Arb, or NumPy where entries only move.

A truth is computed entry by entry in exact arithmetic from numbers drawn inside intervals, so that
it must lie in what the table makes of the intervals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flint import arb, ctx, fmpq
from jax import lax

from stagecert import jaxprs, pieces
from stagecert.enclosure.intervals import Interval
from stagecert.enclosure.primitives import enclose


@dataclass(frozen=True)
class Case:
    """A JAX function, its truth on object arrays of rationals, and what its arguments are."""

    name: str
    function: Callable
    truth: Callable
    shapes: tuple[tuple[int, ...], ...]
    low: float = -3.0
    high: float = 3.0
    width: float = 1.0  # of the intervals, at most


def _ball(name: str, *parameters) -> Callable:
    def entry(x):
        return getattr(_arb(x), name)(*parameters)

    return np.vectorize(entry, otypes=[object])


def _arb(x) -> arb:
    return x if isinstance(x, arb) else arb(fmpq(x.numerator, x.denominator))


def _entries(function) -> Callable:
    return np.vectorize(function, otypes=[object])


def _convolution(x, w):
    out = np.full((2, 2, 3, 2), Fraction(0), object)
    padded = np.full((2, 2, 6, 6), Fraction(0), object)
    padded[:, :, 1:6, 0:5] = x
    for b, o, i, j in np.ndindex(*out.shape):
        for c, k, l in np.ndindex(2, 2, 2):
            if 2 * i + k < 6 and 2 * j + 2 * l < 6:
                out[b, o, i, j] += padded[b, c, 2 * i + k, 2 * j + 2 * l] * w[o, c, k, l]
    return out


def _scanned(carry, x):
    out = []
    for row in x:
        carry = carry * row + 1
        out.append(carry)
    return np.array([*carry, *np.ravel(out)], object)


def _scan(carry, x):
    step = lambda c, row: (c * row + 1, c * row + 1)  # noqa: E731
    last, rows = lax.scan(step, carry, x)
    return jnp.concatenate([last, rows.ravel()])


def _doubled(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]


V, M = (4,), (3, 4)
_INDEX = np.array([3, 0, 3, 1])
_SQUARE = _entries(lambda x: x * x)
_TANH, _EXP = _ball("tanh"), _ball("exp")


def _case(name, function, truth, *shapes, **options) -> Case:
    return Case(name, function, truth, shapes or (V,), **options)


CASES = [
    _case("add", lambda x, y: x + y, lambda x, y: x + y, V, V),
    _case("tiny sums", lambda x, y: x + y, lambda x, y: x + y, V, V, width=1e-15),
    _case("sub", lambda x, y: x - y, lambda x, y: x - y, V, V),
    _case("mul", lambda x, y: x * y, lambda x, y: x * y, V, V),
    _case("tiny products", lambda x, y: x * y, lambda x, y: x * y, V, V, width=1e-16),
    _case("mul itself", lambda x: x * x, _SQUARE),
    _case("square", jnp.square, _SQUARE),
    _case("div", lambda x, y: x / y, lambda x, y: x / y, V, V, low=0.1),
    _case("reciprocal", lambda x: 1 / x, lambda x: 1 / x),
    _case("neg", lambda x: -x, lambda x: -x),
    _case("sign", jnp.sign, _entries(lambda x: (x > 0) - (x < 0))),
    _case("abs", jnp.abs, _entries(abs)),
    _case("max", jnp.maximum, np.maximum, V, V),
    _case("min", jnp.minimum, np.minimum, V, V),
    _case("piece", pieces.maximum, np.maximum, V, V),
    _case("pieces", lambda x: pieces.max(x), lambda x: x.max(axis=-1), M),
    _case("clamp", lambda x: lax.clamp(-1.0, x, 1.0), _entries(lambda x: min(max(x, -1), 1))),
    _case("exp", jnp.exp, _EXP),
    _case("exp of points", jnp.exp, _EXP, width=0, low=-700, high=700),
    _case("expm1", jnp.expm1, _ball("expm1")),
    _case("expm1 of points", jnp.expm1, _ball("expm1"), width=0, low=-0.5, high=0.5),
    _case("log", jnp.log, _ball("log"), low=1e-3),
    _case("log of points", jnp.log, _ball("log"), width=0, low=0.4, high=2.5),
    _case("log1p", jnp.log1p, _ball("log1p"), low=-0.9, width=0.05),
    _case("sqrt", jnp.sqrt, _ball("sqrt"), low=0.0),
    _case("rsqrt", lax.rsqrt, lambda x: 1 / _ball("sqrt")(x), low=0.1),
    _case("tanh", jnp.tanh, _TANH),
    _case("tanh of points", jnp.tanh, _TANH, width=0, low=-0.4, high=0.4),
    _case("logistic", jax.nn.sigmoid, _entries(lambda x: 1 / (1 + (-_arb(x)).exp()))),
    _case("pow", lambda x: x**2.5, _entries(lambda x: _arb(x) ** arb(2.5)), low=0.01),
    _case("pow 3", lambda x: lax.pow(x, 3.0), _entries(lambda x: x**3)),
    _case("integer_pow", lambda x: x**3, _entries(lambda x: x**3)),
    _case("even power", lambda x: x**4, _entries(lambda x: x**4)),
    _case("negative power", lambda x: x**-3, _entries(lambda x: x**-3), low=0.2),
    _case("erf", jax.lax.erf, _ball("erf")),
    _case("slope of erf", jax.vmap(jax.grad(lax.erf)),
          _entries(lambda x: 2 * (-_arb(x) ** 2).exp() / arb.pi().sqrt()), width=0),
    _case("erfc", jax.lax.erfc, _ball("erfc")),
    _case("sin", jnp.sin, _ball("sin")),
    _case("cos", jnp.cos, _ball("cos")),
    _case("tan", jnp.tan, _ball("tan"), low=-1.0, high=1.0, width=0.3),
    _case("atan", lambda x: lax.atan(x), _ball("atan")),
    _case("sinh", lambda x: lax.sinh(x), _ball("sinh")),
    _case("cosh", lambda x: lax.cosh(x), _ball("cosh")),
    _case("asinh", lambda x: lax.asinh(x), _ball("asinh")),
    _case("exp2", lambda x: lax.exp2(x), _entries(lambda x: arb(2) ** _arb(x))),
    _case("slope of exp2", jax.vmap(jax.grad(lax.exp2)),
          _entries(lambda x: arb(2) ** _arb(x) * arb(2).log()), width=0),
    _case("floor", jnp.floor, _entries(lambda x: x.__floor__())),
    _case("ceil", jnp.ceil, _entries(lambda x: x.__ceil__())),
    _case("round", jnp.round, _entries(round)),
    _case("select", lambda x, y: jnp.where(x > 0.5, x + 2, y),
          _entries(lambda x, y: x + 2 if x > 0.5 else y), V, V),
    _case("lt le", lambda x, y: jnp.where((x < y) & (x <= 1), 1.0, 2.0),
          _entries(lambda x, y: 1 if x < y and x <= 1 else 2), V, V),
    _case("ge or", lambda x, y: jnp.where((x >= y) | (y > 1), 1.0, 2.0),
          _entries(lambda x, y: 1 if x >= y or y > 1 else 2), V, V),
    _case("eq ne not xor", lambda x, y: jnp.where(~(x == y) ^ (x != 0.0), 1.0, 2.0),
          _entries(lambda x, y: 1 if (x != y) != (x != 0) else 2), V, V),
    _case("is_finite", lambda x: jnp.where(lax.is_finite(x), x, 0.0), lambda x: x),
    _case("three cases",
          lambda x, y: lax.select_n(jnp.floor(jnp.abs(x)).astype(int) % 3, x, y, 2 * x),
          _entries(lambda x, y: (x, y, 2 * x)[int(abs(x)) % 3]), V, V, width=0),
    _case("reduce_sum", lambda x: x.sum(axis=0), lambda x: x.sum(axis=0), M),
    _case("long sum", lambda x: x.sum(), lambda x: x.sum(), (1001,), width=0),
    _case("reduce_max", lambda x: x.max(axis=1), lambda x: x.max(axis=1), M),
    _case("reduce_min", lambda x: x.min(axis=1), lambda x: x.min(axis=1), M),
    _case("reduce_prod", lambda x: x.prod(axis=1), lambda x: x.prod(axis=1), M),
    _case("all any", lambda x: jnp.where((x > 0).all() | (x > 2.5).any(), 1.0, 0.0),
          lambda x: np.array(int(all(x > 0) or any(x > 2.5)), object)),
    _case("cumsum", lambda x: jnp.cumsum(x, 1), lambda x: np.cumsum(x, 1), (3, 50), width=1e-16),
    _case("cumsum back", lambda x: lax.cumsum(x, 1, reverse=True),
          lambda x: np.cumsum(x[:, ::-1], 1)[:, ::-1], M),
    _case("cummax", lambda x: lax.cummax(x, 1), lambda x: np.maximum.accumulate(x, 1), M),
    _case("cummin", lambda x: lax.cummin(x, 1), lambda x: np.minimum.accumulate(x, 1), M),
    _case("argmax", lambda x: jnp.argmax(x, 1).astype(x.dtype), lambda x: x.argmax(1), M),
    _case("argmin", lambda x: jnp.argmin(x, 1).astype(x.dtype), lambda x: x.argmin(1), M),
    _case("sort", lambda x: jnp.sort(x, 1), lambda x: np.sort(x, 1), M),
    _case("dot_general", lambda x, y: x @ y, lambda x, y: x @ y, M, (4, 2)),
    _case("dots of points", lambda x, y: x @ y, lambda x, y: x @ y, (2, 60), (60, 2), width=0),
    _case("batched dots", lambda x, y: jnp.einsum("bij,bkj->bik", x, y),
          lambda x, y: np.einsum("bij,bkj->bik", x, y), (2, 2, 3), (2, 4, 3)),
    _case("conv_general_dilated",
          lambda x, w: lax.conv_general_dilated(
              x, w, (2, 2), [(1, 0), (0, 1)], rhs_dilation=(1, 2)),
          _convolution, (2, 2, 5, 5), (2, 2, 2, 2)),
    _case("reshape transpose", lambda x: x.T.reshape(2, 6)[:, ::-1].squeeze(),
          lambda x: x.T.reshape(2, 6)[:, ::-1], M),
    _case("broadcast concatenate",
          lambda x: jnp.concatenate([jnp.broadcast_to(x, (2, 4)), x[None]]),
          lambda x: np.stack([x, x, x])),
    _case("slice pad", lambda x: lax.pad(x[1:], 2.0, [(1, -1, 1)]),
          lambda x: np.array([2, x[1], 2, x[2], 2], object)),
    _case("iota", lambda x: x * lax.iota(float, 4), lambda x: x * np.arange(4)),
    _case("dynamic slices",
          lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (9,), (2,)), (0,)),
          lambda x: x[[2, 3, 2, 3]]),
    _case("gather", lambda x: x[_INDEX], lambda x: x[_INDEX]),
    _case("gather rows", lambda x: x[jnp.array([2, 0]), 1:3], lambda x: x[[2, 0], 1:3], M),
    _case("take along", lambda x: jnp.take_along_axis(x, jnp.array([[1], [3], [0]]), 1),
          lambda x: np.take_along_axis(x, np.array([[1], [3], [0]]), 1), M),
    _case("scatter-add", jax.grad(lambda x: jnp.sum(jnp.sin(1.0) * x[_INDEX] ** 2)),
          lambda x: 2 * Fraction(float(np.sin(1.0))) * x * np.bincount(_INDEX, minlength=4),
          width=0),
    _case("stack unstack", lambda x: jnp.stack([*jnp.unstack(x), x[0]], axis=1),
          lambda x: np.stack([*x, x[0]], axis=1), M),
    _case("tile", lambda x: jnp.tile(x, (2, 1)), lambda x: np.tile(x, (2, 1)), M),
    _case("slope of a maximum", jax.grad(lambda x: jnp.sum(jnp.max(x, axis=1) ** 2)),
          lambda x: np.where(x == x.max(axis=1, keepdims=True), 2 * x, 0), M),
    _case("slope of a minimum", jax.grad(lambda x: jnp.min(x)),
          lambda x: (x == x.min()).astype(int), V),
    _case("split", lambda x: sum(jnp.split(x, 2)), lambda x: x[:2] + x[2:]),
    _case("scan", _scan, _scanned, V, M),
    _case("while", _doubled, lambda x: 8 * x),
    _case("cond", lambda x, y: lax.cond(x[0] > 0, lambda: x, lambda: y),
          lambda x, y: x if x[0] > 0 else y, V, V),
    _case("div rem of whole numbers",
          lambda x: x * (jnp.floor(x).astype(int) // 2 + 7 % 4).astype(x.dtype),
          _entries(lambda x: x * (x.__floor__() // 2 + 3)), width=0),
    _case("softplus", jax.nn.softplus, _entries(lambda x: _arb(x).exp().log1p())),
    _case("slope of softplus", jax.vmap(jax.grad(jax.nn.softplus)),
          _entries(lambda x: 1 / (1 + (-_arb(x)).exp())), width=0),
    _case("stop_gradient copy", lambda x: jnp.copy(lax.stop_gradient(x)), lambda x: x),
    _case("reduce_precision",
          lambda x: lax.optimization_barrier(lax.reduce_precision(x, 5, 9)), lambda x: x),
]  # fmt: skip


def traced(case: Case):
    """The jaxpr of a case."""
    with jax.enable_x64(True):
        shapes = [jax.ShapeDtypeStruct(shape, np.float64) for shape in case.shapes]
        return jax.make_jaxpr(case.function)(*shapes)


def primitives_of(case: Case) -> set[str]:
    """The names of what a case is made of."""
    return {equation.primitive.name for equation in jaxprs.equations(traced(case).jaxpr)}


def draw(case: Case, seed: int) -> list[tuple[Interval, np.ndarray]]:
    """Intervals, some of them points, with exact numbers inside."""
    rng = np.random.default_rng(seed)
    drawn = []
    for shape in case.shapes:
        a = rng.uniform(case.low, case.high, shape)
        b = a + rng.uniform(0, 1, shape) * case.width * np.where(rng.random(shape) < 0.3, 0, 1)
        b = np.maximum(np.minimum(b, case.high), a)
        t = rng.choice([0.0, 0.5, 1.0], shape)
        exact = np.empty(shape, object)
        for k in np.ndindex(*shape):
            low, high, share = (Fraction(float(x[k])) for x in (a, b, t))
            exact[k] = low + share * (high - low)
        drawn.append((Interval(a) if case.width == 0 else Interval(a, b), exact))
    return drawn


def violations(case: Case, seeds, closed: Any = None) -> int:
    """How often the truth is outside for sure."""
    closed = traced(case) if closed is None else closed
    count, claims = 0, 0
    ctx.prec = 200
    for seed in seeds:
        drawn = draw(case, seed)
        with np.errstate(all="ignore"):
            (found,) = enclose(closed.jaxpr, closed.consts, [interval for interval, _ in drawn])
        truth = np.asarray(case.truth(*(exact for _, exact in drawn)), object)
        assert truth.shape == found.shape
        ends = zip(truth.ravel(), found.low.ravel(), found.high.ravel(), strict=True)
        for value, low, high in ends:
            if low != low or high != high:  # undefined somewhere: no claim
                continue
            claims += 1
            value = value if isinstance(value, (int, Fraction, arb)) else int(value)
            if isinstance(value, arb):
                count += bool(value < arb(low)) + bool(value > arb(high))
            else:
                count += (low > -np.inf and value < Fraction(float(low))) + (
                    high < np.inf and value > Fraction(float(high))
                )
    assert claims > 0
    return count
