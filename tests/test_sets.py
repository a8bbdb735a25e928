"""Sets against independent truths: conic solvers, scipy, optimality conditions, distributions."""

import functools
from typing import NamedTuple

import cvxpy as cp
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from stagecert.errors import ProblemError
from stagecert.sets import AbstractSet, Ball, Box, Product, Simplex

BOX = Box(np.array([-1.0, 0.0, 2.0, -3.0]), np.array([1.0, 0.5, 2.0, 7.0]))  # entry 2: no width
BALL = Ball(np.array([[1.0, -2.0, 0.5], [0.0, 3.0, 0.0]]), 1.5)
SIMPLEX = Simplex(4, 2.5)
PRODUCT = Product({"a": BOX, "b": (BALL, Product(SIMPLEX, Simplex(2)))})
SETS = {"box": BOX, "ball": BALL, "simplex": SIMPLEX, "product": PRODUCT}
each_set = pytest.mark.parametrize("name", SETS)
few = settings(deadline=None, max_examples=60, derandomize=True)


def flat(point):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(point)])


def like(name, vector):
    """The vector as a point of the named set."""
    leaves, tree = jax.tree.flatten(CENTRES[name])
    pieces = np.split(np.asarray(vector), np.cumsum([leaf.size for leaf in leaves])[:-1])
    return tree.unflatten([p.reshape(x.shape) for p, x in zip(pieces, leaves, strict=True)])


def size_of(part):
    if isinstance(part, Product):
        return parts_and_pieces(part)[-1][1].stop
    return part.size if isinstance(part, Simplex) else np.size(jax.tree.leaves(part)[0])


def parts_and_pieces(product):
    """The parts of a product, each with the slice that it takes of a flat point."""
    parts = jax.tree.leaves(product.parts, is_leaf=lambda p: isinstance(p, AbstractSet))
    ends = np.cumsum([0, *map(size_of, parts)]).tolist()
    return [(p, slice(*ends[i : i + 2])) for i, p in enumerate(parts)]


def constraints(set_, x):
    """The set's definition for cvxpy, with the point laid out as in `flat`."""
    if isinstance(set_, Box):
        return [x >= set_.lower, x <= set_.upper]
    if isinstance(set_, Ball):
        return [cp.norm(x - np.ravel(set_.middle)) <= set_.radius]
    if isinstance(set_, Simplex):
        return [x >= 0, cp.sum(x) == set_.total]
    return [c for part, piece in parts_and_pieces(set_) for c in constraints(part, x[piece])]


def members(set_, rng, count):
    """Points of the set, drawn by numpy; corners and rims are as likely as the interior."""
    if isinstance(set_, Box):
        t = np.clip(rng.uniform(-0.5, 1.5, (count, *np.shape(set_.lower))), 0, 1)
        return set_.lower + t * (set_.upper - set_.lower)
    if isinstance(set_, Ball):
        d = rng.normal(size=(count, np.size(set_.middle)))
        d *= np.minimum(rng.uniform(0, 2, (count, 1)), 1) / np.linalg.norm(d, axis=1, keepdims=True)
        return np.ravel(set_.middle) + set_.radius * d
    if isinstance(set_, Simplex):
        return set_.total * rng.dirichlet(np.full(set_.size, 0.3), count)
    return np.hstack([members(part, rng, count) for part, _ in parts_and_pieces(set_)])


def assert_inside(set_, points, tol=1e-12):
    """Check points, laid out as in `flat`, against the set's definition."""
    if isinstance(set_, Box):
        assert (points >= set_.lower).all()
        assert (points <= set_.upper).all()
    elif isinstance(set_, Ball):
        distances = np.linalg.norm(points - np.ravel(set_.middle), axis=-1)
        assert np.max(distances) <= set_.radius + tol
    elif isinstance(set_, Simplex):
        assert np.min(points) >= 0
        np.testing.assert_allclose(np.sum(points, axis=-1), set_.total, atol=tol)
    else:
        for part, piece in parts_and_pieces(set_):
            assert_inside(part, points[..., piece], tol)


def solve(set_, objective, x):
    problem = cp.Problem(cp.Minimize(objective), constraints(set_, x))
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
    assert problem.status == "optimal"
    return problem.value


