"""Degenerate entries, Escape-Exact-Local-Min, Fix-Degeneracy and the solvers that need them."""

import equinox as eqx
import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reformulation import SIZES, Transcript, assert_close, draws, hand_problem

import stagecert as sc
from stagecert.certificate import complementarity_of, evaluate
from stagecert.degeneracy import (
    FixStatus,
    any_entry,
    degenerate,
    degenerate_for,
    escape_exact_local_min,
    fix_degeneracy,
)
from stagecert.reformulation import Point, complementarity, linearise
from stagecert.solvers import Backtracking, Safe

_evaluate = eqx.filter_jit(evaluate)
_escaped = eqx.filter_jit(escape_exact_local_min)
_fix = eqx.filter_jit(fix_degeneracy)


# -- Escape-Exact-Local-Min: the point stays, K_0 becomes empty -----------------------------------
#
# Random problems whose bounds meet at a given point x0 = (s0, z0) in some entries, with different
# slopes below and above. With d = x - x0 for x the inputs and earlier blocks,
#
#     mu  = base - k . d + P . d^2 + G . (exp(d) - 1)
#     eta = base + l . d - P . d^2 + room              (room = 0: no width at x0)
#
# All numbers are small multiples of 1/8, so nothing is rounded, and "unchanged" and "empty" hold to
# the last bit. The lemma needs no more than smooth functions, so the bounds may cross elsewhere.

INPUTS, FIRST, STEPS, STATE, LAST = 2, 3, 2, 2, 2
WIDTHS = (FIRST, STEPS * STATE, LAST)
READS = (INPUTS, INPUTS + FIRST + STATE, INPUTS + FIRST + STEPS * STATE)
COUNT = INPUTS + sum(n * (4 * reads + 3) for n, reads in zip(WIDTHS, READS, strict=True))
COUNT += INPUTS + sum(WIDTHS)


def _met_lower(p, x):
    d = x - p["x0"]
    return p["base"] - p["k"] @ d + p["P"] @ d**2 + p["G"] @ jnp.expm1(d)


def _met_upper(p, x):
    d = x - p["x0"]
    return p["base"] + p["l"] @ d - p["P"] @ d**2 + p["room"]


def _flat(s, z):
    return jnp.concatenate([s, *(block.ravel() for block in z)])


def _met_feed(s, z):
    return jnp.broadcast_to(_flat(s, z), (STEPS, INPUTS + FIRST))


def _met_objective(c, s, z):
    x = _flat(s, z)
    return c["linear"] @ x + 0.5 * jnp.sum((x - c["x0"]) ** 2)


def _met_problem(params):
    first, steps, last, objective = params

    def stage(p):
        return sc.Stage(
            lambda q, s, z: _met_lower(q, _flat(s, z)),
            lambda q, s, z: _met_upper(q, _flat(s, z)),
            params=p,
        )

    scan = sc.ScanStage(
        lambda q, feed, x: _met_lower(q, jnp.concatenate([feed, x])),
        lambda q, feed, x: _met_upper(q, jnp.concatenate([feed, x])),
        length=STEPS,
        initial=jnp.zeros(STATE),
        feed=_met_feed,
        params=steps,
    )
    return sc.Problem(
        sc.Box(-jnp.ones(INPUTS), jnp.ones(INPUTS)),
        (stage(first), scan, stage(last)),
        sc.Objective(_met_objective, params=objective),
    )


