"""What a point and its multipliers prove: evaluations for the search, certificates for users.

Both use the one formula of stagecert.formula; here multipliers come from the sweeps back.
"""

import io
import json
import os
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from stagecert import pieces, tree
from stagecert.errors import ProblemError
from stagecert.evidence import Assumptions
from stagecert.files import write_whole
from stagecert.formula import Anchor, Linearisation, lower_bound, minimum_of_linearisation
from stagecert.problem import Problem, as_arrays
from stagecert.reformulation import (
    ForwardPass,
    Point,
    Sweep,
    complementarity,
    fractions_gradient,
    linearise,
)
from stagecert.sides import SideRule, Sides, with_multipliers, without


def lagrangian_value(done: ForwardPass, multipliers: tuple):
    """L at the point of a forward pass."""
    total = done.total
    for y, z, lower, upper in zip(multipliers, done.blocks, done.lower, done.upper, strict=True):
        total = total + jnp.sum(jnp.maximum(y, 0) * (lower - z) - jnp.maximum(-y, 0) * (upper - z))
    return total


class Evaluation(eqx.Module):
    """A feasible point with its value, and a lower bound proposed from it.

    The bound here is for steering the search, in the search's own precision; what is published is
    `lower_bound` of the same proposal in float64.
    """

    point: Point
    done: ForwardPass
    consistent: Sweep
    ordinary: Sweep | None
    fixed: tuple[Float[Array, "*block"], ...] | None
    minimiser: Any
    bound: Float[Array, ""]
    crossing: "Crossing"
    feasible: Any

    @property
    def value(self):
        return self.done.value

    @property
    def lagrangian_gap(self):
        """How far the objective with its side terms is above the bound."""
        return self.done.total - self.bound

    def gradient(self) -> Point:
        """The ordinary gradient of psi_0 (eq. 5)."""
        sweep = self._ordinary()
        return Point(sweep.inputs, fractions_gradient(self.done, sweep))

    def proposal(self) -> "Proposal":
        """What is needed to derive the bound again."""
        return Proposal(self.point, self.done.records, jnp.ones_like(self.bound), self.done.held)

    def multipliers_as_drawn(self) -> tuple:
        """y_i = d psi_i / d z_i."""
        return self._ordinary().multipliers

    def _ordinary(self) -> Sweep:
        if self.ordinary is None:
            raise TypeError("This evaluation was made without the ordinary sweep.")
        return self.ordinary


class Proposal(eqx.Module):
    """A point, slopes for the nonsmooth pieces there, and the rule that makes multipliers.

    corrected = 1: consistent multipliers; 0: as drawn (the paper's). `sides` are the multipliers of
    side constraints.
    """

    point: Point
    slopes: Any
    corrected: Any
    sides: Sides = Sides()


class Crossing(eqx.Module):
    """The worst place where a lower bound exceeds its upper bound; amount 0 if nowhere."""

    amount: Float[Array, ""]
    stage: Int[Array, ""]
    entry: Int[Array, ""]


def standing(problem: Problem, done: ForwardPass, eps=None) -> tuple[Crossing, Any]:
    """(where bounds cross, whether the point is feasible).

    Where stages are followed beyond crossings, these are no event of their own.
    """
    crossing = crossing_of(done, eps)
    feasible = jnp.array(True)
    for values in done.sides.constraints:
        feasible = feasible & jnp.all(values <= 0)
    guide = problem.guide
    if guide is None or not guide.followed:
        return crossing, feasible
    if guide.ordered:
        feasible = feasible & (crossing.amount <= 0)
    return Crossing(jnp.zeros_like(crossing.amount), jnp.array(-1), jnp.array(-1)), feasible


def crossing_of(done: ForwardPass, eps=None) -> Crossing:
    """Finds where bounds cross by more than rounding (1000 `eps`, relative) explains."""
    dtype = done.value.dtype
    eps = jnp.finfo(dtype).eps if eps is None else eps
    worst = Crossing(jnp.zeros((), dtype), jnp.array(-1), jnp.array(-1))
    for i, (lower, upper) in enumerate(zip(done.lower, done.upper, strict=True)):
        size = 1 + jnp.abs(lower) + jnp.abs(upper)
        excess = (lower - upper - 1e3 * eps * size).ravel()
        if excess.size == 0:
            continue
        # Two plain maxima: XLA's argmax on CPUs costs as much as a layer of the network.
        most = jnp.max(excess)
        entry = jnp.max(jnp.where(excess >= most, jnp.arange(excess.size), -1))
        amount = jnp.where(most > 0, (lower - upper).ravel()[entry], 0)
        here = Crossing(amount, jnp.array(i), entry)
        worst = tree.select(amount > worst.amount, here, worst)
    return worst


