"""Lower bounds are lower bounds: any anchor, any multipliers, any slopes, every known problem.

The optima come from tests/zoo.py, which does not use stagecert to find them.
"""

import io
from functools import lru_cache

import equinox as eqx
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zoo import CASES

import stagecert as sc
from stagecert.certificate import certify, duality_gap, evaluate
from stagecert.reformulation import Point, psi_0

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def named(*names):
    cases = [case for case in CASES if case.name in names]
    assert len(cases) == len(names)
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def rounding_of(value):
    return 1e-9 * (1 + abs(value))


@lru_cache
def problem_of(case):
    return case.make()


def strip_curvature(problem):
    objective = sc.Objective(problem.objective.function, params=problem.objective.params)
    return sc.Problem(problem.inputs, problem.stages, objective)


# -- random anchors, multipliers and slopes -------------------------------------------------------

# (how far the anchor is moved, relative and absolute noise on the multipliers, as drawn?)
KINDS = [
    (moved, relative, absolute, drawn)
    for moved in (0.0, 0.1, 3.0)
    for relative, absolute in ((0.0, 0.0), (0.2, 0.0), (0.0, 1.0), (3.0, 10.0))
    for drawn in (False, True)
]
EACH = 2
COUNT = EACH * len(KINDS)
MOVED, RELATIVE, ABSOLUTE, DRAWN = (np.array(column) for column in zip(*KINDS * EACH, strict=True))


@eqx.filter_jit
def _seen(problem, inputs, fractions):
    """What multipliers and slopes a feasible point near each given one leads to."""

    def one(inputs, fractions):
        seen = evaluate(problem, Point(problem.inputs.project(inputs), fractions))
        multipliers = (seen.consistent.multipliers, seen.ordinary.multipliers)
        return seen.value, seen.point.inputs, seen.done.blocks, multipliers, seen.done.records

    return jax.vmap(one)(inputs, fractions)


@eqx.filter_jit
def _bounds(problem, anchors, multipliers, slopes):
    return jax.vmap(lambda a, y, w: sc.lower_bound(problem, a, y, w).bound())(
        anchors, multipliers, slopes
    )


@lru_cache
def attempts_at(case):
    """COUNT feasible points with their values; anchors, multipliers and slopes made of them."""
    problem, rng = problem_of(case), np.random.default_rng(7)

    def noise(tree):
        return jax.tree.map(lambda x: rng.normal(size=x.shape), tree)

    def along(numbers, x):
        return numbers.reshape(-1, *(1,) * (x.ndim - 1))

    middle, scale = problem.inputs.centre(), problem.inputs.scale()
    inputs = jax.tree.map(lambda m, d: m + d * rng.normal(size=(COUNT, *m.shape)), middle, scale)
    fractions = tuple(
        np.clip(rng.uniform(-0.3, 1.3, (COUNT, *s.shape)), 0, 1) for s in problem.block_shapes()
    )
    seen = jax.tree.map(np.asarray, _seen(problem, inputs, fractions))
    value, inputs, blocks, (consistent, drawn), recorded = seen
    anchors = jax.tree.map(
        lambda x, e: x + along(MOVED, x) * (1 + np.abs(x)) * e,
        sc.Anchor(inputs, blocks),
        noise(sc.Anchor(inputs, blocks)),
    )
    multipliers = jax.tree.map(
        lambda g, y, e, f: (
            np.where(along(DRAWN, y), y, g) * (1 + along(RELATIVE, y) * e) + along(ABSOLUTE, y) * f
        ),
        *(consistent, drawn, noise(drawn), noise(drawn)),
    )
    return value, anchors, multipliers, recorded, noise(recorded)


