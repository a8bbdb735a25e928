"""The table of primitives against exact values; planted mistakes are found."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enclosure_truth import CASES, primitives_of, traced, violations
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

import stagecert as sc
from stagecert import jaxprs
from stagecert.enclosure import UnknownPrimitives, functions, primitives
from stagecert.enclosure import intervals as iv
from stagecert.enclosure.intervals import Interval, constant

BY_NAME = {case.name: case for case in CASES}
JAXPRS: dict = {}


def _violations(name: str, seeds) -> int:
    if name not in JAXPRS:
        JAXPRS[name] = traced(BY_NAME[name])
    return violations(BY_NAME[name], seeds, JAXPRS[name])


@pytest.mark.parametrize("name", BY_NAME)
def test_results_contain_the_exact_values(name):
    assert _violations(name, range(25)) == 0


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(BY_NAME)), st.integers(0, 2**32 - 1))
def test_results_contain_the_exact_values_of_any_draw(name, seed):
    assert _violations(name, [seed]) == 0


def test_every_primitive_of_the_table_is_tried():
    tried = set().union(*map(primitives_of, CASES))
    # Other names for the same rule, and what JAX makes only when it differentiates or compiles.
    aliases = {"add_any", "copy_p", "stop_gradient", "scatter_add", "real", "expand_dims"}
    aliases.add("stagecert_allocation")  # test_allocations.py compares it with exact rationals
    known = primitives.TABLE.keys() | primitives._SEVERAL.keys()
    assert known - aliases - tried == set()


def _inexact(function):
    """A function at the ends, without any allowance for rounding."""
    return lambda equation, x: Interval(function(x.low), function(x.high))


def _sum_of_ends(equation, x):
    return x.map(lambda a: a.sum(axis=equation.params["axes"]))


def _dot_without_allowance(equation, x, y):
    (a, b), batch = equation.params["dimension_numbers"]
    middle = iv.dot_general(Interval(x.middle()), Interval(y.middle()), (a, b), batch)
    return Interval(0.5 * (middle.low + middle.high))


MUTANTS = [
    ("tiny sums", "add", lambda e, x, y: Interval(x.low + y.low, x.high + y.high)),
    ("sub", "sub", lambda e, x, y: iv.add(x, Interval(-y.low, -y.high))),
    ("tiny products", "mul", lambda e, x, y: Interval(x.low * y.low, x.high * y.high)),
    ("mul", "mul", lambda e, x, y: iv.multiply(Interval(x.low), y)),
    ("reciprocal", "div", lambda e, x, y: Interval(x.low / y.high, x.high / y.low)),
    ("div", "div", lambda e, x, y: Interval(x.low / y.low, x.high / y.high)),
    ("abs", "abs", lambda e, x: Interval(np.abs(x.low), np.abs(x.high))),
    ("max", "max", lambda e, x, y: Interval(np.maximum(x.low, y.low), np.minimum(x.high, y.high))),
    ("square", "square", lambda e, x: iv._outward(x.low**2, x.high**2)),
    ("even power", "integer_pow", lambda e, x: iv._outward(x.low**4, x.high**4)),
    ("exp of points", "exp", _inexact(np.exp)),
    ("exp", "exp", lambda e, x: functions.exp(Interval(x.middle()))),
    ("log of points", "log", _inexact(np.log)),
    ("log1p", "log1p", _inexact(np.log1p)),
    ("expm1 of points", "expm1", _inexact(np.expm1)),
    ("tanh of points", "tanh", _inexact(np.tanh)),
    ("logistic", "logistic", lambda e, x: functions.logistic(iv.negative(x))),
    ("sqrt", "sqrt", _inexact(np.sqrt)),
    ("sin", "sin", lambda e, x: Interval(np.sin(x.low), np.sin(x.high))),
    ("select", "select_n", lambda e, which, no, yes: iv.select(Interval(which.high), no, yes)),
    ("lt le", "lt", lambda e, x, y: Interval(x.low < y.low)),
    ("ge or", "ge", lambda e, x, y: Interval(x.high >= y.high)),
    ("long sum", "reduce_sum", _sum_of_ends),
    ("cumsum", "cumsum", lambda e, x: x.map(lambda a: np.cumsum(a, 1))),
    ("dots of points", "dot_general", _dot_without_allowance),
    ("dot_general", "dot_general", _dot_without_allowance),
    ("conv_general_dilated", "conv_general_dilated",
     lambda e, x, w: primitives.moving.convolution(Interval(x.middle()), w, e.params)),
    ("argmax", "argmax", lambda e, x: Interval(x.low.argmax(1))),
    ("gather", "gather", lambda e, x, at: x),
    ("scatter-add", "scatter-add", lambda e, x, at, u: u),
]  # fmt: skip


@pytest.mark.parametrize(("case", "name", "wrong"), MUTANTS)
def test_planted_mistakes_are_found(monkeypatch, case, name, wrong):
    assert name in primitives_of(BY_NAME[case])
    monkeypatch.setitem(primitives.TABLE, name, wrong)
    with np.errstate(all="ignore"):
        assert _violations(case, range(25)) > 0


def test_rounded_numbers_in_derivatives_of_jax_are_widened():
    """JAX's derivatives of erf and erfc have 2 / sqrt(pi) in them, rounded."""
    for rounded, true in (
        (2 / np.sqrt(np.pi), 2 / arb.pi().sqrt()),
        (-2 / np.sqrt(np.pi), -2 / arb.pi().sqrt()),
        (np.log(2), arb(2).log()),
    ):
        assert float(rounded) in functions.ROUNDED_IN_DERIVATIVES
        found = functions.literal(rounded)
        assert arb(float(found.low)) < true < arb(float(found.high))
    for function, sign in ((jax.lax.erf, 1), (jax.lax.erfc, -1)):
        with jax.enable_x64(True):
            closed = jax.make_jaxpr(jax.grad(function))(0.5)
        atoms = [a for e in jaxprs.equations(closed.jaxpr) for a in e.invars if hasattr(a, "val")]
        assert sign * 2 / np.sqrt(np.pi) in {float(atom.val) for atom in atoms}


