"""What solve finds out about the assumptions, says, and records."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from zoo import CASES

import stagecert as sc
from stagecert import assumptions
from stagecert.evidence import Assumptions, Evidence

BOX = sc.Box(-np.ones(2), np.ones(2))
PROVEN, SAMPLED, UNCHECKED = Evidence.PROVEN, Evidence.SAMPLED, Evidence.UNCHECKED


def concave(s, z):
    return -jnp.sum(s**2)


def not_known(s, z):
    # Convex, by an identity that no composition rule knows: (x + y)^2 - 2 x y.
    return (s[0] + s[1]) ** 2 - 2 * s[0] * s[1]


def test_a_concave_objective_is_an_error():
    # This was solved to GAP_REACHED with bound 0; the minimum is -2.
    with pytest.raises(
        sc.ProblemError, match=r"The objective: it is not convex.*inputs.*check=False"
    ):
        sc.solve(sc.Problem(BOX, (), concave))


def test_without_a_check_nothing_is_said():
    solution = sc.solve(sc.Problem(BOX, (), concave), check=False)
    assert solution.assumptions == Assumptions.unchecked(0)
    assert str(solution.assumptions) == "unchecked"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_zoo_is_proven(case):
    found = assumptions.examine(case.make())
    assert found.assumptions.weakest is PROVEN
    assert not found.steep


def test_what_is_not_known_is_sampled():
    solution = sc.solve(sc.Problem(BOX, (), not_known))
    assert solution.assumptions.objective is SAMPLED
    assert str(solution.assumptions) == "sampled"


def test_a_wrong_stage_is_named_with_its_entry_and_points():
    def lower(s, z):
        return jnp.stack([s[0] ** 2, -(s[1] ** 2)]) - 2

    stage = sc.Stage(lower, lambda s, z: 1 - s**2, name="second")
    problem = sc.Problem(BOX, (stage,), lambda s, z: jnp.sum(z[0]))
    with pytest.raises(
        sc.ProblemError, match=r"Stage 0 \('second'\): the lower bound is not convex"
    ) as info:
        sc.solve(problem)
    assert "entry 1" in str(info.value)
    assert "blocks" in str(info.value)


def test_an_upper_bound_that_is_not_concave_is_an_error():
    stage = sc.Stage(lambda s, z: s**2 - 1, lambda s, z: 1 + s**2)
    with pytest.raises(sc.ProblemError, match="the upper bound is not concave"):
        sc.solve(sc.Problem(BOX, (stage,), lambda s, z: jnp.sum(z[0])))


def test_a_feed_that_is_not_affine_is_an_error_unless_the_bounds_are_convex_all_the_same():
    def problem(lower):
        stage = sc.ScanStage(
            lower=lower,
            upper=lambda u, x: jnp.full(2, 9.0),
            length=2,
            initial=np.zeros(2),
            feed=lambda s, z: jnp.stack([s**2, s**2]),
        )
        return sc.Problem(BOX, (stage,), lambda s, z: jnp.sum(z[0]))

    assert str(sc.solve(problem(lambda u, x: x + u)).assumptions) == "proven"
    with pytest.raises(sc.ProblemError, match="Stage 0"):
        sc.solve(problem(lambda u, x: x - u))


def test_curvature_is_proven_up_to_what_there_is():
    def problem(weights, declared):
        objective = sc.Objective(
            lambda w, s, z: 0.5 * jnp.sum(w * (s - 0.3) ** 2) + jnp.max(s),
            params=np.asarray(weights),
            curvature_inputs=np.asarray(declared),
        )
        return sc.Problem(BOX, (), objective)

    assert sc.solve(problem([1.0, 2.0], [1.0, 2.0])).assumptions.curvature is PROVEN
    with pytest.raises(sc.ProblemError, match="less curved than was declared"):
        sc.solve(problem([1.0, 0.1], [1.0, 2.0]))


def test_other_numbers_of_the_same_shape_are_not_taken_for_proven():
    # One proof is for all numbers, or for the numbers at hand: never for the first ones only.
    def weighted(w, s, z):
        return jnp.sum(w * s**2)

    def problem(weights):
        return sc.Problem(BOX, (), sc.Objective(weighted, params=np.asarray(weights)))

    assert assumptions.examine(problem([1.0, 2.0])).assumptions.objective is PROVEN
    with pytest.raises(sc.ProblemError, match="not convex"):
        assumptions.examine(problem([1.0, -2.0]))
    assert assumptions.examine(problem([3.0, 4.0])).assumptions.objective is PROVEN


def test_a_batch_is_judged_by_all_its_problems():
    def weighted(w, s, z):
        return jnp.sum(w * s**2)

    def problems(weights):
        return [sc.Problem(BOX, (), sc.Objective(weighted, params=np.asarray(w))) for w in weights]

    good = sc.solve_batch(problems([[1.0, 2.0], [3.0, 1.0]]))
    assert good.assumptions.objective is PROVEN
    assert good[1].assumptions.objective is PROVEN
    with pytest.raises(sc.ProblemError, match="Problem 1 of the batch: The objective"):
        sc.solve_batch(problems([[1.0, 2.0], [3.0, -1.0]]))


def test_whole_numbers_belong_to_the_shape():
    def picked(index, s, z):
        return jnp.sum(jnp.stack([s**2, -s])[index])

    def problem(index):
        return sc.Problem(BOX, (), sc.Objective(picked, params=np.array([index])))

    for index in (0, 1):
        assert assumptions.examine(problem(index)).assumptions.objective is PROVEN


def test_certificates_record_what_was_known(tmp_path):
    stage = sc.Stage(lambda s, z: s**2 - 1, lambda s, z: 1 - s**2)
    problem = sc.Problem(BOX, (stage,), lambda s, z: jnp.sum(z[0]) + not_known(s, z))
    certificate = sc.solve(problem).certificate
    assert certificate.assumptions == Assumptions(SAMPLED, (PROVEN,), (PROVEN,))
    path = tmp_path / "certificate.npz"
    certificate.save(path)
    loaded = sc.Certificate.load(path, problem)
    assert loaded.assumptions == certificate.assumptions
    assert loaded.derive(problem) == certificate.derive(problem)
    # One that was made by hand says nothing, and can be read all the same.
    parts = (certificate.inputs, certificate.blocks, certificate.multipliers, certificate.slopes)
    sc.Certificate(*parts, bound=certificate.bound).save(path)
    assert sc.Certificate.load(path, problem).assumptions.weakest is UNCHECKED


def test_old_and_foreign_files(tmp_path):
    problem = sc.Problem(BOX, (), lambda s, z: jnp.sum(s**2))
    path = tmp_path / "certificate.npz"
    sc.solve(problem).certificate.save(path)
    with np.load(path) as held:
        arrays = dict(held)
    header = json.loads(str(arrays["structure"]))
    proven = {"objective": "PROVEN", "lower": [], "upper": [], "curvature": None}
    one = ["PROVEN"]
    for names, wrong in (
        (None, None),  # as older releases wrote it
        (proven | {"objective": "CERTAIN"}, "is not a certificate"),
        (proven | {"lower": one}, "is not a certificate"),
        (proven | {"lower": one, "upper": one}, "does not belong to this problem"),
        ("PROVEN", "is not a certificate"),
    ):
        new = {k: v for k, v in header.items() if k != "assumptions"}
        new |= {} if names is None else {"assumptions": names}
        changed: dict[str, Any] = arrays | {"structure": np.array(json.dumps(new))}
        np.savez(path, **changed)
        if wrong is not None:
            with pytest.raises(sc.ProblemError, match=wrong):
                sc.Certificate.load(path, problem)
        else:
            assert sc.Certificate.load(path, problem).assumptions.weakest is UNCHECKED


def test_rounding_is_no_witness():
    # Convex, but computed with noise of 1e-4: numbers of 1e12 cancel.
    def noisy(s, z):
        return jnp.abs(s[0] + s[1]) + (1e12 + s[0] * s[1]) - (1e12 + s[0] * s[1])

    assert str(sc.solve(sc.Problem(BOX, (), noisy), max_iterations=20).assumptions) == "sampled"


def test_the_weakest_part_speaks_for_all():
    found = Assumptions(PROVEN, (PROVEN, SAMPLED), (PROVEN, UNCHECKED), None)
    assert found.weakest is UNCHECKED
    assert Assumptions.from_names(found.as_names()) == found


def test_a_rule_that_fails_proves_nothing(monkeypatch):
    from stagecert.curvature.lattice import RULES

    def broken(*_, **__):
        raise IndexError

    monkeypatch.setitem(RULES, "exp", broken)
    solution = sc.solve(sc.Problem(BOX, (), lambda s, z: jnp.sum(jnp.exp(s))))
    assert solution.assumptions.objective is SAMPLED
    assert solution.status.solved


def test_a_proof_is_not_repeated_for_numbers_that_it_does_not_look_at(monkeypatch):
    def weighted(p, s, z):
        return jnp.sum(p["weight"] * (s - p["middle"]) ** 2)

    def problem(weight, middle, reach=1.0):
        params = {"weight": np.full(2, weight), "middle": np.full(2, middle)}
        box = sc.Box(np.full(2, -reach), np.full(2, reach))
        return sc.Problem(box, (), sc.Objective(weighted, params=params))

    assert assumptions.examine(problem(1.0, 0.0)).assumptions.objective is PROVEN
    walks = []
    plain = assumptions._proven
    monkeypatch.setattr(assumptions, "_proven", lambda *a: walks.append(a) or plain(*a))
    assert assumptions.examine(problem(1.0, 0.5, 3.0)).assumptions.objective is PROVEN
    assert not walks  # middles and reaches decide nothing
    assert assumptions.examine(problem(2.0, 0.5)).assumptions.objective is PROVEN
    assert len(walks) == 1
    with pytest.raises(sc.ProblemError, match="not convex"):
        assumptions.examine(problem(-1.0, 0.5))