MEMBERS = {name: members(s, np.random.default_rng(0), 400) for name, s in SETS.items()}
CENTRES = {name: jax.tree.map(np.asarray, s.centre()) for name, s in SETS.items()}
SIZES = {name: flat(x).size for name, x in CENTRES.items()}
project = eqx.filter_jit(lambda set_, x: set_.project(x))
minimise_linear = eqx.filter_jit(lambda set_, g: set_.minimise_linear(g))
minimise_quadratic = eqx.filter_jit(lambda set_, g, z, c: set_.minimise_quadratic(g, z, c))
quadratic_slopes = eqx.filter_jit(
    jax.grad(lambda g, z, c, set_: set_.minimise_quadratic(g, z, c)[1], (0, 1, 2))
)


def vectors(name, size=10.0):
    entry = st.floats(-size, size, allow_subnormal=False) | st.sampled_from([0.0, 1.0, -1.0])
    return arrays(float, SIZES[name], elements=entry)


def curvatures(name):
    entry = st.floats(0.0, 5.0, allow_subnormal=False) | st.sampled_from([0.0, 1e-300, 1e-14])
    return arrays(float, SIZES[name], elements=entry)


def quadratic(points, g, z, c):
    moves = points - z
    return moves @ g + 0.5 * (moves**2) @ c


# Projection


@each_set
def test_projection_agrees_with_clarabel(name):
    rng, set_ = np.random.default_rng(1), SETS[name]
    for size in (0.1, 1.0, 10.0):
        target = flat(CENTRES[name]) + size * rng.normal(size=SIZES[name])
        x = cp.Variable(SIZES[name])
        solve(set_, cp.sum_squares(x - target), x)
        found = flat(project(set_, like(name, target)))
        np.testing.assert_allclose(found, np.asarray(x.value), atol=1e-4)


@each_set
@given(data=st.data())
@few
def test_projection_is_inside_and_satisfies_the_variational_inequality(name, data):
    set_, x = SETS[name], data.draw(vectors(name))
    p = flat(project(set_, like(name, x)))
    assert_inside(set_, p)
    assert np.max((MEMBERS[name] - p) @ (x - p)) <= 1e-10
    np.testing.assert_allclose(flat(project(set_, like(name, p))), p, atol=1e-14)


@each_set
def test_projection_leaves_members_alone(name):
    for member in MEMBERS[name][:50]:
        np.testing.assert_allclose(
            flat(project(SETS[name], like(name, member))), member, atol=1e-14
        )