def evaluate(
    problem: Problem,
    point: Point,
    treatment_of=pieces.exactly_sloped,
    data=None,
    with_gradient: bool = True,
    fix=None,
    rule: SideRule = without,
) -> Evaluation:
    """Value and consistent bound at a point; the ordinary sweep if `with_gradient`.

    With `fix` a number q, also the fractions that Fix-Degeneracy(q) asks for; `rule` says how side
    constraints count. One pass forward, and one for each sweep back: `passes_of_evaluate` counts
    them.
    """
    done, back = linearise(problem, point, treatment_of, data, rule)
    rules = [(1, 0)] + [(0, 0)] * with_gradient + ([] if fix is None else [(1, fix)])
    if len(rules) == 1:
        sweeps = [back(*rules[0])]
    else:
        # All sweeps in one batched pass back: several right-hand sides cost less than several
        # passes.
        corrected, q = (
            jnp.stack([jnp.asarray(x, done.value.dtype) for x in c])
            for c in zip(*rules, strict=True)
        )
        batched = jax.vmap(back)(corrected, q)
        sweeps = [jax.tree.map(lambda x, k=k: x[k], batched) for k in range(len(rules))]
    consistent = sweeps[0]
    ordinary = sweeps[1] if with_gradient else None
    fixed = None if fix is None else sweeps[-1].shares
    anchor = Anchor(point.inputs, done.blocks)
    value = lagrangian_value(done, consistent.multipliers)
    line = Linearisation(value, jnp.abs(value), consistent.inputs, None, consistent.slack)
    parts = minimum_of_linearisation(problem, anchor, line, consistent.multipliers)
    bound = jnp.where(jnp.isnan(parts.computed), -jnp.inf, parts.computed)
    minimiser = parts.minimiser
    return Evaluation(
        point, done, consistent, ordinary, fixed, minimiser, bound, *standing(problem, done)
    )


def passes_of_evaluate(with_gradient: bool = True, fix: bool = False) -> int:
    """How many passes `evaluate` makes."""
    return 2 + with_gradient + fix


def as_drawn(problem: Problem, evaluation: Evaluation):
    """The paper's bound f - Delta: multipliers y_i = d psi_i / d z_i as drawn. Two more passes."""
    parts = lower_bound(
        problem,
        Anchor(evaluation.point.inputs, evaluation.done.blocks),
        evaluation.multipliers_as_drawn(),
        evaluation.done.records,
    )
    return parts.bound()


def duality_gap(problem: Problem, point: Point):
    """Delta(s, theta) of the paper, with multipliers as drawn; infinite where boxes are missing."""
    evaluation = evaluate(problem, point)
    return evaluation.value - as_drawn(problem, evaluation)


def complementarity_of(evaluation: Evaluation) -> tuple:
    """r_i = theta_i y_i+ + (1 - theta_i) y_i- for the ordinary sweep."""
    return jax.tree.map(
        complementarity, evaluation.multipliers_as_drawn(), evaluation.point.fractions
    )


def propose(problem: Problem, proposal: Proposal) -> tuple[ForwardPass, tuple]:
    """The forward pass and the multipliers that a proposal stands for. Two passes."""
    rule = with_multipliers(proposal.sides)
    done, back = linearise(problem, proposal.point, pieces.given_slopes, proposal.slopes, rule)
    return done, back(proposal.corrected, 0).multipliers


# -- what a user keeps -----------------------------------------------------------------------------


_NOTHING_KNOWN = Assumptions.unchecked(0)


