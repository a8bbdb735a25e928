"""Policies within budgets, as mixtures of deterministic ones (Dantzig and Wolfe 1960).

Visits of policies are mixtures of visits of deterministic ones, the columns. A small linear
programme finds the best mixture within the budgets; its multipliers are prices of the resources and
weights of the adversary; the best policy at these is the next column, found by one backward
induction, which also proves a value. Nothing is as large as the programme over all visits.
"""

import time
from typing import Any

import numpy as np
from scipy.optimize import linprog

from stagecert.applications.mdp.adversary import Linear
from stagecert.applications.mdp.model import MDP
from stagecert.applications.mdp.resources import Uses
from stagecert.applications.mdp.search import Search
from stagecert.applications.mdp.weights import Capped, Chances
from stagecert.errors import ProblemError

# How far from the best multipliers towards the programme's the next column is looked for: those of
# few columns jump about.
_FAR = 0.5
# A mixture this far within all budgets, as a share of what could be used at all, is inside.
_INSIDE = 1e-3
# Shares below this come from the programme's own tolerance.
_SHARE = 1e-10


class Columns:
    """The search: columns so far, and what they prove.

    Attributes:
        prices: of the resources; they prove the value or, where `infeasible`, that there is none.
        policy: the best that is proven to keep within the budgets; where none is, the nearest.
    """

    def __init__(self, search: Search, uses: Uses):
        self._search, self._uses, self._mdp = search, uses, search.mdp
        weights, effects = search.adversary.weights, search.adversary.effects
        if not isinstance(effects, Linear) or not isinstance(weights, Chances | Capped):
            raise ProblemError(
                "Budgets of resources go with rewards that are known, a Box of them, a Mixture, or "
                "Effects with a budget."
            )
        # The process without final rewards, for policies that only save.
        self._free: MDP = self._mdp.without_final()
        self._actions: list[np.ndarray] = []
        self._nominal: list[float] = []
        self._effect: list[np.ndarray] = []
        self._used: list[np.ndarray] = []
        self.prices = np.zeros(len(uses))
        self.infeasible = False
        self.policy = np.full(self._mdp.shape, 1 / self._mdp.actions)

    def run(self) -> None:
        """Finds the best policy, or a proof that none keeps within the budgets."""
        self._search.x = self._search.adversary.weights.start()
        inside = self._enter()
        self.policy = self._policy_of(inside)
        if self.infeasible:
            self._search.value = -np.inf
        else:
            self._offer(self.policy)
            self._improve(inside)

    # -- columns ------------------------------------------------------------------------------

    def _add(self, process: MDP, reward) -> float:
        """Adds the best policy for a reward; returns its value."""
        actions = np.empty((self._mdp.horizon, self._mdp.states), np.int32)
        first = process.final
        for t, values, best in process.action_values(reward):
            actions[t] = values.argmax(axis=0)
            first = best
        visits, mass = self._mdp.occupancy(self._deterministic(actions))
        adversary = self._search.adversary
        self._actions.append(actions)
        self._nominal.append(float(np.sum(visits * adversary.nominal) + mass @ self._mdp.final))
        self._effect.append(adversary.effects.back(visits))
        self._used.append(self._uses.of(visits))
        self._search.iterations += 1
        return float(self._mdp.initial @ first)

    def _deterministic(self, actions: np.ndarray) -> np.ndarray:
        return (np.arange(self._mdp.actions)[:, None] == actions[:, None]).astype(float)

    def _mixed(self, shares: np.ndarray) -> np.ndarray:
        """Visits of a mixture of columns."""
        shares = np.where(shares > _SHARE, shares, 0.0)
        total = np.zeros(self._mdp.shape)
        for share, actions in zip(shares / shares.sum(), self._actions, strict=True):
            if share:
                total += share * self._mdp.occupancy(self._deterministic(actions))[0]
        return total

    def _policy_of(self, visits: np.ndarray) -> np.ndarray:
        return self._mdp.policy_of(visits, self._deterministic(self._actions[-1]))

    # -- within the budgets -------------------------------------------------------------------

    def _enter(self) -> np.ndarray:
        """Visits within the budgets, well inside if there are such, or those that are nearest.

        Minimises the largest excess over a budget, in units of what a policy could use at all.
        """
        uses, search = self._uses, self._search
        units = np.where(uses.sizes > 0, uses.sizes, 1.0) * self._mdp.mass
        prices = 1 / units / len(uses)
        proven, shares = -np.inf, np.ones(1)
        while True:
            least = uses.excess(prices, self._add(self._free, -uses.priced(prices)), self._free)
            proven = max(proven, least)
            if least > 0:
                self.infeasible, self.prices = True, prices
            count = len(self._used)
            answer = self._programme(
                np.append(np.zeros(count), 1.0),
                np.column_stack([np.array(self._used).T, -units]), uses.budgets,
                np.append(np.ones(count), 0.0), [(0, None)] * count + [(None, None)],
            )  # fmt: skip
            if answer is None:
                return self._mixed(np.append(shares, np.zeros(count - len(shares))))
            shares, excess = answer.x[:count], float(answer.x[-1])
            settled = self.infeasible or excess < -_INSIDE or excess - proven <= 1e-12
            if settled or search.over_limits:
                return self._mixed(shares)
            prices = np.maximum(-answer.ineqlin.marginals, 0.0)

    # -- the best within them -----------------------------------------------------------------

    def _improve(self, inside: np.ndarray) -> None:
        """Adds columns until value and bound are as near as asked, or nothing is won any more."""
        search, uses, adversary = self._search, self._uses, self._search.adversary
        x, prices, far, before = search.x, self.prices, 0.0, -np.inf
        while True:
            reward = adversary.reward(x)
            best = self._add(self._mdp, reward - uses.priced(prices))
            value = uses.value(adversary, x, prices, best)
            if value < search.value:
                search.value, search.x, self.prices = value, x, prices
            answer = self._best_mixture()
            if answer is None:
                return
            shares, estimate, x, prices = answer
            asked = search.limits.absolute + search.limits.relative * abs(estimate)
            near = search.value - estimate <= 0.5 * asked
            # Nothing better at the programme's own multipliers: nothing is left.
            ended = far == 1.0 and value - estimate <= 1e-12 * (abs(value) + adversary.size)
            if near or ended or search.over_limits:
                self._settle(self._mixed(shares), inside)
                return
            search.limits.report(search.iterations, search.value, search.bound)
            far = _FAR if estimate > before else 1.0
            before = estimate
            x = adversary.weights.feasible(search.x + far * (x - search.x))
            prices = self.prices + far * (prices - self.prices)

    def _best_mixture(self):
        """The best shares of columns within the budgets, their value, and the multipliers."""
        weights, uses = self._search.adversary.weights, self._uses
        effects, used = np.array(self._effect).T, np.array(self._used).T
        rows, count = effects.shape
        nominal = np.array(self._nominal)
        if isinstance(weights, Chances):
            # The least effect is one more variable.
            extra = np.ones((rows, 1))
            cost, ends = [-1.0], [(None, None)]
        else:
            assert isinstance(weights, Capped)
            # What a budget takes at most: its price, and what single effects are above it.
            extra = np.column_stack([-np.ones(rows), -np.eye(rows)])
            cost, ends = [weights.total, *np.ones(rows)], [(0, None)] * (rows + 1)
        matrix = np.vstack([
            np.column_stack([-effects, extra]),
            np.column_stack([used, np.zeros((len(used), len(cost)))]),
        ])  # fmt: skip
        answer = self._programme(
            np.append(-nominal, cost), matrix, np.append(np.zeros(rows), uses.budgets),
            np.append(np.ones(count), np.zeros(len(cost))), [(0, None)] * count + ends,
        )  # fmt: skip
        if answer is None:
            return None
        multipliers = np.maximum(-answer.ineqlin.marginals, 0.0)
        x = multipliers[:rows]
        if not x.any():  # all that is earned is nominal
            x = weights.start()
        return answer.x[:count], -float(answer.fun), weights.feasible(x), multipliers[rows:]

    def _programme(self, cost, matrix, limits, shares, ends) -> Any:
        """HiGHS's answer, or None; rows are scaled, since uses come in any unit."""
        scale = np.maximum(np.abs(matrix).max(axis=1), 1e-300)
        options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
        seconds = self._search.limits.deadline - time.perf_counter()
        if np.isfinite(seconds):
            options["time_limit"] = max(seconds, 0.0)
        answer = linprog(
            cost, matrix / scale[:, None], limits / scale, shares[None], [1.0], ends,
            method="highs", options=options,
        )  # fmt: skip
        if answer.status != 0:
            return None
        answer.ineqlin.marginals = answer.ineqlin.marginals / scale
        return answer

    def _settle(self, visits: np.ndarray, inside: np.ndarray) -> None:
        """Offers the policy with these visits; if it uses too much, with some of those inside."""
        limits, room = self._uses.limits, self._uses.limits - self._uses.at_most(inside)
        share = 0.0
        for _ in range(8):
            used = self._offer(self._policy_of((1 - share) * visits + share * inside))
            over = used > limits
            if not over.any() or np.any(room[over] <= 0):
                return
            missing = (used - limits)[over]
            share = min(1.0, share + 2 * float(np.max(missing / (missing + room[over]))))

    def _offer(self, policy: np.ndarray) -> np.ndarray:
        """Keeps a policy that is within the budgets and the best so far; returns what it uses."""
        visits, mass = self._mdp.occupancy(policy)
        used = self._uses.at_most(visits)
        bound = self._search.adversary.bound(self._mdp, visits, mass)
        if np.all(used <= self._uses.limits) and bound > self._search.bound:
            self.policy, self._search.bound = policy, bound
        return used
