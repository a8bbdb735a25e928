"""The forward pass and the ways back, against loops in NumPy with Jacobians derived by hand.

The family of problems here has three stages of two, three and two entries. With x the inputs and
all earlier blocks in one vector,

    mu_i(x)  = exp(C x) - top                      d mu_i / d x  = diag(exp(C x)) C
    eta_i(x) = room + D x - 1/2 (E x)^2            d eta_i / d x = D - diag(E x) E
    f(x)     = 1/2 sum w (x - t)^2 + exp(h . x)    d f / d x     = w (x - t) + h exp(h . x)

`Transcript` evaluates it in NumPy and transcribes eq. 5 and Fix-Degeneracy entry by entry;
test_degeneracy.py uses it too.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stagecert as sc
from stagecert.certificate import evaluate
from stagecert.degeneracy import fix_degeneracy
from stagecert.formula import lower_bound
from stagecert.reformulation import (
    Point,
    forward,
    forward_pass,
    full_point,
    linearise,
    mix,
    psi_0,
    psi_0_and_gradient,
)

INPUTS, SIZES = 2, (2, 3, 2)
STARTS = np.cumsum((INPUTS, *SIZES))[:-1]  # where each block begins in x
TOTAL = INPUTS + sum(SIZES)


# -- the family, for stagecert --------------------------------------------------------------------


def _joined(s, z):
    return jnp.concatenate([s, *z])


def hand_lower(p, s, z):
    return jnp.exp(p["C"] @ _joined(s, z)) - p["top"]


def hand_upper(p, s, z):
    x = _joined(s, z)
    return p["room"] + p["D"] @ x - 0.5 * (p["E"] @ x) ** 2


def hand_objective(p, s, z):
    x = _joined(s, z)
    return 0.5 * jnp.sum(p["w"] * (x - p["t"]) ** 2) + jnp.exp(p["h"] @ x)


def hand_problem(params):
    stages, objective = params
    return sc.Problem(
        sc.Box(-jnp.ones(INPUTS), jnp.ones(INPUTS)),
        tuple(sc.Stage(hand_lower, hand_upper, params=p) for p in stages),
        sc.Objective(hand_objective, params=objective),
    )


def draw(seed, widths=(0.0, 0.01, 0.1, 1.0, 3.0)):
    """Parameters, inputs and fractions; each entry's width at that point is one of `widths`."""
    rng = np.random.default_rng(seed)
    s = rng.uniform(-1, 1, INPUTS)
    fractions = tuple(
        np.where(rng.random(n) < 0.3, rng.integers(0, 2, n), rng.random(n)) for n in SIZES
    )
    x, stages = s, []
    for n, theta in zip(SIZES, fractions, strict=True):
        C, D, E = (0.8 * rng.normal(size=(n, x.size)) / np.linalg.norm(x) for _ in range(3))
        top, width = rng.normal(size=n), rng.choice(widths, n)
        lower = np.exp(C @ x) - top
        room = lower + width - D @ x + 0.5 * (E @ x) ** 2
        stages.append({"C": C, "D": D, "E": E, "top": top, "room": room})
        x = np.concatenate([x, lower + theta * width])
    objective = {
        "w": rng.uniform(0, 0.5, TOTAL),
        "t": 2 * rng.normal(size=TOTAL),
        "h": 0.8 * rng.normal(size=TOTAL) / np.linalg.norm(x),
    }
    return (tuple(stages), objective), s, fractions


def draws(seeds, **options):
    """The same for many seeds, stacked."""
    drawn = [draw(seed, **options) for seed in seeds]
    return drawn, jax.tree.map(lambda *leaves: jnp.stack(leaves), *drawn)


# -- the family, by hand --------------------------------------------------------------------------


