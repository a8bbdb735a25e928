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


def primal_dual(search: Search, relative: float, most: int) -> None:
    """Improves what the search knows, until its gap is within a tolerance or a limit is reached.

    Begins where the search stands; makes `most` iterations, counting those of before.
    """
    state = _State(search)
    while not search.within(relative) and not search.over and search.iterations < most:
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
        # Entropic steps keep probabilities above this, so that what is all but ruled out can come
        # back within a few steps; what it costs is far below the tolerance.
        floor = np.clip(1e-3 * search.relative_tolerance, np.exp(-60.0), 1e-6)
        self.least_log = weights.least_log = float(np.log(floor))
        self.span = self.adversary.effects.span or 1.0
        reach = mdp.horizon * np.log(max(mdp.actions, 2))
        self.balance = np.sqrt(reach / weights.radius) if weights.radius > 0 else 1.0
        self.first_balance = self.balance
        # Ten times what is fine even when both players move as far as they can.
        self.length = 10 * np.sqrt(reach * (weights.radius or 1.0)) / (mdp.horizon * self.span)
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
        return np.maximum(np.log(np.maximum(policy, 1e-300)), self.least_log)

    def step(self) -> None:
        """One step of both players, as long as its search finds good."""
        weights, effects = self.adversary.weights, self.adversary.effects
        reward = self.adversary.reward(2 * self.x - self.x_before)
        while True:
            length = self.length
            self.mdp.soft_backup(
                reward, self.log_policy, length * self.balance, self.least_log,
                self._spare, self.policy,
            )  # fmt: skip
            visits, mass = self.mdp.occupancy(self.policy)
            gradient = effects.back(visits)
            x = weights.step(self.x, gradient, length / self.balance)
            moved = self._entropy(visits, self._spare, self.log_policy) / self.balance
            moved += weights.distance(x, self.x) * self.balance
            bilinear = abs(float(np.sum((x - self.x) * (gradient - self.gradient))))
            longest = moved / bilinear if bilinear > 1e-200 * self.span else np.inf
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
        if total > 1e-6 * len(visits):
            return total
        # Close policies: the sum has lost its digits, this bound from below has not.
        new, old = np.exp(log_new), np.exp(log_old)
        mass = visits.sum(axis=1, keepdims=True)
        return max(total, 0.5 * float(np.sum(mass * (new - old) ** 2 / np.maximum(new, old))))

    def look(self) -> None:
        """Offers the average and the current point to the search; restarts if it is time."""
        search = self.search
        x, visits = self.x_sum / self.weight, self.visits_sum / self.weight
        mass = self.mass_sum / self.weight
        average = search.offer_weights(x) - search.offer_visits(visits, mass)
        current = search.offer_weights(self.x) - search.offer_visits(self.visits, self.mass)
        gap = min(average, current)
        fell = gap <= _ENOUGH * self.restart_gap
        fell |= gap <= _SOME * self.restart_gap and gap > self.last_gap
        late = self.steps >= _LATE * search.iterations
        self.last_gap = gap
        if not fell and not late:
            return
        if not fell:  # the balance may be to blame: back towards the first one
            self.balance = np.sqrt(self.balance * self.first_balance)
        point = (self.x, self.visits, self.mass, self.log_policy)
        if average < current:
            point = (x, visits, mass, self._log_policy(visits))
        weights_moved = self.adversary.weights.distance(point[0], self.x_begin)
        policy_moved = self._entropy(point[1], point[3], self.log_begin)
        if weights_moved > 0 and policy_moved > 0:
            self.balance = np.sqrt(self.balance * np.sqrt(policy_moved / weights_moved))
        self.restart_gap, self.last_gap = gap, np.inf
        self._restart(*point)