def test_ball_projection_at_the_middle_and_far_away():
    assert (project(BALL, BALL.middle) == BALL.middle).all()
    slopes = jax.jit(jax.jacobian(BALL.project))(BALL.middle)
    np.testing.assert_array_equal(slopes.reshape(6, 6), np.eye(6))
    inner = BALL.middle + 0.999 * 1.5 * np.eye(2, 3) / np.sqrt(2)
    assert (project(BALL, inner) == inner).all()
    far = BALL.middle + 1e300 * np.eye(2, 3)
    expected = BALL.middle + 1.5 * np.eye(2, 3) / np.sqrt(2)
    np.testing.assert_allclose(project(BALL, far), expected, rtol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_simplex_projection_keeps_dtype_and_digits(dtype):
    eps, rng = np.finfo(dtype).eps, np.random.default_rng(2)
    x = project(Simplex(1000, 3.0), rng.normal(size=1000).astype(dtype))
    assert x.dtype == dtype
    assert abs(np.sum(np.asarray(x), dtype=float) - 3.0) <= 100 * eps
    # A common offset that swamps the sum must not: 2**20 + 1/8 is exact in single precision.
    far = np.array([2**20 + 0.125, 2**20, -(2.0**30)], dtype)
    np.testing.assert_allclose(project(Simplex(3), far), [0.5625, 0.4375, 0.0], atol=4 * eps)


@each_set
def test_projection_derivative_agrees_with_differences(name):
    set_, rng = SETS[name], np.random.default_rng(3)
    x, d = (like(name, v) for v in rng.normal(size=(2, SIZES[name])) * 3.0)
    _, tangent = jax.jit(lambda x, d: jax.jvp(set_.project, (x,), (d,)))(x, d)
    h = 1e-6
    ahead, behind = (jax.tree.map(lambda a, b, s=s: a + s * b, x, d) for s in (h, -h))
    difference = (flat(project(set_, ahead)) - flat(project(set_, behind))) / (2 * h)
    np.testing.assert_allclose(flat(tangent), difference, atol=1e-7)


# Linear minimisation


@each_set
@given(data=st.data())
@few
def test_linear_minimiser_beats_every_member(name, data):
    set_, g = SETS[name], data.draw(vectors(name))
    x = flat(minimise_linear(set_, like(name, g)))
    assert_inside(set_, x)
    assert g @ x <= np.min(MEMBERS[name] @ g) + 1e-12 * (1 + np.sum(np.abs(g)))


@each_set
def test_linear_minimum_agrees_with_clarabel(name):
    set_, g = SETS[name], np.random.default_rng(4).normal(size=SIZES[name])
    x = cp.Variable(SIZES[name])
    best = solve(set_, g @ x, x)
    assert g @ flat(minimise_linear(set_, like(name, g))) == pytest.approx(best, abs=1e-7)


@each_set
@pytest.mark.parametrize("size", [0.0, 1e-320, 1e-300, 1e-160, 1e160, 1e300])
def test_linear_minimiser_of_extreme_gradients(name, size):
    set_, g = SETS[name], np.linspace(-1.0, 1.5, SIZES[name])
    x = flat(minimise_linear(set_, like(name, size * g)))
    assert_inside(set_, x)
    if size >= 1e-300:
        np.testing.assert_allclose(x, flat(minimise_linear(set_, like(name, g))), rtol=1e-13)


def test_ball_linear_minimiser_at_zero_is_the_middle():
    assert (minimise_linear(BALL, np.zeros((2, 3))) == BALL.middle).all()
    derivative = jax.jit(jax.jacobian(BALL.minimise_linear))(jnp.zeros((2, 3)))
    assert jnp.isfinite(derivative).all()


# Quadratic minimisation


@each_set
@given(data=st.data())
@few
def test_quadratic_value_is_a_lower_bound(name, data):
    set_ = SETS[name]
    g, z, c = data.draw(vectors(name)), data.draw(vectors(name)), data.draw(curvatures(name))
    x, value = minimise_quadratic(set_, *(like(name, v) for v in (g, z, c)))
    assert_inside(set_, flat(x))
    lowest = np.min(quadratic(MEMBERS[name], g, z, c))
    assert value <= lowest + 1e-12 * (1 + abs(lowest))
    # No bound exceeds the true function at the point that comes with it.
    own = quadratic(flat(x), g, z, c)
    assert value <= own + 1e-12 * (1 + abs(own))


@given(data=st.data())
@few
def test_box_quadratic_is_exact(data):
    g, z, c = (data.draw(s) for s in (vectors("box"), vectors("box"), curvatures("box")))
    x, value = minimise_quadratic(BOX, g, z, c)
    assert value == pytest.approx(quadratic(np.asarray(x), g, z, c), rel=1e-13, abs=1e-13)
    found = scipy.optimize.minimize(
        lambda y: quadratic(y, g, z, c),
        BOX.centre(),
        jac=lambda y: g + c * (y - z),
        bounds=list(zip(BOX.lower, BOX.upper, strict=True)),
        method="L-BFGS-B",
        options={"ftol": 1e-15, "gtol": 1e-12},
    )
    assert value == pytest.approx(found.fun, rel=1e-7, abs=1e-7)


def test_box_quadratic_leaves_idle_entries_alone():
    x, value = Box(np.zeros(3), np.ones(3)).minimise_quadratic(
        np.zeros(3), np.array([0.3, 0.7, 4.0]), np.array([0.0, 2.0, 0.0])
    )
    assert x.tolist() == [0.3, 0.7, 1.0]
    assert value == 0.0


@each_set
@pytest.mark.parametrize("c", [0.0, 1e-9, 0.7, 40.0])
def test_uniform_quadratic_agrees_with_clarabel(name, c):
    set_, rng = SETS[name], np.random.default_rng(5)
    g, z = rng.normal(size=(2, SIZES[name])) * 2.0
    z = MEMBERS[name][0] if c == 40.0 else z  # inner solutions, too
    point, value = minimise_quadratic(set_, like(name, g), like(name, z), jnp.asarray(c))
    attained = quadratic(flat(point), g, z, np.full(g.shape, c))
    assert value == pytest.approx(attained, rel=1e-13, abs=1e-13)
    x = cp.Variable(SIZES[name])
    best = solve(set_, g @ (x - z) + 0.5 * c * cp.sum_squares(x - z), x)
    assert value == pytest.approx(best, rel=1e-7, abs=1e-7)


@each_set
@pytest.mark.parametrize("c", [0.0, 1e-320, 1e-300, 1e-150, 1e-20, 1.0, 1e40])
@pytest.mark.parametrize("size", [0.0, 1e-320, 1e-300, 1e-20, 1.0, 1e200])
def test_quadratic_with_extreme_numbers(name, c, size):
    set_ = SETS[name]
    g, z = size * np.linspace(-1.0, 1.5, SIZES[name]), MEMBERS[name][1]
    x, value = minimise_quadratic(set_, like(name, g), like(name, z), jnp.asarray(c))
    assert np.isfinite(flat(x)).all()
    # z is inside: the minimum lies between the linear minimum and 0, both with their rounding.
    linear = g @ (flat(minimise_linear(set_, like(name, g))) - z)
    slack = 1e-14 * (np.sum(np.abs(g)) + c) * 10.0 + 1e-300
    assert linear - slack <= value <= slack
    lowest = np.min(quadratic(MEMBERS[name], g, z, np.full(g.shape, c)))
    assert value <= lowest + slack


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["box", "ball", "simplex"])
def test_quadratic_derivatives_are_finite_and_right(name, dtype):
    set_ = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), SETS[name])
    z = np.asarray(set_.centre()) + dtype(0.25)
    g = np.linspace(-1.0, 0.5, z.size, dtype=dtype).reshape(z.shape)
    tol = 200 * np.finfo(dtype).eps
    for c in (dtype(c) for c in (0.0, 1e-40, 1e-30, 1e-20, 1e-10, 1.0, 50.0)):
        x, value = minimise_quadratic(set_, g, z, c)
        assert x.dtype == value.dtype == dtype
        slopes = quadratic_slopes(g, z, c, set_)
        # The derivative of a minimum is that of the objective at the minimiser (Danskin).
        np.testing.assert_allclose(slopes[0], x - z, atol=tol)
        np.testing.assert_allclose(slopes[1], -(g + c * (x - z)), atol=tol)
        np.testing.assert_allclose(slopes[2], 0.5 * np.sum((x - z) ** 2), rtol=tol)


