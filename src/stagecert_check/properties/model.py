"""A property: which inputs and outputs of a network would be a counterexample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from stagecert_check.properties.errors import PropertyError

# A variable is one integer: its kind in the high bits, its flat index in the low ones.
KIND = 1 << 40

Terms = tuple[tuple[int, Fraction], ...]


@dataclass(frozen=True)
class Tensor:
    """An input, output or hidden value of a network.

    `node` is the name of a hidden value in the model file; inputs and outputs have none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    node: str | None = None

    @property
    def size(self) -> int:
        """How many entries it has."""
        return math.prod(self.shape)

    def entry(self, index: int) -> str:
        """The name of one entry, which is given by its place in row-major order."""
        if not self.shape:
            return self.name
        where = []
        for length in reversed(self.shape):
            index, rest = divmod(index, length)
            where.append(str(rest))
        return f"{self.name}[{','.join(reversed(where))}]"


@dataclass(frozen=True)
class Network:
    """The interface of a network as the property declares it.

    `equal_to` and `isomorphic_to` name an earlier network with the same weights, or with the same
    structure.
    """

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    hidden: tuple[Tensor, ...] = ()
    equal_to: str | None = None
    isomorphic_to: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One linear constraint: inputs·x + outputs·y + hidden·h <= bound, or < where `strict`.

    Each side holds pairs (index, coefficient), with indices into the flattened vectors. Products of
    variables follow the hidden values, in the order of `Property.products`.
    """

    inputs: Terms
    outputs: Terms
    hidden: Terms
    bound: Fraction
    strict: bool

    def holds(self, x: Any, y: Any, hidden: Any, tolerance: Fraction = Fraction(0)) -> bool:
        """Whether exact vectors satisfy the row when its bound is raised by `tolerance`."""
        value = sum(c * x[i] for i, c in self.inputs)
        value += sum(c * y[i] for i, c in self.outputs)
        value += sum(c * hidden[i] for i, c in self.hidden)
        limit = self.bound + tolerance
        return value < limit if self.strict else value <= limit


class Dense(NamedTuple):
    """Rows as exact object arrays: outputs @ y + inputs @ x <= bound, or < where `strict`.

    `inputs` or `outputs` is None where no row mentions them.
    """

    outputs: np.ndarray | None
    inputs: np.ndarray | None
    bound: np.ndarray
    strict: np.ndarray


@dataclass(frozen=True, eq=False)
class InputSet:
    """A box of inputs, and the linear rows that cut it.

    `lower` and `upper` are exact (object arrays of Fractions). `lower64` and `upper64` are float64,
    rounded outwards, so the float box contains the exact one. A strict bound appears in the box as
    a closed one and once more, strict, in `rows`.
    """

    lower: np.ndarray
    upper: np.ndarray
    lower64: np.ndarray
    upper64: np.ndarray
    rows: tuple[Row, ...] = ()

    def contains(self, x: Any, tolerance: Fraction = Fraction(0)) -> bool:
        """Whether an exact vector lies in the set, each constraint relaxed by `tolerance`."""
        return all(
            l - tolerance <= value <= u + tolerance
            for l, value, u in zip(self.lower, x, self.upper, strict=True)
        ) and all(row.holds(x, (), (), tolerance) for row in self.rows)


@dataclass(frozen=True, eq=False)
class Case:
    """One way to be a counterexample: inputs from a set, and outputs that satisfy every row.

    Cases with the same inputs share one `inputs` object; `Property.groups` collects them.
    """

    inputs: InputSet
    outputs: tuple[Row, ...]
    sizes: tuple[int, int, int]
    products: tuple[tuple[int, int], ...] = ()

    @property
    def input_lower(self) -> np.ndarray:
        """Exact lower bounds of the inputs."""
        return self.inputs.lower

    @property
    def input_upper(self) -> np.ndarray:
        """Exact upper bounds of the inputs."""
        return self.inputs.upper

    @property
    def input_lower64(self) -> np.ndarray:
        """Lower bounds of the inputs, rounded down to float64."""
        return self.inputs.lower64

    @property
    def input_upper64(self) -> np.ndarray:
        """Upper bounds of the inputs, rounded up to float64."""
        return self.inputs.upper64

    @property
    def input_rows(self) -> tuple[Row, ...]:
        """Linear constraints on the inputs beyond the box."""
        return self.inputs.rows

    def dense_outputs(self) -> Dense:
        """The output rows as exact dense arrays, unless they are on hidden values or products."""
        return _dense(self.outputs, self.sizes)

    def counterexample(self, x: Any, y: Any, tolerance: Any = 0, hidden: Any = None) -> bool:
        """Whether inputs `x` and outputs `y` belong to this case, in exact arithmetic.

        Arrays of any shape are read in row-major order, and each float stands for exactly the
        number it holds. `tolerance` relaxes every constraint by that amount. A point with an
        infinity or a NaN is no counterexample.
        """
        point = _point((x, y, hidden), self.sizes, self.products, self.outputs)
        relaxed = _tolerance(tolerance)
        if point is None:
            return False
        # The output rows come first: they are few, and the box may have thousands of entries.
        return all(
            row.holds(point.x, point.y, point.hidden, relaxed) for row in self.outputs
        ) and self.inputs.contains(point.x, relaxed)


@dataclass(frozen=True, eq=False)
class Property:
    """What a property file says: the networks, and every way to be a counterexample.

    The property holds if no case has a point. `dropped` counts the cases that cannot have one,
    and `notes` says why. With several networks, the inputs (and the outputs, and the hidden
    values) of all of them follow one another in the order of their declarations. `digest` is the
    SHA-256 of what the file holds, unpacked. `products` are pairs of variables: i is an input,
    `KIND` + i an output, 2 `KIND` + i a hidden value or, after those, an earlier product.
    """

    source: str
    version: str
    networks: tuple[Network, ...]
    cases: tuple[Case, ...]
    dropped: int = 0
    notes: tuple[str, ...] = ()
    digest: str = ""
    products: tuple[tuple[int, int], ...] = ()

    @property
    def empty(self) -> bool:
        """Whether no case is left, so that there is nothing to verify: the property holds."""
        return not self.cases

    @property
    def status(self) -> str:
        """`"ready"`, or `"empty"` when no input satisfies the assertions."""
        return "empty" if self.empty else "ready"

    @cached_property
    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs of all networks."""
        return tuple(tensor for network in self.networks for tensor in network.inputs)

    @cached_property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of all networks."""
        return tuple(tensor for network in self.networks for tensor in network.outputs)

    @cached_property
    def hidden(self) -> tuple[Tensor, ...]:
        """The hidden values that the property names."""
        return tuple(tensor for network in self.networks for tensor in network.hidden)

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """How many inputs, outputs and hidden values there are, counted in entries."""
        return (
            sum(tensor.size for tensor in self.inputs),
            sum(tensor.size for tensor in self.outputs),
            sum(tensor.size for tensor in self.hidden),
        )

    @cached_property
    def compares(self) -> bool:
        """Whether every row compares two outputs: Y_i - Y_j with zero, times any number.

        Then nothing matters but the order of the outputs.
        """
        return all(_compares(row) for case in self.cases for row in case.outputs)

    @cached_property
    def groups(self) -> tuple[tuple[InputSet, tuple[Case, ...]], ...]:
        """The cases by input set, so that bounds on a network can be shared between them."""
        found: dict[int, list[Case]] = {}
        for case in self.cases:
            found.setdefault(id(case.inputs), []).append(case)
        return tuple((cases[0].inputs, tuple(cases)) for cases in found.values())

    def counterexample(self, x: Any, y: Any, tolerance: Any = 0, hidden: Any = None) -> bool:
        """Whether inputs `x` and outputs `y` belong to any case; see `Case.counterexample`."""
        rows = [row for case in self.cases for row in case.outputs]
        point = _point((x, y, hidden), self.sizes, self.products, rows)
        relaxed = _tolerance(tolerance)
        if point is None:
            return False
        return any(
            inputs.contains(point.x, relaxed)
            and any(
                all(row.holds(point.x, point.y, point.hidden, relaxed) for row in case.outputs)
                for case in cases
            )
            for inputs, cases in self.groups
        )


def entry_name(tensors: Sequence[Tensor], index: int, version: str) -> str:
    """The name that the file uses for one entry of the concatenated tensors."""
    for tensor in tensors:
        if index < tensor.size:
            one = version.startswith("1.")
            return f"{tensor.name}_{index}" if one else tensor.entry(index)
        index -= tensor.size
    raise IndexError(index)


def _compares(row: Row) -> bool:
    if row.inputs or row.hidden or row.bound != 0 or len(row.outputs) != 2:
        return False
    (first, factor), (second, opposite) = row.outputs
    return first != second and factor == -opposite != 0


def needs_hidden(rows: Sequence[Row]) -> bool:
    """Whether any of the rows mentions a hidden value or a product."""
    return any(row.hidden for row in rows)


def _dense(rows: Sequence[Row], sizes: tuple[int, int, int]) -> Dense:
    if needs_hidden(rows):
        raise PropertyError(
            "Rows on hidden values or products have no dense form over inputs and outputs."
        )

    def matrix(kind: int):
        chosen = [(row.inputs, row.outputs)[kind] for row in rows]
        if not any(chosen):
            return None
        out = np.full((len(chosen), sizes[kind]), Fraction(0), dtype=object)
        for number, terms in enumerate(chosen):
            for index, coefficient in terms:
                out[number, index] = coefficient
        return out

    bound = np.empty(len(rows), dtype=object)
    bound[:] = [row.bound for row in rows]
    return Dense(matrix(1), matrix(0), bound, np.array([row.strict for row in rows], dtype=bool))


def _tolerance(value: Any) -> Fraction:
    exact = _exact([value], 1, "tolerance")
    if exact is None or exact[0] < 0:
        raise PropertyError(f"The tolerance is {value!r}; give a finite number that is at least 0.")
    return exact[0]


class _Point(NamedTuple):
    x: list[Fraction]
    y: list[Fraction]
    hidden: list[Fraction]


def _point(
    values: tuple[Any, Any, Any],
    sizes: tuple[int, int, int],
    products: tuple[tuple[int, int], ...],
    rows: Sequence[Row],
) -> _Point | None:
    """The exact vectors of a point (x, y, hidden), or None if an entry is not finite."""
    x, y, hidden = values
    if hidden is None and any(index < sizes[2] for row in rows for index, _ in row.hidden):
        raise PropertyError("The property constrains hidden values; give them as `hidden`.")
    exact_x, exact_y = _exact(x, sizes[0], "x"), _exact(y, sizes[1], "y")
    exact_hidden = [] if hidden is None else _exact(hidden, sizes[2], "hidden")
    if exact_x is None or exact_y is None or exact_hidden is None:
        return None
    exact_hidden += [Fraction(0)] * (sizes[2] - len(exact_hidden))  # which no row mentions
    return _Point(exact_x, exact_y, with_products(products, (exact_x, exact_y, exact_hidden)))


def with_products(
    products: Sequence[tuple[int, int]], values: tuple[list[Fraction], ...]
) -> list[Fraction]:
    """The hidden values, followed by the products, of exact vectors (x, y, hidden)."""
    hidden = list(values[2])
    known = values[0], values[1], hidden
    for pair in products:
        one, other = (known[variable // KIND][variable % KIND] for variable in pair)
        hidden.append(one * other)
    return hidden


def _exact(values: Any, size: int, name: str) -> list[Fraction] | None:
    """Exact values in row-major order, or None if an entry is not finite."""
    try:
        flat = np.asarray(values).reshape(-1)
        if flat.dtype.kind == "V":  # bfloat16 and its like
            flat = flat.astype(np.float64)
        elif flat.dtype.kind not in "fiubO":
            raise PropertyError(f"{name} must be an array of real numbers, not {flat.dtype}.")
        entries = flat.tolist()
        if len(entries) != size:
            raise PropertyError(f"{name} has {len(entries)} entries; the property has {size}.")
        return [Fraction(*value.as_integer_ratio()) for value in entries]
    except OverflowError:
        return None  # an infinity
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, PropertyError):
            raise
        if "NaN" in str(error):
            return None
        raise PropertyError(f"{name} must be an array of real numbers: {error}.") from None
