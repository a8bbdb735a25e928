"""The paper's lemmas and Theorem 1 as inequalities, on problems whose constants are known.

Names follow the paper: L is the smoothness of psi_0; D_s and D_z the diameters of S and Z; c the
constant of Assumption 4; gamma a width below which no entry of the problem ever falls, so that
K_gamma is empty everywhere.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_reformulation import draws, hand_problem

import stagecert as sc
from stagecert.certificate import as_drawn, complementarity_of, duality_gap, evaluate
from stagecert.degeneracy import FixStatus, any_entry, degenerate, fix_degeneracy
from stagecert.reformulation import Point, forward_pass, psi_0
from stagecert.solvers import Simple
from stagecert.solvers.base import project, step_progress


@dataclass(frozen=True)
class Known:
    """A problem with boxes, and its constants."""

    name: str
    problem: sc.Problem
    value: float | None  # the optimum
    L: float
    D_s: float
    D_z: float
    c: float
    gamma: float

    def shapes(self):
        return [shape.shape for shape in self.problem.block_shapes()]

    @property
    def factor(self):
        """L (D_s sqrt 2 + 2 c / gamma)^2, which Lemma 1 and Theorem 1 share."""
        return self.L * (self.D_s * np.sqrt(2) + 2 * self.c / self.gamma) ** 2


# -- a wide lens: psi_0 is not convex -------------------------------------------------------------
#
# s in [-1, 1], mu = s^2 - 2, eta = 2 - s^2, f = z. The optimum is -2, at s = 0.
#
# With u = 1 - 2 theta, |u| <= 1, psi_0 = u (s^2 - 2) has the Hessian ((2 u, -4 s), (-4 s, 0)). Its
# eigenvalues u +- sqrt(u^2 + 16 s^2) are at most L = 1 + sqrt(17) in size.
# D_s = 2; Z = [-2, 2], so D_z = 4. The width 2 (2 - s^2) is at least 2.
# |eta - mu| + D_s |grad_s eta - grad_s mu| = 2 (2 - s^2) + 2 * 4 |s| grows in |s| <= 1, to c = 10.


def _wide_lens_lower(s, z):
    return s**2 - 2


def _wide_lens_upper(s, z):
    return 2 - s**2


def _first_block(s, z):
    return z[0]


def _wide_lens():
    stage = sc.Stage(_wide_lens_lower, _wide_lens_upper, box=(jnp.asarray(-2.0), jnp.asarray(2.0)))
    problem = sc.Problem(sc.Box(jnp.asarray(-1.0), jnp.asarray(1.0)), (stage,), _first_block)
    return Known("wide lens", problem, -2.0, 1 + np.sqrt(17), 2, 4, 10, 1.999)


# -- a lens in a lens -----------------------------------------------------------------------------
#
# mu_1 = s^2 - 2, eta_1 = 2 - s^2, mu_2 = z_1^2 / 4 - 2, eta_2 = 2 - z_1^2 / 4, f = z_2; optimum -2.
#
# With p = s^2 - 2, w = 1 - 2 theta_1 and u = 1 - 2 theta_2: psi_0 = u (w^2 p^2 / 4 - 2), and
#
#     d^2/ds^2              = u w^2 (3 s^2 - 2)     at most 2 in size
#     d^2/ds dtheta_1       = -4 u w p s            at most 4 k, k = max s (2 - s^2) = sqrt(2/3) 4/3
#     d^2/ds dtheta_2       = -2 w^2 p s            at most 2 k
#     d^2/dtheta_1^2        = 2 u p^2               at most 8
#     d^2/dtheta_1 dtheta_2 = 2 w p^2               at most 8
#     d^2/dtheta_2^2        = 0
#
# so L = the Frobenius norm of these bounds. Both widths lie in [2, 4], Z = [-2, 2]^2, and
# |eta - mu| <= 4 sqrt 2; the slopes of eta - mu are at most 4 |s| <= 4 in s and |z_1| <= 2 in z.


def _inner_lower(s, z):
    return z[0] ** 2 / 4 - 2


def _inner_upper(s, z):
    return 2 - z[0] ** 2 / 4


def _second_block(s, z):
    return z[1]


def _nested_lens():
    box = (jnp.asarray(-2.0), jnp.asarray(2.0))
    stages = (
        sc.Stage(_wide_lens_lower, _wide_lens_upper, box=box),
        sc.Stage(_inner_lower, _inner_upper, box=box),
    )
    problem = sc.Problem(sc.Box(jnp.asarray(-1.0), jnp.asarray(1.0)), stages, _second_block)
    k = np.sqrt(2 / 3) * 4 / 3
    L = np.sqrt(2**2 + 2 * (4 * k) ** 2 + 2 * (2 * k) ** 2 + 8**2 + 2 * 8**2)
    D_z = 4 * np.sqrt(2)
    return Known("nested lens", problem, -2.0, L, 2, D_z, 4 * np.sqrt(2) + 2 * 4 + D_z * 2, 1.999)


# -- corridors of constant width ------------------------------------------------------------------
#
# s in [-1, 1]^2 and three scalar stages z_i = A_i . s + B_i . z_{<i} + b_i (2 theta_i - 1), that is
# mu_i = A_i . s + B_i . z - b_i and eta_i = mu_i + 2 b_i; f = 1/2 |z - t|^2 + 1/2 |s - r|^2.
#
# z = (I - B)^-1 (A s + b (2 theta - 1)) is affine with Jacobian J = (I - B)^-1 (A, 2 diag(b)), so
# psi_0 is quadratic and L is the largest eigenvalue of J' J + diag(1, 1, 0, 0, 0). The slopes of mu
# and eta agree, so c = |eta - mu| = 2 |b|, and the least width is 2 min b.


def _corridor_lower(p, s, z):
    return p["A"] @ s + sum((w * block for w, block in zip(p["B"], z, strict=True)), -p["b"])


def _corridor_upper(p, s, z):
    return _corridor_lower(p, s, z) + 2 * p["b"]


def _corridor_objective(p, s, z):
    return 0.5 * jnp.sum((jnp.stack(z) - p["t"]) ** 2) + 0.5 * jnp.sum((s - p["r"]) ** 2)


def _corridor(seed):
    rng = np.random.default_rng(seed)
    A, B = rng.normal(size=(3, 2)), np.tril(0.7 * rng.normal(size=(3, 3)), -1)
    b = rng.uniform(0.2, 1, 3)
    reach, stages = [], []
    for i in range(3):
        reach.append(np.abs(A[i]).sum() + np.abs(B[i, :i]) @ reach + b[i])
        params = {"A": A[i], "B": [B[i, j] for j in range(i)], "b": b[i]}
        box = (jnp.asarray(-reach[i]), jnp.asarray(reach[i]))
        params = jax.tree.map(jnp.asarray, params)
        stages.append(sc.Stage(_corridor_lower, _corridor_upper, params=params, box=box))
    # Targets out of reach, so that optima lie on bounds.
    targets = {"t": jnp.asarray(3 * rng.normal(size=3)), "r": jnp.asarray(2 * rng.normal(size=2))}
    problem = sc.Problem(
        sc.Box(-jnp.ones(2), jnp.ones(2)),
        tuple(stages),
        sc.Objective(_corridor_objective, params=targets),
    )
    J = np.linalg.solve(np.eye(3) - B, np.hstack([A, 2 * np.diag(b)]))
    L = np.linalg.eigvalsh(J.T @ J + np.diag([1.0, 1, 0, 0, 0]))[-1]
    D_s, D_z = 2 * np.sqrt(2), 2 * float(np.linalg.norm(reach))
    gamma = 1.999 * b.min()
    c = 2 * float(np.linalg.norm(b))
    return Known(f"corridor {seed}", problem, None, L, D_s, D_z, c, gamma)


KNOWN = [_wide_lens(), _nested_lens(), *map(_corridor, range(6))]
every_known = pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.name)


# -- points: random ones, and those that projected gradients pass ---------------------------------


class Seen(eqx.Module):
    """What the inequalities speak of, at one point."""

    point: Point
    value: Any
    delta: Any  # delta_L
    gap: Any  # Delta
    next_value: Any
    gradient: Any
    r: Any
    degenerate: Any  # is K_gamma not empty?


def _see(problem, point, L, gamma) -> Seen:
    here = evaluate(problem, point)
    gradient = here.gradient()
    step = jax.tree.map(lambda x, g: x - g / L, point, gradient)
    target = project(problem, step)
    return Seen(
        point,
        here.value,
        step_progress(problem, point, gradient, L),
        duality_gap(problem, point),
        psi_0(problem, target.inputs, target.fractions),
        gradient,
        complementarity_of(here),
        any_entry(degenerate(here, gamma)),
    )


@eqx.filter_jit
def _see_all(problem, points, L, gamma) -> Seen:
    return jax.vmap(lambda point: _see(problem, point, L, gamma))(points)


@eqx.filter_jit
def _descend(problem, point, L, gamma, steps) -> Seen:
    """What projected gradients with step 1 / L see on their way."""

    def step(point, _):
        seen = _see(problem, point, L, gamma)
        moved = jax.tree.map(lambda x, g: x - g / L, point, seen.gradient)
        return project(problem, moved), seen

    return jax.lax.scan(step, point, length=steps)[1]


def _random_points(known, count, seed=0):
    rng = np.random.default_rng(seed)
    inputs = rng.uniform(-1, 1, (count, *jax.eval_shape(known.problem.inputs.centre).shape))
    fractions = [rng.random((count, *shape)) for shape in known.shapes()]
    corner = [rng.random(f.shape) < 0.3 for f in fractions]
    fractions = [np.where(at, np.round(f), f) for at, f in zip(corner, fractions, strict=True)]
    return Point(jnp.asarray(inputs), tuple(map(jnp.asarray, fractions)))


STEPS = 200


@lru_cache
def _seen(index) -> Seen:
    """Random points of KNOWN[index], and the ways down from four of them."""
    known = KNOWN[index]
    points = _random_points(known, 200)
    many = [_see_all(known.problem, points, known.L, known.gamma)]
    for k in range(4):
        start = jax.tree.map(lambda x, k=k: x[k], points)
        many.append(_descend(known.problem, start, known.L, known.gamma, STEPS))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *many)


@pytest.fixture
def seen(known):
    return _seen(KNOWN.index(known))


def _optimum(known, seen):
    """The optimum, or the best of what was seen (which is no lower)."""
    return known.value if known.value is not None else seen.value.min()


# -- delta_L, the sure progress of a step ---------------------------------------------------------


@every_known
def test_delta_is_the_maximum_that_defines_it(known, seen):
    """delta_L = max over feasible d of -(gradient . d) - L/2 |d|^2; separable over boxes."""
    expected = 0
    for x, g, low in [
        (seen.point.inputs, seen.gradient.inputs, -1.0),
        *((x, g, 0.0) for x, g in zip(seen.point.fractions, seen.gradient.fractions, strict=True)),
    ]:
        d = np.clip(-g / known.L, low - x, 1 - x)
        gain = -(g * d) - known.L / 2 * d**2
        # The clipped stationary point is the best of a fine grid of steps.
        grid = (low - x)[..., None] + np.linspace(0, 1, 33) * (1 - low)
        assert np.all(gain[..., None] >= -g[..., None] * grid - known.L / 2 * grid**2 - 1e-12)
        expected = expected + gain.reshape(len(gain), -1).sum(axis=1)
    np.testing.assert_allclose(seen.delta, expected, rtol=1e-9, atol=1e-12)


@every_known
def test_a_step_of_1_over_l_gains_delta(known, seen):
    assert np.all(seen.next_value <= seen.value - seen.delta + 1e-12 * (1 + np.abs(seen.value)))
    assert np.all(seen.delta >= -1e-15)
    assert seen.delta.max() > 1e-3


# -- Delta, the duality gap -----------------------------------------------------------------------


@every_known
def test_delta_is_a_gap(known, seen):
    assert np.all(seen.gap >= seen.value - _optimum(known, seen) - 1e-9)


@every_known
def test_projected_gradients_close_the_gap(known, seen):
    assert seen.gap.min() < 1e-3 * seen.gap.max()


def test_sign_of_the_supremum_in_delta():
    """Delta of the paper's example by hand: y = 1, L(s, z, y) = s^2 - 1, so grad_s L = 2 s.

    Delta = (z - mu) + sup over s-hat of 2 s (s - s-hat) = 2 theta (1 - s^2) + 2 s^2 + 2 |s|. With
    the opposite sign it would be 2 theta (1 - s^2) - 2 s^2 + 2 |s|, which is 0 at s = 1: less than
    the distance 1 from the optimum.
    """
    stage = sc.Stage(lambda s, z: s**2 - 1, lambda s, z: 1 - s**2, box=(-1.0, 1.0))
    problem = sc.Problem(sc.Box(-1.0, 1.0), (stage,), _first_block)

    @eqx.filter_jit
    def both(problem, point):
        seen = evaluate(problem, point)
        return duality_gap(problem, point), seen.value - as_drawn(problem, seen)

    for s in (-1.0, -0.4, 0.0, 0.7, 1.0):
        for theta in (0.0, 0.3, 1.0):
            found, distance = both(problem, Point(jnp.asarray(s), (jnp.asarray(theta),)))
            np.testing.assert_allclose(found, distance, atol=1e-14)
            expected = 2 * theta * (1 - s**2) + 2 * s**2 + 2 * abs(s)
            np.testing.assert_allclose(found, expected, atol=1e-12)
            assert found >= (1 - 2 * theta) * (s**2 - 1) + 1


# -- Lemma 1 and Theorem 1 ------------------------------------------------------------------------


@every_known
def test_lemma_1(known, seen):
    """Delta^2 <= factor * delta_L where K_gamma is empty and delta_L <= L / 2."""
    assert not seen.degenerate.any()
    applies = seen.delta <= known.L / 2
    assert applies.sum() > 500
    gap, delta = seen.gap[applies], np.maximum(seen.delta[applies], 0)
    assert np.all(gap**2 <= known.factor * delta + 1e-12 * (1 + gap**2))


@eqx.filter_jit
def _iterations(solver, problem, point, eps, limit):
    """How many iterations Simple-Psi-Minimization takes until Delta <= eps, and the first Delta."""
    state, _ = solver.init(problem, point)
    first = duality_gap(problem, point)

    def body(carry):
        state, _, k = carry
        state, found = solver.step(problem, state)
        return state, duality_gap(problem, found.point), k + 1

    _, gap, count = jax.lax.while_loop(
        lambda carry: (carry[1] > eps) & (carry[2] < limit), body, (state, first, jnp.array(1))
    )
    return first, gap, count


@every_known
def test_theorem_1(known):
    """Termination after at most 1 + 2 Delta_1 / L + factor / eps iterations."""
    solver = Simple(smoothness=known.L)
    for k, eps in enumerate((1.0, 1e-1, 1e-2, 1e-3)):
        start = jax.tree.map(lambda x, k=k: x[k], _random_points(known, 4, seed=1))
        first, gap, count = _iterations(solver, known.problem, start, eps, 100_000)
        assert gap <= eps
        assert count <= 1 + 2 * first / known.L + known.factor / eps
        # The bound is loose; projected gradients on these problems are far better than it.
        assert count < 2000


# -- the lemmas behind Lemma 1 --------------------------------------------------------------------


class Slopes(eqx.Module):
    """Bounds and their Jacobians over all entries at once, and the gradient of the Lagrangian."""

    widths: Any
    of_inputs: Any
    of_blocks: Any
    r: Any
    lagrangian_inputs: Any
    lagrangian_blocks: Any
    psi_inputs: Any
    complementary: Any
    gap: Any
    value: Any
    delta: Any


def _slopes(problem, point, L) -> Slopes:
    here = evaluate(problem, point)
    y, z = here.ordinary.multipliers, here.done.blocks

    def bounds(s, z):
        pairs = [stage.bounds(s, z[:i], z[i]) for i, stage in enumerate(problem.stages)]
        flat = [jnp.concatenate([jnp.ravel(pair[k]) for pair in pairs]) for k in (0, 1)]
        return flat[1] - flat[0], flat

    def lagrangian(s, z):
        _, (lower, upper) = bounds(s, z)
        flat_y, flat_z = (jnp.concatenate([jnp.ravel(x) for x in xs]) for xs in (y, z))
        up, down = jnp.maximum(flat_y, 0), jnp.maximum(-flat_y, 0)
        return problem.objective(s, z) + jnp.sum(up * lower - down * upper - flat_y * flat_z)

    widths, _ = bounds(point.inputs, z)
    of_inputs, of_blocks = jax.jacobian(lambda s, z: bounds(s, z)[0], argnums=(0, 1))(
        point.inputs, z
    )
    n = widths.size
    of_inputs = of_inputs.reshape(n, -1)
    of_blocks = jnp.concatenate([j.reshape(n, -1) for j in of_blocks], axis=1)
    of_s, of_z = jax.grad(lagrangian, argnums=(0, 1))(point.inputs, z)
    gradient = here.gradient()
    return Slopes(
        widths,
        of_inputs,
        of_blocks,
        jnp.concatenate([jnp.ravel(r) for r in complementarity_of(here)]),
        jnp.ravel(of_s),
        jnp.concatenate([jnp.ravel(x) for x in of_z]),
        jnp.ravel(gradient.inputs),
        here.value - lagrangian(point.inputs, z),
        duality_gap(problem, point) if problem.stages[0].box is not None else jnp.nan,
        here.value,
        step_progress(problem, point, gradient, L),
    )


@eqx.filter_jit
def _slopes_of_hand(batch):
    def one(params, s, fractions):
        return _slopes(hand_problem(params), Point(s, fractions), 1.0)

    return jax.vmap(one)(*batch)


@eqx.filter_jit
def _slopes_of_known(problem, points, L):
    return jax.vmap(lambda point: _slopes(problem, point, L))(points)


def test_lagrangian_and_psi_0_differ_by_the_complementarity():
    """The equalities in the proof of the gradient bounds, with r the complementarity:

    grad_s L - grad_s psi_0 = (grad_s mu - grad_s eta)' r, grad_z L = (grad_z mu - grad_z eta)' r,
    and f - L = r . (eta - mu).
    """
    _, batch = draws(range(50))
    found = jax.tree.map(np.asarray, _slopes_of_hand(batch))
    of_inputs = np.einsum("bij,bi->bj", -found.of_inputs, found.r)
    of_blocks = np.einsum("bij,bi->bj", -found.of_blocks, found.r)
    np.testing.assert_allclose(found.lagrangian_inputs - found.psi_inputs, of_inputs, atol=1e-9)
    np.testing.assert_allclose(found.lagrangian_blocks, of_blocks, atol=1e-9)
    expected = np.sum(found.r * found.widths, axis=1)
    np.testing.assert_allclose(found.complementary, expected, rtol=1e-9, atol=1e-9)
    assert np.abs(of_blocks).max() > 0.1


@every_known
def test_generic_gap_bound(known):
    """Delta <= D_s sqrt(2 L delta_L) + (|eta - mu| + D_s |grad_s .| + D_z |grad_z .|) |r|."""
    points = _random_points(known, 200, seed=2)
    found = jax.tree.map(np.asarray, _slopes_of_known(known.problem, points, known.L))
    norms = [np.linalg.norm(j, 2, axis=(1, 2)) for j in (found.of_inputs, found.of_blocks)]
    c = np.linalg.norm(found.widths, axis=1) + known.D_s * norms[0] + known.D_z * norms[1]
    assert np.all(c <= known.c + 1e-9)  # the constant was right
    root = np.sqrt(2 * known.L * np.maximum(found.delta, 0))
    bound = known.D_s * root + c * np.linalg.norm(found.r, axis=1)
    assert np.all(found.gap <= bound + 1e-9)


@every_known
def test_the_smoothness_is_right(known):
    """Gradients of psi_0 differ by at most L times the distance; a tenth of L would not do."""

    def gradients(problem, points):
        return jax.vmap(lambda point: evaluate(problem, point).gradient())(points)

    def flat(tree):
        return np.concatenate(
            [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves(tree)], axis=1
        )

    a, b = (_random_points(known, 500, seed=seed) for seed in (3, 4))
    b = jax.tree.map(lambda x, y: x + 0.1 * (y - x), a, b)
    ga, gb = (eqx.filter_jit(gradients)(known.problem, points) for points in (a, b))
    ratio = np.linalg.norm(flat(ga) - flat(gb), axis=1) / np.linalg.norm(flat(a) - flat(b), axis=1)
    assert known.L / 10 < ratio.max() <= known.L * (1 + 1e-9)


# -- Fix-Degeneracy on the lens in a lens ---------------------------------------------------------
#
# The same as above with constants that let both lenses close: mu_1 = s^2 - 1, mu_2 = z_1^2 - 1, and
# eta = -mu; f = z_2 + z_1 / 2. g_2 = 1 is exact. g_1 = 1/2 + 2 u z_1 with u = 1 - 2 theta-hat_2,
# |u| <= 1, so it is wrong by 2 |z_1 - z-hat_1| = 2 |theta_1 - theta-hat_1| width_1 at most:
# Assumption 5 holds with Q = 2. The second width, 2 (1 - z_1^2), changes by
# 2 |z_1^2 - z-hat_1^2| <= 4 |z_1 - z-hat_1|, as |z_1| <= 1: Assumption 6 holds with P = 4.

Q, P = 2.0, 4.0


def _closing_lower(s, z):
    return (z[-1] if z else s) ** 2 - 1


def _closing_upper(s, z):
    return 1 - (z[-1] if z else s) ** 2


def _closing_lenses():
    stage = sc.Stage(_closing_lower, _closing_upper)
    box = sc.Box(jnp.asarray(-1.0), jnp.asarray(1.0))
    return sc.Problem(box, (stage, stage), lambda s, z: z[1] + 0.5 * z[0])


@eqx.filter_jit
def _fix_all(problem, points, q):
    def one(point, q):
        before = evaluate(problem, point)
        fixed = fix_degeneracy(problem, point, q)
        after = evaluate(problem, fixed.point)
        return before, fixed, after, complementarity_of(after)

    return jax.vmap(one)(points, q)


def _closing_points(count, seed):
    rng = np.random.default_rng(seed)
    # Near the tips of the lenses more often than not: s = +-1 for the first; for the second s = 0,
    # where z_1 can reach +-1.
    small = 10 ** rng.uniform(-6, 0, count)
    where, sign = rng.integers(0, 3, count), rng.choice([-1, 1], (2, count))
    s = np.select([where == 0, where == 1], [1 - small, np.sqrt(small)], rng.random(count))
    first = np.where(where == 1, (1 + sign[1] * (1 - small)) / 2, rng.random(count))
    return Point(jnp.asarray(sign[0] * s), (jnp.asarray(first), jnp.asarray(rng.random(count))))


def test_fix_degeneracy_succeeds_once_q_is_q_of_assumption_5():
    points = _closing_points(500, seed=0)
    q = np.random.default_rng(1).uniform(Q, 2 * Q, 500)
    before, fixed, after, _ = _fix_all(_closing_lenses(), points, jnp.asarray(q))
    assert np.all(fixed.status == FixStatus.SUCCESS)
    assert np.all(after.value <= before.value - fixed.progress + 1e-12)
    assert np.sum(fixed.progress > 1e-9) > 50  # v is more than the allowance for rounding


def test_complementarity_after_fix_degeneracy():
    """After SUCCESS, r-hat <= q ((3 + 2 P) omega_0 + 2 width-hat), and omega_0 <= sqrt(2 v / q).

    The paper has q ((3 + P) omega_0 + width-hat), but its proof loses the factor 2 of
    p <= 2 q (omega + width): where C is empty, r may be anything up to 2 q width.
    """
    points = _closing_points(500, seed=2)
    q = 10 ** np.random.default_rng(3).uniform(-3, 2, 500)
    before, fixed, after, r = _fix_all(_closing_lenses(), points, jnp.asarray(q))
    success = np.asarray(fixed.status == FixStatus.SUCCESS)
    assert 100 < success.sum() < 500
    omega = sum(
        np.abs(old - new) * width
        for old, new, width in zip(
            points.fractions, fixed.point.fractions, before.done.widths(), strict=True
        )
    )
    rounding = 1e-12
    broken = 0
    for r_i, width in zip(r, after.done.widths(), strict=True):
        assert np.all((r_i <= q * ((3 + 2 * P) * omega + 2 * width) + rounding)[success])
        broken += np.sum((r_i > q * ((3 + P) * omega + width) + rounding)[success])
    assert broken > 0
    assert np.all((omega <= np.sqrt(2 * fixed.progress / q) + rounding)[success])


# -- remarks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5])
def test_smoothness_may_be_exponential(n):
    """z_1 = s, z_i = 2 z_{i-1} and f = z_n^2 / 2 give psi_0 = (2^(n-1) s)^2 / 2: L = 4^(n-1).

    The paper's remark has 4^n, counting one doubling too many.
    """

    def doubled(s, z):
        return 2 * z[-1] if z else s

    stages = (sc.Stage(doubled, doubled),) * n
    problem = sc.Problem(sc.Box(-1.0, 1.0), stages, lambda s, z: 0.5 * z[-1] ** 2)
    fractions = (jnp.asarray(0.3),) * n
    value = psi_0(problem, jnp.asarray(0.7), fractions)
    np.testing.assert_allclose(value, 0.5 * (2 ** (n - 1) * 0.7) ** 2)
    slopes = [jax.grad(psi_0, argnums=1)(problem, jnp.asarray(s), fractions) for s in (0.0, 1.0)]
    np.testing.assert_allclose(slopes[1] - slopes[0], 4.0 ** (n - 1))


def _chain(n):
    """Eq. 3 with the constraints on x_2..x_n (the paper writes 1..n-1): n - 1 stages."""

    def lower(feed, x):
        return -jnp.ones_like(x)

    def upper(feed, x):
        return x

    stage = sc.ScanStage(lower, upper, length=n - 1, initial=lambda s, z: s)
    return sc.Problem(sc.Box(0.0, 1.0), (stage,), lambda s, z: -z[0][-1])


def test_the_chain_runs_over_2_to_n():
    n = 20
    problem = _chain(n)
    assert problem.block_shapes()[0].shape == (n - 1,)
    # From x = 0 (theta = 1: each x_i at its upper bound) one long step reaches the optimum.
    origin = Point(jnp.array(0.0), (jnp.ones(n - 1),))
    assert forward_pass(problem, origin).blocks[0].tolist() == [0.0] * (n - 1)
    _, found = eqx.filter_jit(_one_step)(Simple(smoothness=0.5), problem, origin)
    assert found.value == -1
    assert found.point.inputs == 1
    assert found.bound == -1
    # With theta = 0 instead, every x_i is -1 and all derivatives vanish: nothing moves.
    stuck = Point(jnp.array(0.0), (jnp.zeros(n - 1),))
    _, found = eqx.filter_jit(_one_step)(Simple(smoothness=0.5), problem, stuck)
    assert found.value == 1
    # One corrected sweep gets it out.
    fixed = eqx.filter_jit(fix_degeneracy)(problem, stuck, 0.0)
    assert fixed.point.fractions[0].tolist() == [1.0] * (n - 1)


def _one_step(solver, problem, point):
    state, _ = solver.init(problem, point)
    return solver.step(problem, state)
