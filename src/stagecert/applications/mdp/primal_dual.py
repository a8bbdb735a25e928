"""Bregman primal-dual steps: a soft Bellman backup against proximal steps of the weights.

The robust value is a saddle point over visits d and weights x of <d, nominal + effects(x)>. A step
of the policy is the exact proximal step in relative entropy, which a soft Bellman backup makes for
all states at once; a step of the weights is one in their own distance (Chambolle and Pock 2016).

Nothing is tuned by hand. The length of steps is found by search: it may be as long as the distances
moved outweigh the bilinear term between them. The balance between the players begins with the ratio
of how far each can move at all, and follows how far each has moved between restarts. A restart
begins again at the average since the last one, or at the current point, whichever has the smaller
proven gap (Applegate et al. 2021).
"""

import numpy as np

from stagecert.applications.mdp.search import Search

# Steps between looks at the gap, which costs as much as a step.
_LOOK = 10
# A restart is due when the gap fell to the first share; when it fell to the second and grows; or
# when the last one was this share of all iterations ago.
_ENOUGH, _SOME, _LATE = 0.2, 0.5, 0.36


def primal_dual(search: Search, relative: float) -> None:
    """Improves what the search knows, until its gap is within a tolerance or a limit is reached.

    Begins where the search stands.
    """
    state = _State(search)
    while not search.within(relative) and not search.over:
        for _ in range(_LOOK):
            state.step()
        state.look()
        search.limits.report(search.iterations, search.value, search.bound)


class _State:
    """Both players' points, step length and balance, and averages since the last restart."""

    def __init__(self, search: Search):
        self.search, self.mdp, self.adversary = search, search.mdp, search.adversary
        mdp, weights = self.mdp, self.adversary.weights
        self.policy, self._spare = np.empty(mdp.shape), np.empty(mdp.shape)
        reach = mdp.horizon * np.log(max(mdp.actions, 2))
        self.balance = np.sqrt(reach / weights.radius) if weights.radius > 0 else 1.0
        # Far too long on purpose: the search for a length shortens it.
        self.length = 1e3 / (self.adversary.effects.span or 1.0)
        self.trials = 0
        self.last_gap = self.restart_gap = np.inf
        self._restart(search.x, search.visits, search.mass, self._log_policy(search.visits))

    def _restart(self, x, visits, mass, log_policy) -> None:
        self.x, self.visits, self.mass, self.log_policy = x, visits, mass, log_policy
        self.gradient = self.adversary.effects.back(visits)
        self.x_before = x
        self.x_begin, self.log_begin = x, log_policy.copy()
        self.x_sum, self.visits_sum = np.zeros_like(x), np.zeros_like(visits)
        self.mass_sum, self.weight, self.steps = np.zeros_like(mass), 0.0, 0

    def _log_policy(self, visits: np.ndarray) -> np.ndarray:
        """Logarithms of the policy with these visits, uniform where there are none."""
        policy = self.mdp.policy_of(visits, np.full((1, 1, 1), 1 / self.mdp.actions))
        return np.log(np.maximum(policy, 1e-300))

    def step(self) -> None:
        """One step of both players, as long as its search finds good."""
        weights, effects = self.adversary.weights, self.adversary.effects
        reward = self.adversary.reward(2 * self.x - self.x_before)
        while True:
            length = self.length
            self.mdp.soft_backup(
                reward, self.log_policy, length * self.balance, self._spare, self.policy
            )
            visits, mass = self.mdp.occupancy(self.policy)
            gradient = effects.back(visits)
            x = weights.step(self.x, gradient, length / self.balance)
            moved = self._entropy(visits, self._spare, self.log_policy) / self.balance
            moved += weights.distance(x, self.x) * self.balance
            bilinear = abs(float(np.sum((x - self.x) * (gradient - self.gradient))))
            longest = moved / bilinear if bilinear > 0 else np.inf
            self.trials += 1
            cautious = 1 - (self.trials + 1) ** -0.3
            eager = 1 + (self.trials + 1) ** -0.6
            self.length = min(cautious * longest, eager * length)
            if length <= longest or not self.length > 0:
                break
        if not self.length > 0:  # neither player moved: keep the length
            self.length = length
        self.x_before, self.x = self.x, x
        self.visits, self.mass, self.gradient = visits, mass, gradient
        self.log_policy, self._spare = self._spare, self.log_policy
        self.x_sum = self.x_sum + length * x
        self.visits_sum += length * visits
        self.mass_sum = self.mass_sum + length * mass
        self.weight += length
        self.steps += 1
        self.search.iterations += 1

    @staticmethod
    def _entropy(visits, log_new, log_old) -> float:
        """The relative entropy of policies, over the visits of the new one."""
        total = 0.0
        for d, new, old in zip(visits, log_new, log_old, strict=True):
            total += float(np.vdot(d, new - old))
        return max(total, 0.0)

    def look(self) -> None:
        """Offers the average and the current point to the search; restarts if it is time."""
        search = self.search
        x, visits = self.x_sum / self.weight, self.visits_sum / self.weight
        mass = self.mass_sum / self.weight
        average = search.offer_weights(x) - search.offer_visits(visits, mass)
        current = search.offer_weights(self.x) - search.offer_visits(self.visits, self.mass)
        gap = min(average, current)
        due = (
            gap <= _ENOUGH * self.restart_gap
            or (gap <= _SOME * self.restart_gap and gap > self.last_gap)
            or self.steps >= _LATE * search.iterations
        )
        self.last_gap = gap
        if not due:
            return
        point = (self.x, self.visits, self.mass, self.log_policy)
        if average < current:
            point = (x, visits, mass, self._log_policy(visits))
        weights_moved = self.adversary.weights.distance(point[0], self.x_begin)
        policy_moved = self._entropy(point[1], point[3], self.log_begin)
        if weights_moved > 0 and policy_moved > 0:
            self.balance = np.sqrt(self.balance * np.sqrt(policy_moved / weights_moved))
        self.restart_gap, self.last_gap = gap, np.inf
        self._restart(*point)
