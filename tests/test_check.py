"""check() finds what is wrong, shows it, and is silent about what is right."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from zoo import CASES

import stagecert as sc

BOX = sc.Box(-np.ones(2), np.ones(2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_zoo_is_clean(case):
    findings = sc.check(case.make(), samples=64)
    assert findings, str(findings)
    assert "no proof" in str(findings)


def problem(lower=lambda s, z: s**2 - 1, upper=lambda s, z: 1 - s**2, objective=None, **options):
    stage = sc.Stage(lower, upper, **options)
    return sc.Problem(BOX, (stage,), objective or (lambda s, z: jnp.sum(z[0])))


WRONG = {
    "lower not convex": problem(lower=lambda s, z: -2 - s**2),
    "upper not concave": problem(upper=lambda s, z: 1 + s**2),
    "bounds crossed": problem(upper=lambda s, z: 0.5 - s**2),
    "box too small": problem(box=(-0.5 * np.ones(2), np.ones(2))),
    "objective not convex": problem(objective=lambda s, z: -jnp.sum(s**2)),
    "curvature overstated": problem(
        objective=sc.Objective(lambda s, z: jnp.sum(s**2), curvature_inputs=2.5)
    ),
    "initial or feed not affine": sc.Problem(
        BOX,
        (
            sc.ScanStage(
                lower=lambda u, x: x,
                upper=lambda u, x: x + 1,
                length=2,
                initial=lambda s, z: s**2,
            ),
        ),
        lambda s, z: jnp.sum(z[0]),
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_each_kind_of_violation_is_found_with_a_witness(kind):
    findings = sc.check(WRONG[kind])
    assert not findings
    found = [violation for violation in findings.violations if violation.kind == kind]
    assert len(found) == 1
    assert found[0].amount > 0
    assert found[0].where in ("Stage 0", "The objective")
    assert kind in str(findings)


def test_the_witness_shows_the_violation():
    wrong = WRONG["lower not convex"]
    (violation,) = [v for v in sc.check(wrong).violations if v.kind == "lower not convex"]
    (a, _), (b, _) = violation.witness
    stage: Any = wrong.stages[0]
    lower = stage.lower
    excess = lower((a + b) / 2, ()) - (lower(a, ()) + lower(b, ())) / 2
    assert excess[violation.entry] == pytest.approx(violation.amount)


def test_curvature_that_is_right_passes():
    fine = problem(objective=sc.Objective(lambda s, z: jnp.sum(s**2), curvature_inputs=2.0))
    assert sc.check(fine)


def test_float32_users_get_the_same_findings():
    import jax

    with jax.enable_x64(False):
        assert sc.check(problem())
        assert not sc.check(WRONG["bounds crossed"])
