"""Checks a certificate against a model and a property, trusting neither it nor what made it."""

import contextlib
import functools
import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from stagecert_check import (
    graph,
    joining,
    operators,  # noqa: F401  (these register themselves)
    properties,
    recurrent,  # noqa: F401
    stating,
)
from stagecert_check.bounds import Facts, few
from stagecert_check.branching import Branching, path_of
from stagecert_check.cases import said_by
from stagecert_check.certificate import Above, Case, Certificate, Leaf, Rows, Slopes, Source
from stagecert_check.errors import ProblemError
from stagecert_check.external import FilePath, contents, model_contents
from stagecert_check.functions import Refused
from stagecert_check.numbers import Arithmetic
from stagecert_check.objectives import Objectives
from stagecert_check.planes import read_planes
from stagecert_check.quadratics import Goals, Quadratics
from stagecert_check.slopes import Given
from stagecert_check.tree import Path as Way
from stagecert_check.tree import Station, Task, boxes_of, leaves_of, windows

_NUMBERS_AT_ONCE = 2**22  # in the boxes of leaves, and in the intervals of some of them
_LEAF_NUMBERS_AT_ONCE = 2**20  # in intervals of leaves that share a box: more fall out of caches
_WORK_AT_ONCE = 2**26  # entries of cotangents, so that who waits hears something now and then
_MOST_BOXES = 512
_MOST_FORMS = 512  # quadratic forms at once: more fall out of the caches
_MOST_REMEMBERED = 2**17  # bounds
_LARGE = 1000  # entries of activations: then intervals without passes back are tried first
_TRIES = 8  # on so many boxes at least, and as long as a quarter of them is refuted

Bounded = tuple[list[Task], Any]  # some tasks, and the lower bound of each


@dataclass(frozen=True)
class Report:
    """What the checker found.

    Attributes:
        accepted: whether every step of the certificate holds, so that the property does.
        reasons: why not.
        bounds: for every case, for every leaf: the lower bound that refutes it. Those that were not
            reached are NaN; where splits leave no points, it is infinite.
    """

    accepted: bool
    reasons: tuple[str, ...] = ()
    bounds: tuple[tuple[float, ...], ...] = field(default=())


