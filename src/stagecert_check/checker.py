"""Checks a certificate against a model and a property, trusting neither it nor what made it."""

import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from stagecert_check import graph, operators, properties  # noqa: F401  (operators registers itself)
from stagecert_check.bounds import Facts, Lines, lower_bounds
from stagecert_check.certificate import Case, Certificate, Leaf, Rows, Slopes
from stagecert_check.errors import ProblemError
from stagecert_check.external import contents, model_contents
from stagecert_check.functions import Activation, Refused
from stagecert_check.numbers import EPS, Arithmetic

_NUMBERS_AT_ONCE = 2**22  # in the boxes of leaves, and in the intervals of some of them
_ROWS_AT_ONCE = 2**22  # numbers in the slopes of a leaf's boxes
_WORK_AT_ONCE = 2**26  # entries of cotangents, so that who waits hears something now and then
_MOST_BOXES = 512
_MOST_REMEMBERED = 2**17  # bounds
_MOST_OBJECTIVES = 10_000
_LARGE = 1000  # entries of activations: then intervals without passes back are tried first
_TRIES = 8  # on so many boxes at least, and as long as a quarter of them is refuted


@dataclass(frozen=True)
class Report:
    """What the checker found.

    Attributes:
        accepted: whether every step of the certificate holds, so that the property does.
        reasons: why not.
        bounds: for every case, for every leaf: the lower bound that refutes it. Those that were not
            reached are NaN.
    """

    accepted: bool
    reasons: tuple[str, ...] = ()
    bounds: tuple[tuple[float, ...], ...] = field(default=())