def _met_from(numbers, rooms, eighths):
    """Problem parameters, inputs and fractions from flat arrays of whole numbers."""
    numbers, rooms = iter(numbers / 8), iter(np.maximum(rooms, 0) / 8)
    eighths = iter(eighths / 8)

    def take(*shape, source=numbers):
        return np.array([next(source) for _ in range(int(np.prod(shape)))]).reshape(shape)

    s0 = take(INPUTS)
    theta = [take(FIRST, source=eighths), take(STEPS, STATE, source=eighths)]
    theta.append(take(LAST, source=eighths))

    def bounds(n, x0):
        p = {"x0": x0, "base": take(n), "k": take(n, x0.size), "l": take(n, x0.size)}
        p |= {"P": np.abs(take(n, x0.size)), "G": np.abs(take(n, x0.size))}
        return p | {"room": take(n, source=rooms)}

    def chosen(p, theta):
        return p["base"] + theta * p["room"]

    x = s0
    first = bounds(FIRST, x)
    x = np.concatenate([x, chosen(first, theta[0])])
    state, steps = np.zeros(STATE), []
    for t in range(STEPS):
        steps.append(bounds(STATE, np.concatenate([x, state])))
        state = chosen(steps[-1], theta[1][t])
    z1 = np.stack([chosen(p, t) for p, t in zip(steps, theta[1], strict=True)])
    x = np.concatenate([x, z1.ravel()])
    last = bounds(LAST, x)
    x = np.concatenate([x, chosen(last, theta[2])])
    objective = {"linear": take(x.size), "x0": x}
    steps = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
    return (first, steps, last, objective), s0, tuple(theta)


@eqx.filter_jit
def _escape(params, s, fractions):
    problem, point = _met_problem(params), Point(s, fractions)
    before = evaluate(problem, point)
    escaped = escape_exact_local_min(problem, point)
    after = evaluate(problem, escaped)
    # Fix-Degeneracy does the same once q is large against all multipliers over all widths.
    fixed = fix_degeneracy(problem, point, 1e9)
    return before, degenerate(before, 0), escaped, after, degenerate(after, 0), fixed


@given(
    hnp.arrays(int, COUNT, elements=st.integers(-8, 8)),
    hnp.arrays(int, sum(WIDTHS), elements=st.integers(-4, 4)),  # half of the entries have no room
    hnp.arrays(int, sum(WIDTHS), elements=st.integers(0, 8)),
)
def test_escape_leaves_forward_unchanged_and_k_0_empty(numbers, rooms, eighths):
    params, s, fractions = _met_from(numbers, rooms, eighths)
    before, stuck, escaped, after, stuck_after, fixed = _escape(
        *jax.tree.map(jnp.asarray, (params, s, fractions))
    )
    for mask, width, r in zip(stuck, before.done.widths(), complementarity_of(before), strict=True):
        np.testing.assert_array_equal(mask, (np.asarray(width) == 0) & (np.asarray(r) > 0))
    # Forward is unchanged, and so is the objective.
    assert_close(after.done.blocks, before.done.blocks, rtol=0, atol=0)
    assert after.value == before.value
    np.testing.assert_array_equal(escaped.inputs, s)
    # K_0 is empty.
    assert not any(np.any(mask) for mask in stuck_after)
    # Only entries without width were touched, and only to corners.
    for new, old, width in zip(escaped.fractions, fractions, before.done.widths(), strict=True):
        changed = np.asarray(new) != old
        assert np.all(np.asarray(width)[changed] == 0)
        assert np.isin(np.asarray(new)[changed], (0, 1)).all()
    # The last block has nothing after it, so there K_0 itself is what changed.
    np.testing.assert_array_equal(escaped.fractions[-1] != fractions[-1], stuck[-1])
    assert_close(fixed.point.fractions, escaped.fractions, rtol=0, atol=0)
    assert fixed.status == FixStatus.SUCCESS


def test_escape_meets_degenerate_points():
    """The examples above are not vacuous: most random ones have entries in K_0 to begin with."""
    rng = np.random.default_rng(0)
    degenerate_blocks = np.zeros(3)
    for _ in range(20):
        drawn = _met_from(
            rng.integers(-8, 9, COUNT),
            rng.integers(-4, 5, sum(WIDTHS)),
            rng.integers(0, 9, sum(WIDTHS)),
        )
        stuck = _escape(*jax.tree.map(jnp.asarray, drawn))[1]
        degenerate_blocks += [np.any(mask) for mask in stuck]
    assert np.all(degenerate_blocks > 10)