@lru_cache
def bounds_of(case):
    """The bounds of all attempts, with three choices of slopes where there are kinks."""
    _, anchors, multipliers, recorded, random = attempts_at(case)
    problem = problem_of(case)
    found = {"exact": _bounds(problem, anchors, multipliers, None)}
    if jax.tree.leaves(recorded):
        found["recorded"] = _bounds(problem, anchors, multipliers, recorded)
        found["random"] = _bounds(problem, anchors, multipliers, random)
    return {name: np.asarray(bound) for name, bound in found.items()}


@every_case
def test_no_anchor_and_no_multipliers_exceed_the_optimum(case):
    assert np.all(attempts_at(case)[0] >= case.value - rounding_of(case.value))
    plain = (MOVED == 0) & (RELATIVE == 0) & (ABSOLUTE == 0)
    for name, bound in bounds_of(case).items():
        assert not np.isnan(bound).any(), name
        assert bound.max() <= case.value + rounding_of(case.value), name
        # Consistent multipliers at a feasible anchor always prove something.
        if name != "random":
            assert np.isfinite(bound[plain & ~DRAWN]).all(), name
    # Where a block has neither a box nor curvature, other multipliers let the Lagrangian fall
    # without end, and -inf is the answer.
    problem = problem_of(case)
    curvature = problem.objective.curvature_blocks or (0.0,) * len(problem.stages)
    bounded = [
        stage.box is not None or np.all(np.asarray(c) > 0)
        for stage, c in zip(problem.stages, curvature, strict=True)
    ]
    noisy = bounds_of(case)["exact"][ABSOLUTE > 0]
    if all(bounded):
        assert np.isfinite(noisy).mean() > 0.5
    else:
        assert np.all(noisy == -np.inf)


# -- the known solutions prove themselves ---------------------------------------------------------

smooth_cases = pytest.mark.parametrize(
    "case", [case for case in CASES if case.smooth], ids=lambda case: case.name
)


@smooth_cases
def test_known_primal_and_dual_give_the_optimum(case):
    truth = case.truth()
    anchor = sc.Anchor(*jax.tree.map(jnp.asarray, (truth.inputs, truth.blocks)))
    multipliers = jax.tree.map(jnp.asarray, truth.multipliers)
    bound = _compiled(problem_of(case), anchor, multipliers).bound()
    assert bound <= case.value + rounding_of(case.value)
    assert bound >= case.value - 1e-6 * (1 + abs(case.value))


# -- multipliers as drawn, and Delta --------------------------------------------------------------


@eqx.filter_jit
def _gaps(problem, points):
    return jax.vmap(
        lambda point: (psi_0(problem, point.inputs, point.fractions), duality_gap(problem, point))
    )(points)


@named("softplus_net", "wedge", "curved", "max_pool")
def test_as_drawn_with_boxes(case):
    problem, rng = problem_of(case), np.random.default_rng(0)
    inputs = jax.vmap(problem.inputs.sample)(jax.random.split(jax.random.key(0), 20))
    fractions = tuple(jnp.asarray(rng.random((20, *s.shape))) for s in problem.block_shapes())
    value, gap = map(np.asarray, _gaps(problem, Point(inputs, fractions)))
    # Delta is finite, and value - Delta is a lower bound.
    assert np.isfinite(gap).all()
    assert np.all(value - gap <= case.value + rounding_of(case.value))


# -- declared curvature ---------------------------------------------------------------------------


@named("lqr_box", "wedge", "curved", "markowitz", "sandwich", "isotonic")
def test_curvature_tightens_and_stays_sound(case):
    problem = problem_of(case)
    _, anchors, multipliers, recorded, _ = attempts_at(case)
    which = "recorded" if jax.tree.leaves(recorded) else "exact"
    slopes = recorded if which == "recorded" else None
    without = np.asarray(_bounds(strip_curvature(problem), anchors, multipliers, slopes))
    curved = bounds_of(case)[which]
    assert not np.isnan(without).any()
    assert without.max() <= case.value + rounding_of(case.value)
    known = np.isfinite(without)
    assert np.all(curved[~known] >= without[~known])
    size = 1 + np.abs(without[known])
    assert np.all(curved[known] >= without[known] - 1e-9 * size)
    assert np.any(curved[known] > without[known] + 1e-3 * size)


