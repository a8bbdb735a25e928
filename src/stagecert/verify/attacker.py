"""The search for counterexamples: descents from many points, and replays of what they find."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from stagecert.networks.graph import Network
from stagecert.verify import attack
from stagecert.verify.findings import Findings
from stagecert.verify.replay import Replay

# Points with a larger violation than this, in the attack's float32, are not worth a replay.
NEARLY = 1e-4


class Attacker:
    """Looks for counterexamples of open cases.

    Args:
        network: that of the groups.
        known: what is known of the cases; counterexamples are noted there.
        replay: confirms points.
        over: whether to stop.
        say: called with a line of text now and then.
        seed: for starting points.
        places: which entry of a point each of the model's inputs has, if a property ties some.
    """

    def __init__(
        self,
        network: Network,
        known: Findings,
        replay: Replay,
        over: Callable[[], bool],
        say: Callable[[str], None],
        seed: int,
        places: np.ndarray | None = None,
    ):
        self.places = places
        self.network, self.known, self.replay = network, known, replay
        self.over, self.say = over, say
        self.draw = np.random.default_rng(seed)
        self.draw_long = np.random.default_rng([seed, 1])
        self.draw_faces = np.random.default_rng([seed, 2])

    def try_plans(self, plans: Sequence[attack.Plan], corners: bool = True) -> None:
        """Projected gradients on all open cases, for each plan from new points.

        The first ones are the centre, corners and random points, the others random ones; all are if
        `corners` is False.
        """
        width = attack.lanes_at_once(self.network)
        for turn, plan in enumerate(plans):
            cases = self.known.open()
            restarts = max(width // max(len(cases), 1), 4)
            lanes = [case for case in cases for _ in range(restarts)]
            self.say(f"attacking {len(cases)} cases")
            for places, _ in attack.in_lanes(self.network, len(lanes)):
                some = [lanes[k] for k in places]
                goal = attack.targets(self.known.groups, some)
                # Short descents have the same starting points whether there are long ones or not.
                draw = self.draw if plan in attack.SHORT else self.draw_long
                points = self._starts(goal, some, corners and turn == 0, draw)
                found = attack.descend(self.network, points, goal, plan, draw)
                self._judge(found.points, found.violation, some)
                if self.over():
                    return

    def try_faces(self) -> None:
        """Looks at many points on faces of the boxes, and goes on from the best ones.

        Where points are dear, there are none.
        """
        cases, width = self.known.open(), attack.lanes_at_once(self.network)
        each = attack.looks(self.network) // len(cases)
        lanes = [case for case in cases for _ in range(each)]
        if not lanes:
            return
        points, violation = [], []
        for places, count in attack.in_lanes(self.network, len(lanes)):
            goal = attack.targets(self.known.groups, [lanes[k] for k in places])
            starts = attack.points_on_faces(goal.lower, goal.upper, self.draw_faces)
            found = attack.descend(self.network, starts, goal, attack.LOOK)
            points.append(found.points[:count])
            violation.append(found.violation[:count])
            if self.over():
                return
        best = np.argsort(np.concatenate(violation))[:width]
        self.descend_from(np.concatenate(points)[best], [lanes[k] for k in best])

    def _starts(self, goal: attack.Targets, lanes, first: bool, draw) -> np.ndarray:
        points = np.empty_like(goal.lower)
        begin = 0
        while begin < len(lanes):
            end = begin
            while end < len(lanes) and lanes[end] == lanes[begin]:
                end += 1
            points[begin:end] = attack.start_points(
                goal.lower[begin], goal.upper[begin], end - begin, draw, first
            )
            begin = end
        return points

    def _judge(self, points, violation, lanes) -> None:
        """Notes the best violations, and replays the points that look like counterexamples."""
        order = np.argsort(np.where(np.isnan(violation), np.inf, violation))
        for k in order:
            g, c = lanes[k]
            state = self.known.states[g]
            state.nearest[c] = min(state.nearest[c], float(violation[k]))
        for k in order[:8]:
            if violation[k] <= NEARLY and self._confirmed(points[k], *lanes[k]):
                return

    def _confirmed(self, point, g: int, c: int) -> bool:
        number = self.known.groups[g].numbers[c]
        whole = point if self.places is None else point[self.places]
        self.known.found = self.replay.check(whole, number)
        return self.known.found is not None

    def try_minimisers(self, points: np.ndarray, chosen: list[int]) -> None:
        """Attacks from the points where bounds are attained: (boxes, rows, entries)."""
        every = (
            (k, g, int(c), r)
            for k, g in enumerate(chosen)
            for c in np.flatnonzero(~self.known.states[g].refuted)
            for r in range(points.shape[1])
        )
        # There are as many as cases times rows.
        some = list(itertools.islice(every, 4 * attack.lanes_at_once(self.network)))
        self.descend_from(
            np.array([points[k, r] for k, _, _, r in some]), [(g, c) for _, g, c, _ in some]
        )

    def descend_from(self, starts: np.ndarray, lanes: list[tuple[int, int]]) -> None:
        for some, _ in attack.in_lanes(self.network, len(lanes)):
            chosen = [lanes[k] for k in some]
            goal = attack.targets(self.known.groups, chosen)
            found = attack.descend(self.network, starts[some], goal, attack.NEAR)
            self._judge(found.points, found.violation, chosen)
            if self.over():
                return

    def watch(self, step, descend: bool) -> None:
        """Looks at the points that the splitter met, and sometimes goes on from the best."""
        assert step.points is not None
        assert step.violation is not None
        assert step.group is not None
        assert step.open is not None
        worth = np.where(step.open[:, None], step.violation, np.inf)
        worth = np.where(np.isnan(worth), np.inf, worth)
        flat = worth.reshape(-1)
        some = min(attack.lanes_at_once(self.network) if descend else 8, flat.size)
        best = np.argpartition(flat, some - 1)[:some]
        best = best[np.argsort(flat[best], kind="stable")]
        best = best[np.isfinite(flat[best])]
        if not len(best):
            return
        b, p, c = np.unravel_index(best, worth.shape)
        lanes = [(int(step.group[i]), int(k)) for i, k in zip(b, c, strict=True)]
        starts = step.points[b, p]
        self._judge(starts, worth[b, p, c], lanes)
        if descend and not self.over():
            self.descend_from(starts, lanes)
