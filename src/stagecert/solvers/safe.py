"""Safe-Psi-Minimization: projected gradients that cannot end at a degenerate minimiser."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from stagecert.certificate import Evaluation, evaluate, passes_of_evaluate
from stagecert.degeneracy import FixStatus, any_entry, degenerate_for, fix_degeneracy
from stagecert.solvers.base import AbstractSolver, paper_report
from stagecert.solvers.gradient import Backtracking, grown, projected_step


class SafeState(eqx.Module):
    """The evaluation at (s^k, theta-hat^k), q, and the step size."""

    evaluation: Evaluation
    q: Any
    size: Any


class Safe(AbstractSolver):
    """Projected gradient with backtracking, and Fix-Degeneracy before every step that needs it.

    Attributes:
        q: the first threshold; it grows tenfold whenever Fix-Degeneracy fails.
        search: the line search.
        drawn: take the paper's multipliers, as drawn, for the bound; needs boxes around all blocks.
    """

    name: ClassVar[str] = "safe"
    q: float = 1.0
    search: Backtracking = Backtracking()
    drawn: bool = False
    patience: int = 200
    progress: float = 0.99

    def init(self, problem, point):
        evaluation = evaluate(problem, point)
        q = jnp.asarray(self.q, evaluation.value.dtype)
        size = jnp.asarray(self.search.first, evaluation.value.dtype)
        evaluation, q, passes = _corrected(problem, evaluation, q)
        passes = passes + passes_of_evaluate()
        found = paper_report(problem, evaluation, passes, False, self.drawn)
        return SafeState(evaluation, q, size), found

    def step(self, problem, state: SafeState):
        here = state.evaluation
        stepped = projected_step(
            problem, self.search, here.point, here.value, here.gradient(), state.size
        )
        moved = evaluate(problem, stepped.point)
        corrected, q, passes = _corrected(problem, moved, state.q)
        passes = passes + stepped.trials + passes_of_evaluate()
        state = SafeState(corrected, q, grown(self.search, stepped))
        return state, paper_report(problem, corrected, passes, ~stepped.found, self.drawn)


def _corrected(problem, evaluation: Evaluation, q) -> tuple[Evaluation, Any, Any]:
    """Fix-Degeneracy where C(s, theta, q) is not empty; (evaluation at theta-hat, q, passes)."""

    def fix():
        fixed = fix_degeneracy(problem, evaluation.point, q)
        failed = fixed.status == int(FixStatus.FAILURE)
        return evaluate(problem, fixed.point), jnp.where(failed, 10 * q, q)

    needed = any_entry(degenerate_for(evaluation, q))
    new, q = jax.lax.cond(needed, fix, lambda: (evaluation, q))
    return new, q, jnp.where(needed, 4 + passes_of_evaluate(), 0)