_INTERVAL = sc.Box(jnp.asarray(-1.0), jnp.asarray(1.0))
_compiled = eqx.filter_jit(sc.lower_bound)


def _anchor(s, *blocks):
    return sc.Anchor(jnp.asarray(s), tuple(map(jnp.asarray, blocks)))


def _square_in_halves(tilt, s, z):
    return sc.relu(s) ** 2 + sc.relu(-s) ** 2 + tilt * s


@given(hnp.arrays(float, 6, elements=st.floats(-1, 1)))
def test_curvature_with_slopes_that_are_no_subgradient(numbers):
    """s^2 as relu(s)^2 + relu(-s)^2, curvature 2: at s > 0, slope 0 makes the line -s^2, which lies
    below the square, but not with (x - s)^2 added."""
    tilt, anchor, *weights = numbers
    objective = sc.Objective(
        _square_in_halves, params=jnp.asarray(tilt), curvature_inputs=jnp.asarray(2.0)
    )
    problem = sc.Problem(_INTERVAL, (), objective)
    slopes = ((), (jnp.array(weights[:2]), jnp.array(weights[2:])))
    best = -(tilt**2) / 4
    assert _compiled(problem, _anchor(anchor), (), slopes).bound() <= best + 1e-12
    # With subgradients the curvature makes the bound exact, wherever the anchor is.
    np.testing.assert_allclose(_compiled(problem, _anchor(anchor), ()).bound(), best, atol=1e-12)


# -- kinks in odd places --------------------------------------------------------------------------
#
# One stage mu(s) <= z <= 5 on s in [-1, 1], f = z + tilt * s, with mu(s) = s^2 or relu(s)^2 written
# in ways that put kinks where they do not belong.


def _cancelling(s, z):
    return s**2 - sc.relu(s) + sc.relu(s)


def _overcounted(s, z):
    return s**2 + 2 * sc.relu(s) - sc.abs(s) - s  # 2 relu(s) = |s| + s


def _square_of_relu(s, z):
    return sc.relu(s) ** 2


def _five(s, z):
    return jnp.full_like(s, 5.0)


def _twenty(p, s, z):
    return jnp.full_like(s, 20.0)


def _minus_twenty(p, s, z):
    return jnp.full_like(s, -20.0)


def _tilted(tilt, s, z):
    return z[0] + tilt * s


def _best_on_a_grid(mu, tilt):
    grid = np.linspace(-1, 1, 2001)
    return np.min(mu(grid) + tilt * grid)


@pytest.mark.parametrize(
    ("lower", "mu"),
    [
        (_cancelling, np.square),
        (_overcounted, np.square),
        (_square_of_relu, lambda s: np.maximum(s, 0) ** 2),
    ],
)
@given(hnp.arrays(float, 8, elements=st.floats(-2, 2)))
def test_kinks_in_odd_places_never_prove_too_much(lower, mu, numbers):
    tilt, at, block, y, *weights = numbers
    box = (jnp.asarray(-5.0), jnp.asarray(5.0))  # so that every multiplier gives a finite bound
    stage = sc.Stage(lower, _five, box=box)
    problem = sc.Problem(_INTERVAL, (stage,), sc.Objective(_tilted, params=jnp.asarray(tilt)))
    pairs = (jnp.array(weights[:2]), jnp.array(weights[2:]))
    slopes = ((((pairs if lower is not _square_of_relu else pairs[:1]), ()),), ())
    best = _best_on_a_grid(mu, tilt)
    for given_slopes in (None, slopes):
        for multiplier, z in ((y, block), (1.0, float(mu(np.asarray(at))))):
            parts = _compiled(problem, _anchor(at, z), (jnp.asarray(multiplier),), given_slopes)
            assert not np.isnan(parts.bound())
            assert parts.bound() <= best + 1e-9