def test_quadratic_value_differentiates_with_respect_to_the_set():
    def value(radius):
        return Ball(np.zeros(2), radius).minimise_quadratic(np.array([3.0, 4.0]), 0.0, 0.5)[1]

    assert value(2.0) == pytest.approx(-9.0)  # -5 r + r**2 / 4
    assert jax.jit(jax.grad(value))(2.0) == pytest.approx(-4.0)


def test_quadratic_bound_stays_tight_in_single_precision():
    # The step g / c is so short that x is good to few digits, and the slope there to none.
    g, z = np.array([0.8, -0.6], np.float32), np.array([0.3, 0.7], np.float32)
    _, value = Ball(np.zeros(2, np.float32), 1.0).minimise_quadratic(g, z, 1e4)
    assert value.dtype == np.float32
    assert value == pytest.approx(-0.5e-4, rel=1e-4)


class Joint(AbstractSet):
    """A ball over all entries of a dict, as a user might write it."""

    ball: Ball

    def _split(self, x):
        return {"a": x[:2], "b": x[2]}

    def project(self, point):
        return self._split(self.ball.project(jnp.append(point["a"], point["b"])))

    def minimise_linear(self, gradient):
        return self._split(self.ball.minimise_linear(jnp.append(gradient["a"], gradient["b"])))

    def sample(self, key):
        return self._split(self.ball.sample(key))

    def centre(self):
        return self._split(self.ball.centre())

    def scale(self):
        return self._split(self.ball.scale())

    def validate(self):
        self.ball.validate()


