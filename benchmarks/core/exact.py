"""Random small problems with optima that are known exactly, or to 50 digits, and certificates.

Numbers are drawn with all their digits, and optima are computed from them in rationals (balls of
Arb where a root, exponential or logarithm is needed). A certificate is what a perfect search would
find, rounded: its bound is the optimum up to rounding, so that a bound that is rounded the wrong
way is seen.
"""

import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flint import arb, ctx, fmpq, fmpq_mat

import stagecert as sc
from stagecert.certificate import Certificate


class Instance(NamedTuple):
    """`above(x)` says for sure whether a number is above the optimum; `optimum` is near it."""

    problem: sc.Problem
    certificate: Certificate
    above: Callable[[float], bool]
    optimum: float


def _exact(array) -> np.ndarray:
    return np.vectorize(Fraction, otypes=[object])(np.asarray(array))


def _rounded(array) -> np.ndarray:
    return np.vectorize(float, otypes=[np.float64])(array)


def _rational(problem, certificate, optimum: Fraction) -> Instance:
    def above(x: float) -> bool:
        return x == np.inf or (x > -np.inf and Fraction(x) > optimum)

    return Instance(problem, certificate, above, float(optimum))


def _ball(problem, certificate, optimum: arb) -> Instance:
    def above(x: float) -> bool:
        return bool(arb(x) > optimum)

    return Instance(problem, certificate, above, float(optimum.mid()))


def _certificate(inputs, blocks=(), multipliers=(), slopes=None) -> Certificate:
    slopes = (tuple(((), ()) for _ in blocks), ()) if slopes is None else slopes
    return Certificate(inputs, blocks, multipliers, slopes, 0.0)


def _box_minimum(slope, lower, upper) -> Fraction:
    ends = zip(slope, _exact(lower), _exact(upper), strict=True)
    return sum((min(g * a, g * b) for g, a, b in ends), Fraction(0))


def _scaled(rng, *shape) -> np.ndarray:
    return rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3)


# -- linear programs -------------------------------------------------------------------------------


def _first_lower(p, s, z):
    return p["A"] @ s + p["a"]


def _first_upper(p, s, z):
    return _first_lower(p, s, z) + p["w"] * (1.5 + p["V"] @ s)


def _second_lower(p, s, z):
    return p["P"] @ z[0] + p["Q"] @ s + p["b"]


def _second_upper(p, s, z):
    return _second_lower(p, s, z) + p["w"]


def _linear_objective(p, s, z):
    return p["c"] @ s + p["d"] @ z[0] + p["e"] @ z[1]


def stages(rng) -> Instance:
    """Two stages of affine bounds without boxes."""
    n, m, k = 3, 3, 2
    one = {"A": _scaled(rng, m, n), "a": _scaled(rng, m), "w": np.abs(_scaled(rng, m)),
           "V": rng.uniform(-0.4, 0.4, size=(m, n))}  # fmt: skip
    two = {"P": _scaled(rng, k, m), "Q": _scaled(rng, k, n), "b": _scaled(rng, k),
           "w": np.abs(_scaled(rng, k))}  # fmt: skip
    of = {"c": _scaled(rng, n), "d": _scaled(rng, m), "e": _scaled(rng, k)}
    lower = rng.uniform(-1, 0, n)
    upper = lower + rng.uniform(0, 1, n)
    problem = sc.Problem(
        sc.Box(lower, upper),
        (sc.Stage(_first_lower, _first_upper, params=one),
         sc.Stage(_second_lower, _second_upper, params=two)),
        sc.Objective(_linear_objective, params=of),
    )  # fmt: skip
    e1, e2, eo = ({name: _exact(x) for name, x in p.items()} for p in (one, two, of))
    last = eo["e"]
    entries = zip(last, e2["b"], e2["w"], strict=True)
    constant = sum(g * (b + (w if g < 0 else 0)) for g, b, w in entries)
    first = eo["d"] + e2["P"].T @ last
    slope = eo["c"] + e2["Q"].T @ last
    for j, g in enumerate(first):
        extra = e1["w"][j] if g < 0 else Fraction(0)
        slope = slope + g * (e1["A"][j] + extra * e1["V"][j])
        constant += g * (e1["a"][j] + Fraction(3, 2) * extra)
    optimum = constant + _box_minimum(slope, lower, upper)
    inputs = rng.uniform(lower, upper)
    blocks = (rng.normal(size=m), rng.normal(size=k))
    return _rational(
        problem, _certificate(inputs, blocks, (_rounded(first), _rounded(last))), optimum
    )


