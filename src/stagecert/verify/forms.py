"""Branch and bound over the inputs where variables are multiplied, by quadratic forms.

The bounds are those of the checker (`stagecert_check.quadratics`), which needs no more than the
tree of boxes and a combination of the case's rows for each leaf. What is searched for here is where
to cut, and which combination.
"""

import math
from dataclasses import dataclass

import numpy as np

from stagecert.verify.certificates import Cuts
from stagecert.verify.queries import Group
from stagecert_check.checker import Checker
from stagecert_check.quadratics import Forms, Goals, Quadratics, Sums, least

# Boxes at a time: their forms stay in the caches.
BATCH = 512
# Weights of a second row are powers of the square root of two, so that few differ.
BASE = 2**0.5
# How often a weight is changed, and by how many powers at first.
CHANGES, FIRST_CHANGE = 4, 4
# Weights that are tried first, compared with what a row and the first one have in common.
FIRST_WEIGHT = 0.25
# How much of a form's size rounding may take from a bound that the checker derives anew.
SAFE = 1e-10


@dataclass
class _Boxes:
    """Boxes that wait: free entries, their nodes, and by case whether it is open.

    `partner` and `power` are the second row that the box around it used, and its weight.
    """

    low: np.ndarray
    high: np.ndarray
    node: np.ndarray
    open: np.ndarray
    partner: np.ndarray
    power: np.ndarray

    def __len__(self) -> int:
        return len(self.node)

    def __getitem__(self, rows) -> "_Boxes":
        return _Boxes(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


def _joined(*parts: _Boxes) -> _Boxes:
    names = _Boxes.__dataclass_fields__
    return _Boxes(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class FormSplitter:
    """Splits the box of a group until every case is refuted, or a caller has had enough.

    Attributes:
        stack: the boxes that are not decided yet.
        finished: which share of the box is decided.
        seen: how many boxes were bounded.
        stuck: whether a box is too small to halve.
        points, lanes: where combinations were smallest on boxes of the last step that stay open,
            and the case of each.
    """

    def __init__(self, checker: Checker, group: Group, open_: np.ndarray):
        """Begins with the box of a group all of whose cases have rows, some of them `open_`."""
        self.checker, self.group = checker, group
        low, high = (np.array(x, float) for x in (group.inputs.lower64, group.inputs.upper64))
        self.ends = low, high
        forms = checker.quadratics(group.numbers[0])
        assert forms is not None
        self.forms: Quadratics = forms
        self.free = self.forms.free
        self.cases = [checker.wanted.cases[number] for number in group.numbers]
        # Every row of every case by itself: how many a case has, where they begin, and which one
        # combinations begin with. Rows that all cases have are conditions on the side.
        self.rows, self.start, self.first = [], [], []
        shared = set.intersection(*({*case.outputs, *case.input_rows} for case in self.cases))
        wanted = []
        for number, case in zip(group.numbers, self.cases, strict=True):
            rows = (*case.outputs, *case.input_rows)
            own = [k for k, row in enumerate(rows) if row not in shared]
            self.rows.append(len(rows))
            self.first.append(own[0] if own else 0)
            self.start.append(len(wanted))
            for k in range(len(rows)):
                unit = tuple(float(k == j) for j in range(len(rows)))
                wanted.append(checker.objectives.of(number, unit))
        self.goals = self.forms.goals(wanted)
        count = len(self.cases)
        self.stack = _Boxes(
            low[None, self.free], high[None, self.free], np.zeros(1, int), open_[None].copy(),
            np.full((1, count), -1), np.zeros((1, count), int),
        )  # fmt: skip
        self.share = np.ones(1)
        self.finished, self.seen, self.stuck = 0.0, 0, False
        self.nodes = 1
        self._axis: list[tuple[np.ndarray, ...]] = []  # (nodes, axes, cuts, first children)
        self._closed: list[tuple[np.ndarray, ...]] = []  # (nodes, cases, first, second, powers)
        self.points, self.lanes = np.zeros((0, len(low))), np.zeros(0, int)

    def step(self) -> None:
        """Bounds the boxes on top of the stack, closes what is decided and halves the others."""
        count = min(BATCH, len(self.stack))
        boxes, share = self.stack[-count:], self.share[-count:]
        self.stack, self.share = self.stack[:-count], self.share[:-count]
        self.seen += count
        low, high = (np.repeat(end[None], count, axis=0) for end in self.ends)
        low[:, self.free], high[:, self.free] = boxes.low, boxes.high
        forms = self.forms.forms(low, high)
        b, c = np.nonzero(boxes.open)
        tried = _Tried(self, forms, boxes, b, c)
        closed = tried.closed
        self._closed.append(
            (boxes.node[b][closed], c[closed], tried.first[closed], tried.second[closed],
             tried.power[closed])
        )  # fmt: skip
        boxes.open[b[closed], c[closed]] = False
        left = np.flatnonzero(boxes.open.any(axis=1))
        self.finished += float(share.sum() - share[left].sum())
        boxes.partner[b, c], boxes.power[b, c] = tried.second, tried.power
        worst = np.flatnonzero(~closed)
        point = np.zeros((count, len(self.free)))
        point[b[worst]] = tried.point[worst]
        middle = 0.5 * low + 0.5 * high
        middle[:, self.free] += point * 0.5 * (boxes.high - boxes.low)
        self.points, self.lanes = middle[b[worst]], c[worst]
        if len(left):
            self._halve(boxes[left], share[left], self._scores(forms, tried, b, left))

    def _scores(self, forms: Forms, tried: "_Tried", b: np.ndarray, left: np.ndarray) -> np.ndarray:
        """(boxes, free entries): by how much bounds become better if that entry is halved."""
        free = len(self.free)
        rows = np.flatnonzero(~tried.closed)
        scores = np.zeros((len(forms.values), free))
        np.add.at(scores, b[rows], tried.bent[rows])
        harm = np.zeros((len(forms.values), tried.neurons.shape[1]))
        np.add.at(harm, b[rows], tried.neurons[rows])
        at = 0
        for k, layer, argument in zip(
            self.forms.inner, self.forms.layers, forms.arguments, strict=True
        ):
            argument, count = argument[left], math.prod(self.checker.program.nodes[k].shape)
            size = np.abs(argument[:, 1:])
            radius = size.sum(axis=1)
            mine = harm[left, at : at + count]
            at += count
            if layer.function.kind == "relu":
                low, high = argument[:, 0] - radius, argument[:, 0] + radius
                now = _gap(low, high)
                less = size[:, :free]
                then = 0.5 * _gap(low[:, None], high[:, None] - less)
                then += 0.5 * _gap(low[:, None] + less, high[:, None])
                gain = 1 - then / np.where(now > 0, now, 1)[:, None]
                scores[left] += np.einsum("bj,bij->bi", mine, np.where(now[:, None] > 0, gain, 0))
            else:
                part = size[:, :free] / np.maximum(radius, 1e-300)[:, None]
                part = part.reshape(len(left), free, count, -1).mean(axis=-1)
                scores[left] += np.einsum("bj,bij->bi", mine, part)
        return scores[left]

    def _halve(self, boxes: _Boxes, share: np.ndarray, scores: np.ndarray) -> None:
        middle = 0.5 * boxes.low + 0.5 * boxes.high
        possible = (middle > boxes.low) & (middle < boxes.high)
        if not possible.any(axis=1).all():
            self.stuck = True
            return
        axis = np.argmax(np.where(possible, scores, -np.inf), axis=1)
        at = np.arange(len(axis))
        cut = middle[at, axis]
        children = self.nodes + 2 * at
        self.nodes += 2 * len(at)
        self._axis.append((boxes.node, self.free[axis], cut, children))
        low, high = boxes.low.copy(), boxes.high.copy()
        low[at, axis] = high[at, axis] = cut
        rest = boxes.open, boxes.partner, boxes.power
        below = _Boxes(boxes.low, high, children, *rest)
        above = _Boxes(low, boxes.high, children + 1, *rest)
        self.stack = _joined(self.stack, below, above)
        self.share = np.concatenate([self.share, 0.5 * share, 0.5 * share])

    def trees(self) -> dict[int, Cuts]:
        """For every case of the group that this has refuted, its tree."""
        axes, cuts = np.full(self.nodes, -1), np.zeros(self.nodes)
        children = np.full(self.nodes, -1)
        for nodes, axis, cut, first in self._axis:
            axes[nodes], cuts[nodes], children[nodes] = axis, cut, first
        found = {}
        closed = [np.concatenate(part) for part in zip(*self._closed, strict=True)]
        for c, number in enumerate(self.group.numbers):
            mine = closed[1] == c
            if not mine.any():
                continue
            node, _, first, second, power = (part[mine] for part in closed)
            leaf = np.full(self.nodes, -1)
            leaf[node] = np.arange(len(node))
            # In preorder. A case that is closed on a node is closed below it too.
            order, stack = [], [0]
            leaves, below = leaf.tolist(), children.tolist()
            while stack:
                k = stack.pop()
                order.append(k)
                if leaves[k] < 0:
                    stack += (below[k] + 1, below[k])
            order = np.array(order)
            own = leaf[order[leaf[order] >= 0]]
            multipliers = np.zeros((len(own), self.rows[c]))
            multipliers[np.arange(len(own)), first[own]] = 1
            paired = second[own] >= 0
            multipliers[np.flatnonzero(paired), second[own][paired]] = BASE ** power[own][paired]
            ends = leaf[order] >= 0
            found[number] = Cuts(
                np.where(ends, -1, axes[order]), np.where(ends, 0.0, cuts[order]), multipliers
            )
        return found


def _gap(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """How far a ReLU is from its chord on an interval, at most."""
    bent = (low < 0) & (high > 0)
    return np.where(bent, -low * high / np.where(bent, high - low, 1), 0)


class _Tried:
    """Combinations of rows for pairs of a box and a case.

    A row by itself, then one with a second row, whose weight goes up where that row is above zero
    at the point where the combination is smallest: there it helps.
    """

    def __init__(self, search: FormSplitter, forms: Forms, boxes: _Boxes, b, c):
        self.search, self.forms, self.b, self.c = search, forms, b, c
        count = len(b)
        starts = np.array(search.start)
        self.first = np.array(search.first)[c]
        self.second, self.power = np.full(count, -1), np.zeros(count, int)
        self.closed = np.zeros(count, bool)
        most = max(search.rows)
        self.sums: list[Sums] = []
        # All rows of each pair; where a case has fewer, the first again.
        for k in range(most):
            place = starts[c] + np.where(k < np.array(search.rows)[c], k, 0)
            self.sums.append(self._sums(place))
        every = np.arange(count)
        self.bound = np.full(count, -np.inf)
        self.point = np.zeros((count, len(search.free)))
        self.left = np.zeros((count, len(search.free), len(search.free)))
        for k in range(most):
            self._alone(k, every[(self.first == k) | self._promising(self.sums[k])])
        self._pair(boxes)
        total = self._combined(np.arange(count), self.second, self.power)
        self.neurons = total.neurons
        size = np.abs(self.left)
        own = np.einsum("bii->bi", self.left)
        # Halving an entry halves products with others, and quarters its square.
        self.bent = size.sum(axis=2) - np.abs(own) + 0.75 * np.maximum(-own, 0)
        # A row that is linear on the box gains from smaller boxes as well, if nothing else does.
        self.bent += 1e-3 * np.abs(total.linear)

    @staticmethod
    def _promising(sums: Sums) -> np.ndarray:
        """Where a row may refute by itself: it is above zero in the corner that its slope says."""
        corner = -np.sign(sums.linear)
        value = sums.constant - np.abs(sums.linear).sum(axis=1)
        value = value - sums.neurons.sum(axis=1) - sums.rest
        return value + np.einsum("bi,bij,bj->b", corner, sums.square, corner) > 0

    def _alone(self, k: int, some: np.ndarray) -> None:
        """Tries a row by itself. What is found of the case's own row is where the others start."""
        some = some[~self.closed[some]]
        sums = Sums(*(getattr(self.sums[k], name)[some] for name in Sums.__dataclass_fields__))
        bound, point, left = least(sums)
        good = bound > SAFE * self._size(sums)
        use = good | (self.first[some] == k)
        at = some[use]
        self.bound[at], self.point[at], self.left[at] = bound[use], point[use], left[use]
        self.first[some[good]], self.closed[some[good]] = k, True

    def _sums(self, place: np.ndarray) -> Sums:
        goals = self.search.goals
        some = Goals(goals.constant[place], goals.values[place], goals.products[place])
        return self.search.forms.sums(self.forms, self.b, some)

    @staticmethod
    def _size(sums: Sums) -> np.ndarray:
        return np.abs(sums.constant) + np.abs(sums.linear).sum(axis=1)

    def _combined(self, some: np.ndarray, second: np.ndarray, power: np.ndarray) -> Sums:
        """The sums of first rows and weighted second ones, for some of the pairs."""
        weights = np.zeros((len(self.sums), len(some)))
        weights[self.first[some], np.arange(len(some))] = 1
        paired = np.flatnonzero(second >= 0)
        weights[second[paired], paired] = BASE ** power[paired]
        parts = []
        for name in Sums.__dataclass_fields__:
            total = 0
            for k, sums in enumerate(self.sums):
                value = getattr(sums, name)[some]
                total = total + weights[k].reshape(-1, *(1,) * (value.ndim - 1)) * value
            parts.append(total)
        return Sums(*parts)

    def _values(self, k: int, some: np.ndarray, point: np.ndarray) -> np.ndarray:
        """A row at points of boxes, at least."""
        sums = self.sums[k]
        value = sums.constant[some] + (sums.linear[some] * point).sum(axis=1)
        return value + np.einsum("bi,bij,bj->b", point, sums.square[some], point)

    def _pair(self, boxes: _Boxes) -> None:
        some = np.flatnonzero(~self.closed)
        values = np.stack([
            np.where(k == self.first[some], -np.inf, self._values(k, some, self.point[some]))
            for k in range(len(self.sums))
        ])  # fmt: skip
        second = np.argmax(values, axis=0)
        helps = values[second, np.arange(len(some))] > 0
        some, second = some[helps], second[helps]
        if not len(some):
            return
        before = boxes.partner[self.b[some], self.c[some]] == second
        sizes = np.stack([self._size(sums)[some] for sums in self.sums])
        at = np.arange(len(some))
        ratio = sizes[self.first[some], at] / np.maximum(sizes[second, at], 1e-300)
        fresh = np.round(np.log(np.maximum(FIRST_WEIGHT * ratio, 1e-30)) / np.log(BASE))
        power = np.where(before, boxes.power[self.b[some], self.c[some]], fresh).astype(int)
        change = np.full(len(some), FIRST_CHANGE)
        last = np.zeros(len(some), int)
        for _ in range(CHANGES):
            sums = self._combined(some, second, power)
            bound, point, left = least(sums)
            better = bound > self.bound[some]
            k = some[better]
            self.bound[k], self.point[k], self.left[k] = bound[better], point[better], left[better]
            self.second[k], self.power[k] = second[better], power[better]
            done = bound > SAFE * self._size(sums)
            self.closed[some[done]] = True
            values = np.stack([self._values(k, some, point) for k in range(len(self.sums))])
            way = np.where(values[second, np.arange(len(some))] > 0, 1, -1)
            change = np.where(way * last < 0, np.maximum(change // 2, 1), change)
            power, last = power + way * change, way
            go = ~done
            some, second, power, change, last = (x[go] for x in (some, second, power, change, last))
            if not len(some):
                return