@pytest.mark.parametrize("curvature", [(0.5, 2.0), (2.0, 0.5), (0.0, 2.0), (0.5, 0.5)])
def test_quadratic_of_a_set_of_trees(curvature):
    set_, g = Joint(Ball(np.zeros(3), 2.0)), {"a": np.array([1.0, -2.0]), "b": np.array(2.0)}
    z, c = jax.tree.map(np.zeros_like, g), dict(zip("ab", curvature, strict=True))
    x, value = set_.minimise_quadratic(g, z, c)
    least = min(curvature)
    # |g| = 3: the uniform minimum is -3 r + c r**2 / 2 at r = 2, as 3 / c >= 2.
    assert value == pytest.approx(-6.0 + 2.0 * least)
    np.testing.assert_allclose(flat(x), -2.0 / 3.0 * flat(g))
    np.testing.assert_allclose(flat(set_.minimise_quadratic(g, z, least)[0]), flat(x))


class Sloppy(Ball):
    """A ball whose projection stops short of the rim."""

    def project(self, point):
        return 0.9 * super().project(point) + 0.1 * self.middle


def test_quadratic_bound_survives_an_inexact_projection():
    g, z = np.array([3.0, 4.0]), np.array([0.5, 0.0])
    _, exact = Ball(np.zeros(2), 2.0).minimise_quadratic(g, z, 1.0)
    x, value = Sloppy(np.zeros(2), 2.0).minimise_quadratic(g, z, 1.0)
    assert quadratic(np.asarray(x), g, z, np.ones(2)) > exact + 0.1  # so x alone would overstate
    assert exact - 1.0 < value < exact


# Samples, centres, scales


@functools.cache
def draws(name):
    return jax.jit(jax.vmap(SETS[name].sample))(jax.random.split(jax.random.key(0), 4000))


@each_set
def test_centres_and_samples_are_inside(name):
    set_ = SETS[name]
    centre, scale = set_.centre(), set_.scale()
    assert_inside(set_, flat(centre))
    assert jax.tree.structure(scale) == jax.tree.structure(centre)
    assert jax.tree.map(jnp.shape, scale) == jax.tree.map(jnp.shape, centre)
    rows = [np.reshape(leaf, (4000, -1)) for leaf in jax.tree.leaves(draws(name))]
    assert_inside(set_, np.hstack(rows))


def p_value(values, law):
    return scipy.stats.kstest(np.asarray(values), law.cdf).pvalue


def test_samples_are_uniform():
    shares = np.asarray(draws("box") - BOX.lower)[:, [0, 1, 3]] / [2.0, 0.5, 10.0]
    assert min(p_value(s, scipy.stats.uniform()) for s in shares.T) > 1e-3
    # A uniform point of the unit ball in n dimensions: |x|**n is uniform, x_i symmetric beta.
    offsets = np.asarray(draws("ball") - BALL.middle).reshape(-1, 6) / BALL.radius
    assert p_value(np.linalg.norm(offsets, axis=1) ** 6, scipy.stats.uniform()) > 1e-3
    coordinate = scipy.stats.beta(3.5, 3.5, loc=-1, scale=2)
    assert min(p_value(x, coordinate) for x in offsets.T) > 1e-3
    shares = np.asarray(draws("simplex")) / SIMPLEX.total
    assert min(p_value(s, scipy.stats.beta(1, 3)) for s in shares.T) > 1e-3


def test_parts_of_a_product_are_sampled_independently():
    product = Product(Box(np.zeros(50), 1.0), Box(np.zeros(50), 1.0))
    a, b = product.sample(jax.random.key(0))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.5


def test_scales():
    assert BOX.scale().tolist() == [1.0, 0.25, 0.0, 5.0]
    assert BALL.scale().tolist() == [[1.5] * 3] * 2
    assert SIMPLEX.scale().tolist() == [2.5] * 4
    assert Simplex(1, 2.5).scale().tolist() == [0.0]


# Construction, batching, products


def test_fields_stay_as_given_and_scalars_broadcast():
    assert BOX.lower is SETS["box"].lower
    assert isinstance(BOX.lower, np.ndarray)
    box = Box(-1.0, np.ones(3))
    box.validate()
    assert box.centre().tolist() == [0.0] * 3
    assert not Box(0.0, 1.0).centre().weak_type
    assert box.sample(jax.random.key(0)).shape == (3,)
    assert box.minimise_linear(np.array([1.0, -1.0, 0.0])).tolist() == [-1.0, 1.0, 0.0]
    assert Simplex((3,)).centre().shape == (3,)