def _step_lower(p, u, x):
    return p["r"] * x + p["B"] * u + p["e"]


def _step_upper(p, u, x):
    return _step_lower(p, u, x) + p["w"]


def _fed(inputs, blocks):
    return inputs


def _scan_objective(p, s, z):
    return jnp.sum(p["c"] * s) + jnp.sum(p["d"] * z[0])


def scan(rng) -> Instance:
    """A scan of six steps with two states."""
    t, n = 6, 2
    p = {"r": rng.normal(size=(t, n)), "B": _scaled(rng, t, n), "e": _scaled(rng, t, n),
         "w": np.abs(_scaled(rng, t, n))}  # fmt: skip
    of = {"c": _scaled(rng, t, n), "d": _scaled(rng, t, n)}
    start = rng.normal(size=n)
    problem = sc.Problem(
        sc.Box(-np.ones((t, n)), np.ones((t, n))),
        (sc.ScanStage(_step_lower, _step_upper, t, start, feed=_fed, params=p),),
        sc.Objective(_scan_objective, params=of),
    )
    e, eo = ({name: _exact(x) for name, x in q.items()} for q in (p, of))
    later, constant = np.full(n, Fraction(0)), Fraction(0)
    slope, multipliers = eo["c"].copy(), np.empty((t, n), object)
    for step in reversed(range(t)):
        g = multipliers[step] = eo["d"][step] + later
        slope[step] = slope[step] + g * e["B"][step]
        for j in range(n):
            constant += g[j] * (e["e"][step, j] + (e["w"][step, j] if g[j] < 0 else 0))
        later = g * e["r"][step]
    constant += later @ _exact(start)
    optimum = constant - sum(abs(g) for g in slope.ravel())
    inputs = rng.uniform(-1, 1, (t, n))
    blocks = (rng.normal(size=(t, n)),)
    return _rational(problem, _certificate(inputs, blocks, (_rounded(multipliers),)), optimum)


def _kinked_lower(p, s, z):
    return sc.maximum(p["a"] * s + p["b"], p["e"] * s + p["f"])


def _far(p, s, z):
    return jnp.full(p["a"].shape, 1e4)


def _kinked_objective(p, s, z):
    return p["c"] * s + p["d"] @ z[0]


def kinks(rng) -> Instance:
    """One input, and maxima of pairs of lines; the slopes at the optimum are balanced."""
    k = 4
    p = {name: rng.normal(size=k) for name in "abef"}
    of = {"c": rng.normal(), "d": np.abs(rng.normal(size=k))}
    lower, upper = -1.0, float(rng.uniform(-0.9, 1))
    problem = sc.Problem(
        sc.Box(lower, upper),
        (sc.Stage(_kinked_lower, _far, params=p),),
        sc.Objective(_kinked_objective, params=of),
    )
    e, d, c = {name: _exact(x) for name, x in p.items()}, _exact(of["d"]), Fraction(of["c"])

    def lines(s):
        return e["a"] * s + e["b"], e["e"] * s + e["f"]

    def value(s):
        return c * s + d @ np.maximum(*lines(s))

    crossings = (e["f"] - e["b"]) / (e["a"] - e["e"])
    inside = [s for s in crossings if lower <= s <= upper]
    optimum, best = min((value(s), s) for s in (*inside, Fraction(lower), Fraction(upper)))
    one, two = lines(best)
    weights = np.where(one > two, 1.0, 0.0)
    tied = one == two
    fixed = c + (d * np.where(one > two, e["a"], e["e"]))[~tied].sum()
    for j in np.flatnonzero(tied):
        # a w + e (1 - w) such that the slopes add up to zero.
        weights[j] = min(max(float((-fixed / d[j] - e["e"][j]) / (e["a"][j] - e["e"][j])), 0), 1)
    slopes = (((((sc.pieces.First(weights),), ()),)), ())
    blocks = (np.asarray(rng.normal(size=k)),)
    return _rational(
        problem, _certificate(np.asarray(float(best)), blocks, (of["d"],), slopes), optimum
    )


def _shares(p, s, z):
    return p["c"] @ s["x"] + p["d"] @ s["y"]


