"""Checks a certificate against a model and a property, trusting neither it nor what made it."""

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from stagecert import properties
from stagecert.errors import ProblemError
from stagecert.rigor import graph, operators  # noqa: F401  (operators registers itself)
from stagecert.rigor.bounds import Facts, Lines, lower_bounds
from stagecert.rigor.certificate import Case, Certificate, Leaf, Slopes
from stagecert.rigor.functions import Activation, Refused
from stagecert.rigor.numbers import EPS, Arithmetic

_LARGEST_FILE = 2**31
_MOST_NUMBERS = 2**26  # in the boxes of all leaves; a leaf counts as 64 at least
_NUMBERS_AT_ONCE = 2**22  # in the intervals of some leaves
_MOST_BOXES = 512


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
    model, text = contents(model_path), contents(property_path)
    wanted = properties.load(text)
    try:
        certificate = Certificate(Path(certificate_path))
        for data, digest, what in (
            (model, certificate.model, "model"),
            (text, certificate.property, "property"),
        ):
            if hashlib.sha256(data).hexdigest() != digest:
                raise Refused(f"the certificate is for another {what}")
        with np.errstate(all="ignore"):
            checker = Checker(graph.read(model, Arithmetic(exact)), wanted, exact)
        return checker.accepts(certificate, progress)
    except Refused as error:
        return Report(False, (str(error),))
    except ProblemError:
        raise
    except Exception as error:  # a damaged model can be wrong in any way: it is never accepted
        return Report(False, (f"cannot be followed: {type(error).__name__}: {error}",))