class Transcript:
    """One problem at one point, in NumPy: values, bounds, and Jacobians with respect to x."""

    def __init__(self, params, s, fractions):
        self.params, self.s, self.fractions = params, s, fractions
        stages, objective = params
        x = s
        self.lower, self.upper, self.d_lower, self.d_upper = [], [], [], []
        for p, theta in zip(stages, fractions, strict=True):
            self.lower.append(np.exp(p["C"] @ x) - p["top"])
            self.upper.append(p["room"] + p["D"] @ x - 0.5 * (p["E"] @ x) ** 2)
            self.d_lower.append(np.exp(p["C"] @ x)[:, None] * p["C"])
            self.d_upper.append(p["D"] - (p["E"] @ x)[:, None] * p["E"])
            x = np.concatenate([x, (1 - theta) * self.lower[-1] + theta * self.upper[-1]])
        self.x = x
        self.blocks = np.split(x, STARTS)[1:]
        bump = np.exp(objective["h"] @ x)
        self.value = 0.5 * np.sum(objective["w"] * (x - objective["t"]) ** 2) + bump
        self.d_value = objective["w"] * (x - objective["t"]) + objective["h"] * bump
        self.widths = [u - l for l, u in zip(self.lower, self.upper, strict=True)]

    def gradient(self):
        """Eq. 5: (grad_s psi_0, d psi_0 / d theta, y_i = d psi_i / d z_i)."""
        d_psi = self.d_value.copy()  # of psi_n, then of psi_{n-1}, ...
        of_fractions, multipliers = [], []
        for i in reversed(range(len(SIZES))):
            before = slice(0, STARTS[i])
            y = d_psi[STARTS[i] : STARTS[i] + SIZES[i]].copy()
            for k in range(SIZES[i]):
                theta = self.fractions[i][k]
                d_psi[before] += y[k] * (
                    theta * self.d_upper[i][k] + (1 - theta) * self.d_lower[i][k]
                )
            multipliers.insert(0, y)
            of_fractions.insert(0, y * (self.upper[i] - self.lower[i]))
        return d_psi[:INPUTS], of_fractions, multipliers

    def corrected(self, q):
        """The loop of Fix-Degeneracy(q): g, theta-hat, v, omega_0, and the cotangent at s.

        omega_i runs over later blocks: entries of one block do not feed each other.
        """
        g_all = self.d_value.copy()
        hat = [theta.copy() for theta in self.fractions]
        gs, v, omega = [], 0.0, 0.0
        for i in reversed(range(len(SIZES))):
            g = g_all[STARTS[i] : STARTS[i] + SIZES[i]].copy()
            moved = 0.0
            for k in range(SIZES[i]):
                theta, width = self.fractions[i][k], self.widths[i][k]
                p = max(g[k], 0) * theta + max(-g[k], 0) * (1 - theta)
                if p > 2 * q * (omega + width):
                    hat[i][k] = 0 if g[k] > 0 else 1
                    v += 0.5 * p * width
                moved += abs(theta - hat[i][k]) * max(width, 0)  # a width of 0 may be rounded
                slope = hat[i][k] * self.d_upper[i][k] + (1 - hat[i][k]) * self.d_lower[i][k]
                g_all[: STARTS[i]] += g[k] * slope
            omega += moved
            gs.insert(0, g)
        return gs, hat, v, omega, g_all[:INPUTS]

    def fix_degeneracy(self, q):
        """(fractions returned, success, v, progressed), allowing for rounding like the library."""
        gs, hat, v, omega, _ = self.corrected(q)
        after = Transcript(self.params, self.s, hat)
        rounding = 100 * np.finfo(float).eps
        if after.value > self.value - v + rounding * (1 + abs(self.value)):
            return self.fractions, False, v, False
        actual = after.gradient()[2]
        close = [
            np.abs(g - y) <= q * omega + rounding * (1 + np.abs(g))
            for g, y in zip(gs, actual, strict=True)
        ]
        return hat, all(np.all(c) for c in close), v, True


def assert_close(tree, expected, rtol=1e-9, atol=1e-10):
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


# -- the tests ------------------------------------------------------------------------------------

SEEDS = range(40)


@eqx.filter_jit
def _everything(batch):
    def one(params, s, fractions):
        problem, point = hand_problem(params), Point(s, fractions)
        done, gradient = psi_0_and_gradient(problem, point)
        _, back = linearise(problem, point)
        plain = jax.grad(_plain_psi_0, argnums=(1, 2))(params, s, fractions)
        by_definition = tuple(
            jax.grad(lambda z, i=i: _psi(params, s, done.blocks[:i], z, fractions[i + 1 :]))(block)
            for i, block in enumerate(done.blocks)
        )
        return {
            "forward": forward(problem, s, fractions),
            "psi_0": psi_0(problem, s, fractions),
            "done": done,
            "gradient": gradient,
            "drawn": back(0, 0),
            "consistent": back(1, 0),
            "plain": plain,
            "by_definition": by_definition,
        }

    return jax.vmap(one)(*batch)