def test_batched_sets():
    rng = np.random.default_rng(6)
    middle, x, z = rng.normal(size=(3, 5, 3))
    sizes, c = np.arange(1.0, 6.0), rng.uniform(0, 2, (5, 3))
    keys = jax.random.split(jax.random.key(1), 5)

    def all_methods(s, x, z, c, key):
        results = s.project(x), s.minimise_linear(x), s.centre(), s.scale(), s.sample(key)
        return results, s.minimise_quadratic(x, z, c)

    for batch in (Box(middle, middle + sizes[:, None]), Ball(middle, sizes), Simplex(3, sizes)):
        together = jax.jit(jax.vmap(all_methods))(batch, x, z, c, keys)
        one_by_one = jax.jit(all_methods)
        for i in range(5):
            single = jax.tree.map(lambda leaf, i=i: leaf[i], batch)
            alone = one_by_one(single, x[i], z[i], c[i], keys[i])
            for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
                np.testing.assert_allclose(a[i], b, atol=1e-13)


class Pair(NamedTuple):
    box: object
    ball: object


@pytest.mark.parametrize("wrap", [lambda a, b: {"p": a, "q": b}, Pair, lambda a, b: [a, (b,)]])
def test_product_is_separable_and_keeps_its_container(wrap):
    rng, product = np.random.default_rng(7), Product(wrap(BOX, BALL))
    (gb, gr), (zb, zr), (cb, cr) = (
        (rng.uniform(0.1, 2, 4), rng.uniform(0.1, 2, (2, 3))) for _ in range(3)
    )
    g, z, c = wrap(gb, gr), wrap(zb, zr), wrap(cb, cr)
    for method in ("project", "minimise_linear"):
        expected = wrap(getattr(BOX, method)(gb), getattr(BALL, method)(gr))
        got = getattr(product, method)(g)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        np.testing.assert_array_equal(flat(got), flat(expected))
    x, value = product.minimise_quadratic(g, z, c)
    (xb, vb), (xr, vr) = BOX.minimise_quadratic(gb, zb, cb), BALL.minimise_quadratic(gr, zr, cr)
    assert jax.tree.structure(x) == jax.tree.structure(g)
    np.testing.assert_array_equal(flat(x), flat(wrap(xb, xr)))
    assert value == pytest.approx(float(vb + vr), rel=1e-15)
    product.validate()


def test_product_of_positional_sets_is_a_tuple():
    assert isinstance(Product(BOX, BALL).centre(), tuple)
    assert isinstance(Product(BOX).centre(), tuple)
    with pytest.raises(ValueError, match="key"):
        Product({"a": BOX}).project({"b": np.zeros(4)})


# Validation

