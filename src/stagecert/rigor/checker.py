"""Checks a certificate against a model and a property, trusting neither it nor what made it."""

import gzip
import hashlib
import zlib
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from stagecert import properties
from stagecert.errors import ProblemError
from stagecert.rigor import graph, operators  # noqa: F401  (operators registers itself)
from stagecert.rigor.bounds import Facts, lower_bounds
from stagecert.rigor.certificate import Certificate, Leaf, Tree
from stagecert.rigor.functions import Activation, Refused
from stagecert.rigor.numbers import EPS, Arithmetic

_LARGEST_FILE = 2**31


@dataclass(frozen=True)
class Report:
    """What the checker found.

    Attributes:
        accepted: whether every step of the certificate holds, so that the property does.
        reasons: why not.
        bounds: for every case, for every leaf: the lower bound that refutes it.
    """

    accepted: bool
    reasons: tuple[str, ...] = ()
    bounds: tuple[tuple[float, ...], ...] = field(default=())


def check(model_path, property_path, certificate_path, exact: bool = False) -> Report:
    """Whether a certificate proves that a model has no counterexample to a property.

    Args:
        model_path: an ONNX file, .onnx or .onnx.gz.
        property_path: a VNN-LIB file, plain or gzipped.
        certificate_path: the certificate.
        exact: compute in rationals instead of float64 with allowances for rounding; slow.

    Raises:
        ProblemError: one of the files cannot be read at all.
    """
    model, text = contents(model_path), contents(property_path)
    wanted = properties.load(text)
    bounds: list[tuple[float, ...]] = []
    try:
        certificate = Certificate(Path(certificate_path))
        for data, digest, what in (
            (model, certificate.model, "model"),
            (text, certificate.property, "property"),
        ):
            if hashlib.sha256(data).hexdigest() != digest:
                raise Refused(f"the certificate is for another {what}")
        with np.errstate(all="ignore"):
            _Checker(graph.read(model, Arithmetic(exact)), wanted, certificate, exact, bounds).run()
    except Refused as error:
        return Report(False, (str(error),), tuple(bounds))
    except ProblemError:
        raise
    except Exception as error:  # a damaged model can be wrong in any way: it is never accepted
        reason = f"cannot be followed: {type(error).__name__}: {error}"
        return Report(False, (reason,), tuple(bounds))
    return Report(True, (), tuple(bounds))


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