def _plain_psi_0(params, s, fractions):
    """psi_0 as anyone would write it in JAX, without stagecert."""
    return _psi(params, s, (), None, fractions)


def _psi(params, s, earlier, z, fractions):
    """psi_i(s, z_1..z_i, theta_{i+1}..theta_n): `earlier` is z_1..z_{i-1}, `z` is z_i."""
    stages, objective = params
    blocks = earlier if z is None else (*earlier, z)
    for p, theta in zip(stages[len(blocks) :], fractions, strict=True):
        lower, upper = hand_lower(p, s, blocks), hand_upper(p, s, blocks)
        blocks = (*blocks, (1 - theta) * lower + theta * upper)
    return hand_objective(objective, s, blocks)


@pytest.fixture(scope="module")
def everything():
    drawn, batch = draws(SEEDS)
    found = jax.tree.map(np.asarray, _everything(batch))
    return [(Transcript(*d), jax.tree.map(lambda x, k=k: x[k], found)) for k, d in enumerate(drawn)]


def test_forward_and_psi_0(everything):
    for by_hand, found in everything:
        assert_close(found["forward"], by_hand.blocks)
        assert_close(found["psi_0"], by_hand.value)
        done = found["done"]
        assert_close((done.blocks, done.value), (by_hand.blocks, by_hand.value))
        assert_close((done.lower, done.upper), (by_hand.lower, by_hand.upper))
        assert_close(done.widths(), by_hand.widths)


def test_gradient_is_eq_5(everything):
    for by_hand, found in everything:
        of_inputs, of_fractions, multipliers = by_hand.gradient()
        assert_close(found["gradient"].inputs, of_inputs)
        assert_close(found["gradient"].fractions, of_fractions)
        assert_close(found["drawn"].multipliers, multipliers)
        assert_close(found["drawn"].inputs, of_inputs)
        # The ordinary rule shares as the fractions say, and moves nothing.
        assert_close(found["drawn"].shares, by_hand.fractions, rtol=0, atol=0)
        assert found["drawn"].moved == 0


def test_gradient_is_that_of_a_plain_forward_pass(everything):
    for _, found in everything:
        assert_close((found["gradient"].inputs, found["gradient"].fractions), found["plain"])


def test_multipliers_as_drawn_are_the_derivatives_of_psi_i(everything):
    for _, found in everything:
        assert_close(found["drawn"].multipliers, found["by_definition"])


def test_consistent_sweep_is_the_recursion_with_corners(everything):
    changed = 0
    for by_hand, found in everything:
        gs, hat, _, omega, at_inputs = by_hand.corrected(q=0)
        sweep = found["consistent"]
        assert_close(sweep.multipliers, gs)
        assert_close(sweep.inputs, at_inputs)
        assert_close(sweep.moved, omega)
        assert_close(sweep.shares, hat, rtol=0, atol=0)
        changed += not np.allclose(gs[0], by_hand.gradient()[2][0])
    assert changed > len(SEEDS) / 2  # the two sweeps do differ on these draws


@eqx.filter_jit
def _gradient_of_lagrangian(batch, multipliers):
    def one(params, s, fractions, y):
        problem = hand_problem(params)
        blocks = forward(problem, s, fractions)

        def lagrangian(s, blocks):
            total = problem.objective(s, blocks)
            for i, stage in enumerate(problem.stages):
                lower, upper, _ = stage.bounds(s, blocks[:i], blocks[i])
                up, down = jnp.maximum(y[i], 0), jnp.maximum(-y[i], 0)
                total = total + jnp.sum(up * lower - down * upper - y[i] * blocks[i])
            return total

        return jax.grad(lagrangian, argnums=(0, 1))(s, blocks)

    return jax.vmap(one)(batch[0], batch[1], batch[2], multipliers)


def test_consistent_multipliers_leave_no_slope_in_the_blocks(everything):
    _, batch = draws(SEEDS)
    multipliers = jax.tree.map(
        lambda *ys: jnp.stack(ys), *[found["consistent"].multipliers for _, found in everything]
    )
    of_inputs, of_blocks = _gradient_of_lagrangian(batch, multipliers)
    for slope in of_blocks:
        np.testing.assert_allclose(slope, 0, atol=1e-10)
    expected = np.stack([found["consistent"].inputs for _, found in everything])
    np.testing.assert_allclose(of_inputs, expected, atol=1e-10)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("bounds", [(0.1, 0.3), (-1e30, 1e-30), (7.0, 7.0)])