class Certificate(eqx.Module):
    """Everything needed to derive a lower bound again, as plain arrays.

    Attributes:
        inputs, blocks: the anchor point.
        multipliers: one array for each block.
        slopes: weights of the nonsmooth pieces.
        bound: the bound that was derived, a number.
        assumptions: what was known of the problem's convexity when it was.
        sides: the multipliers of side constraints.
        feasibility: whether the bound is one without the objective: a positive one proves that
            there is no feasible point.
    """

    inputs: Any
    blocks: tuple
    multipliers: tuple
    slopes: Any
    bound: Any
    assumptions: Assumptions = eqx.field(static=True, default=_NOTHING_KNOWN)
    sides: Sides = Sides()
    feasibility: bool = eqx.field(static=True, default=False)

    def derive(self, problem: Problem, *, rigorous: bool = False) -> float:
        """The lower bound on `problem` that this certificate proves, computed anew in float64.

        With `rigorous`, in interval arithmetic: whatever was rounded, it is not above the optimum.
        For a certificate of infeasibility, the bound without the objective: a positive one proves
        that no point is feasible.
        """
        if rigorous:
            from stagecert.enclosure import rigorous_bound

            return rigorous_bound(problem, self)
        with jax.enable_x64(True):
            # What was known decides nothing here, and must not mean another compilation.
            plain = replace(self, assumptions=_NOTHING_KNOWN)
            problem, held = as_arrays((problem, plain), jnp.float64)
            return float(_derive(problem, held))

    def save(self, path: str | os.PathLike) -> None:
        """Writes an .npz file (atomically)."""
        known = self.assumptions != _NOTHING_KNOWN
        header = _HEADER | ({"assumptions": self.assumptions.as_names()} if known else {})
        if self.sides.order:
            header["order"] = True
        if self.feasibility:
            header["feasibility"] = True
        leaves = {
            "bound": np.asarray(self.bound),
            "structure": np.array(json.dumps(header)),
        }
        for part in _PARTS:
            for i, leaf in enumerate(jax.tree.leaves(getattr(self, part))):
                leaves[f"{part}_{i}"] = np.asarray(leaf)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, allow_pickle=False, **leaves)
        write_whole(Path(path), buffer.getvalue())

    @staticmethod
    def load(path: str | os.PathLike, problem: Problem) -> "Certificate":
        """Reads what `save` wrote; `problem` says how the arrays are arranged."""
        try:
            # NumPy takes whatever is no archive for pickled data.
            if os.path.getsize(path) and not zipfile.is_zipfile(path):
                raise ValueError("it is no .npz file, which Certificate.save writes.")
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as held:
                arrays = {name: held[name] for name in held.files}
        except (
            OSError,
            ValueError,
            EOFError,
            KeyError,
            TypeError,
            zipfile.BadZipFile,
            zlib.error,
        ) as error:
            if isinstance(error, OSError):
                raise ProblemError(f"{path} cannot be read: {error.strerror}.") from error
            raise ProblemError(f"{path} is not a certificate: {error}") from error
        if "structure" not in arrays or "bound" not in arrays:
            raise ProblemError(f"{path} is not a certificate: it has no header.")
        try:
            header = json.loads(str(arrays["structure"]))
            if not isinstance(header, dict):
                raise ValueError(f"unknown header {header}")
            recorded = header.pop("assumptions", None)  # files of older releases have none
            order, feasibility = header.pop("order", False), header.pop("feasibility", False)
            if not isinstance(order, bool) or not isinstance(feasibility, bool):
                raise ValueError("order and feasibility must be true or false")
            if header != _HEADER:
                raise ValueError(f"unknown header {header}")
            assumptions = _NOTHING_KNOWN if recorded is None else Assumptions.from_names(recorded)
            for name, array in arrays.items():
                if name != "structure" and not np.issubdtype(array.dtype, np.floating):
                    raise ValueError(f"{name} is not made of floating-point numbers")
            bound = float(arrays["bound"])
        except (TypeError, ValueError) as error:
            raise ProblemError(f"{path} is not a certificate: {error}") from error
        like = shape_of_certificate(problem)
        if order:
            like = replace(like, sides=Sides(like.sides.constraints, like.blocks))
        parts = {}
        for part in _PARTS:
            shapes, structure = jax.tree.flatten(getattr(like, part))
            names = [f"{part}_{i}" for i in range(len(shapes))]
            for name, shape in zip(names, shapes, strict=True):
                if name not in arrays or arrays[name].shape != shape.shape:
                    seen = arrays[name].shape if name in arrays else "nothing"
                    raise ProblemError(
                        f"{path} does not belong to this problem: {name} should have shape "
                        f"{shape.shape}, but the file has {seen}."
                    )
            parts[part] = jax.tree.unflatten(structure, [arrays[name] for name in names])
        if recorded is not None and len(assumptions.lower) != len(problem.stages):
            raise ProblemError(
                f"{path} does not belong to this problem: it knows of {len(assumptions.lower)} "
                f"stages, not {len(problem.stages)}."
            )
        if recorded is not None and len(assumptions.constraints) != len(problem.constraints):
            raise ProblemError(
                f"{path} does not belong to this problem: it knows of "
                f"{len(assumptions.constraints)} constraints, not {len(problem.constraints)}."
            )
        return Certificate(**parts, bound=bound, assumptions=assumptions, feasibility=feasibility)


_HEADER = {"format": "stagecert-certificate", "version": 1}
_PARTS = ("inputs", "blocks", "multipliers", "slopes", "sides")


def shape_of_certificate(problem: Problem) -> Certificate:
    """Shapes and dtypes in place of the arrays of a problem's certificates."""
    return jax.eval_shape(lambda: _certificate_like(problem))


def _certificate_like(problem) -> Certificate:
    from stagecert.reformulation import full_point

    problem = as_arrays(problem)
    dtype = jnp.result_type(*jax.tree.leaves(problem.inputs.centre()))
    evaluation = evaluate(problem, full_point(problem, None, dtype))
    done = evaluation.done
    return Certificate(
        evaluation.point.inputs,
        done.blocks,
        evaluation.consistent.multipliers,
        done.records,
        0.0,
        sides=Sides(done.held.constraints),
    )


@eqx.filter_jit
def _derive(problem, held: Certificate):
    anchor = Anchor(held.inputs, held.blocks)
    return lower_bound(
        problem, anchor, held.multipliers, held.slopes, held.sides, held.feasibility
    ).bound()


def certify(problem: Problem, proposal: Proposal) -> tuple[Certificate, Any]:
    """The certificate of a proposal in the precision of the arguments, with its bound."""
    done, multipliers = propose(problem, proposal)
    anchor = Anchor(proposal.point.inputs, done.blocks)
    bound = lower_bound(problem, anchor, multipliers, done.records, done.held).bound()
    return Certificate(
        anchor.inputs, anchor.blocks, multipliers, done.records, bound, sides=done.held
    ), bound