def test_escape_must_work_backwards():
    """Two entries without width: correcting the later one changes which way the earlier one goes.

    f = z_2 at z_1 = 0, mu_2 = -z_1, eta_2 = z_1 (for z_1 >= 0) and theta_2 = 1/2 + 1/4: as drawn
    d psi_1 / d z_1 = 1/2 > 0, but with the corrected theta_2 = 0 it is -1.
    """
    problem = sc.Problem(
        sc.Box(0.0, 1.0),
        (
            sc.Stage(lambda s, z: 0 * s, lambda s, z: s),
            sc.Stage(lambda s, z: -z[0], lambda s, z: z[0]),
        ),
        lambda s, z: z[1],
    )
    point = Point(jnp.array(0.0), (jnp.array(0.5), jnp.array(0.75)))
    escaped = _escaped(problem, point)
    assert [float(f) for f in escaped.fractions] == [1.0, 0.0]
    assert not any_entry(degenerate(_evaluate(problem, escaped), 0))


# -- Fix-Degeneracy against its transcription -----------------------------------------------------

SEEDS = range(150)


@eqx.filter_jit
def _fixes(batch, q):
    def one(q, params, s, fractions):
        problem, point = hand_problem(params), Point(s, fractions)
        fixed = fix_degeneracy(problem, point, q)
        _, back = linearise(problem, point)
        seen = evaluate(problem, point)
        masks = {"K": degenerate(seen, q), "C": degenerate_for(seen, q)}
        return fixed, back(1, q), masks, complementarity_of(seen)

    return jax.vmap(one)(q, *batch)


@pytest.fixture(scope="module")
def fixes():
    drawn, batch = draws(SEEDS)
    qs = 10.0 ** np.random.default_rng(1).uniform(-3, 3, len(SEEDS))
    found = jax.tree.map(np.asarray, _fixes(batch, jnp.asarray(qs)))
    return [
        (Transcript(*drawn[k]), q, jax.tree.map(lambda x, k=k: x[k], found))
        for k, q in enumerate(qs)
    ]


def test_fix_degeneracy_is_the_algorithm_of_the_paper(fixes):
    outcomes = {(True, True): 0, (True, False): 0, (False, False): 0}
    moved, unmoved = 0, 0
    for by_hand, q, (fixed, sweep, _, _) in fixes:
        fractions, success, v, progressed = by_hand.fix_degeneracy(q)
        gs, hat, _, omega, at_inputs = by_hand.corrected(q)
        assert_close(sweep.multipliers, gs)
        assert_close(sweep.shares, hat, rtol=0, atol=0)
        assert_close((sweep.inputs, sweep.moved), (at_inputs, omega))
        assert_close(fixed.point.fractions, fractions, rtol=0, atol=0)
        assert_close(fixed.point.inputs, by_hand.s, rtol=0, atol=0)
        assert_close(fixed.progress, v)
        assert fixed.status == (FixStatus.SUCCESS if success else FixStatus.FAILURE)
        outcomes[progressed, success] += 1
        changes = [np.mean(h != f) for h, f in zip(hat, by_hand.fractions, strict=True)]
        moved, unmoved = moved + (max(changes) > 0), unmoved + (min(changes) < 1)
    # Every way to end was taken, and some entries were corrected, others not.
    assert min(outcomes.values()) >= 5, outcomes
    assert min(moved, unmoved) >= len(SEEDS) / 3


def test_the_sets_k_and_c(fixes):
    counts = {"K": [0, 0], "C": [0, 0]}
    for by_hand, q, (_, _, masks, r) in fixes:
        y = by_hand.gradient()[2]
        for i, n in enumerate(SIZES):
            for k in range(n):
                theta, width = by_hand.fractions[i][k], by_hand.widths[i][k]
                if abs(width) < 1e-12:
                    continue  # zero up to rounding; widths of exactly zero are tested above
                by_definition = theta * max(y[i][k], 0) + (1 - theta) * max(-y[i][k], 0)
                np.testing.assert_allclose(r[i][k], by_definition, rtol=1e-9, atol=1e-10)
                expected = {
                    "K": width <= q and by_definition > 0,
                    "C": by_definition > 2 * q * width,
                }
                for name, inside in expected.items():
                    assert masks[name][i][k] == inside
                    counts[name][int(inside)] += 1
    assert min(counts["K"] + counts["C"]) > 50


def test_fix_degeneracy_leaves_a_point_alone_where_c_is_empty(fixes):
    alone = 0
    for by_hand, _, (fixed, _, masks, _) in fixes:
        if not any(np.any(mask) for mask in masks["C"]):
            alone += 1
            assert_close(fixed.point.fractions, by_hand.fractions, rtol=0, atol=0)
            assert fixed.status == FixStatus.SUCCESS
            assert fixed.progress == 0
    assert alone > 5


