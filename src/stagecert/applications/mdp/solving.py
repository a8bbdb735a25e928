"""solve(): checks the input, picks the engine by structure, returns a policy with its proof."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from stagecert.applications.answer import Answer
from stagecert.applications.mdp.adversary import Adversary
from stagecert.applications.mdp.checking import amount, numbers, reject, whole
from stagecert.applications.mdp.columns import Columns
from stagecert.applications.mdp.model import MDP
from stagecert.applications.mdp.primal_dual import primal_dual
from stagecert.applications.mdp.resources import Resource, Uses
from stagecert.applications.mdp.rewards import adversary as adversary_of
from stagecert.applications.mdp.search import Limits, Report, Search
from stagecert.applications.mdp.sifting import can_sift, few_rows_matter, sift
from stagecert.errors import ProblemError
from stagecert.solution import Status

ENGINES = ("auto", "primal-dual")
# First-order steps are fast down to about this relative gap; linear programmes finish from there.
_COARSE = 1e-4
# Rows (times, actions and states) of a small problem, and the most steps before its programme;
# and of one so large that looking for rows that matter is not worth it.
_SMALL, _FEW = 5_000, 1_000
_LARGE = 40_000


@dataclass(frozen=True, repr=False)
class RobustPolicy(Answer):
    """A policy, what it earns whatever the reward, and how close that is to the best possible.

    The robust value, which the best policy guarantees, is between `bound` and `value`.

    Attributes:
        policy: probabilities of shape (horizon, states, actions); rows sum to one.
        bound: what the policy is proven to earn in expectation, for every reward of the set.
        worst_reward: a reward of the set, (states, actions) or (horizon, states, actions).
        value: proven: no policy earns more in expectation when this is the reward.
        weights: the adversary's weights behind the worst reward: of the scenarios or effects, or
            the share of each deviation, shaped like the reward.
        visits: probabilities of shape (horizon, states, actions) under the policy.
        status: why the search ended; `status.value` is a sentence.
        engine: what found it: "backward induction", "linear minimisation", "primal-dual",
            "primal-dual, linear programmes" or, with resources, "columns".
        iterations: steps of the primal-dual engine, or columns.
        seconds: wall time.
        prices: of the resources, one for each, not negative: what one more unit of a budget is
            worth. With the worst reward they prove the value; where `status` is INFEASIBLE, that
            every policy's uses cost more at these prices than the budgets are worth.
        uses: proven: the policy uses at most so much of each resource in expectation.
    """

    policy: np.ndarray
    bound: float
    worst_reward: np.ndarray
    value: float
    weights: np.ndarray
    visits: np.ndarray
    status: Status
    engine: str
    iterations: int
    seconds: float
    prices: np.ndarray = field(default_factory=lambda: np.zeros(0))
    uses: np.ndarray = field(default_factory=lambda: np.zeros(0))


def solve(
    mdp: MDP,
    rewards: Any,
    *,
    resources: Resource | Sequence[Resource] = (),
    atol: float = 1e-9,
    rtol: float = 1e-6,
    engine: str = "auto",
    max_iterations: int = 100_000,
    time_limit: float | None = None,
    progress: bool | Report = False,
) -> RobustPolicy:
    """Finds the policy that earns most when an adversary picks the reward after seeing the policy.

    Args:
        mdp: the process.
        rewards: `Mixture`, `Budget`, `Effects`, or a set of `stagecert` (`Box`, `Ball`, or any
            other) whose points are rewards of shape (states, actions) or, over time, (horizon,
            states, actions). An array is a reward that is known.
        resources: budgets that the policy keeps in expectation, each a `Resource`. For rewards
            that are known, a `Box`, a `Mixture`, or `Effects` with a budget. Where no policy is
            within them the status is INFEASIBLE, value and bound are minus infinity, and the policy
            is one that exceeds them little. A bound of minus infinity alone says that no policy is
            proven to be within them.
        atol, rtol: stop when value - bound <= atol + rtol * |bound|.
        engine: "auto" picks by structure; "primal-dual" leaves out the linear programmes that
            finish the search for small tolerances.
        max_iterations, time_limit: limits on steps of the primal-dual engine or columns, and on
            seconds.
        progress: True prints a line a second; a function is called with (iterations, value, bound).

    Raises:
        ProblemError: bad input; the entry is named.

    >>> from stagecert.applications.mdp import MDP, Mixture
    >>> process = MDP([[[0.9, 0.1], [0.0, 1.0]], [[0.5, 0.5], [0.2, 0.8]]], horizon=3)
    >>> found = solve(process, Mixture([[[1.0, 0.0], [0.0, 2.0]], [[0.0, 2.0], [2.0, 0.0]]]))
    >>> round(found.value, 5), found.status.name
    (2.73077, 'GAP_REACHED')
    """
    begin = time.perf_counter()
    if not isinstance(mdp, MDP):
        raise ProblemError(f"mdp must be an MDP, not {type(mdp).__name__}.")
    if engine not in ENGINES:
        raise ProblemError(f"Unknown engine {engine!r}; known are {', '.join(ENGINES)}.")
    limits = Limits(
        amount("atol", atol), amount("rtol", rtol), whole("max_iterations", max_iterations),
        np.inf if time_limit is None else begin + time_limit, _reporter(progress),
    )  # fmt: skip
    adversary = adversary_of(rewards, mdp)
    if resources:
        return _within(Uses(resources, mdp), mdp, adversary, limits, begin)
    search = Search(mdp, adversary, limits)
    if adversary.lowest is not None:
        reward = adversary.lowest_reward
        reward = adversary.reward(adversary.lowest) if reward is None else reward
        policy = mdp.greedy(reward)
        search.x, search.value = adversary.lowest, adversary.value(mdp, reward)
        return _result(search, reward, policy, "backward induction", begin)
    search.begin()
    if mdp.actions == 1:
        search.offer_weights(adversary.weights.minimiser(adversary.effects.back(search.visits)))
        name = "linear minimisation"
    else:
        name = _by_search(search, engine)
    reward = adversary.reward(search.x)
    policy = mdp.policy_of(search.visits, mdp.greedy(reward))
    return _result(search, reward, policy, name, begin)


def _within(uses: Uses, mdp: MDP, adversary: Adversary, limits: Limits, begin) -> RobustPolicy:
    """The best policy within budgets."""
    # Visits are not negative, so the lowest reward is the worst one whatever the budgets.
    lowest = adversary.lowest
    known = adversary
    if lowest is not None:
        reward = adversary.lowest_reward
        reward = adversary.reward(lowest) if reward is None else reward
        known = adversary_of(np.swapaxes(reward, -1, -2), mdp)
    search = Search(mdp, known, limits)
    columns = Columns(search, uses)
    columns.run()
    visits, _ = mdp.occupancy(columns.policy)
    return RobustPolicy(
        np.swapaxes(columns.policy, 1, 2), search.bound,
        np.swapaxes(known.reward(search.x), -1, -2), search.value,
        _outer(search.x if lowest is None else lowest), np.swapaxes(visits, 1, 2), search.status(),
        "columns", search.iterations, time.perf_counter() - begin, columns.prices,
        uses.at_most(visits),
    )  # fmt: skip


def _by_search(search: Search, engine: str) -> str:
    name = "primal-dual"
    finish = engine == "auto" and can_sift(search)
    # Small programmes are solved at once, wherever the search stands; larger ones as soon as few
    # of their rows matter, which is looked at ever more rarely.
    most, rows = search.limits.iterations, int(np.prod(search.mdp.shape))
    steps = _FEW if rows <= _LARGE else most
    while finish and steps < most and not search.over:
        primal_dual(search, _COARSE, steps)
        if search.within(_COARSE) or rows <= _SMALL or few_rows_matter(search):
            most = search.iterations
            break
        steps *= 2
    primal_dual(search, _COARSE if finish else 0.0, most)
    if finish and not search.within(0.0) and not search.over:
        if sift(search):
            name = "primal-dual, linear programmes"
        primal_dual(search, 0.0, search.limits.iterations)
    return name


def _result(search: Search, reward, policy, engine: str, begin: float) -> RobustPolicy:
    """The answer; its bound is proven anew, by the policy itself."""
    mdp, adversary = search.mdp, search.adversary
    visits, mass = mdp.occupancy(policy)
    search.bound = adversary.bound(mdp, visits, mass)
    return RobustPolicy(
        np.swapaxes(policy, 1, 2), search.bound, np.swapaxes(reward, -1, -2), search.value,
        _outer(search.x), np.swapaxes(visits, 1, 2), search.status(), engine, search.iterations,
        time.perf_counter() - begin,
    )  # fmt: skip


class WorstCase(NamedTuple):
    """What a policy earns at least, and the adversary's answer to it.

    Attributes:
        bound: proven: the policy earns this in expectation for every reward of the set.
        reward: one of the set for which it earns no more, up to rounding.
        weights: of the scenarios or effects behind that reward, or the share of each deviation.
    """

    bound: float
    reward: np.ndarray
    weights: np.ndarray


def worst_case(mdp: MDP, rewards: Any, policy: Any) -> WorstCase:
    """What a policy earns at least, proven, and a reward of the set for which it earns no more.

    Args:
        mdp: the process.
        rewards: as for `solve`.
        policy: probabilities of shape (states, actions) or (horizon, states, actions).

    >>> from stagecert.applications.mdp import MDP, Mixture
    >>> process = MDP([[[1.0]]], horizon=2)
    >>> worst_case(process, Mixture([[[1.0]], [[3.0]]]), [[1.0]]).weights.tolist()
    [1.0, 0.0]
    """
    adversary = adversary_of(rewards, mdp)
    policy = numbers("policy", policy)
    shape = (mdp.states, mdp.actions)
    if policy.shape not in (shape, (mdp.horizon, *shape)):
        raise ProblemError(
            f"policy has shape {policy.shape}, not {shape} or {(mdp.horizon, *shape)}."
        )
    reject(policy < 0, "policy", policy, "probabilities must not be negative")
    total = policy.sum(axis=-1)
    reject(np.abs(total - 1) > 1e-8, "The sum of policy", total, "it must be 1")
    policy = policy / total[..., None]
    visits, mass = mdp.occupancy(mdp.over_time(np.swapaxes(policy, -1, -2)))
    x = adversary.weights.minimiser(adversary.effects.back(visits))
    x = adversary.weights.feasible(x)
    reward = adversary.reward(x)
    return WorstCase(adversary.bound(mdp, visits, mass), np.swapaxes(reward, -1, -2), _outer(x))


def _outer(weights: np.ndarray) -> np.ndarray:
    """Weights of entries in the layout of users."""
    return np.swapaxes(weights, -1, -2) if weights.ndim >= 2 else weights


def _reporter(
    progress: bool | Callable[[int, float, float], None],
) -> Callable[[int, float, float], None]:
    if callable(progress):
        return progress
    last = time.perf_counter()

    def write(iterations: int, value: float, bound: float) -> None:
        nonlocal last
        if progress and time.perf_counter() > last + 1:
            last = time.perf_counter()
            print(f"{iterations} steps: {bound:.8g} to {value:.8g}", file=sys.stderr, flush=True)

    return write
