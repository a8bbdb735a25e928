"""A property as arrays: for each input box, the rows to bound and the limits they must exceed.

Coefficients in a property are exact fractions. A row is multiplied by a positive number so that
its coefficients become floats exactly, which nearly always works. Where it does not, the limit is
raised by more than the difference can matter. Limits are rounded up. So `bound > limit` is a proof.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks import Network
from stagecert.networks.bounding.bounds import bound
from stagecert_check.properties import InputSet, Property, Row


@dataclass(frozen=True)
class Scaled:
    """A row with float coefficients: scale * row is `coefficients`, apart from `differences`.

    `differences` are (place, how far the float coefficient is from the exact one, at most).
    """

    coefficients: dict[int, float]
    scale: Fraction
    differences: tuple[tuple[int, Fraction], ...]


@dataclass
class Group:
    """All cases over one input box.

    Attributes:
        inputs: the box, exactly and in float64 rounded outwards.
        numbers: the cases' places in the property.
        rows: the distinct rows of all the cases.
        scaled: those rows as floats.
        places: for each case, where its rows are among these, in the case's own order.
        matrix: (rows, outputs), objectives for `networks.bound`.
        limits: a bound above its limit refutes every case with that row; rounded up.
        goals: a point satisfies a row where the row's value is at most its goal; rounded.
        strict: for these rows a bound that equals the limit refutes too.
    """

    inputs: InputSet
    numbers: tuple[int, ...]
    rows: tuple[Row, ...]
    scaled: tuple[Scaled, ...]
    places: tuple[np.ndarray, ...]
    matrix: np.ndarray
    limits: np.ndarray
    goals: np.ndarray
    strict: np.ndarray

    def passes(self, bounds: np.ndarray, rows: Any = slice(None)) -> np.ndarray:
        """Which certified bounds (..., rows) show that no point satisfies the row."""
        limits, strict = self.limits[rows], self.strict[rows]
        return np.isfinite(bounds) & ((bounds > limits) | (strict & (bounds >= limits)))

    def margin(self, values: np.ndarray) -> np.ndarray:
        """Values of scaled rows (..., rows) in the units of the property, minus the bounds."""
        scale = np.array([_nearest(row.scale) for row in self.scaled])
        with np.errstate(invalid="ignore", over="ignore"):
            return (values - self.goals) / scale


def groups_of(network: Network, property: Property) -> tuple[Network, tuple[Group, ...]]:
    """The groups, and the network whose outputs their rows combine.

    That is `network` itself or, if a row mentions inputs, the network with its inputs as further
    outputs.

    Raises:
        ProblemError: the property does not fit the network, or is of a kind that is not supported.
    """
    _check_fit(network, property)
    sets = [
        (inputs, cases, [(*case.outputs, *inputs.rows) for case in cases])
        for inputs, cases in property.groups
    ]
    if any(row.hidden for _, _, of_cases in sets for rows in of_cases for row in rows):
        raise ProblemError("Rows on hidden values have to be stated first: `OpenModel.stating`.")
    mixed = any(row.inputs for _, _, of_cases in sets for rows in of_cases for row in rows)
    outputs = network.output_size
    if mixed:
        network = with_inputs(network)
    places = {id(case): k for k, case in enumerate(property.cases)}
    groups = []
    for inputs, cases, of_cases in sets:
        order: dict[Row, int] = {}
        for rows in of_cases:
            for row in rows:
                order.setdefault(row, len(order))
        # A table of cases and rows would be quadratic in the length of a disjunction.
        at = tuple(np.array([order[row] for row in rows], np.intp) for rows in of_cases)
        rows = tuple(order)
        scaled = tuple(scaled_row(row, outputs) for row in rows)
        matrix = np.zeros((len(rows), network.output_size))
        for k, one in enumerate(scaled):
            for place, value in one.coefficients.items():
                matrix[k, place] = value
        groups.append(
            Group(
                inputs,
                tuple(places[id(case)] for case in cases),
                rows,
                scaled,
                at,
                matrix,
                np.zeros(len(rows)),
                np.array([_nearest(s.scale * r.bound) for s, r in zip(scaled, rows, strict=True)]),
                np.array([row.strict for row in rows], bool),
            )
        )
    _set_limits(network, groups)
    return network, tuple(groups)


def with_inputs(network: Network) -> Network:
    """The network whose outputs are followed by its inputs."""
    outputs = (*network.outputs, *range(len(network.input_shapes)))
    return Network(
        network.input_shapes, network.nodes, outputs, network.hidden_axis, network.labels
    )


def input_sizes(network: Network) -> tuple[int, ...]:
    """How many entries each input has."""
    return tuple(math.prod(shape) for shape in network.input_shapes)


def shaped(network: Network, flat) -> tuple:
    """Flat input vectors (..., entries) as one array for each input, in the graph's shapes."""
    parts, begin = [], 0
    for shape, size in zip(network.input_shapes, input_sizes(network), strict=True):
        parts.append(flat[..., begin : begin + size].reshape(*flat.shape[:-1], *shape))
        begin += size
    return tuple(parts)