# -- slips in the paper, pinned -------------------------------------------------------------------


def test_the_negative_part_is_not_negative():
    """(.)^- = max(-., 0): with min(., 0), K_gamma would miss every negative multiplier."""
    multipliers, fractions = jnp.array([2.0, -3.0, 0.0, -1.0]), jnp.array([0.25, 0.25, 0.5, 1.0])
    assert complementarity(multipliers, fractions).tolist() == [0.5, 2.25, 0.0, 0.0]
    # f = -z at the lens's tip: the fraction must be able to go up, so the entry is degenerate.
    problem = _lens(lambda s, z: -z[0])
    seen = _evaluate(problem, Point(jnp.array(1.0), (jnp.array(0.25),)))
    assert degenerate(seen, 0)[0]
    assert degenerate_for(seen, 10.0)[0]
    escaped = _escaped(problem, seen.point)
    assert escaped.fractions[0] == 1


def test_omega_runs_over_later_blocks():
    """Two entries, widths 1 and 1, g = (1, 3), theta = (1/2, 1/2), q = 0.2.

    The second has p = 1.5 > 2 q (0 + 1) = 0.4 and moves z by 1/2. The first has p = 0.5, which
    exceeds 2 q (0 + 1) = 0.4, but not 2 q (1/2 + 1) = 0.6: it is corrected if the two stand in one
    block, where neither feeds the other, and not if the second is a later stage.
    """
    box, half = sc.Box(-1.0, 1.0), jnp.array(0.5)
    one_block = sc.Problem(
        box,
        (sc.Stage(lambda s, z: jnp.zeros(2), lambda s, z: jnp.ones(2)),),
        lambda s, z: z[0][0] + 3 * z[0][1],
    )
    unit = sc.Stage(lambda s, z: jnp.zeros(()), lambda s, z: jnp.ones(()))
    two_blocks = sc.Problem(box, (unit, unit), lambda s, z: z[0] + 3 * z[1])
    scanned = sc.Problem(
        box,
        (sc.ScanStage(lambda f, x: 0 * x, lambda f, x: 0 * x + 1, 2, initial=jnp.array(0.0)),),
        lambda s, z: z[0][0] + 3 * z[0][1],
    )
    s, q = jnp.array(0.0), 0.2
    together = _fix(one_block, Point(s, (jnp.full(2, 0.5),)), q)
    assert together.point.fractions[0].tolist() == [0, 0]
    assert together.progress == 0.5 * (0.5 + 1.5)
    apart = _fix(two_blocks, Point(s, (half, half)), q)
    assert [float(f) for f in apart.point.fractions] == [0.5, 0]
    assert apart.progress == 0.5 * 1.5
    steps = _fix(scanned, Point(s, (jnp.full(2, 0.5),)), q)
    assert steps.point.fractions[0].tolist() == [0.5, 0]
    assert steps.progress == 0.5 * 1.5


# -- the paper's example --------------------------------------------------------------------------


def _lens_lower(s, z):
    return s**2 - 1


def _lens_upper(s, z):
    return 1 - s**2


def _lens_value(s, z):
    return z[0]


def _lens(objective=_lens_value):
    stage = sc.Stage(_lens_lower, _lens_upper, box=(jnp.asarray(-1.0), jnp.asarray(1.0)))
    return sc.Problem(sc.Box(jnp.asarray(-1.0), jnp.asarray(1.0)), (stage,), objective)


def test_derivatives_of_the_example():
    """psi_0 = (1 - 2 theta) (s^2 - 1), so d psi_0 / d s = (1 - 2 theta) 2 s."""
    problem = _lens()
    for s in (-1.0, -0.3, 0.0, 0.5, 1.0):
        for theta in (0.0, 0.2, 0.5, 0.9, 1.0):
            seen = _evaluate(problem, Point(jnp.asarray(s), (jnp.asarray(theta),)))
            gradient = seen.gradient()
            np.testing.assert_allclose(seen.value, (1 - 2 * theta) * (s**2 - 1), atol=1e-15)
            np.testing.assert_allclose(gradient.inputs, (1 - 2 * theta) * 2 * s, atol=1e-15)
            np.testing.assert_allclose(gradient.fractions[0], -2 * (s**2 - 1), atol=1e-15)