def simplex(rng) -> Instance:
    """A simplex beside a box."""
    of = {"c": _scaled(rng, 4), "d": _scaled(rng, 3)}
    total = float(rng.uniform(0.1, 10))
    lower = _scaled(rng, 3)
    upper = lower + np.abs(_scaled(rng, 3))
    sets = sc.Product({"x": sc.Simplex(4, total), "y": sc.Box(lower, upper)})
    problem = sc.Problem(sets, (), sc.Objective(_shares, params=of))
    optimum = Fraction(total) * min(_exact(of["c"])) + _box_minimum(_exact(of["d"]), lower, upper)
    inputs = {"x": np.full(4, total / 4), "y": 0.5 * (lower + upper)}
    return _rational(problem, _certificate(inputs), optimum)


# -- side constraints ------------------------------------------------------------------------------


class _Vertex(NamedTuple):
    """The optimum of a linear program, a point that attains it, and a multiplier for each row."""

    optimum: Fraction
    point: list[Fraction]
    multipliers: np.ndarray


def _vertex(rows, right, cost) -> _Vertex | None:
    """minimise cost . x subject to rows x <= right, exactly; None where floats cannot find it.

    Floats look for the rows that hold with equality. Whether these are the right ones is then
    decided in rationals: the point satisfies all rows, and the multipliers are not negative.
    """
    n = len(cost)
    chosen = np.array(list(itertools.combinations(range(len(right)), n)))
    chosen = chosen[np.abs(np.linalg.det(rows[chosen])) > 1e-9]
    points = np.linalg.solve(rows[chosen], right[chosen][..., None])[..., 0]
    inside = np.all(points @ rows.T <= right + 1e-9 * (1 + np.abs(right)), axis=1)
    if not inside.any():
        return None
    held = chosen[inside][np.argmin(points[inside] @ cost)]
    matrix = fmpq_mat([[_fmpq(x) for x in row] for row in rows[held]])
    point = matrix.solve(fmpq_mat([[_fmpq(x)] for x in right[held]]))
    dual = matrix.transpose().solve(fmpq_mat([[-_fmpq(x)] for x in cost]))
    point, dual = ([Fraction(int(x.p), int(x.q)) for x in side.entries()] for side in (point, dual))
    if np.any(_exact(rows) @ point > _exact(right)) or min(dual) < 0:
        return None
    multipliers = np.full(len(right), Fraction(0))
    multipliers[held] = dual
    return _Vertex(_exact(cost) @ point, point, multipliers)


def _fmpq(x: float) -> fmpq:
    return fmpq(*float(x).as_integer_ratio())


def _over(p, s, z):
    return p["A"] @ s - p["b"]


def _with_rows(A, b, c) -> sc.Problem:
    side = sc.Constraint(_over, {"A": A, "b": b}, name="rows")
    ones = np.ones(A.shape[1])
    return sc.Problem(sc.Box(-ones, ones), (), sc.Objective(_along, params={"c": c}), (side,))


def _proof(rng, multipliers, feasibility=False) -> Certificate:
    inputs = rng.uniform(-1, 1, 3)  # of linear functions: anywhere
    sides = sc.Sides((multipliers,))
    return Certificate(inputs, (), (), ((), (), ((),)), 0.0, sides=sides, feasibility=feasibility)


def sides(rng) -> Instance:
    """Rows beside a box, and the multipliers of the best vertex."""
    best = None
    while best is None:
        A, c = _scaled(rng, 4, 3), _scaled(rng, 3)
        b = A @ rng.uniform(-0.5, 0.5, 3) + np.abs(A).sum(axis=1) * rng.uniform(0, 0.3, 4)
        one, ones = np.eye(3), np.ones(3)
        best = _vertex(np.vstack([A, one, -one]), np.concatenate([b, ones, ones]), c)
    return _rational(_with_rows(A, b, c), _proof(rng, _rounded(best.multipliers[:4])), best.optimum)


def empty(rng) -> Instance:
    """Rows of which the largest is nowhere below a number: nothing is feasible if that is positive.

    It is a hair's breadth below or above zero as often as it is far from it. A bound above that of
    its multipliers in rationals is wrong, and so is a proof that a feasible problem has no point.
    """
    one = np.hstack([np.eye(3), np.zeros((3, 1))])

    def least(A, b):
        rows = np.vstack([np.hstack([A, -np.ones((5, 1))]), one, -one])
        right = np.concatenate([b, np.ones(6)])
        return _vertex(rows, right, np.array([0.0, 0.0, 0.0, 1.0]))

    best = None
    while best is None:
        A, b = _scaled(rng, 5, 3), _scaled(rng, 5)
        first = least(A, b)
        if first is not None:
            size = np.abs(A).sum(axis=1).max()
            wanted = size * rng.choice([-0.1, -1e-15, 0.0, 1e-15, 1e-12, 0.1])
            b = b + (float(first.optimum) - wanted)
            best = least(A, b)
    multipliers = _rounded(best.multipliers[:5])
    slope = _exact(multipliers) @ _exact(A)
    proven = -(_exact(multipliers) @ _exact(b)) - sum(abs(g) for g in slope)
    problem = _with_rows(A, b, np.ones(3))
    instance = _rational(problem, _proof(rng, multipliers, True), proven)
    feasible = best.optimum <= 0

    def above(x: float) -> bool:
        return instance.above(x) or (feasible and x > 0)

    return instance._replace(above=above)