def _three_lines(p, s, z):
    return sc.max(p["slopes"] * s + p["intercepts"])


def _three_lines_from_above(p, s, z):
    return sc.min(p["slopes"] * s + p["intercepts"]) + 20


def _tilted_sum(tilt, s, z):
    return z[0] - z[1] + tilt * s


@given(hnp.arrays(float, 17, elements=st.integers(-8, 8).map(lambda k: k / 4)))
def test_any_weights_make_a_line_below_a_maximum(numbers):
    """f = z_1 - z_2 + tilt s with z_1 above a maximum of three lines, z_2 below a minimum of three.

    With the multipliers 1 and -1, the bound is the least value of the weighted lines: nothing is
    lost but by the weights, so weights that were not brought to the simplex would show.
    """
    tilt, at, w, x = numbers[0], numbers[1] / 2, numbers[2:5], numbers[5:8]
    first = {"slopes": numbers[8:11], "intercepts": numbers[11:14]}
    second = {"slopes": numbers[14:17], "intercepts": numbers[11:14][::-1].copy()}
    params = jax.tree.map(jnp.asarray, (first, second))
    stages = (
        sc.Stage(_three_lines, _twenty, params=params[0]),
        sc.Stage(_minus_twenty, _three_lines_from_above, params=params[1]),
    )
    problem = sc.Problem(_INTERVAL, stages, sc.Objective(_tilted_sum, params=jnp.asarray(tilt)))

    def lines(p, s):
        return p["slopes"] * s + p["intercepts"]

    def value(s):
        return lines(first, s).max() - lines(second, s).min() - 20 + tilt * s

    slopes = ((((jnp.asarray(w),), ()), ((), (jnp.asarray(x),))), ())
    found = _compiled(problem, _anchor(at, 0.0, 0.0), (jnp.asarray(1.0), jnp.asarray(-1.0)), slopes)
    # Convex and piecewise linear: the least value is at an end or where two lines meet.
    places = [-1.0, 1.0]
    for p in (first, second):
        for i in range(3):
            for j in range(i):
                if p["slopes"][i] != p["slopes"][j]:
                    steepness = p["slopes"][i] - p["slopes"][j]
                    places.append((p["intercepts"][j] - p["intercepts"][i]) / steepness)
    best = min(value(s) for s in places if -1 <= s <= 1)
    assert found.bound() <= best + 1e-12
    # By hand: weights without negative parts, brought to sum to one; equal ones if none is left.
    w, x = (np.maximum(v, 0) for v in (w, x))
    w, x = (v / v.sum() if v.sum() > 0 else np.full(3, 1 / 3) for v in (w, x))
    ends = [w @ lines(first, s) - x @ lines(second, s) - 20 + tilt * s for s in (-1, 1)]
    np.testing.assert_allclose(found.computed, min(ends), atol=1e-12)


def test_a_negative_kink_with_the_wrong_slope_is_no_proof():
    """At s = 0.1 with slope 0 for +relu and 1 for -relu, s^2 would be cut by -0.01 - 0.8 s."""
    problem = sc.Problem(
        _INTERVAL,
        (sc.Stage(_cancelling, _five),),
        sc.Objective(_tilted, params=jnp.asarray(0.8)),
    )
    slopes = ((((jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])), ()),), ())
    found = _compiled(problem, _anchor(0.1, 0.01), (jnp.asarray(1.0),), slopes).bound()
    assert found <= -0.16 + 1e-12


def test_square_of_relu_is_tight_at_its_minimiser():
    problem = sc.Problem(
        _INTERVAL,
        (sc.Stage(_square_of_relu, _five),),
        sc.Objective(_tilted, params=jnp.asarray(-1.0)),
    )
    found = _compiled(problem, _anchor(0.5, 0.25), (jnp.asarray(1.0),)).bound()
    assert -0.25 - 1e-9 <= found <= -0.25


