"""What a solver is: a small object with `init` and `step`; one loop runs them all."""

import abc
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from stagecert import tree
from stagecert.certificate import Crossing, Evaluation, Proposal, as_drawn, standing
from stagecert.problem import Problem
from stagecert.reformulation import Point
from stagecert.repairing import PASSES, repaired
from stagecert.sides import Guide


class Report(eqx.Module):
    """What a step found: a point with its value, and a proposed bound.

    The loop keeps the best value and the best bound of all reports, so a step may report whatever
    it evaluated, good or bad.
    """

    point: Point
    value: Any
    crossing: Crossing
    bound: Any
    proposal: Proposal
    passes: Any
    stuck: Any
    feasible: Any = True  # whether the side constraints hold at the point


class AbstractSolver(eqx.Module):
    """A search on psi_0. `step` must be a pure JAX function: batches run it under `vmap`.

    Attributes:
        name: how traces and tables call it.
        patience: after how many steps without a smaller gap the loop takes it as stalled.
        progress: "smaller" means: at most this share of the gap before.
    """

    name: eqx.AbstractClassVar[str]
    patience: eqx.AbstractVar[int]
    progress: eqx.AbstractVar[float]

    @abc.abstractmethod
    def init(self, problem: Problem, point: Point) -> tuple[Any, Report]:
        """The state at a starting point, and what was found there."""

    @abc.abstractmethod
    def step(self, problem: Problem, state) -> tuple[Any, Report]:
        """One iteration."""


def paper_report(problem: Problem, evaluation: Evaluation, passes, stuck, drawn: bool) -> Report:
    """The report of one evaluation; with `drawn`, its bound is the paper's: multipliers as drawn.

    That bound needs boxes around all blocks (or curvature), and two more passes.
    """
    consistent = report(evaluation, passes, stuck)
    if not drawn:
        return consistent
    proposal = Proposal(evaluation.point, evaluation.done.records, jnp.zeros_like(evaluation.bound))
    return eqx.tree_at(
        lambda r: (r.bound, r.proposal, r.passes),
        consistent,
        (as_drawn(problem, evaluation), proposal, consistent.passes + 2),
    )


def report(evaluation: Evaluation, passes, stuck: Any = False) -> Report:
    """The report of one evaluation."""
    return Report(
        evaluation.point,
        evaluation.value,
        evaluation.crossing,
        evaluation.bound,
        evaluation.proposal(),
        jnp.asarray(passes, jnp.int32),
        jnp.asarray(stuck),
        evaluation.feasible,
    )


def guide_of(problem: Problem) -> Guide:
    """What is known of a problem's side constraints; nothing where it has none."""
    return Guide() if problem.guide is None else problem.guide


def repaired_report(problem: Problem, evaluation: Evaluation, passes, stuck: Any = False) -> Report:
    """The report of one evaluation whose point is brought into the side constraints, if it can."""
    found = report(evaluation, passes, stuck)
    if problem.guide is None:
        return found
    point, done = repaired(problem, evaluation.point, evaluation.done)
    crossing, feasible = standing(problem, done)
    return eqx.tree_at(
        lambda r: (r.point, r.value, r.crossing, r.passes, r.feasible),
        found,
        (point, done.value, crossing, found.passes + PASSES, feasible),
    )


def project(problem: Problem, point: Point) -> Point:
    """The nearest point with inputs in S and fractions in [0, 1]."""
    fractions = tuple(jnp.clip(f, 0, 1) for f in point.fractions)
    return Point(problem.inputs.project(point.inputs), fractions)


def step_progress(problem: Problem, point: Point, gradient: Point, smoothness):
    """delta_L(s, theta): what one projected-gradient step is sure to gain if psi_0 is L-smooth."""
    target = project(problem, tree.move(point, gradient, -1 / smoothness))
    d = tree.subtract(target, point)
    return -(tree.dot(gradient, d) + 0.5 * smoothness * tree.dot(d, d))
