"""Bad input: one clear exception, before any work."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import stagecert as sc

BOX = sc.Box(np.zeros(2), np.ones(2))


def stage(lower=lambda s, z: s, upper=lambda s, z: s + 1, **options):
    return sc.Stage(lower, upper, **options)


def scan(**options):
    settings = {
        "lower": lambda u, x: x + u,
        "upper": lambda u, x: x + u + 1,
        "length": 3,
        "initial": np.zeros(2),
        "feed": lambda s, z: jnp.zeros((3, 2)) + s,
    }
    return sc.ScanStage(**(settings | options))


def total(s, z):
    return jnp.sum(s) + sum(jnp.sum(block) for block in z)


BAD = {
    "a later block": (
        (stage(), stage(lower=lambda s, z: z[1])),
        total,
        r"Stage 1 reads block 1, but only blocks 0 to 0 come before it",
    ),
    "a block before the first": (
        (stage(lower=lambda s, z: z[-1], name="first"),),
        total,
        r"Stage 0 \('first'\) reads block -1, but no block comes before it",
    ),
    "shapes of lower and upper": (
        (stage(upper=lambda s, z: jnp.ones(3)),),
        total,
        r"lower has shape \(2,\) but upper has shape \(3,\)",
    ),
    "whole numbers": (
        (stage(lower=lambda s, z: jnp.zeros(2, int)),),
        total,
        r"Stage 0: lower returns int64; it must return floating-point",
    ),
    "parameters not finite": (
        (stage(lambda p, s, z: s, lambda p, s, z: s, params={"w": np.array([1.0, np.nan])}),),
        total,
        r"Stage 0: params\['w'\] is not finite: entry \[1\] is nan",
    ),
    "complex parameters": (
        (stage(lambda p, s, z: s, lambda p, s, z: s, params=np.array([1j])),),
        total,
        r"Stage 0: params is complex",
    ),
    "a function that fails": (
        (stage(lower=lambda s, z: s @ jnp.ones((5, 5))),),
        total,
        r"Stage 0 failed on inputs of the right shapes",
    ),
    "a function of NumPy": (
        (stage(upper=lambda s, z: np.exp(s)),),
        total,
        r"(?s)Stage 0 failed.*use those of jax.numpy, jnp.exp for np.exp",
    ),
    "a function of math": (
        (stage(upper=lambda s, z: jnp.full(2, math.exp(s[0]))),),
        total,
        r"(?s)Stage 0 failed.*functions of `math` need numbers",
    ),
    "an if": (
        (stage(upper=lambda s, z: s if s[0] > 0 else 2 * s),),
        total,
        r"(?s)Stage 0 failed.*use jnp.where\(condition, a, b\)",
    ),
    "no function": ((stage(lower=3.0),), total, r"Stage 0: lower must be a function, not 3.0"),
    "no stage": ((3,), total, r"Stage 0 must be a Stage"),
    "objective of the wrong shape": (
        (stage(),),
        lambda s, z: s,
        r"objective must return a scalar, but returns an array of shape \(2,\)",
    ),
    "objective reading a block that is not there": (
        (stage(),),
        lambda s, z: jnp.sum(z[1]),
        r"The objective reads block 1",
    ),
    "objective of whole numbers": ((), lambda s, z: 1, r"The objective returns int64"),
    "empty block box": (
        (stage(box=(np.array([0.0, 2.0]), np.array([1.0, 1.0]))),),
        total,
        r"Stage 0: box is empty at entry \[1\]: 2.0 > 1.0",
    ),
    "block box not finite": (
        (stage(box=(np.array([0.0, -np.inf]), np.array([1.0, 1.0]))),),
        total,
        r"Stage 0: box\[0\] is not finite: entry \[1\] is -inf",
    ),
    "block box of the wrong shape": (
        (stage(box=(np.zeros(3), np.ones(3))),),
        total,
        r"Stage 0: box has shapes \(3,\) and \(3,\), the block \(2,\)",
    ),
    "ends of a block box of different shapes": (
        (stage(box=(np.zeros(3), np.ones(2))),),
        total,
        r"ends of box have shapes \(3,\) and \(2,\)",
    ),
    "block box that is no pair": ((stage(box=3.0),), total, r"box must be a pair"),
    "scan of no steps": ((scan(length=0),), total, r"length must be a positive whole number"),
    "feed of another length": (
        (scan(feed=lambda s, z: jnp.zeros((4, 2))),),
        total,
        r"feed must have leading axis 3 \(length\), but one array has shape \(4, 2\)",
    ),
    "scan parameters of another length": (
        (scan(lower=lambda p, u, x: x, upper=lambda p, u, x: x, params=np.zeros(2)),),
        total,
        r"params must have leading axis 3",
    ),
    "a step that changes shape": (
        (scan(lower=lambda u, x: jnp.zeros(3), upper=lambda u, x: jnp.zeros(3)),),
        total,
        r"maps a state of shape \(2,\) \(initial\) to one of shape \(3,\)",
    ),
    "initial state not finite": (
        (scan(initial=np.array([np.inf, 0.0])),),
        total,
        r"initial is not finite: entry \[0\] is inf",
    ),
    "negative curvature": (
        (stage(),),
        sc.Objective(total, curvature_inputs=np.array([-1.0, 1.0])),
        r"curvature_inputs has a negative entry",
    ),
    "curvature of the wrong shape": (
        (stage(),),
        sc.Objective(total, curvature_blocks=(np.ones(3),)),
        r"curvature_blocks\[0\] has shape \(3,\), which does not broadcast to \(2,\)",
    ),
    "curvature for too many stages": (
        (stage(),),
        sc.Objective(total, curvature_blocks=(1.0, 1.0)),
        r"one entry for each of the 1 stages",
    ),
}


@pytest.mark.parametrize(("stages", "objective", "message"), BAD.values(), ids=BAD.keys())
def test_bad_problems_are_refused(stages, objective, message):
    with pytest.raises(sc.ProblemError, match=message):
        sc.solve(sc.Problem(BOX, stages, objective))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        # Of JAX arrays: with NumPy's they are refused where they are written down.
        (sc.Box(jnp.ones(2), jnp.zeros(2)), "Box is empty"),
        (sc.Box(jnp.zeros(2), jnp.array([1.0, jnp.inf])), "unbounded|not finite"),
        (sc.Ball(jnp.zeros(2), -1.0), "radius"),
        (np.zeros(2), "inputs must be a set"),
    ],
)
def test_bad_sets_are_refused(inputs, message):
    with pytest.raises(sc.ProblemError, match=message):
        sc.solve(sc.Problem(inputs, (), total))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"atol": -1.0}, "atol must be a finite number >= 0"),
        ({"rtol": float("nan")}, "rtol must be a finite number >= 0"),
        ({"max_iterations": 2.5}, "max_iterations must be a whole number"),
        ({"time_limit": 0}, "time_limit must be a positive number"),
        ({"solver": "fast"}, "Unknown solver 'fast'; known are auto"),
        ({"solver": 3}, "solver must be a name"),
        ({"start": 3}, "start must be a stagecert.Point"),
        ({"start": sc.Point(np.zeros(3))}, "not arranged like a point"),
        ({"start": sc.Point(None, (0.5, 0.5))}, "2 arrays of fractions for 1 stages"),
        ({"start": sc.Point(None, (np.zeros(3),))}, r"shape \(3,\), the block \(2,\)"),
        ({"start": sc.Point(np.array([0.0, np.nan]))}, "not finite"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(sc.ProblemError, match=message):
        sc.solve(sc.Problem(BOX, (stage(),), total), **options)


def test_not_a_problem():
    with pytest.raises(sc.ProblemError, match=r"Expected a stagecert.Problem, got dict"):
        sc.solve({})  # pyright: ignore[reportArgumentType]