def check(
    model_path: FilePath | Sequence[tuple[str, FilePath]],
    property_path: FilePath,
    certificate_path: FilePath,
    exact: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Whether a certificate proves that a model has no counterexample to a property.

    Args:
        model_path: an ONNX file, .onnx or .onnx.gz; for a property of several networks
            [("f", path), ("g", path)], with the names that the property gives them.
        property_path: a VNN-LIB file, plain or gzipped.
        certificate_path: the certificate.
        exact: compute in rationals instead of float64 with allowances for rounding; slow.
        progress: is called with how many leaves are finished, and how many there are.

    Raises:
        ProblemError: one of the files cannot be read at all.
    """
    text, several = contents(property_path), joining.named(model_path)
    wanted = properties.load(text)
    joining.check_names(several, wanted)
    one: Any = model_path  # unless it names several
    model = model_contents(one) if several is None else joining.joint_contents(several)
    model, wanted = stating.tied(*stating.stated(model, wanted))
    try:
        certificate = Certificate(Path(certificate_path))
        if model.digest != certificate.model:
            raise Refused("the certificate is for another model")
        if hashlib.sha256(text).hexdigest() != certificate.property:
            raise Refused("the certificate is for another property")
        with np.errstate(all="ignore"):
            ordered = several is None and wanted.compares
            program = graph.read(model.data, Arithmetic(exact), model.files, ordered)
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


class Checker:
    """Bounds the cases of one property of one model on boxes."""

    def __init__(self, program: graph.Program, wanted: properties.Property, exact: bool = False):
        self.program, self.wanted, self.real = program, wanted, Arithmetic(exact)
        self.activations = program.activations
        self.objectives = Objectives(program, wanted, self.real)
        self._remembered: OrderedDict[bytes, Any] = OrderedDict()
        self._tried = self._easy = 0  # boxes
        self._quadratics: dict[int, Quadratics | None] = {}
        numbers = sum(math.prod(node.shape) for node in program.nodes)
        self.given = Given(program)
        entries = sum(self.given.sizes.values())
        self._large = entries >= _LARGE and not exact
        some = [few(program.nodes[k].operation) for k in self.activations]  # type: ignore
        self._easier = (False,) if all(some) or not any(some) else (False, few)
        most = min(_NUMBERS_AT_ONCE // numbers, _WORK_AT_ONCE // (numbers * max(entries, 1)))
        self.boxes_at_once = min(max(most, 1), _MOST_BOXES)
        self.branching = Branching(
            self.given, wanted, self.objectives, self.boxes_at_once, _LEAF_NUMBERS_AT_ONCE
        )
        sizes, outputs = (
            [math.prod(program.nodes[k].shape) for k in places]
            for places in (program.inputs, program.outputs)
        )
        if wanted.sizes[0] != sum(sizes) or wanted.sizes[1] != sum(outputs):
            raise Refused(
                f"the property has {wanted.sizes[0]} inputs and {wanted.sizes[1]} outputs, the "
                f"model {sum(sizes)} and {sum(outputs)}"
            )
        for what, tensors, there in (
            ("inputs", wanted.inputs, sizes),
            ("outputs", wanted.outputs, outputs),
        ):
            if len(tensors) > 1 and [tensor.size for tensor in tensors] != there:
                raise Refused(f"the {what} of the property and of the model have different sizes")

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
        """The leaves of a case's tree."""
        inputs = self.wanted.cases[number].inputs
        box = np.array(inputs.lower64, float), np.array(inputs.upper64, float)
        return leaves_of(number, case, *box, sum(self.given.sizes.values()))

    def bounds(self, certificate: Source, tasks: Iterable[Task]) -> Iterator[Bounded]:
        """(some tasks, their lower bounds) until all are done.

        Tasks are taken as they come, so many at a time that memory is bounded; boxes that recur
        among those are worked once. What was bounded before is remembered.
        """
        for some in windows(tasks, box=max(sum(self.wanted.sizes), 64) // 4):
            leaves: dict[Leaf | Station | None, bytes] = {None: b""}
            keys = self._keys(certificate, some, leaves)
            known = [task for task in some if keys[id(task)] in self._remembered]
            if known:
                yield known, [self._remembered[keys[id(task)]] for task in known]
            rest = [task for task in some if keys[id(task)] not in self._remembered]
            trees = [task for task in rest if task.path is not None]
            plain = [task for task in rest if task.path is None]
            for now, found in itertools.chain(
                self._new_bounds(certificate, plain),
                self.branching.bounds(certificate, trees, leaves),
            ):
                for task, bound in zip(now, found, strict=True):
                    self._remembered[keys[id(task)]] = bound
                while len(self._remembered) > _MOST_REMEMBERED:
                    self._remembered.popitem(last=False)
                yield now, found

    def remembered(self) -> dict[bytes, Any]:
        """The bounds found so far, by digests of all that they depend on."""
        return dict(self._remembered)

    def recall(self, bounds: dict[bytes, Any]) -> None:
        """Takes over what a checker of the same model and property remembers."""
        self._remembered.update(bounds)

    def _keys(
        self, certificate: Source, tasks: list[Task], leaves: dict[Leaf | Station | None, bytes]
    ) -> dict[int, bytes]:
        """Digests of all that the bound of a task depends on, by the task's id.

        Those of what leaves and stations use instead of defaults are kept in `leaves`.
        """
        arrays: dict[str, bytes] = {}

        def of_slopes(slopes: tuple[Slopes | None, ...], rows: int | None = None) -> list[Any]:
            found = []
            for index, pair in zip(self.activations, slopes, strict=False):
                for name in pair or ():
                    if name is not None and name not in arrays:
                        array = certificate.slopes(name, self.given.shape(index, rows))
                        arrays[name] = _digest(array.shape, array.tobytes())
                found.append(pair and [name and arrays[name] for name in pair])
            return found

        def of_boxes(boxes: tuple[Rows | None, ...], path: Way | None = None) -> list[Any]:
            found: list[Any] = []
            for index, rows in zip(self.activations, boxes, strict=False):
                if rows is not None:
                    entries, sides = self.given.entries(certificate, index, rows)
                    slopes = of_slopes(rows.slopes, len(entries))
                    forces = self.given.forces(certificate, rows, len(entries), path)
                    found += [index, entries.tobytes(), sides.tobytes(), slopes, forces.tobytes()]
                    if rows.cases is not None:
                        found += said_by(self.given, certificate, index, rows.cases)
            return found

        def of_planes(planes: tuple[Above | None, ...]) -> list[Any]:
            found: list[Any] = []
            for index, above in zip(self.activations, planes, strict=False):
                if above is not None:
                    own = read_planes(certificate, self.program, index, above)
                    found += [
                        index,
                        own.entries.tobytes(),
                        own.shares.tobytes(),
                        own.kept.tobytes(),
                    ]
            return found

        passes: dict[Any, list[Any]] = {}  # those of stations, which trees of several cases share
        for task in tasks:
            if (leaf := task.leaf) is not None and leaf not in leaves:
                own = of_slopes(leaf.slopes) if leaf.count is None else "all"
                leaves[leaf] = _digest(own, *of_boxes(leaf.boxes), *of_planes(leaf.planes))
            new, station = [], task.station
            while station is not None and station not in leaves:
                new.append(station)
                station = station.above
            for station in new[::-1]:
                which = station.boxes, len(station.path.neurons)
                if which not in passes:
                    passes[which] = of_boxes(station.boxes, station.path)
                way = path_of(station.path)
                leaves[station] = _digest(leaves[station.above], *way, *passes[which])
        return {
            id(task): _digest(task.case, box, task.multipliers, leaves[task.leaf],
                              leaves[task.station],
                              *(self.branching.own(certificate, task) if task.path else ()))
            for task, box in boxes_of(tasks)
        }  # fmt: skip

    def _new_bounds(self, certificate: Source, tasks: list[Task]) -> Iterator[Bounded]:
        rest: list[Task] = []
        for some, found in self._by_forms(tasks):
            good = [self.refutes(task, bound) for task, bound in zip(some, found, strict=True)]
            done = list(itertools.compress(some, good))
            rest += itertools.compress(some, (not one for one in good))
            if done:
                yield done, found[good]
        kinds: dict[tuple[bytes, tuple[Rows | None, ...]], list[Task]] = {}
        for task, box in boxes_of(rest):
            boxes = task.leaf.boxes if task.leaf is not None else ()
            boxes = boxes if any(rows is not None for rows in boxes) else ()
            kinds.setdefault((box, boxes), []).append(task)
        plain = []
        for (_, boxes), same in kinds.items():
            facts = None if boxes else self.branching.known(same[0].low[None], same[0].high[None])
            if facts is not None:
                yield from self._together(certificate, [same], lambda _, facts=facts: facts)
            elif not boxes:
                plain.append(same)
        for begin in range(0, len(plain), self.boxes_at_once):
            batch = plain[begin : begin + self.boxes_at_once]
            if self._large and (self._tried < _TRIES or 4 * self._easy >= self._tried):
                left = batch
                for passes in self._easier:
                    easy = list(self._easily(certificate, left, passes))
                    if easy:
                        yield [task for task, _ in easy], [bound for _, bound in easy]
                    done = {id(task) for task, _ in easy}
                    left = [[task for task in same if id(task) not in done] for same in left]
                self._tried += len(batch)
                self._easy += left.count([])
                batch = [same for same in left if same]
            if batch:
                yield from self._together(certificate, batch, Facts.derive)
        for key, same in kinds.items():
            if key[1]:
                leaf: Any = same[0].leaf
                tighter = functools.partial(self.given.tighten, certificate, leaf)
                yield from self._together(
                    certificate, [same], functools.partial(Facts.derive, tighter=tighter)
                )

    def _by_forms(self, tasks: list[Task]) -> Iterator[Bounded]:
        """(tasks, bounds) by quadratic forms where variables are multiplied, else minus infinity.

        Boxes differ from leaf to leaf: nothing is shared but what is worked out for whole cases.
        """
        plain: dict[int, list[Task]] = {}
        for task in tasks:
            own = task.leaf is not None or self.quadratics(task.case) is None
            plain.setdefault(-1 if own else task.case, []).append(task)
        for number, mine in plain.items():
            forms = self.quadratics(number) if number >= 0 else None
            for begin in range(0, len(mine), _MOST_FORMS):
                some = mine[begin : begin + _MOST_FORMS]
                if forms is None:
                    yield some, np.full(len(some), -np.inf)
                    continue
                different = {task.multipliers: 0 for task in some}
                goals = forms.goals([self.objectives.of(number, x) for x in different])
                places = {x: k for k, x in enumerate(different)}
                at = np.array([places[task.multipliers] for task in some])
                goals = Goals(goals.constant[at], goals.values[at], goals.products[at])
                low, high = (np.stack([getattr(task, x) for task in some]) for x in ("low", "high"))
                try:
                    found = forms.bounds(forms.forms(low, high), np.arange(len(some)), goals)
                except Refused:  # an interval is too wide: lines may do
                    found = np.full(len(some), -np.inf)
                yield some, found

    def quadratics(self, number: int) -> Quadratics | None:
        """Quadratic forms on the box of a case, where there is use for them."""
        inputs = self.wanted.cases[number].inputs
        if id(inputs) not in self._quadratics:
            low, high = np.array(inputs.lower64, float), np.array(inputs.upper64, float)
            found = None
            if not self.real.exact and Quadratics.applicable(self.program, low, high):
                with contextlib.suppress(Refused):
                    found = Quadratics(self.program, low, high)
            self._quadratics[id(inputs)] = found
        return self._quadratics[id(inputs)]

    def _easily(
        self, certificate: Source, batch: list[list[Task]], passes: Any
    ) -> Iterator[tuple[Task, Any]]:
        """(task, bound) of those that intervals without passes back, or with few, refute.

        That is many times cheaper, and in large networks worth a try. Such intervals may be too
        wide for a function that is evaluated within limits: then passes back have to do it.
        """
        simple = [[task for task in same if not _own_slopes(task)] for same in batch]
        simple = [same for same in simple if same]
        if not simple:
            return
        try:
            these = self._together(certificate, simple, lambda facts: facts.derive(passes=passes))
            done = list(these)
        except Refused:
            return
        for some, found in done:
            pairs = zip(some, found, strict=True)
            yield from ((task, bound) for task, bound in pairs if self.refutes(task, bound))

    def _together(
        self, certificate: Source, batch: list[list[Task]], derive: Callable[[Facts], Facts]
    ) -> Iterator[Bounded]:
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
                leaf: Any = some[0].leaf
                lines = self.given.planes(certificate, leaf, facts, int(of[rows[0]]))
            yield some, self.objectives.bounds(facts, of[rows], some, lines, None)

    def refutes(self, task: Task, bound: Any) -> bool:
        """Whether a lower bound on a task's combination of rows leaves no counterexample."""
        strict = self.objectives.of(task.case, task.multipliers).strict
        return bool(bound > 0 or (strict and bound == 0))


class _Ended(BaseException):
    """Whoever watches a check wants it to end."""

    def __init__(self, reason: Exception):
        self.reason = reason


def _own_slopes(task: Task) -> bool:
    return task.leaf is not None and (any(task.leaf.slopes) or any(task.leaf.planes))


def _digest(*parts: Any) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else repr(part).encode()
        found.update(b"%d:" % len(data))
        found.update(data)
    return found.digest()


def _number(x: Any) -> Any:
    return Fraction(int(x.p), int(x.q)) if hasattr(x, "p") else x
