"""Turns the assertions of a file into cases: input sets with conjunctions of output rows."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from stagecert_check.properties.errors import PropertyError
from stagecert_check.properties.model import Case, InputSet, Property, Row, entry_name
from stagecert_check.properties.reader import (
    HIDDEN,
    MAX_BITS,
    OUTPUT,
    Atom,
    Budget,
    Clause,
    Parsed,
    conjunction,
)

MAX_NOTES = 20
PASSES = 8  # over the rows, in search of bounds that they imply

Ends = dict[int, Fraction]  # one side of a box, as far as it is known


def floor64(value: Fraction) -> float:
    """The largest float64 that is not above the value."""
    try:
        near = value.numerator / value.denominator  # correctly rounded
    except OverflowError:
        return math.nextafter(math.inf, 0.0) if value > 0 else -math.inf
    return near if Fraction(near) <= value else math.nextafter(near, -math.inf)


def ceil64(value: Fraction) -> float:
    """The smallest float64 that is not below the value."""
    return -floor64(-value)


def normalise(parsed: Parsed, source: str, max_cases: int) -> Property:
    """The property, with every case that has a point in its box."""
    products = tuple(parsed.products)
    shell = Property(source, parsed.version, tuple(parsed.networks), (), products=products)
    budget = parsed.budget
    # Disjunctions over inputs alone are multiplied out apart from the others, so that all cases
    # with the same inputs share one input set.
    pure = [all(_input_only(a) for clause in dnf for a in clause) for dnf in parsed.choices]
    boxes = conjunction([d for d, p in zip(parsed.choices, pure, strict=True) if p], budget)
    rest = conjunction([d for d, p in zip(parsed.choices, pure, strict=True) if not p], budget)
    count = len(boxes) * len(rest)
    if count > max_cases:
        raise PropertyError(
            f"{source}: the disjunctions multiply out to {count:,} cases; the limit is "
            f"{max_cases:,}. Split the property into several files, or raise `max_cases`.",
            source=source,
        )

    common_inputs = [atom for atom in parsed.common if _input_only(atom)]
    common_outputs = [_row(atom) for atom in parsed.common if not _input_only(atom)]
    sets = _InputSets(shell, common_inputs, budget)
    # Every clause apart: its constraints on inputs alone, and the rest as rows.
    split = []
    for clause in rest:
        own = [atom for atom in clause if _input_only(atom)]
        budget.spend(4 * len(common_outputs))
        outputs = (*common_outputs, *(_row(atom) for atom in clause if not _input_only(atom)))
        split.append((own, outputs, _contradiction(outputs)))
    cases, notes, dropped = [], [], 0
    for box in boxes:
        for own, outputs, contradiction in split:
            found = sets.get(box + own)
            why = f"has no input: {found}" if isinstance(found, str) else contradiction
            if isinstance(found, InputSet) and not why:
                cases.append(Case(found, outputs, shell.sizes, products))
                continue
            dropped += 1
            if len(notes) < MAX_NOTES:
                notes.append(f"Case {len(cases) + dropped} of {count} {why}.")
    if dropped > len(notes):
        notes.append(f"{dropped - len(notes)} more cases have no input, or no output.")
    if not count:
        notes.append("An assertion is false whatever the values of the variables.")
    notes = (*parsed.notes, *notes)
    return replace(shell, cases=tuple(cases), dropped=dropped, notes=notes)


def _contradiction(rows: tuple[Row, ...]) -> str:
    """Why no outputs satisfy the rows, as far as two of them tell that say the opposite."""
    # By direction: the least one, and whether it is closed.
    limits: dict[tuple[tuple[tuple[int, Fraction], ...], ...], tuple[Fraction, bool]] = {}
    for row in rows:
        parts = row.inputs, row.outputs, row.hidden
        unit = abs(next(c for part in parts for _, c in part))
        key = tuple(tuple((i, c / unit) for i, c in part) for part in parts)
        limit = row.bound / unit, not row.strict
        limits[key] = min(limits.get(key, limit), limit)
    for key, (bound, closed) in limits.items():
        opposite = limits.get(tuple(tuple((i, -c) for i, c in part) for part in key))
        if opposite is not None:
            room = bound + opposite[0]  # from minus the one to the other
            if room < 0 or (room == 0 and not (closed and opposite[1])):
                return "has no output: two of its rows exclude each other"
    return ""


def _input_only(atom: Atom) -> bool:
    return atom.terms[-1][0] < OUTPUT  # terms are in order


def _row(atom: Atom) -> Row:
    inputs, outputs, hidden = [], [], []
    for variable, coefficient in atom.terms:
        if variable < OUTPUT:
            inputs.append((variable, coefficient))
        elif variable < HIDDEN:
            outputs.append((variable - OUTPUT, coefficient))
        else:
            hidden.append((variable - HIDDEN, coefficient))
    return Row(tuple(inputs), tuple(outputs), tuple(hidden), atom.bound, atom.strict)


class _InputSets:
    """Makes input sets from the constraints that all cases share and some of their own."""

    def __init__(self, shell: Property, common: Clause, budget: Budget):
        self.shell = shell
        self.budget = budget
        self.size = shell.sizes[0]
        # Sparse, because the file may declare far more inputs than it mentions.
        self.lower: dict[int, Fraction] = {}
        self.upper: dict[int, Fraction] = {}
        self.rows = self.apply(common, self.lower, self.upper)
        self.base_fault = self.fault(self.lower, self.upper, self.rows, self.lower)
        self.shared: list[np.ndarray] = []  # the arrays of the shared bounds, once they are needed
        self.known: dict[tuple[int, ...], InputSet | str] = {}

    def get(self, own: Clause) -> InputSet | str:
        """The set, or why it is empty."""
        if self.base_fault:
            return self.base_fault
        self.budget.spend(1 + len(own))
        key = tuple(map(id, own))
        if key not in self.known:
            self.known[key] = self.make(own)
        return self.known[key]

    def make(self, own: Clause) -> InputSet | str:
        self.budget.spend(len(self.lower) + len(self.upper) + len(self.rows))
        lower, upper = dict(self.lower), dict(self.upper)
        rows = self.rows + self.apply(own, lower, upper)
        changed = {atom.terms[0][0] for atom in own if len(atom.terms) == 1}
        fault = self.fault(lower, upper, rows, changed)
        if not fault and (len(lower) < self.size or len(upper) < self.size):
            changed |= self.imply(lower, upper, rows)
            self.demand(lower, upper)
            fault = self.fault(lower, upper, rows, changed)
        if fault:
            return fault
        # Rounding is the dear part, so only what differs from the shared bounds is rounded here.
        if not self.shared:
            self.shared = [np.zeros(self.size, dtype) for dtype in (object, object, float, float)]
            for index in self.lower.keys() & self.upper.keys():
                _set(self.shared, index, self.lower[index], self.upper[index])
        changed |= lower.keys() - (self.lower.keys() & self.upper.keys())
        arrays = [array.copy() for array in self.shared] if changed else self.shared
        for index in changed:
            _set(arrays, index, lower[index], upper[index])
        for array in arrays:
            array.flags.writeable = False
        return InputSet(*arrays, rows=tuple(_row(atom) for atom in rows))

    def apply(self, atoms: Clause, lower: Ends, upper: Ends) -> list[Atom]:
        """Tightens the box, and returns the constraints that a closed box cannot express."""
        rows = []
        for atom in atoms:
            if len(atom.terms) == 1:
                (index, sign), bound = atom.terms[0], atom.bound
                if sign > 0:
                    if index not in upper or bound < upper[index]:
                        upper[index] = bound
                elif index not in lower or -bound > lower[index]:
                    lower[index] = -bound
            if len(atom.terms) > 1 or atom.strict:
                rows.append(atom)
        return rows

    def fault(self, lower: Ends, upper: Ends, rows: list[Atom], indices: Any) -> str:
        """Why no input satisfies the bounds, as far as single constraints tell; or nothing."""
        for index in indices:
            if index in lower and index in upper and lower[index] > upper[index]:
                name = self.name(index)
                return f"{name} >= {_short(lower[index])} and {name} <= {_short(upper[index])}"
        for atom in rows:
            self.budget.spend(len(atom.terms))
            least = _least(atom.terms, lower, upper)
            if least is not None and (least > atom.bound or (atom.strict and least == atom.bound)):
                names = ", ".join(self.name(index) for index, _ in atom.terms[:3])
                more = ", ..." if len(atom.terms) > 3 else ""
                return f"a constraint on {names}{more} excludes the whole box"
        return ""

    def imply(self, lower: Ends, upper: Ends, rows: list[Atom]) -> set[int]:
        """Fills in missing bounds that follow from a row and the bounds on its other inputs."""
        filled = set()
        for _ in range(PASSES):
            before = len(filled)
            for atom in rows:
                self.budget.spend(len(atom.terms))
                unknown = [t for t in atom.terms if t[0] not in (lower if t[1] > 0 else upper)]
                if len(unknown) > 1:
                    continue
                for index, coefficient in unknown or atom.terms:
                    side = upper if coefficient > 0 else lower
                    if index in side:
                        continue
                    # coefficient · input <= bound - the least value of the other terms
                    self.budget.spend(len(atom.terms))
                    others = tuple(t for t in atom.terms if t[0] != index)
                    least = _least(others, lower, upper)
                    if least is not None:
                        side[index] = (atom.bound - least) / coefficient
                        filled.add(index)
            if len(filled) == before:
                break
        return filled

    def demand(self, lower: Ends, upper: Ends) -> None:
        """Stops if an input has no bounds."""
        for side, word in ((lower, "lower"), (upper, "upper")):
            if len(side) < self.size:
                index = next(i for i in range(self.size) if i not in side)
                more = self.size - len(side) - 1
                also = f" (nor have {more:,} other inputs)" if more else ""
                raise PropertyError(
                    f"{self.shell.source}: the input {self.name(index)} has no {word} bound{also}. "
                    "Every input needs a lower and an upper bound in every case; add assertions "
                    f"such as (>= {self.name(index)} 0) and (<= {self.name(index)} 1).",
                    source=self.shell.source,
                )

    def name(self, index: int) -> str:
        return entry_name(self.shell.inputs, index, self.shell.version)


def _set(arrays: list[np.ndarray], index: int, lower: Fraction, upper: Fraction) -> None:
    arrays[0][index], arrays[1][index] = lower, upper
    arrays[2][index], arrays[3][index] = floor64(lower), ceil64(upper)


def _least(terms: Any, lower: Ends, upper: Ends) -> Fraction | None:
    """The least value of the terms over the box; None if it has none, or one of too many digits."""
    total = Fraction(0)
    for index, coefficient in terms:
        side = lower if coefficient > 0 else upper
        if index not in side or total.denominator.bit_length() > 4 * MAX_BITS:
            return None
        total += coefficient * side[index]
    return total


def _short(value: Fraction) -> str:
    """A number for a message."""
    text = str(value) if value.denominator == 1 else f"{floor64(value)!r}"
    return text if len(text) <= 30 else f"{floor64(value)!r}"