def test_corners_are_the_bounds_exactly(fraction, bounds):
    lower, upper = map(jnp.asarray, bounds)
    block, _ = mix(jnp.asarray(fraction), lower, upper, (0.0, 0.0, 0.0))
    assert block == (upper if fraction else lower)


# -- feasible points of eq. 1 and of eq. 2 are the same -------------------------------------------


@eqx.filter_jit
def _there_and_back(problem, s, fractions):
    done = forward_pass(problem, Point(s, fractions))
    recovered = tuple(
        (z - l) / (u - l) for z, l, u in zip(done.blocks, done.lower, done.upper, strict=True)
    )
    return done, recovered, forward(problem, s, recovered)


def test_fractions_and_feasible_points_correspond():
    for seed in range(5):
        params, s, fractions = draw(seed, widths=(0.1, 1.0))
        problem = hand_problem(jax.tree.map(jnp.asarray, params))
        done, recovered, again = _there_and_back(problem, s, fractions)
        for lower, block, upper in zip(done.lower, done.blocks, done.upper, strict=True):
            assert np.all(lower <= block)
            assert np.all(block <= upper)
        assert_close(recovered, fractions, atol=1e-12)
        assert_close(again, done.blocks)


# -- one ScanStage is as many Stages --------------------------------------------------------------

STEPS, STATE = 3, 2


def _step_lower(p, feed, x):
    return p["A"] @ x + jnp.exp(p["B"] @ feed) + p["k"] * (p["r"] @ x) ** 2 + sc.relu(x - feed)


def _step_upper(p, feed, x):
    return p["room"] + p["A"] @ x + p["B"] @ feed - p["k"] * (p["r"] @ x) ** 2 - sc.abs(x)


# What step t reads is affine in the inputs and the first block; so is the state before step 0.
_FEED = np.random.default_rng(0).normal(size=(STEPS, STATE, 5))
_INITIAL = np.random.default_rng(1).normal(size=(STATE, 5))


def _scan_feed(s, z):
    return _FEED @ _joined(s, z[:1]) + 0.1


def _scan_initial(s, z):
    return _INITIAL @ _joined(s, z[:1])


def _first_lower(p, s, z):
    return (p @ s) ** 2 - 1


def _first_upper(p, s, z):
    return 1 - 0.5 * (p @ s) ** 2


def _unrolled_functions(t):
    def previous(s, z):
        return z[t] if t else _scan_initial(s, z)

    def lower(p, s, z):
        return _step_lower(p, _FEED[t] @ _joined(s, z[:1]) + 0.1, previous(s, z))

    def upper(p, s, z):
        return _step_upper(p, _FEED[t] @ _joined(s, z[:1]) + 0.1, previous(s, z))

    return lower, upper


_UNROLLED = [_unrolled_functions(t) for t in range(STEPS)]


def _scan_last(z):
    return z[1] if len(z) == 2 else jnp.stack(z[1 : 1 + STEPS])


def _last_lower(p, s, z):
    return jnp.sum(p * _scan_last(z) ** 2, axis=0) - 1


def _last_upper(p, s, z):
    return 2 + jnp.sum(p * _scan_last(z), axis=0) - 0.1 * z[0][:2] ** 2


def _scan_objective(p, s, z):
    steps = z[1] if len(z) == 3 else jnp.stack(z[1 : 1 + STEPS])
    smooth = jnp.sum(p["of_steps"] * steps) + 0.5 * jnp.sum((z[-1] - p["target"]) ** 2)
    return smooth + jnp.sum(p["of_first"] * z[0]) + jnp.sum(sc.abs(steps[1:] - steps[:-1]))