def test_nearly_consistent_multipliers_prove_nothing_false():
    """A block near 1e15 with a multiplier of 1e-12, not 0: L is 1e3 too high at a block of 0."""

    def far(s, z):
        return jnp.full_like(s, 1e15)

    def far_too(s, z):
        return jnp.full_like(s, 1e15) + 1

    stages = (sc.Stage(far, far_too), sc.Stage(lambda s, z: s**2, _five))
    problem = sc.Problem(_INTERVAL, stages, lambda s, z: z[1])
    found = _compiled(problem, _anchor(0.0, 0.0, 0.0), (jnp.asarray(1e-12), jnp.asarray(1.0)))
    assert found.bound() <= 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300, -1e300])
def test_numbers_that_are_not_finite_prove_nothing(bad):
    for case in CASES[:2]:
        problem = problem_of(case)
        for where in range(3):
            s, z, y = (bad if where == k else 0.5 for k in range(3))
            found = _compiled(problem, _anchor(s, z), (jnp.asarray(y),)).bound()
            assert not np.isnan(found)
            assert found <= case.value


# -- certificates ---------------------------------------------------------------------------------


@eqx.filter_jit
def _certificate(problem, point):
    return certify(problem, evaluate(problem, point).proposal())[0]


@lru_cache
def certificate_of(case):
    problem = problem_of(case)
    fractions = tuple(jnp.full(s.shape, 0.3) for s in problem.block_shapes())
    return _certificate(problem, Point(problem.inputs.sample(jax.random.key(1)), fractions))


# A scan, kinks in a stage and in the objective, inputs that are a dict and a tuple, no kinks.
KEPT = ("sandwich", "relu_kinks", "inventory", "box_and_ball", "shortfall", "lens")