def _enclosed(function, *arguments):
    with jax.enable_x64(True), np.errstate(all="ignore"):
        closed = jax.make_jaxpr(function)(*(x.low for x in arguments))
        (found,) = primitives.enclose(closed.jaxpr, closed.consts, list(arguments))
    return found


@pytest.mark.parametrize(
    "function",
    [jnp.log, jnp.sqrt, lambda x: x / x * x / 0, lambda x: x**-1.5],
)
def test_what_may_be_undefined_stays_undefined(function):
    """max(nan, 0) is not a number that is at least zero."""
    doubtful = Interval(np.array(-1.0), np.array(1.0))
    for after in (lambda x: x, jnp.exp, lambda x: jnp.maximum(x, 0.0), jnp.tanh, jnp.sum):
        found = _enclosed(lambda x, after=after: after(function(x)), doubtful)
        assert np.isnan(found.low)
        assert np.isnan(found.high)
    chosen = _enclosed(lambda x: jnp.where(function(x) > 0, 1.0, 2.0), doubtful)
    assert chosen.low == 1
    assert chosen.high == 2


def test_overflow_is_no_bound():
    big = constant(np.array([1e308, 1e308]))
    for function in (lambda x: x @ x, lambda x: x * x, lambda x: x.sum() * 10, jnp.exp):
        found = _enclosed(function, big)
        assert not np.any(found.low > np.finfo(float).max)
        assert np.all(np.isnan(found.high) | (found.high == np.inf))


def test_products_that_underflow_keep_their_sign():
    found = _enclosed(lambda x, y: x * y, constant(1e-200), constant(1e-200))
    assert found.low == 0
    assert 0 < found.high < 1e-320
    zeros = _enclosed(lambda x, y: x @ y, constant(np.zeros((2, 3))), constant(np.ones(3)))
    assert np.all(zeros.low == 0)
    assert np.all(zeros.high == 0)
    wide = Interval(np.array([0.0, 1.0, 1e-300]), np.array([0.0, 2.0, 2e-300]))
    rows = constant(np.array([[3.0, 0.0, 0.0], [0.0, 0.0, 1e-20], [0.0, 1e-200, 0.0]]))
    found = _enclosed(lambda x, y: x @ y, rows, wide)
    assert found.low[0] == found.high[0] == 0
    assert found.low[1] <= 1e-320 < 2e-320 <= found.high[1]
    assert 0 < found.low[2] < found.high[2]


def test_small_factors_of_large_ones_are_charged():
    """eps times a factor underflows where the product, and what it is off by, do not."""
    rng = np.random.default_rng(0)
    a, b = rng.uniform(1, 2, (50, 3)) * 1e300, rng.uniform(1, 2, (50, 3)) * 1e-320
    for x, y in zip(a, b, strict=True):
        found = _enclosed(lambda x, y: x @ y, constant(x), constant(y))
        exact = sum(Fraction(p) * Fraction(q) for p, q in zip(x, y, strict=True))
        assert Fraction(float(found.low)) <= exact <= Fraction(float(found.high))


def test_the_slope_of_a_maximum_is_known_where_one_entry_is_the_largest():
    """x == max(x) is not decided for intervals; the slope was, and with it the bound, nothing."""
    x = Interval(np.array([1.0, 2.0, 0.0]), np.array([1.1, 2.1, 3.0]))
    slope = jax.grad(jnp.max)
    clear = _enclosed(slope, Interval(x.low, np.array([1.1, 2.1, 1.9])))
    assert clear.low.tolist() == pytest.approx([0, 1, 0], abs=1e-14)
    assert clear.high.tolist() == pytest.approx([0, 1, 0], abs=1e-14)
    open_ = _enclosed(slope, x)
    assert np.all(open_.low <= 0)
    assert np.all(open_.low > -0.1)
    assert open_.high[0] == 0
    assert np.all(open_.high[1:] >= 1)


def test_unknown_primitives_are_refused_by_name_before_work():
    def objective(s, z):
        return jnp.sum(jax.scipy.special.gammaln(s) + jax.scipy.special.digamma(s))

    problem = sc.Problem(sc.Box(np.ones(2), 2 * np.ones(2)), (), objective)
    with pytest.raises(UnknownPrimitives, match="The objective uses 'digamma', 'lgamma'"):
        sc.solve(problem, rigorous=True)
    stage = sc.Stage(lambda s, z: jax.scipy.special.i0e(s) - 5, lambda s, z: s, name="odd")
    problem = sc.Problem(sc.Box(np.ones(2), 2 * np.ones(2)), (stage,), lambda s, z: z[0].sum())
    with pytest.raises(UnknownPrimitives, match=r"Stage 0 \('odd'\) uses 'bessel_i0e'"):
        sc.solve_batch([problem, problem], rigorous=True)