def _draw_scan(seed):
    rng = np.random.default_rng(seed)
    params = {
        "first": rng.normal(size=(3, 2)),
        "steps": {
            "A": 0.4 * rng.normal(size=(STEPS, STATE, STATE)),
            "B": 0.3 * rng.normal(size=(STEPS, STATE, STATE)),
            "k": rng.uniform(0, 0.1, (STEPS, STATE)),
            "r": rng.normal(size=(STEPS, STATE)),
            # Little room, so that Fix-Degeneracy finds something to do.
            "room": rng.choice([0.5, 2.0, 5.0], (STEPS, STATE)),
        },
        "last": rng.uniform(0, 0.3, (STEPS, 2)),
        "objective": {
            "of_steps": rng.normal(size=(STEPS, STATE)),
            "of_first": rng.normal(size=3),
            "target": rng.normal(size=2),
        },
    }
    fractions = (rng.random(3), rng.random((STEPS, STATE)), rng.random(2))
    return params, rng.uniform(-1, 1, 2), fractions


def _scan_problem(params, unrolled):
    first = sc.Stage(_first_lower, _first_upper, params=params["first"])
    last = sc.Stage(_last_lower, _last_upper, params=params["last"])
    if unrolled:
        middle = tuple(
            sc.Stage(lower, upper, params=jax.tree.map(lambda x, t=t: x[t], params["steps"]))
            for t, (lower, upper) in enumerate(_UNROLLED)
        )
    else:
        middle = (
            sc.ScanStage(
                _step_lower,
                _step_upper,
                length=STEPS,
                initial=_scan_initial,
                feed=_scan_feed,
                params=params["steps"],
            ),
        )
    objective = sc.Objective(_scan_objective, params=params["objective"])
    return sc.Problem(sc.Box(-jnp.ones(2), jnp.ones(2)), (first, *middle, last), objective)


def _rolled(blocks, unrolled):
    """One array for each block of the scanned problem."""
    if not unrolled:
        return tuple(blocks)
    return blocks[0], jnp.stack(blocks[1 : 1 + STEPS]), blocks[-1]


@eqx.filter_jit
def _both_ways(params, s, fractions, q):
    def one(unrolled):
        problem = _scan_problem(params, unrolled)
        given = (fractions[0], *fractions[1], fractions[2]) if unrolled else fractions
        seen = evaluate(problem, Point(s, given), fix=q)
        fixed = fix_degeneracy(problem, Point(s, given), q)
        anchor = sc.Anchor(s, seen.done.blocks)
        whole = {
            "value": seen.value,
            "inputs": (seen.consistent.inputs, seen.ordinary.inputs),
            "moved": seen.consistent.moved,
            "bounds": (
                seen.bound,
                lower_bound(problem, anchor, seen.consistent.multipliers).bound(),
            ),
            "fixed": (fixed.point.inputs, fixed.status, fixed.progress),
        }
        by_block = {
            "blocks": seen.done.blocks,
            "lower": seen.done.lower,
            "upper": seen.done.upper,
            "gradient": seen.gradient().fractions,
            "drawn": seen.ordinary.multipliers,
            "consistent": seen.consistent.multipliers,
            "corners": seen.consistent.shares,
            "asked": seen.fixed,
            "fixed": fixed.point.fractions,
        }
        return whole, {name: _rolled(blocks, unrolled) for name, blocks in by_block.items()}

    return one(False), one(True)


def test_a_scanned_stage_is_its_steps_unrolled():
    moved, left = 0, 0
    for seed in range(20):
        params, s, fractions = jax.tree.map(jnp.asarray, _draw_scan(seed))
        q = jnp.asarray(10.0 ** (seed % 4 - 2))
        (scanned, by_step), (unrolled, by_stage) = _both_ways(params, s, fractions, q)
        for name in scanned:
            assert_close(scanned[name], unrolled[name])
        for name in by_step:
            assert_close(by_step[name], by_stage[name])
        assert np.isfinite(scanned["bounds"]).all()
        moved += np.sum(by_step["asked"][1] != fractions[1])
        left += np.sum(by_step["asked"][1] != by_step["corners"][1])
    # The draws are worth something: Fix-Degeneracy changes the scan, but not to corners only.
    assert min(moved, left) > 10


# -- kinks ----------------------------------------------------------------------------------------
#
# z_i = (1 - theta) (A x + relu(x)) + theta (2 + A x - |x|) for x the block before. Compiled code
# may evaluate an expression twice and round it differently: slopes must not hang on equalities.


def _kinked_lower(A, s, z):
    x = z[-1] if z else s
    return A @ x + sc.relu(x)