def for_users(network: Network, flat) -> Any:
    """Flat input vectors as `networks.bound` takes them: without hidden batch axes."""
    parts = list(
        x.reshape(*flat.shape[:-1], *(shape[1:] if hidden else shape))
        for x, shape, hidden in zip(
            shaped(network, flat), network.input_shapes, network.hidden_axis, strict=True
        )
    )
    return tuple(parts) if len(parts) > 1 else parts[0]


def _check_fit(network: Network, property: Property) -> None:
    inputs, outputs, _ = property.sizes
    for what, declared, there in (
        ("inputs", inputs, sum(input_sizes(network))),
        ("outputs", outputs, network.output_size),
    ):
        if declared != there:
            raise ProblemError(
                f"The property declares {declared} {what}, but the network has {there}."
            )
    for what, tensors, sizes in (
        ("inputs", property.inputs, list(input_sizes(network))),
        ("outputs", property.outputs, [math.prod(shape) for shape in network.output_shapes]),
    ):
        if len(tensors) > 1 and [tensor.size for tensor in tensors] != sizes:
            raise ProblemError(
                f"The {what} of the property have the sizes {[one.size for one in tensors]}, those "
                f"of the network {sizes}."
            )


def scaled_row(row: Row, outputs: int) -> Scaled:
    """A row with float coefficients; those of inputs follow those of all `outputs` outputs."""
    terms = {index: c for index, c in row.outputs if c}
    terms |= {outputs + index: c for index, c in row.inputs if c}
    if not terms:
        return Scaled({}, Fraction(1), ())
    values = list(terms.values())
    denominators = math.lcm(*(c.denominator for c in values))
    whole = [int(c * denominators) for c in values]
    divisor = math.gcd(*whole)
    # Largest coefficient between 1/2 and 1: powers of two do not round.
    power = max(abs(n // divisor) for n in whole).bit_length()
    scale = Fraction(denominators, divisor) / 2**power
    floats = {place: _nearest(c * scale) for place, c in terms.items()}
    differences = tuple(
        (place, abs(Fraction(floats[place]) - c * scale))
        for place, c in terms.items()
        if Fraction(floats[place]) != c * scale
    )
    return Scaled(floats, scale, differences)


def _set_limits(network: Network, groups: list[Group]) -> None:
    for group in groups:
        places = {place for one in group.scaled for place, _ in one.differences}
        sizes = _magnitudes(network, group, sorted(places)) if places else {}
        for k, (row, one) in enumerate(zip(group.rows, group.scaled, strict=True)):
            reach = [sizes[place] for place, _ in one.differences]
            if not all(map(math.isfinite, reach)):
                group.limits[k] = math.inf
                continue
            slip = sum(
                (d * Fraction(size) for (_, d), size in zip(one.differences, reach, strict=True)),
                Fraction(0),
            )
            group.limits[k] = rounded_up(one.scale * row.bound + slip)


def _magnitudes(network: Network, group: Group, places: list[int]) -> dict[int, float]:
    """Upper bounds on the absolute values of some outputs, by intervals."""
    rows = np.zeros((2 * len(places), network.output_size))
    for k, place in enumerate(places):
        rows[2 * k, place], rows[2 * k + 1, place] = 1, -1
    low = for_users(network, group.inputs.lower64[None].astype(float))
    high = for_users(network, group.inputs.upper64[None].astype(float))
    found = bound(network, low, high, rows, method="ibp", intermediate="ibp").bound[0]
    return {
        place: float(np.max(np.abs(found[2 * k : 2 * k + 2]))) for k, place in enumerate(places)
    }


def rounded_up(x: Fraction) -> float:
    """The smallest float64 that is not below x."""
    try:
        value = float(x)
    except OverflowError:
        return math.inf if x > 0 else -float(np.finfo(float).max)
    return value if Fraction(value) >= x else math.nextafter(value, math.inf)


def _nearest(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        return math.inf if x > 0 else -math.inf