@named(*KEPT)
def test_certificates_survive_saving(case, tmp_path):
    problem, certificate = problem_of(case), certificate_of(case)
    certificate.save(tmp_path / "proof.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["proof.npz"]
    loaded = sc.Certificate.load(tmp_path / "proof.npz", problem)
    assert jax.tree.structure(loaded) == jax.tree.structure(certificate)
    for a, b in zip(jax.tree.leaves(loaded), jax.tree.leaves(certificate), strict=True):
        np.testing.assert_array_equal(a, b)
    derived = loaded.derive(problem)
    np.testing.assert_allclose(derived, certificate.bound, rtol=1e-12)
    assert np.isfinite(derived)
    assert derived <= case.value + rounding_of(case.value)


def test_the_certificate_of_a_solution_derives_its_bound(tmp_path):
    case = CASES[0]
    solution = sc.solve(problem_of(case))
    solution.certificate.save(str(tmp_path / "proof"))
    loaded = sc.Certificate.load(str(tmp_path / "proof"), problem_of(case))
    assert loaded.bound == solution.bound
    assert loaded.derive(problem_of(case)) == pytest.approx(solution.bound, rel=1e-12)
    assert solution.bound >= -1 - 2e-4


@named(*KEPT)
def test_tampering_cannot_prove_too_much(case):
    problem, certificate = problem_of(case), certificate_of(case)
    rng = np.random.default_rng(0)

    def shaken(tree, size):
        return jax.tree.map(lambda x: x + size * (1 + np.abs(x)) * rng.normal(size=x.shape), tree)

    for size in (1e-13, 1e-6, 0.1, 10.0):
        for part in ("multipliers", "inputs", "blocks", "slopes"):
            where = lambda c, part=part: getattr(c, part)  # noqa: E731
            if not jax.tree.leaves(where(certificate)):
                continue
            tampered = eqx.tree_at(where, certificate, shaken(where(certificate), size))
            derived = tampered.derive(problem)
            assert not np.isnan(derived)
            assert derived <= case.value + rounding_of(case.value)
    # What the file says about its bound does not matter.
    boasting = eqx.tree_at(lambda c: c.bound, certificate, 1e9)
    assert boasting.derive(problem) <= case.value + rounding_of(case.value)


def test_a_certificate_of_another_problem_of_the_same_shape_is_sound_for_this_one():
    lens, pinched = CASES[:2]
    assert (lens.name, pinched.name) == ("lens", "pinched")
    assert certificate_of(lens).derive(problem_of(pinched)) <= pinched.value
    assert certificate_of(pinched).derive(problem_of(lens)) <= lens.value


def test_not_a_number_in_a_certificate_proves_nothing():
    case = CASES[0]
    tampered = eqx.tree_at(
        lambda c: c.multipliers, certificate_of(case), (jnp.asarray(float("nan")),)
    )
    assert tampered.derive(problem_of(case)) == -np.inf


def _saved(tmp_path, case):
    path = tmp_path / "proof.npz"
    certificate_of(case).save(path)
    return path


def test_a_file_that_cannot_be_written_is_the_one_named(tmp_path):
    path = tmp_path / "nowhere" / "answer.npz"
    with pytest.raises(FileNotFoundError) as error:
        certificate_of(CASES[0]).save(path)
    assert error.value.filename == str(path)


def test_loading_something_else(tmp_path):
    problem = problem_of(CASES[0])
    path = _saved(tmp_path, CASES[0])
    whole = path.read_bytes()
    array = io.BytesIO()
    np.save(array, np.ones(3))
    archive = io.BytesIO()
    np.savez(archive, weights=np.ones(3))
    damaged = bytearray(whole)
    damaged[len(whole) // 4] ^= 255
    broken = {
        "empty": b"",
        "text": b"not a certificate at all",
        "array": array.getvalue(),
        "other archive": archive.getvalue(),
        "damaged": bytes(damaged),
        **{f"first {n} bytes": whole[:n] for n in (3, 10, 100, len(whole) // 2, len(whole) - 1)},
    }
    for content in broken.values():
        path.write_bytes(content)
        with pytest.raises(sc.ProblemError, match="not a certificate"):
            sc.Certificate.load(path, problem)
    with pytest.raises(sc.ProblemError):
        sc.Certificate.load(tmp_path, problem)
    with pytest.raises(sc.ProblemError, match="nothing cannot be read: No such file"):
        sc.Certificate.load(tmp_path / "nothing", problem)
    path.write_bytes(broken["text"])
    with pytest.raises(sc.ProblemError, match=r"it is no \.npz file"):
        sc.Certificate.load(path, problem)


def test_loading_the_certificate_of_another_problem(tmp_path):
    by_name = {case.name: case for case in CASES}
    path = _saved(tmp_path, by_name["lens"])
    with pytest.raises(sc.ProblemError, match="does not belong to this problem: inputs_0"):
        sc.Certificate.load(path, problem_of(by_name["sandwich"]))
    path = _saved(tmp_path, by_name["sandwich"])
    with pytest.raises(sc.ProblemError, match="does not belong to this problem"):
        sc.Certificate.load(path, problem_of(by_name["lens"]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bound", np.ones(3)),
        ("bound", np.array("low")),
        ("multipliers_0", np.array("one")),
        ("multipliers_0", np.array(1j)),
        ("structure", np.array('{"format": "other", "version": 1}')),
        ("structure", np.array('{"format": "stagecert-certificate", "version": 2}')),
        ("structure", np.array("not even JSON")),
    ],
)
def test_loading_a_file_with_a_field_of_the_wrong_kind(tmp_path, field, value):
    path = _saved(tmp_path, CASES[0])
    with np.load(path) as held:
        fields = dict(held)
    assert field in fields
    np.savez(path, **(fields | {field: value}))
    with pytest.raises(sc.ProblemError):
        sc.Certificate.load(path, problem_of(CASES[0]))