def contents(path) -> bytes:
    """A file's contents, unpacked if it is gzipped."""
    try:
        data = Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            with gzip.open(path) as file:
                data = file.read(_LARGEST_FILE + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ProblemError(f"{path}: cannot be read: {error}.") from None
    if len(data) > _LARGEST_FILE:
        raise ProblemError(f"{path}: larger than 2 GiB.")
    return data


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
        self._objectives: dict[tuple, _Objective] = {}
        self._numbers = 0
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
        """Whether a certificate, whatever files it is for, refutes every case."""
        bounds: list[np.ndarray] = []
        reasons: tuple[str, ...] = ()
        try:
            with np.errstate(all="ignore"):
                self._accept(certificate, bounds, progress)
        except Refused as error:
            reasons = (str(error),)
        except Exception as error:  # a damaged certificate can be wrong in any way
            reasons = (f"cannot be followed: {type(error).__name__}: {error}",)
        return Report(not reasons, reasons, tuple(tuple(map(float, found)) for found in bounds))

    def _accept(self, certificate: Certificate, bounds: list[np.ndarray], progress) -> None:
        rows = [len(case.outputs) + len(case.input_rows) for case in self.wanted.cases]
        cases = certificate.cases(len(self.activations), rows)
        bounds += [np.full(len(case.multipliers), np.nan) for case in cases]
        tasks = [task for n, case in enumerate(cases) for task in self.tasks(n, case)]
        finished = 0
        for some, found in self.bounds(certificate, tasks):
            for task, bound in zip(some, found, strict=True):
                if not self.refutes(task, bound):
                    raise Refused(
                        f"case {task.case + 1}, leaf {task.number + 1}: the bound is "
                        f"{float(_number(bound)):g}, which refutes nothing"
                    )
                bounds[task.case][task.number] = float(_number(bound))
            finished += len(some)
            if progress is not None:
                progress(finished, len(tasks))
        if any(np.isnan(found).any() for found in bounds):
            raise Refused("a leaf was left out")  # of no use but to be sure

    def tasks(self, number: int, case: Case) -> list[Task]:
        """The leaves with their boxes: parts of parts of the case's box, so they cover it."""
        inputs = self.wanted.cases[number].inputs
        stack = [(np.array(inputs.lower64, float), np.array(inputs.upper64, float))]
        self._numbers += len(case.multipliers) * max(len(stack[0][0]), 64)
        if self._numbers > _MOST_NUMBERS:
            raise Refused("there are too many leaves")
        if len(case.axes) != 2 * len(case.multipliers) - 1:
            raise Refused("a tree does not have one split less than leaves")
        found: list[Task] = []
        for axis, at in zip(case.axes.tolist(), case.cuts.tolist(), strict=True):
            if not stack:
                raise Refused("a tree has more nodes than parts")
            low, high = stack.pop()
            if axis == -1:
                k = len(found)
                multipliers = tuple(case.multipliers[k].tolist())
                found.append(Task(number, k, low, high, multipliers, case.leaves.get(k)))
                continue
            if not 0 <= axis < len(low) or not low[axis] <= at <= high[axis]:
                raise Refused(f"a split at {at} along axis {axis} is outside of its box")
            left, right = high.copy(), low.copy()
            left[axis] = right[axis] = at
            stack += [(right, high), (low, left)]
        if stack:
            raise Refused("a tree has fewer nodes than parts")
        return found

    def bounds(self, certificate: Certificate | None, tasks: list[Task]) -> Iterator:
        """(some tasks, their lower bounds) until all are done; boxes that recur are worked once."""
        numbers = sum(int(np.prod(node.shape)) for node in self.program.nodes)
        at_once = min(max(_NUMBERS_AT_ONCE // numbers, 1), _MOST_BOXES)
        kinds: dict[tuple, list[Task]] = {}
        for task in tasks:
            boxes = task.leaf.boxes if task.leaf is not None else ()
            boxes = boxes if any(rows is not None for rows in boxes) else ()
            kinds.setdefault((task.low.tobytes(), task.high.tobytes(), boxes), []).append(task)
        plain = [same for key, same in kinds.items() if not key[2]]
        batches = [plain[k : k + at_once] for k in range(0, len(plain), at_once)]
        batches += [[same] for key, same in kinds.items() if key[2]]
        for batch in batches:
            low = np.stack([same[0].low for same in batch])
            high = np.stack([same[0].high for same in batch])
            facts = Facts(self.real, self.program, low, high)
            leaf = batch[0][0].leaf
            if leaf is not None and any(rows is not None for rows in leaf.boxes):
                facts.derive(lambda facts, index, argument, leaf=leaf: self.tighten(
                    certificate, leaf, facts, index, argument))  # fmt: skip
            else:
                facts.derive()
            every = [(task, box) for box, same in enumerate(batch) for task in same]
            of = np.array([box for _, box in every])
            default = np.array([t.leaf is None or not any(t.leaf.slopes) for t, _ in every])
            groups = [np.flatnonzero(default)] if default.any() else []
            groups += [np.array([k]) for k in np.flatnonzero(~default)]
            for rows in groups:
                some = [every[k][0] for k in rows]
                lines = {}
                if some[0].leaf is not None and any(some[0].leaf.slopes):
                    lines = self._lines(certificate, facts, some[0].leaf.slopes, of[rows])
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
        sums: dict[int, list[Fraction]] = {}
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
                    sums.setdefault(index, [Fraction(0)] * size)[place] += weight * coefficient
        near = {k: list(zip(*map(self.real.near, v), strict=True)) for k, v in sums.items()}
        dtype = object if self.real.exact else float
        terms = {k: (np.array(a, dtype), np.array(b, dtype)) for k, (a, b) in near.items()}
        found = _Objective(terms, self.real.near(constant), strict)
        if len(self._objectives) < 10_000:
            self._objectives[key] = found
        return found

    def _lines(
        self, certificate, facts: Facts, slopes: tuple[Slopes | None, ...], of, rows: bool = False
    ) -> dict[int, Lines]:
        """Lines with given slopes, for boxes `of`; the arrays have an axis of `rows` or not."""
        lines = {}
        for index, pair in zip(self.activations, slopes, strict=False):
            if pair is None:
                continue
            function, box = self.program.nodes[index].operation, facts.boxes[index]
            assert isinstance(function, Activation)
            shape = box[0].shape[1:]
            low, high = function.slopes(*(x[of] for x in box))
            low, high = (
                x if name is None
                else np.broadcast_to(certificate.slopes(name, (len(of), *shape) if rows else shape),
                                     x.shape)
                for name, x in zip(pair, (low, high), strict=True)
            )  # fmt: skip
            lines[index] = facts.line(index, of, low, high)
        return lines

    def tighten(self, certificate, leaf: Leaf, facts: Facts, index: int, argument: int) -> None:
        """Passes back with slopes that the leaf gives for single entries of an argument."""
        given = leaf.boxes[self.activations.index(index)]
        if given is None:
            return
        entries = certificate.array(given.entries, ("<i4",), (None,))
        sides = certificate.array(given.sides, ("<i4",), entries.shape)
        size = int(np.prod(self.program.nodes[argument].shape))
        if np.any(entries < 0) or np.any(entries >= size) or np.any(np.abs(sides) != 1):
            raise Refused("entries or sides of a box are impossible")
        of = np.zeros(len(entries), int)
        lines = self._lines(certificate, facts, given.slopes, of, rows=True)
        for sign in (1, -1):
            some = np.flatnonzero(sides == sign)
            if len(some):
                mine = {k: tuple(x[some] for x in line) for k, line in lines.items()}
                found = facts.unit_bounds(argument, of[some], entries[some], sign, mine)
                facts.improve(argument, of[some], entries[some], sign, found)


def _number(x: Any) -> Any:
    return Fraction(int(x.p), int(x.q)) if hasattr(x, "p") else x
