"""Budgets of resources: what a policy may use in expectation, and what multipliers prove."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert.applications.mdp.adversary import Adversary
from stagecert.applications.mdp.checking import amount, numbers
from stagecert.applications.mdp.model import MDP
from stagecert.errors import ProblemError

_UNIT = 0.5 * float(np.finfo(float).eps)


@dataclass(frozen=True)
class Resource:
    """A resource of which a policy may use so much in expectation: <visits, use> <= budget.

    Fuel, hours of a machine, visits to a place that is to be avoided. Negative uses make a least
    amount of it. Uses are discounted as rewards are.

    Args:
        use: what a step uses, of shape (states, actions), or (horizon, states, actions).
        budget: the most that may be used in expectation, over all steps.
        tolerance: how much more a policy may use and still count as within the budget; for budgets
            that every policy exhausts, where rounding decides. Values are proven without it.
        name: for messages.
    """

    use: Any
    budget: float
    tolerance: float = 0.0
    name: str = "resource"


class Uses:
    """All budgets of a problem, in the inner layout, with charges for rounding.

    Attributes:
        budgets: one number for each resource.
        limits: the same with tolerances.
        sizes: the largest use of each.
    """

    def __init__(self, resources: Resource | Sequence[Resource], mdp: MDP):
        if isinstance(resources, Resource):
            resources = (resources,)
        self._mdp = mdp
        self._tables, budgets, tolerances = [], [], []
        for k, resource in enumerate(resources):
            where = f"resources[{k}]"
            if not isinstance(resource, Resource):
                raise ProblemError(f"{where} must be a Resource, not {type(resource).__name__}.")
            where += f" ({resource.name})"
            table = mdp.inner(f"The use of {where}", resource.use)
            if mdp.endless and table.ndim == 3:
                raise ProblemError(f"Without a horizon, {where} must be the same at all steps.")
            budget = numbers(f"The budget of {where}", resource.budget)
            if budget.ndim:
                raise ProblemError(f"The budget of {where} must be one number.")
            self._tables.append(table)
            budgets.append(float(budget))
            tolerances.append(amount(f"The tolerance of {where}", resource.tolerance))
        self.budgets = np.array(budgets)
        self.limits = self.budgets + np.array(tolerances)
        self.sizes = np.array([float(np.abs(table).max()) for table in self._tables])

    def __len__(self) -> int:
        return len(self._tables)

    def priced(self, prices: np.ndarray) -> np.ndarray | float:
        """What a step costs at these prices of the resources."""
        return sum((p * c for p, c in zip(prices, self._tables, strict=True)), 0.0)

    def of(self, visits: np.ndarray) -> np.ndarray:
        """What is used in expectation, up to rounding."""
        return np.array([float(np.sum(visits * table)) for table in self._tables])

    def at_most(self, visits: np.ndarray) -> np.ndarray:
        """At least what a policy with these visits, computed by `MDP.occupancy`, really uses."""
        relative = 2 * self._mdp.relative_visit_error + 4 * (visits.size + 64) * _UNIT
        found = []
        for table, size in zip(self._tables, self.sizes, strict=True):
            used, moved = float(np.sum(visits * table)), float(np.sum(visits * np.abs(table)))
            charge = 1.01 * relative * moved + self._mdp.later(1.01 * size)
            found.append(np.nextafter(used + charge, np.inf) if charge else used)
        return np.array(found)

    def value(self, adversary: Adversary, x: np.ndarray, prices: np.ndarray, best: float) -> float:
        """Proven: no policy within the budgets earns more when x are the adversary's weights.

        For any prices >= 0 the budgets may be sold: the best policy without budgets, for rewards
        less the price of what is used, earns at least what the best within them does, less what
        the budgets are worth.

        Args:
            adversary: the set of rewards.
            x: weights of that set.
            prices: of the resources.
            best: `MDP.best_value` of `adversary.reward(x) - priced(prices)`.
        """
        size = 1.01 * (adversary.size + float(prices @ self.sizes))
        terms = adversary.effects.terms + len(self)
        off = 1.01 * (adversary.weights.rounding + 2 * (terms + 3) * _UNIT) * size
        return self._charged(best, prices, size, off, self._mdp)

    def excess(self, prices: np.ndarray, best: float, free: MDP) -> float:
        """Proven: every policy's uses, at these prices, are at least this far above the budgets.

        `best` is the `best_value` of `-priced(prices)` for `free`, the process without its final
        rewards. Prices with a positive excess prove that no policy keeps within the budgets.
        """
        size = 1.01 * float(prices @ self.sizes)
        return -self._charged(best, prices, size, 2 * (len(self) + 3) * _UNIT * size, free)

    def _charged(self, best: float, prices, size: float, off: float, mdp: MDP) -> float:
        worth = prices * self.budgets
        rounding = mdp.value_error(size) + off * mdp.mass
        rounding += 4 * (len(self) + 4) * _UNIT * (float(np.abs(worth).sum()) + abs(best))
        return float(np.nextafter(best + worth.sum() + 1.01 * rounding + mdp.later(size), np.inf))