def _kinked_upper(A, s, z):
    x = z[-1] if z else s
    return 2 + A @ x - sc.abs(x)


def _kinked_objective(s, z):
    return jnp.sum(z[-1])


def _kinked_problem(As):
    stages = tuple(sc.Stage(_kinked_lower, _kinked_upper, params=A) for A in As)
    return sc.Problem(sc.Box(-jnp.ones(2), jnp.ones(2)), stages, _kinked_objective)


@eqx.filter_jit
def _kinked_evaluation(As, s, fractions):
    def one(As, s, fractions):
        seen = evaluate(_kinked_problem(As), Point(s, tuple(fractions)))
        return seen.ordinary, seen.consistent

    return jax.vmap(one)(As, s, fractions)


@eqx.filter_jit
def _kinked_gradient(As, s, fractions):
    def one(As, s, fractions):
        return psi_0_and_gradient(_kinked_problem(As), Point(s, tuple(fractions)))[1]

    return jax.vmap(one)(As, s, fractions)


def test_slopes_of_kinks_survive_compilation():
    n, count = 3, 40
    rng = np.random.default_rng(0)
    As, s = 0.4 * rng.normal(size=(count, n, 2, 2)), rng.uniform(-1, 1, (count, 2))
    fractions = rng.random((count, n, 2))
    ordinary, consistent = jax.tree.map(np.asarray, _kinked_evaluation(As, s, fractions))
    gradient = jax.tree.map(np.asarray, _kinked_gradient(As, s, fractions))
    for j in range(count):
        x, steps = s[j], []
        for A, theta in zip(As[j], fractions[j], strict=True):
            below, above = A @ x + np.maximum(x, 0), 2 + A @ x - np.abs(x)
            steps.append((A + np.diag(x > 0), A - np.diag(np.sign(x)), above - below))
            x = (1 - theta) * below + theta * above
        y, g = np.ones(2), np.ones(2)
        for i in reversed(range(n)):
            (d_below, d_above, width), theta = steps[i], fractions[j][i]
            np.testing.assert_allclose(ordinary.multipliers[i][j], y, atol=1e-12)
            np.testing.assert_allclose(gradient.fractions[i][j], y * width, atol=1e-12)
            np.testing.assert_allclose(consistent.multipliers[i][j], g, atol=1e-12)
            y = ((1 - theta) * y) @ d_below + (theta * y) @ d_above
            g = np.maximum(g, 0) @ d_below + np.minimum(g, 0) @ d_above
        np.testing.assert_allclose(ordinary.inputs[j], y, atol=1e-12)
        np.testing.assert_allclose(gradient.inputs[j], y, atol=1e-12)
        np.testing.assert_allclose(consistent.inputs[j], g, atol=1e-12)


# -- where searches start; precision --------------------------------------------------------------


def test_a_start_is_completed_and_projected():
    params, _, _ = draw(0)
    problem = hand_problem(jax.tree.map(jnp.asarray, params))
    centre = full_point(problem, None, jnp.float64)
    assert_close(centre.inputs, np.zeros(2))
    assert [f.shape for f in centre.fractions] == [(n,) for n in SIZES]
    assert all(np.all(f == 0.5) for f in centre.fractions)
    given = Point(jnp.array([3.0, -0.25]), (jnp.array([2.0, -1.0]), 0.25, jnp.array([0.5, 1.0])))
    point = full_point(problem, given, jnp.float64)
    assert_close(point.inputs, np.array([1.0, -0.25]))
    assert_close(point.fractions, (np.array([1.0, 0.0]), np.full(3, 0.25), np.array([0.5, 1.0])))


@eqx.filter_jit
def _swept(params, s, fractions):
    done, back = linearise(hand_problem(params), Point(s, fractions))
    return done, back(1, 0.5)


def test_float32_stays_float32():
    single = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), draw(3))
    params, s, fractions = single
    done, sweep = jax.tree.map(np.asarray, _swept(params, s, fractions))
    assert {leaf.dtype for leaf in jax.tree.leaves((done, sweep))} == {np.dtype(np.float32)}
    by_hand = Transcript(*draw(3))
    assert_close(done.blocks, by_hand.blocks, rtol=1e-5, atol=1e-5)
    assert_close(sweep.multipliers, by_hand.corrected(0.5)[0], rtol=1e-4, atol=1e-4)