NAN, INF = float("nan"), float("inf")
BAD = [
    (lambda: Box(np.array([0.0, 2.5]), np.array([1.0, 1.5])),
     "Box is empty: lower[1] = 2.5 exceeds upper[1] = 1.5"),
    (lambda: Box(np.array([[0.0, 3.0]]), 2.0), "lower[0, 1] = 3.0 exceeds upper[0, 1] = 2.0"),
    (lambda: Box(1.0, 0.5), "lower = 1.0 exceeds upper = 0.5"),
    (lambda: Box(np.array([0.0, NAN]), 1.0), "Box has a NaN: lower[1] = nan"),
    (lambda: Box(0.0, np.array([1.0, 1.0, INF])), "Box is unbounded: upper[2] = inf"),
    (lambda: Box(-INF, np.ones(2)), "Box is unbounded: lower = -inf"),
    (lambda: Box(np.zeros(2), np.ones(3)), "lower has shape (2,) but upper (3,)"),
    (lambda: Box(np.zeros((1, 2)), np.ones(2)), "lower has shape (1, 2) but upper (2,)"),
    (lambda: Box(np.zeros(2, int), np.ones(2, int)), "must be floating, got int64 and int64"),
    (lambda: Box(np.zeros(2, complex), 1.0), "must be floating, got complex128 and float"),
    (lambda: Box(["a"], 1.0), "must be floating, got list and float"),
    (lambda: Box(np.array(["a"]), 1.0), "must be floating, got <U1 and float"),
    (lambda: Ball(np.zeros(2), 0.0), "Ball: radius must be one positive number, got radius = 0.0"),
    (lambda: Ball(np.zeros(2), -1.5), "radius must be one positive number, got radius = -1.5"),
    (lambda: Ball(np.zeros(2), INF), "Ball is unbounded: radius = inf"),
    (lambda: Ball(np.zeros(2), NAN), "Ball has a NaN: radius = nan"),
    (lambda: Ball(np.array([0.0, NAN]), 1.0), "Ball has a NaN: middle[1] = nan"),
    (lambda: Ball(np.zeros(2), np.ones(2)), "radius must be one positive number, got [1. 1.]"),
    (lambda: Ball(np.zeros((0, 2)), 1.0), "middle has no entries, its shape is (0, 2)"),
    (lambda: Simplex(0), "Simplex: size must be a positive integer, got 0"),
    (lambda: Simplex((2, 3)), "Simplex: size must be a positive integer, got (2, 3)"),  # type: ignore
    (lambda: Simplex(2.0), "Simplex: size must be a positive integer, got 2.0"),  # type: ignore
    (lambda: Simplex(2, -0.5), "Simplex: total must be one positive number, got total = -0.5"),
    (lambda: Simplex(2, 0.0), "Simplex: total must be one positive number, got total = 0.0"),
    (lambda: Simplex(2, NAN), "Simplex has a NaN: total = nan"),
    (lambda: Simplex(2, INF), "Simplex is unbounded: total = inf"),
    (lambda: Simplex(2, np.ones(2)), "total must be one positive number, got [1. 1.]"),
    (lambda: Product(), "Product has no parts"),
    (lambda: Product({}), "Product has no parts"),
    (lambda: Product({"a": BOX, "b": (BALL, Box(1.0, 0.0))}),
     "Box is empty: lower = 1.0 exceeds upper = 0.0"),
    (lambda: Product({"a": BOX, "b": (BALL, Box(jnp.ones(()), 0.0))}),
     "Product part ['b'][1]: Box is empty: lower = 1.0 exceeds upper = 0.0"),
    (lambda: Product(BOX, 3.0), "Product part [1] is not a set but 3.0"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[message for _, message in BAD])
def test_validation_names_what_is_wrong(bad, message):
    with pytest.raises(ProblemError) as caught:
        bad().validate()
    assert message in str(caught.value)


def test_what_is_no_set_is_said_where_it_is_written_down():
    for bad in (lambda: Box(0.0, np.array([1.0, NAN])), lambda: Box(1.0, 0.5),
                lambda: Ball(np.zeros(2), -1.0), lambda: Simplex(2, -0.5)):  # fmt: skip
        with pytest.raises(ProblemError):
            bad()
    # Arrays of JAX may be traced, or a batch of sets: these are looked at by `solve`.
    assert jax.jit(lambda x: Ball(jnp.zeros(2), x).radius)(-1.0) == -1
    assert Ball(jnp.zeros((3, 2)), jnp.ones(3)).radius.shape == (3,)


@each_set
def test_validation_accepts_good_sets(name):
    SETS[name].validate()
    jax.tree.map(jnp.asarray, SETS[name]).validate()
    jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), SETS[name]).validate()


def test_validation_accepts_a_box_without_entries():
    box = Box(np.zeros(0), np.ones(0))
    box.validate()
    x, value = box.minimise_quadratic(np.zeros(0), np.zeros(0), 1.0)
    assert x.shape == (0,)
    assert value == 0.0


def test_lists_and_whole_numbers_are_taken_as_people_type_them():
    for typed, meant in (
        (Box(0, 1), Box(0.0, 1.0)),
        (Box([0, -1], [1, 2]), Box(np.array([0.0, -1.0]), np.array([1.0, 2.0]))),
        (Ball([3, 4], 1), Ball(np.array([3.0, 4.0]), 1.0)),
        (Simplex(2, 1), Simplex(2, 1.0)),
    ):
        typed.validate()
        np.testing.assert_array_equal(typed.centre(), meant.centre())
        assert typed.centre().dtype == meant.centre().dtype