# -- curved ----------------------------------------------------------------------------------------


def _curved_objective(p, s, z):
    return 0.5 * jnp.sum(p["q"] * s**2) + p["c"] @ s + p["d"] @ z[0]


def _squares(rng, declared: bool) -> Instance:
    n, m = 3, 2
    one = {"A": _scaled(rng, m, n), "a": _scaled(rng, m), "w": np.abs(_scaled(rng, m)),
           "V": rng.uniform(-0.4, 0.4, size=(m, n))}  # fmt: skip
    of = {"q": np.abs(_scaled(rng, n)) + 0.01, "c": _scaled(rng, n), "d": _scaled(rng, m)}
    lower, upper = -rng.uniform(0, 1, n), rng.uniform(0, 1, n)
    problem = sc.Problem(
        sc.Box(lower, upper),
        (sc.Stage(_first_lower, _first_upper, params=one),),
        sc.Objective(_curved_objective, params=of, curvature_inputs=of["q"] if declared else None),
    )
    e, eo = ({name: _exact(x) for name, x in p.items()} for p in (one, of))
    slope, constant = eo["c"], Fraction(0)
    for j, g in enumerate(eo["d"]):
        extra = e["w"][j] if g < 0 else Fraction(0)
        slope = slope + g * (e["A"][j] + extra * e["V"][j])
        constant += g * (e["a"][j] + Fraction(3, 2) * extra)
    ends = zip(slope, eo["q"], _exact(lower), _exact(upper), strict=True)
    best = np.array([min(max(-g / q, a), b) for g, q, a, b in ends], object)
    optimum = constant + (eo["q"] * best * best / 2 + slope * best).sum()
    inputs = rng.uniform(lower, upper) if declared else _rounded(best)
    return _rational(problem, _certificate(inputs, (rng.normal(size=m),), (of["d"],)), optimum)


def squares(rng) -> Instance:
    """Separable quadratics over a box."""
    return _squares(rng, False)


def declared(rng) -> Instance:
    """The same with the curvature declared: a tangent anywhere is as good."""
    return _squares(rng, True)


def _along(p, s, z):
    return p["c"] @ s


def ball(rng) -> Instance:
    """A linear function over a ball."""
    of, middle = {"c": _scaled(rng, 5)}, _scaled(rng, 5)
    radius = float(np.abs(_scaled(rng, 1)[0]))
    problem = sc.Problem(sc.Ball(middle, radius), (), sc.Objective(_along, params=of))
    ctx.prec = 200
    c, m = (np.vectorize(arb, otypes=[object])(x) for x in (of["c"], middle))
    optimum = c @ m - arb(radius) * (c @ c).sqrt()
    return _ball(problem, _certificate(middle + 0.0), optimum)


def _exponentials(p, s, z):
    return jnp.sum(jnp.exp(p["a"] * s) - p["c"] * s)


def exponentials(rng) -> Instance:
    """exp(a s) - c s for each input."""
    of = {"a": rng.uniform(0.5, 3, 3), "c": rng.uniform(0.1, 5, 3)}
    problem = sc.Problem(
        sc.Box(np.full(3, -8.0), np.full(3, 8.0)), (), sc.Objective(_exponentials, params=of)
    )
    ctx.prec = 200
    optimum = arb(0)
    for a, c in zip(of["a"].tolist(), of["c"].tolist(), strict=True):
        share = arb(c) / arb(a)
        optimum += share - share * share.log()
    return _ball(problem, _certificate(np.log(of["c"] / of["a"]) / of["a"]), optimum)


FAMILIES: dict[str, Callable[[Any], Instance]] = {
    family.__name__: family
    for family in (
        stages,
        scan,
        kinks,
        simplex,
        squares,
        declared,
        ball,
        exponentials,
        sides,
        empty,
    )
}