def check(
    model_path,
    property_path,
    certificate_path,
    exact: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Whether a certificate proves that a model has no counterexample to a property.

    Args:
        model_path: an ONNX file, .onnx or .onnx.gz.
        property_path: a VNN-LIB file, plain or gzipped.
        certificate_path: the certificate.
        exact: compute in rationals instead of float64 with allowances for rounding; slow.
        progress: is called with how many leaves are finished, and how many there are.

    Raises:
        ProblemError: one of the files cannot be read at all.
    """
    model, text = model_contents(model_path), contents(property_path)
    wanted = properties.load(text)
    try:
        certificate = Certificate(Path(certificate_path))
        if model.digest != certificate.model:
            raise Refused("the certificate is for another model")
        if hashlib.sha256(text).hexdigest() != certificate.property:
            raise Refused("the certificate is for another property")
        with np.errstate(all="ignore"):
            program = graph.read(model.data, Arithmetic(exact), model.files)
            checker = Checker(program, wanted, exact)
    except Refused as error:
        return Report(False, (str(error),))
    except ProblemError:
        raise
    except Exception as error:  # a damaged model can be wrong in any way: it is never accepted
        return Report(False, (_unexpected(error),))
    return checker.accepts(certificate, progress)


def _unexpected(error: Exception) -> str:
    return f"cannot be followed: {type(error).__name__}: {error}"


@dataclass(frozen=True, eq=False)
class Task:
    """A case to refute on a leaf's box, by some multipliers, with a leaf's own slopes if any."""

    case: int
    number: int
    low: np.ndarray
    high: np.ndarray
    multipliers: tuple[float, ...]
    leaf: Leaf | None = None


@dataclass(frozen=True, eq=False)
class _Objective:
    """What every counterexample makes <= 0, or < 0 if `strict`: sum of g_v . v, plus a constant.

    `terms` has g_v by node, and how far its entries are off; so have the constants.
    """

    terms: dict[int, tuple[Any, Any]]
    constant: tuple[Any, Any]
    strict: bool


class Checker:
    """Bounds the cases of one property of one model on boxes."""

    def __init__(self, program: graph.Program, wanted: properties.Property, exact: bool = False):
        self.program, self.wanted, self.real = program, wanted, Arithmetic(exact)
        self.activations = program.activations
        self._objectives: OrderedDict[tuple, _Objective] = OrderedDict()
        self._remembered: OrderedDict[bytes, Any] = OrderedDict()
        self._tried = self._easy = 0  # boxes
        numbers = sum(math.prod(node.shape) for node in program.nodes)
        entries = sum(math.prod(self._shape(k)) for k in self.activations)
        self._large = entries >= _LARGE and not exact
        most = min(_NUMBERS_AT_ONCE // numbers, _WORK_AT_ONCE // (numbers * max(entries, 1)))
        self._boxes_at_once = min(max(most, 1), _MOST_BOXES)
        sizes = [int(np.prod(program.nodes[k].shape)) for k in program.inputs]
        outputs = sum(int(np.prod(program.nodes[k].shape)) for k in program.outputs)
        if len(wanted.networks) != 1:
            raise Refused("properties of several networks are not supported")
        if wanted.sizes[0] != sum(sizes) or wanted.sizes[1] != outputs:
            raise Refused(
                f"the property has {wanted.sizes[0]} inputs and {wanted.sizes[1]} outputs, the "
                f"model {sum(sizes)} and {outputs}"
            )
        declared = [tensor.size for tensor in wanted.inputs]
        if len(declared) > 1 and declared != sizes:
            raise Refused("the inputs of the property and of the model have different sizes")

    def accepts(
        self, certificate: Certificate, progress: Callable[[int, int], None] | None = None
    ) -> Report:
        """Whether a certificate refutes all cases; that it is for this model was checked before.

        Args:
            certificate: an open certificate.
            progress: is called with how many leaves are finished, and how many there are. What it
                raises ends the check and is passed on.
        """
        bounds: list[np.ndarray] = []
        reasons: tuple[str, ...] = ()
        finished, tell = 0, progress or (lambda *_: None)
        try:
            with np.errstate(all="ignore"):
                rows = [len(case.outputs) + len(case.input_rows) for case in self.wanted.cases]
                cases = certificate.cases(len(self.activations), rows)
                bounds += [np.full(len(case.multipliers), np.nan) for case in cases]
                every = (task for n, case in enumerate(cases) for task in self.tasks(n, case))
                for some, found in self.bounds(certificate, every):
                    for task, bound in zip(some, found, strict=True):
                        if not self.refutes(task, bound):
                            raise Refused(
                                f"case {task.case + 1}, leaf {task.number + 1}: the bound is "
                                f"{float(_number(bound)):g}, which refutes nothing"
                            )
                        bounds[task.case][task.number] = float(_number(bound))
                    finished += len(some)
                    try:
                        tell(finished, sum(map(len, bounds)))
                    except Exception as error:
                        raise _Ended(error) from None
                if any(np.isnan(found).any() for found in bounds):
                    raise Refused("a leaf was left out")  # of no use but to be sure
        except Refused as error:
            reasons = (str(error),)
        except _Ended as error:
            raise error.reason from None
        except Exception as error:
            reasons = (_unexpected(error),)
        return Report(not reasons, reasons, tuple(tuple(map(float, found)) for found in bounds))

    def tasks(self, number: int, case: Case) -> Iterator[Task]:
        """The leaves with their boxes, one after the other: parts of parts, so they cover it all.

        On the way to a leaf only what changes is remembered, so that deep trees need no memory.
        """
        inputs = self.wanted.cases[number].inputs
        low, high = np.array(inputs.lower64, float), np.array(inputs.upper64, float)
        above: list[tuple[int, float, float, bool]] = []  # (axis, cut, old end, is it the left)
        leaf, done = 0, False
        for axis, at in zip(case.axes.tolist(), case.cuts.tolist(), strict=True):
            if done:
                raise Refused("a tree has more nodes than parts")
            if axis != -1:
                if not 0 <= axis < len(low) or not low[axis] <= at <= high[axis]:
                    raise Refused(f"a split at {at} along axis {axis} is outside of its box")
                above.append((axis, at, float(high[axis]), True))
                high[axis] = at
                continue
            multipliers = tuple(case.multipliers[leaf].tolist())
            own = case.leaves.get(leaf)
            yield Task(number, leaf, low.copy(), high.copy(), multipliers, own)
            leaf += 1
            # Up to the first split whose right part is still to come, and down there.
            done = True
            while above:
                k, cut, end, is_left = above.pop()
                if is_left:
                    above.append((k, cut, float(low[k]), False))
                    high[k], low[k], done = end, cut, False
                    break
                low[k] = end
        if not done:
            raise Refused("a tree has fewer nodes than parts")

    def bounds(self, certificate: Certificate | None, tasks: Iterable[Task]) -> Iterator:
        """(some tasks, their lower bounds) until all are done.

        Tasks are taken as they come, so many at a time that memory is bounded; boxes that recur
        among those are worked once. What was bounded before is remembered.
        """
        tasks = iter(tasks)
        at_once = _NUMBERS_AT_ONCE // max(sum(self.wanted.sizes), 64) + 1
        while some := list(itertools.islice(tasks, at_once)):
            keys = self._keys(certificate, some)
            known = [task for task in some if keys[id(task)] in self._remembered]
            if known:
                yield known, [self._remembered[keys[id(task)]] for task in known]
            rest = [task for task in some if keys[id(task)] not in self._remembered]
            for now, found in self._new_bounds(certificate, rest):
                for task, bound in zip(now, found, strict=True):
                    self._remembered[keys[id(task)]] = bound
                while len(self._remembered) > _MOST_REMEMBERED:
                    self._remembered.popitem(last=False)
                yield now, found

    def _keys(self, certificate, tasks: list[Task]) -> dict[int, bytes]:
        """Digests of all that the bound of a task depends on, by the task's id."""
        arrays: dict[str, bytes] = {}
        leaves: dict[Leaf | None, bytes] = {None: b""}

        def of_slopes(slopes: tuple[Slopes | None, ...], rows: int | None = None) -> list:
            found = []
            for index, pair in zip(self.activations, slopes, strict=False):
                for name in pair or ():
                    if name is not None and name not in arrays:
                        array = certificate.slopes(name, self._shape(index, rows))
                        arrays[name] = _digest(array.shape, array.tobytes())
                found.append(pair and [name and arrays[name] for name in pair])
            return found

        for task in tasks:
            if (leaf := task.leaf) is not None and leaf not in leaves:
                parts: list[Any] = [of_slopes(leaf.slopes)]
                for index, rows in zip(self.activations, leaf.boxes, strict=False):
                    if rows is not None:
                        entries, sides = self._entries(certificate, index, rows)
                        slopes = of_slopes(rows.slopes, len(entries))
                        parts += [index, entries.tobytes(), sides.tobytes(), slopes]
                leaves[leaf] = _digest(*parts)
        return {
            id(task): _digest(task.case, task.low.tobytes(), task.high.tobytes(), task.multipliers,
                              leaves[task.leaf])
            for task in tasks
        }  # fmt: skip

    def _new_bounds(self, certificate, tasks: list[Task]) -> Iterator:
        kinds: dict[tuple, list[Task]] = {}
        for task in tasks:
            boxes = task.leaf.boxes if task.leaf is not None else ()
            boxes = boxes if any(rows is not None for rows in boxes) else ()
            kinds.setdefault((task.low.tobytes(), task.high.tobytes(), boxes), []).append(task)
        plain = [same for key, same in kinds.items() if not key[2]]
        for begin in range(0, len(plain), self._boxes_at_once):
            batch = plain[begin : begin + self._boxes_at_once]
            if self._large and (self._tried < _TRIES or 4 * self._easy >= self._tried):
                easy = list(self._easily(batch))
                if easy:
                    yield [task for task, _ in easy], [bound for _, bound in easy]
                done = {id(task) for task, _ in easy}
                left = [[task for task in same if id(task) not in done] for same in batch]
                self._tried += len(batch)
                self._easy += left.count([])
                batch = [same for same in left if same]
            if batch:
                yield from self._together(certificate, batch, Facts.derive)
        for key, same in kinds.items():
            if key[2]:
                leaf: Any = same[0].leaf
                yield from self._together(certificate, [same], lambda facts, leaf=leaf:
                    facts.derive(lambda *of: self.tighten(certificate, leaf, *of)))  # fmt: skip

    def _easily(self, batch: list[list[Task]]) -> Iterator:
        """(task, bound) of those that intervals without passes back refute.

        That is many times cheaper, and in large networks worth a try.
        """
        simple = [[task for task in same if not _own_slopes(task)] for same in batch]
        simple = [same for same in simple if same]
        if simple:
            for some, found in self._together(
                None, simple, lambda facts: facts.derive(passes=False)
            ):
                pairs = zip(some, found, strict=True)
                yield from ((task, bound) for task, bound in pairs if self.refutes(task, bound))

    def _together(self, certificate, batch: list[list[Task]], derive: Callable) -> Iterator:
        """(tasks, bounds); a batch has lists of tasks, each for a box."""
        low = np.stack([same[0].low for same in batch])
        high = np.stack([same[0].high for same in batch])
        facts = derive(Facts(self.real, self.program, low, high))
        every = [(task, box) for box, same in enumerate(batch) for task in same]
        of = np.array([box for _, box in every])
        own = np.array([_own_slopes(task) for task, _ in every])
        groups = [] if own.all() else [np.flatnonzero(~own)]
        groups += [np.array([k]) for k in np.flatnonzero(own)]
        for rows in groups:
            some, lines = [every[k][0] for k in rows], {}
            if own[rows[0]]:
                slopes = self._slopes(certificate, some[0].leaf.slopes)  # type: ignore
                lines = self._lines(facts, slopes, int(of[rows[0]]))
            yield some, self._bound(facts, of[rows], some, lines)

    def refutes(self, task: Task, bound: Any) -> bool:
        """Whether a lower bound on a task's combination of rows leaves no counterexample."""
        strict = self._objective(task.case, task.multipliers).strict
        return bool(bound > 0 or (strict and bound == 0))

    def _bound(self, facts: Facts, of, tasks: list[Task], lines: dict[int, Lines]) -> np.ndarray:
        goals = [self._objective(task.case, task.multipliers) for task in tasks]
        nodes = sorted({index for goal in goals for index in goal.terms})
        dtype = object if self.real.exact else float

        def stacked(index: int, k: int) -> np.ndarray:
            """The coefficients of a value in all objectives (k = 0), or how far they are off."""
            shape = self.program.nodes[index].shape
            nothing = np.zeros(int(np.prod(shape)), dtype), np.zeros(int(np.prod(shape)), dtype)
            rows = [goal.terms.get(index, nothing)[k] for goal in goals]
            return np.stack(rows).reshape(-1, *shape)

        given = {index: stacked(index, 0) for index in nodes}
        bound = lower_bounds(facts, of, lambda some: {k: g[some] for k, g in given.items()}, lines)
        constant, slip = (np.array([goal.constant[k] for goal in goals], dtype) for k in (0, 1))
        for index in nodes:
            off = stacked(index, 1)
            if np.any(off):
                off = (off * facts.magnitude(index)[of]).reshape(len(of), -1).sum(axis=1)
                slip = slip + off * 1.001
        if self.real.exact:
            return bound + constant - slip
        size = np.abs(bound) + np.abs(constant) + slip
        return bound + constant - slip - 8 * EPS * size

    def _objective(self, number: int, multipliers: tuple[float, ...]) -> _Objective:
        """The sum of multiplier * (row . (X, Y) - bound) over the rows of a case."""
        key = number, multipliers
        if key in self._objectives:
            return self._objectives[key]
        case = self.wanted.cases[number]
        if min(multipliers, default=0) < 0 or not any(multipliers):
            raise Refused("multipliers must not be negative, and not all zero")
        sums: dict[int, dict[int, Fraction]] = {}
        constant, strict = Fraction(0), False
        for row, multiplier in zip((*case.outputs, *case.input_rows), multipliers, strict=True):
            if not multiplier:
                continue
            if row.hidden:
                raise Refused("rows on hidden values are not supported")
            weight = Fraction(multiplier)
            strict |= row.strict
            constant -= weight * row.bound
            for nodes, terms in (
                (self.program.inputs, row.inputs),
                (self.program.outputs, row.outputs),
            ):
                for place, coefficient in terms:
                    for index in nodes:  # which of the values the place is in
                        size = int(np.prod(self.program.nodes[index].shape))
                        if place < size:
                            break
                        place -= size
                    of = sums.setdefault(index, {})
                    of[place] = of.get(place, Fraction(0)) + weight * coefficient
        terms, dtype = {}, object if self.real.exact else float
        for index, of in sums.items():
            size = math.prod(self.program.nodes[index].shape)
            terms[index] = near, off = np.zeros(size, dtype), np.zeros(size, dtype)
            for place, coefficient in of.items():
                near[place], off[place] = self.real.near(coefficient)
        self._objectives[key] = found = _Objective(terms, self.real.near(constant), strict)
        while len(self._objectives) > _MOST_OBJECTIVES:
            self._objectives.popitem(last=False)
        return found

    def _shape(self, index: int, rows: int | None = None) -> tuple[int, ...]:
        """The shape of an activation's argument, or of many."""
        shape = self.program.nodes[self.program.nodes[index].arguments[0]].shape
        return shape if rows is None else (rows, *shape)

    def _slopes(self, certificate, slopes: tuple[Slopes | None, ...], rows: int | None = None):
        """The arrays (rows, *shape) by activation, below and above; None is the default."""
        found = {}
        for index, pair in zip(self.activations, slopes, strict=False):
            if pair is not None:
                found[index] = [
                    None if name is None
                    else certificate.slopes(name, self._shape(index, rows)).reshape(
                        -1 if rows is None else rows, *self._shape(index))
                    for name in pair
                ]  # fmt: skip
        return found

    def _lines(self, facts: Facts, slopes: dict, box: int, rows: Any = None) -> dict[int, Lines]:
        """Lines with given slopes for one box; of the slopes some `rows` if there are many."""
        lines, of = {}, slice(box, box + 1)
        for index, pair in slopes.items():
            function, ends = self.program.nodes[index].operation, facts.boxes[index]
            assert isinstance(function, Activation)
            default = ()
            if any(x is None for x in pair):
                default = function.slopes(*(x[of] for x in ends))
            shape = self._shape(index, 1 if rows is None else len(rows))
            low, high = (
                np.broadcast_to(default[k] if x is None else x if rows is None else x[rows], shape)
                for k, x in enumerate(pair)
            )
            lines[index] = facts.line(index, of, low, high)
        return lines

    def _entries(self, certificate, index: int, given: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Entries of an activation's argument, each at most once for a side, and their sides."""
        entries = certificate.array(given.entries, ("<i4",), (None,))
        sides = certificate.array(given.sides, ("<i4",), entries.shape)
        if np.any(entries < 0) or np.any(entries >= math.prod(self._shape(index))):
            raise Refused("a box has entries that are not there")
        if np.any(np.abs(sides) != 1):
            raise Refused("a box has sides other than 1 and -1")
        if any(np.any(np.diff(entries[sides == side]) <= 0) for side in (1, -1)):
            raise Refused("the entries of a box do not increase on each side")
        return entries, sides

    def tighten(self, certificate, leaf: Leaf, facts: Facts, index: int, argument: int) -> None:
        """Passes back with slopes that the leaf gives for single entries of an argument."""
        given = leaf.boxes[self.activations.index(index)]
        if given is None:
            return
        entries, sides = self._entries(certificate, index, given)
        slopes = self._slopes(certificate, given.slopes, len(entries))
        width = sum(math.prod(self._shape(k)) for k in slopes)
        at_once = max(_ROWS_AT_ONCE // max(width, 1), 1)
        for sign in (1, -1):
            mine = np.flatnonzero(sides == sign)
            for begin in range(0, len(mine), at_once):
                rows = mine[begin : begin + at_once]
                lines = self._lines(facts, slopes, 0, rows)
                of = np.zeros(len(rows), int)
                found = facts.unit_bounds(argument, of, entries[rows], sign, lines)
                facts.improve(argument, of, entries[rows], sign, found)


class _Ended(BaseException):
    """Whoever watches a check wants it to end."""

    def __init__(self, reason: Exception):
        self.reason = reason


def _own_slopes(task: Task) -> bool:
    return task.leaf is not None and any(task.leaf.slopes)


def _digest(*parts: Any) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        found.update(b"%d:" % len(data))
        found.update(data)
    return found.digest()


def _number(x: Any) -> Any:
    return Fraction(int(x.p), int(x.q)) if hasattr(x, "p") else x