SPURIOUS = [(s, theta) for s in (-1.0, 1.0) for theta in (0.6, 0.8, 1.0)]


@pytest.mark.parametrize(("s", "theta"), SPURIOUS)
def test_projected_gradients_stay_at_spurious_minimisers(s, theta):
    problem, start = _lens(), Point(jnp.asarray(s), (jnp.asarray(theta),))
    assert degenerate(_evaluate(problem, start), 0)[0]
    solution = sc.solve(problem, solver="simple", start=start)
    assert solution.value == 0
    assert solution.inputs == s
    assert not solution.status.solved
    assert solution.bound <= -1


@pytest.mark.parametrize("solver", ["safe", "auto"])
@pytest.mark.parametrize(("s", "theta"), SPURIOUS)
def test_safe_and_default_escape_spurious_minimisers(solver, s, theta):
    start = Point(jnp.asarray(s), (jnp.asarray(theta),))
    solution = sc.solve(_lens(), atol=1e-6, rtol=0, solver=solver, start=start)
    assert solution.status is sc.Status.GAP_REACHED
    assert solution.gap <= 1e-6
    assert solution.value == pytest.approx(-1, abs=1e-6)
    assert -1 - 1e-6 <= solution.bound <= -1


# -- Safe-Psi-Minimization ------------------------------------------------------------------------


def test_safe_reports_theta_hat():
    """What is returned is theta-hat, where Delta was tested, not theta."""
    point = Point(jnp.array(1.0), (jnp.array(0.9),))
    state, found = eqx.filter_jit(Safe(drawn=True).init)(_lens(), point)
    assert found.point.fractions[0] == 0
    assert state.evaluation.point.fractions[0] == 0
    assert found.value == 0
    # As drawn at theta-hat: y = 1, L = s^2 - 1, whose tangent at s = 1 is -4 at s = -1.
    np.testing.assert_allclose(found.bound, -4, atol=1e-12)


def test_safe_corrects_where_c_is_not_empty():
    init = eqx.filter_jit(Safe(q=0.25).init)
    # At s = 1/2 the width is 3/2, so C asks for theta > 2 q * 3/2 = 3/4.
    empty = Point(jnp.array(0.5), (jnp.array(0.7),))
    state, found = init(_lens(), empty)
    assert found.point.fractions[0] == 0.7
    assert state.q == 0.25
    not_empty = Point(jnp.array(0.5), (jnp.array(0.8),))
    state, found_too = init(_lens(), not_empty)
    assert found_too.point.fractions[0] == 0
    assert found_too.passes > found.passes
    assert state.q == 0.25  # SUCCESS


def _bent_objective(s, z):
    return 50 * (z[0] - 0.1) ** 2


def test_safe_raises_q_tenfold_when_fixing_fails():
    """f = 50 (z - 0.1)^2 on 0 <= z <= 1 at z = 0.2: going to z = 0 gains nothing, q = 1 is too low.

    g = 10, p = 2 > 2 q width = 2 q for q < 1. theta-hat = 0 gives the same value, but v = 1 was
    promised: FAILURE, and theta stays.
    """
    unit = sc.Stage(lambda s, z: jnp.zeros(()), lambda s, z: jnp.ones(()))
    problem = sc.Problem(sc.Box(-1.0, 1.0), (unit,), _bent_objective)
    point = Point(jnp.array(0.0), (jnp.array(0.2),))
    fixed = _fix(problem, point, 0.5)
    assert fixed.status == FixStatus.FAILURE
    assert fixed.point.fractions[0] == 0.2
    np.testing.assert_allclose(fixed.progress, 1)
    solver = Safe(q=0.5, search=Backtracking(first=1e-3))
    state, found = eqx.filter_jit(solver.init)(problem, point)
    assert found.point.fractions[0] == 0.2
    assert state.q == 5
    state, _ = eqx.filter_jit(solver.step)(problem, state)
    assert state.q == 5  # C is empty for q = 5
    assert state.evaluation.value < found.value