class _Checker:
    def __init__(self, program: graph.Program, wanted, certificate: Certificate, exact, bounds):
        self.program, self.wanted, self.certificate = program, wanted, certificate
        self.real, self.bounds = Arithmetic(exact), bounds
        self.activations = program.activations
        self.sizes = [int(np.prod(program.nodes[k].shape)) for k in program.inputs]
        self.proven: set[tuple] = set()  # lines that were found to be valid
        self.latest: tuple[Any, Any] = (None, None)  # what one set of boxes is known to imply

    def run(self) -> None:
        """Checks all cases; the first fault ends in `Refused`."""
        nodes, wanted = self.program.nodes, self.wanted
        outputs = sum(int(np.prod(nodes[k].shape)) for k in self.program.outputs)
        if len(wanted.networks) != 1:
            raise Refused("properties of several networks are not supported")
        if wanted.sizes[0] != sum(self.sizes) or wanted.sizes[1] != outputs:
            raise Refused(
                f"the property has {wanted.sizes[0]} inputs and {wanted.sizes[1]} outputs, the "
                f"model {sum(self.sizes)} and {outputs}"
            )
        declared = [tensor.size for tensor in wanted.inputs]
        if len(declared) > 1 and declared != self.sizes:
            raise Refused("the inputs of the property and of the model have different sizes")
        if len(self.certificate.cases) != len(wanted.cases):
            raise Refused(
                f"the certificate has {len(self.certificate.cases)} cases, the property "
                f"{len(wanted.cases)}"
            )
        for number, (case, tree) in enumerate(
            zip(wanted.cases, self.certificate.cases, strict=True), 1
        ):
            found: list[float] = []
            self.bounds.append(())
            for low, high, leaf in boxes(case, tree):
                try:
                    found.append(self.leaf(case, low, high, leaf))
                except Refused as error:
                    raise Refused(f"case {number}, leaf {len(found) + 1}: {error}") from None
                self.bounds[-1] = tuple(found)

    def leaf(self, case, low, high, leaf: Leaf) -> float:
        """The bound that refutes a case on a box."""
        if len(leaf.boxes) != len(self.activations):
            raise Refused(
                f"{len(leaf.boxes)} boxes for {len(self.activations)} activations of the model"
            )
        key = low.tobytes(), high.tobytes(), leaf.boxes, leaf.justify
        if self.latest[0] != key:
            self.latest = key, self.facts(low, high, leaf)
        facts = self.latest[1]
        lines = {
            index: self.line(facts, leaf, number, leaf.lines[number])
            for number, index in enumerate(self.activations)
        }
        start, constant, slip, strict = self.objective(case, facts, leaf)
        bound = lower_bounds(facts, start, lines)[0]
        if self.real.exact:
            bound = bound + constant - slip
        else:
            size = abs(bound) + abs(constant) + slip
            bound = bound + constant - slip - 8 * EPS * size
        if not (bound > 0 or (strict and bound == 0)):
            raise Refused(f"the bound is {float(_number(bound)):g}, which refutes nothing")
        return float(_number(bound))

    def objective(self, case, facts: Facts, leaf: Leaf):
        """What every counterexample makes <= 0: cotangents, a constant, an error; if strict, < 0.

        It is the sum of multiplier * (row . (X, Y) - bound) over the rows of the case.
        """
        rows = (*case.outputs, *case.input_rows)
        multipliers = self.certificate.array(leaf.multipliers, (len(rows),))
        if np.any(multipliers < 0) or not np.any(multipliers > 0):
            raise Refused("multipliers must not be negative, and not all zero")
        inputs = [Fraction(0)] * self.wanted.sizes[0]
        outputs = [Fraction(0)] * self.wanted.sizes[1]
        constant, strict = Fraction(0), False
        for row, multiplier in zip(rows, map(float, multipliers), strict=True):
            if not multiplier:
                continue
            if row.hidden:
                raise Refused("rows on hidden values are not supported")
            weight = Fraction(multiplier)
            strict |= row.strict
            constant -= weight * row.bound
            for target, terms in ((inputs, row.inputs), (outputs, row.outputs)):
                for index, coefficient in terms:
                    target[index] += weight * coefficient
        slip: Any = 0
        start: dict[int, Any] = {}
        for values, sources in ((inputs, self.program.inputs), (outputs, self.program.outputs)):
            place = 0
            for index in sources:
                shape = self.program.nodes[index].shape
                count = int(np.prod(shape))
                some = [self.real.near(v) for v in values[place : place + count]]
                place += count
                numbers, off = (
                    np.array([pair[k] for pair in some], object if self.real.exact else float)
                    for k in (0, 1)
                )
                magnitude = facts.magnitude(index).reshape(-1)
                slip = slip + (off * magnitude).sum() * (1 if self.real.exact else 1.001)
                if index in start:  # one value is an input and an output, or two outputs
                    both = self.real.array(np.zeros(shape)) + start[index][0]
                    error = np.abs(both) + np.abs(numbers.reshape(shape))
                    slip = slip + self.real.slip(2, 0) * (error * facts.magnitude(index)).sum()
                    numbers = both + numbers.reshape(shape)
                start[index] = numbers.reshape(1, *shape)
        number, off = self.real.near(constant)
        return start, number, slip + off, strict

    def facts(self, low, high, leaf: Leaf) -> Facts:
        """Intervals of all values, with the claimed boxes shown to be true."""
        facts = Facts(self.real, self.program, low, high)
        claimed = iter(range(len(self.activations)))
        for index, node in enumerate(self.program.nodes):
            if not isinstance(node.operation, Activation):
                facts.append(*facts.derive())
                continue
            number, argument = next(claimed), node.arguments[0]
            shape = self.program.nodes[argument].shape
            box_low, box_high = (self.certificate.array(name, shape) for name in leaf.boxes[number])
            if np.any(box_low > box_high):
                raise Refused(f"the box of activation {number + 1} is empty")
            exact_low, exact_high = self.real.array(box_low), self.real.array(box_high)
            self.justify(facts, argument, exact_low, exact_high, leaf, number)
            facts.low[argument] = np.maximum(facts.low[argument], exact_low)
            facts.high[argument] = np.minimum(facts.high[argument], exact_high)
            least, most = node.operation.image(box_low, box_high)
            facts.sizes.append(None)
            facts.append(self.real.array(least), self.real.array(most))
            if index != len(facts.low) - 1:
                raise AssertionError("values are out of order")
        return facts

    def justify(self, facts: Facts, argument: int, low, high, leaf: Leaf, number: int) -> None:
        """The argument of an activation is in the claimed box."""
        under, over = facts.low[argument] < low, facts.high[argument] > high
        if not np.any(under) and not np.any(over):
            return
        name = f"the box of activation {number + 1}"
        given = leaf.justify[number]
        if given is None:
            raise Refused(f"{name} is smaller than interval arithmetic says")
        lines = {
            self.activations[k]: self.line(facts, leaf, k, names) for k, names in enumerate(given)
        }
        for where, box, sign in ((under, low, 1), (over, high, -1)):
            entries = np.flatnonzero(where)
            if not len(entries):
                continue
            at_once = max(2**24 // where.size, 1)
            for begin in range(0, len(entries), at_once):
                some = entries[begin : begin + at_once]
                rows = np.zeros((len(some), where.size))
                rows[np.arange(len(some)), some] = sign
                rows = self.real.array(rows.reshape(-1, *where.shape))
                found = lower_bounds(facts, {argument: rows}, lines)
                if not np.all(found >= sign * box.reshape(-1)[some]):
                    raise Refused(f"{name} is smaller than its lines prove")

    def line(self, facts: Facts, leaf: Leaf, number: int, names) -> tuple:
        """The lines of an activation, shown to be valid on its claimed box."""
        node = self.program.nodes[self.activations[number]]
        argument = self.program.nodes[node.arguments[0]].shape
        low, high = (self.certificate.array(name, argument) for name in leaf.boxes[number])
        function = node.operation
        assert isinstance(function, Activation)
        if names is None:
            if function.kind != "relu":
                raise Refused(f"there are no default lines for {function.kind}")
            lines = default_lines(low, high)
        else:
            shapes = (argument, node.shape) * 2
            lines = tuple(self.certificate.array(n, s) for n, s in zip(names, shapes, strict=True))
        key = number, leaf.boxes[number], names
        if key not in self.proven:
            for side, slope, offset in ((1, *lines[:2]), (-1, *lines[2:])):
                if not function.holds(low, high, slope, offset, side):
                    where = "below" if side > 0 else "above"
                    raise Refused(f"a line is not {where} activation {number + 1} on its box")
            self.proven.add(key)
        return tuple(self.real.array(x) for x in lines)


def default_lines(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, ...]:
    """The lines of relu that a certificate may leave out."""
    unstable = (low < 0) & (high > 0)
    low_slope = np.where(unstable, high > -low, low >= 0).astype(float)
    width = np.where(unstable, high - low, 1)
    slope = np.where(unstable, high / width, low_slope)
    offset = np.maximum(-slope * low, high - slope * high) + 8 * EPS * high
    offset = np.where(unstable, offset, 0)
    return low_slope, np.zeros(low.shape), slope, offset


def boxes(case, tree: Tree):
    """The leaves with their boxes: halves of halves of the case's box, so they cover it."""
    stack = [(np.array(case.input_lower64, float), np.array(case.input_upper64, float))]
    leaves = iter(tree.leaves)
    for split in tree.splits:
        if not stack:
            raise Refused("a tree has more splits than parts")
        low, high = stack.pop()
        if split is None:
            leaf = next(leaves, None)
            if leaf is None:
                raise Refused("a tree has a leaf without a proof")
            yield low, high, leaf
            continue
        axis, at = split
        if not 0 <= axis < len(low) or not low[axis] <= at <= high[axis]:
            raise Refused(f"a split at {at} along axis {axis} is outside of its box")
        left, right = high.copy(), low.copy()
        left[axis] = right[axis] = at
        stack += [(right, high), (low, left)]
    if stack or next(leaves, None) is not None:
        raise Refused("a tree does not fit its leaves")


def _number(x: Any) -> Any:
    return Fraction(int(x.p), int(x.q)) if hasattr(x, "p") else x
