"""Faults planted in importer and checker while the program runs, which the fuzzer must find.

Most are faults of one operator: `_FAULTS` says what is done to a node before the importer or the
checker reads it, and each is planted in both. The others are in what the operators have in common.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np

from stagecert.networks.importers import enclosures
from stagecert.networks.importers.onnx import arithmetic
from stagecert.networks.importers.onnx import model as onnx_importer
from stagecert.networks.importers.onnx.nodes import CONVERTERS
from stagecert_check import bounds, checker, functions, linear, numbers
from stagecert_check import graph as rigor_graph
from stagecert_check.graph import HANDLERS


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        name: what is wrong.
        side: "importer" or "checker".
        focus: the recipes that random graphs should be made of.
        plant: a context manager in which the fault is there.
    """

    name: str
    side: str
    focus: tuple[str, ...]
    plant: Callable[[], Any]


class _Then(str):
    """The name of an operator that is applied to what the node's own makes."""


# A fault of an operator changes a node's attributes and inputs; it may name another operator.
Fault = Callable[[dict, list], str | None]


def _constant(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def _without(*names: str) -> Fault:
    def fault(attributes, items):
        for name in names:
            attributes.pop(name, None)

    return fault


def _as(operator: str) -> Fault:
    return lambda attributes, items: operator


def _swapped_pads(attributes, items) -> None:
    pads = attributes.get("pads")
    if pads:
        half = len(pads) // 2
        attributes["pads"] = [*pads[half:], *pads[:half]]


def _turned_weights(attributes, items) -> None:
    for k in (0, 1):
        x = items[k]
        if _constant(x) and x.ndim == 2 and x.shape[0] == x.shape[1]:
            items[k] = x.T


def _no_bias(attributes, items) -> None:
    del items[2:]


def _padding_counts(attributes, items) -> None:
    attributes["count_include_pad"] = 1 - attributes.get("count_include_pad", 0)


def _other_default(name: str, value: float) -> Fault:
    def fault(attributes, items):
        attributes.setdefault(name, value)

    return fault


def _forwards(attributes, items) -> None:
    """A negative step of a Slice walks over the same entries from front to back."""
    if len(items) < 5 or not all(_constant(x) for x in items[1:] if x is not None):
        return
    x = items[0]
    starts, ends, axes, steps = (
        None if i is None else [int(n) for n in i.reshape(-1)] for i in items[1:5]
    )
    assert starts is not None
    assert ends is not None
    assert steps is not None
    axes = list(range(len(starts))) if axes is None else axes
    for k, step in enumerate(steps):
        found = range(x.shape[axes[k]])[starts[k] : ends[k] : step]
        if step < 0 and len(found):
            starts[k], ends[k] = found[-1], found[0] + 1
            steps[k] = -step
    items[1], items[2], items[4] = (np.asarray(v, np.int64) for v in (starts, ends, steps))


def _reversed(attributes, items) -> None:
    items.reverse()


def _no_epsilon(attributes, items) -> None:
    attributes["epsilon"] = 0.0


def _swapped(one: int, two: int) -> Fault:
    def fault(attributes, items):
        items[one], items[two] = items[two], items[one]

    return fault


def _no_upper_bound(attributes, items) -> None:
    attributes.pop("max", None)
    del items[2:]


def _inverse_order(attributes, items) -> None:
    if "perm" in attributes:
        attributes["perm"] = [int(k) for k in np.argsort(attributes["perm"])]


def _pads_of_zero(attributes, items) -> None:
    attributes.pop("value", None)
    if len(items) > 2:
        items[2] = None


def _loses_constant(attributes, items) -> None:
    constants = [k for k, x in enumerate(items) if _constant(x)]
    if constants and len(items) > 1:
        del items[constants[-1]]


def _no_negative_indices(attributes, items) -> None:
    if _constant(items[1]):
        items[1] = np.maximum(items[1], 0)


def _other_sizes(attributes, items) -> None:
    if "split" in attributes:
        attributes["split"] = attributes["split"][::-1]
    if len(items) > 1 and _constant(items[1]):
        items[1] = items[1][::-1].copy()


def _one_slope(attributes, items) -> None:
    if _constant(items[1]):
        items[1] = np.full(items[1].shape, items[1].reshape(-1)[0])


def _all_axes(attributes, items) -> None:
    attributes.pop("axes", None)
    del items[1:]


def _coarse(attributes, items) -> None:
    """Constants are rounded to twelve bits."""
    for k, x in enumerate(items):
        if _constant(x) and x.dtype in (np.float32, np.float64):
            mantissa, exponent = np.frexp(x)
            items[k] = np.asarray(np.ldexp(np.round(mantissa * 4096) / 4096, exponent), x.dtype)


def _negates(attributes, items) -> str:
    return _Then("Neg")


def _negated(attributes, items) -> str:
    """For operators that hand their first input on."""
    attributes.clear()
    del items[1:]
    return "Neg"


def _reversed_input(place: int) -> Fault:
    def fault(attributes, items):
        if _constant(items[place]):
            items[place] = items[place][::-1].copy()

    return fault


def _rolled_gates(attributes, items) -> None:
    """Every row of the weights is read as the one after it."""
    items[1] = np.roll(items[1], 1, axis=1)


def _other_triangle(attributes, items) -> None:
    attributes["upper"] = 1 - attributes.get("upper", 1)


def _reversed_result(attributes, items) -> None:
    """The letters behind the arrow of an Einsum, from back to front."""
    given = attributes["equation"]
    left, arrow, right = (given if isinstance(given, str) else given.decode()).partition("->")
    if "." not in right:
        turned = left + arrow + right[::-1]
        attributes["equation"] = turned if isinstance(given, str) else turned.encode()


# name: operators, focus of the graphs, fault
_FAULTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Fault]] = {
    "Gemm ignores beta": (("Gemm",), ("Gemm",), _without("beta")),
    "Gemm ignores alpha": (("Gemm",), ("Gemm",), _without("alpha")),
    "Gemm turns square weights": (("Gemm",), ("Gemm",), _turned_weights),
    "MatMul turns square weights": (("MatMul",), ("MatMul",), _turned_weights),
    "Conv swaps its pads": (("Conv",), ("Conv",), _swapped_pads),
    "Conv loses its bias": (("Conv",), ("Conv",), _no_bias),
    "ConvTranspose swaps its pads": (("ConvTranspose",), ("ConvTranspose",), _swapped_pads),
    "ConvTranspose loses its bias": (("ConvTranspose",), ("ConvTranspose",), _no_bias),
    "AveragePool counts padding": (("AveragePool",), ("AveragePool",), _padding_counts),
    "AveragePool swaps its pads": (("AveragePool",), ("AveragePool",), _swapped_pads),
    "MaxPool ignores ceil_mode": (("MaxPool",), ("MaxPool",), _without("ceil_mode")),
    "LeakyRelu has another default": (
        ("LeakyRelu",), ("LeakyRelu",), _other_default("alpha", 0.1)),
    "Elu ignores alpha": (("Elu",), ("Elu",), _without("alpha")),
    "Celu ignores alpha": (("Celu",), ("Celu",), _without("alpha")),
    "Selu ignores gamma": (("Selu",), ("Selu",), _without("gamma")),
    "HardSigmoid ignores beta": (("HardSigmoid",), ("HardSigmoid",), _without("beta")),
    "Gelu ignores approximate": (("Gelu",), ("Gelu",), _without("approximate")),
    "Swish ignores alpha": (("Swish",), ("Swish",), _without("alpha")),
    "Slice walks forwards always": (("Slice",), ("Slice",), _forwards),
    "Concat joins in reverse order": (("Concat",), ("Concat",), _reversed),
    "BatchNormalization forgets epsilon": (
        ("BatchNormalization",), ("BatchNormalization",), _no_epsilon),
    "BatchNormalization swaps bias and mean": (
        ("BatchNormalization",), ("BatchNormalization",), _swapped(2, 3)),
    "Clip ignores its upper bound": (("Clip",), ("Clip",), _no_upper_bound),
    "Transpose inverts its order": (("Transpose",), ("Transpose", "Reshape"), _inverse_order),
    "Pad pads with zeros": (("Pad",), ("Pad",), _pads_of_zero),
    "Pad swaps its widths": (("Pad",), ("Pad",), _swapped_pads),
    "Sub adds": (("Sub",), ("Sub",), _as("Add")),
    "Sum loses a constant": (("Sum",), ("Sum",), _loses_constant),
    "Max loses a constant": (("Max",), ("Max",), _loses_constant),
    "Min takes the maximum": (("Min",), ("Min",), _as("Max")),
    "Mean adds up": (("Mean",), ("Mean",), _as("Sum")),
    "Gather knows no negative indices": (("Gather",), ("Gather",), _no_negative_indices),
    "Split reverses its sizes": (("Split",), ("Split",), _other_sizes),
    "ReduceMean adds up": (("ReduceMean",), ("ReduceMean",), _as("ReduceSum")),
    "ReduceMax takes the minimum": (("ReduceMax",), ("ReduceMax",), _as("ReduceMin")),
    "ReduceSum ignores its axes": (("ReduceSum",), ("ReduceSum",), _all_axes),
    "GlobalAveragePool takes the maximum": (
        ("GlobalAveragePool",), ("GlobalAveragePool",), _as("GlobalMaxPool")),
    "PRelu has one slope": (("PRelu",), ("PRelu",), _one_slope),
    "Div multiplies": (("Div",), ("Div",), _as("Mul")),
    "Neg does nothing": (("Neg",), ("Neg",), _as("Identity")),
    "Pow does nothing": (("Pow",), ("Pow",), _as("Identity")),
    "Softplus is Relu": (("Softplus",), ("Softplus",), _as("Relu")),
    "Softsign is Tanh": (("Softsign",), ("Softsign",), _as("Tanh")),
    "Mish is HardSwish": (("Mish",), ("Mish",), _as("HardSwish")),
    "Abs is Relu": (("Abs",), ("Abs",), _as("Relu")),
    "Mul rounds its constant": (("Mul",), ("Mul",), _coarse),
    "Add rounds its constant": (("Add",), ("Add",), _coarse),
    "Where swaps its branches": (("Where",), ("branch",), _swapped(1, 2)),
    "Less is Greater": (("Less",), ("branch",), _as("Greater")),
    "LessOrEqual is GreaterOrEqual": (("LessOrEqual",), ("branch",), _as("GreaterOrEqual")),
    "Greater is Less": (("Greater",), ("branch",), _as("Less")),
    "GreaterOrEqual is LessOrEqual": (("GreaterOrEqual",), ("branch",), _as("LessOrEqual")),
    "And is Or": (("And",), ("branch",), _as("Or")),
    "Or is And": (("Or",), ("branch",), _as("And")),
    "Xor is Or": (("Xor",), ("branch",), _as("Or")),
    "Not does nothing": (("Not",), ("branch",), _as("Identity")),
    "ThresholdedRelu ignores alpha": (
        ("ThresholdedRelu",), ("ThresholdedRelu",), _without("alpha")),
    "Shrink ignores bias": (("Shrink",), ("Shrink",), _without("bias")),
    "Softmax is LogSoftmax": (("Softmax",), ("Softmax",), _as("LogSoftmax")),
    "Softmax ignores its axis": (("Softmax",), ("Softmax",), _without("axis")),
    "LogSoftmax is Softmax": (("LogSoftmax",), ("LogSoftmax",), _as("Softmax")),
    "LayerNormalization loses its bias": (
        ("LayerNormalization",), ("LayerNormalization",), _no_bias),
    "InstanceNormalization swaps scale and bias": (
        ("InstanceNormalization",), ("InstanceNormalization",), _swapped(1, 2)),
    "Einsum reverses the letters of its result": (("Einsum",), ("Einsum",), _reversed_result),
    "LSTM takes gates for others": (("LSTM",), ("LSTM",), _rolled_gates),
    "GRU takes gates for others": (("GRU",), ("GRU",), _rolled_gates),
    "RNN takes rows of weights for others": (("RNN",), ("RNN",), _rolled_gates),
    "LSTM ignores its direction": (("LSTM",), ("LSTM",), _without("direction")),
    "GRU ignores linear_before_reset": (("GRU",), ("GRU",), _without("linear_before_reset")),
    "Resize has one way to place points": (
        ("Resize",), ("interpolation",), _without("coordinate_transformation_mode")),
    "Upsample changes the sign": (("Upsample",), ("Upsample",), _negates),
    "ScatterND writes in reverse order": (("ScatterND",), ("ScatterND",), _reversed_input(1)),
    "CumSum forgets that it is exclusive": (("CumSum",), ("CumSum",), _without("exclusive")),
    "CumSum changes the sign": (("CumSum",), ("CumSum",), _negates),
    "ReduceLogSumExp takes the maximum": (
        ("ReduceLogSumExp",), ("ReduceLogSumExp",), _as("ReduceMax")),
    "ReduceLogSum takes no logarithm": (("ReduceLogSum",), ("ReduceLogSum",), _as("ReduceSum")),
    "ReduceProd adds up": (("ReduceProd",), ("ReduceProd",), _as("ReduceSum")),
    "LRN changes the sign": (("LRN",), ("LRN",), _negates),
    "LpNormalization ignores p": (("LpNormalization",), ("LpNormalization",), _without("p")),
    "RMSNormalization changes the sign": (("RMSNormalization",), ("RMSNormalization",), _negates),
    "GroupNormalization swaps scale and bias": (
        ("GroupNormalization",), ("GroupNormalization",), _swapped(1, 2)),
    "GlobalLpPool ignores p": (("GlobalLpPool",), ("GlobalLpPool",), _without("p")),
    "DepthToSpace ignores its mode": (("DepthToSpace",), ("DepthToSpace",), _without("mode")),
    "SpaceToDepth changes the sign": (("SpaceToDepth",), ("SpaceToDepth",), _negates),
    "Trilu takes the other triangle": (("Trilu",), ("Trilu",), _other_triangle),
    "GatherElements reads in reverse order": (
        ("GatherElements",), ("GatherElements",), _reversed_input(1)),
    "GatherND reads in reverse order": (("GatherND",), ("GatherND",), _reversed_input(1)),
    "Tile reverses its repeats": (("Tile",), ("Tile",), _reversed_input(1)),
    "Expand does nothing": (("Expand",), ("Expand",), _as("Identity")),
    "ReduceL1 is ReduceL2": (("ReduceL1",), ("ReduceL1",), _as("ReduceL2")),
    "ReduceL2 is ReduceSumSquare": (("ReduceL2",), ("ReduceL2",), _as("ReduceSumSquare")),
    "ReduceSumSquare is ReduceL1": (
        ("ReduceSumSquare",), ("ReduceSumSquare",), _as("ReduceL1")),
    "ReduceMin takes the maximum": (("ReduceMin",), ("ReduceMin",), _as("ReduceMax")),
    "GlobalMaxPool takes the mean": (
        ("GlobalMaxPool",), ("GlobalMaxPool",), _as("GlobalAveragePool")),
    "Sin is Cos": (("Sin",), ("Sin",), _as("Cos")),
    "Cos is Sin": (("Cos",), ("Cos",), _as("Sin")),
    "Sqrt is Log": (("Sqrt",), ("Sqrt",), _as("Log")),
    "Log is Sqrt": (("Log",), ("Log",), _as("Sqrt")),
    "Exp is Softplus": (("Exp",), ("Exp",), _as("Softplus")),
    "Erf is Tanh": (("Erf",), ("Erf",), _as("Tanh")),
    "Reciprocal does nothing": (("Reciprocal",), ("Reciprocal",), _as("Identity")),
    "Floor is Ceil": (("Floor",), ("Floor",), _as("Ceil")),
    "Ceil is Round": (("Ceil",), ("Ceil",), _as("Round")),
    "Round is Floor": (("Round",), ("Round",), _as("Floor")),
    "Sign is Tanh": (("Sign",), ("Sign",), _as("Tanh")),
    "Relu is Abs": (("Relu",), ("Relu",), _as("Abs")),
    "Sigmoid is Tanh": (("Sigmoid",), ("Sigmoid",), _as("Tanh")),
    "Tanh is Erf": (("Tanh",), ("Tanh",), _as("Erf")),
    "HardSwish is Mish": (("HardSwish",), ("HardSwish",), _as("Mish")),
    "Identity changes the sign": (("Identity",), ("Identity",), _negated),
    "Dropout changes the sign": (("Dropout",), ("Dropout",), _negated),
    "Cast changes the sign": (("Cast",), ("Cast",), _negated),
    "CastLike changes the sign": (("CastLike",), ("CastLike",), _negated),
    "Reshape changes the sign": (("Reshape",), ("Reshape",), _negates),
    "Flatten changes the sign": (("Flatten",), ("Flatten",), _negates),
    "Squeeze changes the sign": (("Squeeze",), ("Squeeze",), _negates),
    "Unsqueeze changes the sign": (("Unsqueeze",), ("Unsqueeze",), _negates),
    "ConstantOfShape is zero": (("ConstantOfShape",), ("constants",), _without("value")),
}  # fmt: skip


# name: operator, focus, what becomes of the constant that it makes
_CHANGES: dict[str, tuple[str, tuple[str, ...], Callable]] = {
    "Shape is one larger": ("Shape", ("constants",), lambda shape: shape + 1),
    "Size is one larger": ("Size", ("constants",), lambda size: np.asarray(size + 1)),
    "Constant is read twice": ("Constant", ("Constant",), lambda value: value + value),
    "Range is turned around": ("Range", ("constants",), lambda values: values[::-1]),
}


@contextlib.contextmanager
def _planted(table: dict, operators, fault: Fault) -> Iterator[None]:
    """Nodes of some operators are changed before the table's own function sees them."""
    original = dict(table)

    def wrong(own, call):
        items = call.inputs if hasattr(call, "inputs") else call.items
        other = fault(call.attributes, items)
        if isinstance(other, _Then):
            made = own(call)
            items[:] = made if isinstance(made, list) else [made]
        if other is not None:
            call.operator = str(other)
            return original[other](call)
        return own(call)

    for operator in operators:
        if operator in table:
            table[operator] = functools.partial(wrong, original[operator])
    try:
        yield
    finally:
        table.update(original)


@contextlib.contextmanager
def _planted_results(table: dict, operator: str, change: Callable) -> Iterator[None]:
    """What an operator makes, a constant, is changed."""
    original = table[operator]

    def wrong(call):
        made = original(call)
        return [change(x) for x in made] if isinstance(made, list) else change(made)

    table[operator] = wrong
    try:
        yield
    finally:
        table[operator] = original


# -- what operators have in common -----------------------------------------------------------------


def _rounded_store(original):
    def stored(tensor):
        array = original(tensor)
        return array.astype(np.float32) if array.dtype == np.float64 else array

    return stored


def _rounded_sum(original):
    def add(x, y):
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            return np.asarray(x, np.float64) + np.asarray(y, np.float64)
        return original(x, y)

    return add


def _tolerant_gate(original):
    """hard_swish is recognised within a millionth, as it once was."""

    def gate(call, value, a, b):
        known = original(call, value, a, b)
        if known is not None and known.kind == "hard_swish" and abs(known.p - 1) < 1e-6:
            return replace(known, p=Fraction(1))
        return known

    return gate


def _rolled_index(original):
    def init(self, index):
        original(self, np.roll(index.reshape(-1), 1).reshape(index.shape))

    return init


def _always_plus(original):
    return lambda self, signs: original(self, [1] * len(signs))


def _unturned(original):
    def transposed(self, g, shapes):
        square = self.weights.shape[0] == self.weights.shape[1]
        return [self._times(g, self.weights)] if square else original(self, g, shapes)

    return transposed


def _flipped_sign(original):
    def unit_bounds(self, index, of, entry, sign, lines):
        return original(self, index, of, entry, -sign, lines)

    return unit_bounds


def _too_tight(original):
    def improve(self, index, of, entry, sign, found):
        return original(self, index, of, entry, sign, found + 1e-3 * np.abs(found))

    return improve


def _close_line(original):
    def offset(self, low, high, slope, side):
        return original(self, low, high, slope, side) + side * 1e-3 * (high - low)

    return offset


def _largest_low(self, low, high):
    return high.max(axis=-1), high.max(axis=-1)


def _lenient(self, task, bound) -> bool:
    return bool(bound > -1e-9)


def _patched(target: Any, name: str, fault: Callable) -> Callable[[], Any]:
    def plant():
        return mock.patch.object(target, name, fault(getattr(target, name)))

    return plant


def _common() -> list[Mutant]:
    importer = [
        ("float64 weights are stored in float32", ("MatMul", "Mul", "Add"),
         _patched(onnx_importer, "stored", _rounded_store)),
        ("sums of constants are rounded", ("cancelling_sum", "Sum"),
         _patched(enclosures, "add", _rounded_sum)),
        ("hard_swish is recognised with a tolerance", ("hard_swish",),
         _patched(arithmetic, "_gate", _tolerant_gate)),
    ]  # fmt: skip
    in_checker = [
        ("entries are moved by one place", ("Transpose", "Gather", "Concat", "Pad"),
         _patched(linear.Move, "__init__", _rolled_index)),
        ("Sum ignores signs", ("Sub", "Neg", "Min"),
         _patched(linear.Sum, "__init__", _always_plus)),
        ("MatMul is not transposed on the way back", ("MatMul", "Gemm"),
         _patched(linear.MatMul, "transposed", _unturned)),
        ("intervals are tightened from the wrong side", ("Relu", "MatMul"),
         _patched(bounds.Facts, "unit_bounds", _flipped_sign)),
        ("intervals are tightened too far", ("Relu", "MatMul"),
         _patched(bounds.Facts, "improve", _too_tight)),
        ("lines on smooth curves are too close", ("Sigmoid", "Tanh", "Exp"),
         _patched(functions.Smooth, "offset", _close_line)),
        ("lines on kinked curves are too close", ("Relu", "LeakyRelu", "Clip"),
         _patched(functions.Piecewise, "offset", _close_line)),
        ("a maximum is at least its largest upper end", ("MaxPool", "ReduceMax", "Max"),
         _patched(functions.Maximum, "image", lambda _: _largest_low)),
        ("rounding is not charged", ("cancelling_products", "cancelling_sum", "MatMul"),
         _patched(numbers.Arithmetic, "slip", lambda _: lambda self, terms, loose: 0)),
        ("certificates are accepted with a tolerance", ("Relu", "MatMul"),
         _patched(checker.Checker, "refutes", lambda _: _lenient)),
        ("shifts are subtracted", ("Add",), _patched(rigor_graph.Call, "shift", _negated_shift)),
    ]  # fmt: skip
    return [
        *(Mutant(name, "importer", focus, plant) for name, focus, plant in importer),
        *(Mutant(name, "checker", focus, plant) for name, focus, plant in in_checker),
    ]


def _negated_shift(original):
    return lambda self, x, constant: original(self, x, -constant)


def all_mutants() -> dict[str, Mutant]:
    """The mutants by "side: name"."""
    found = [
        Mutant(name, side, focus, functools.partial(_planted, table, operators, fault))
        for name, (operators, focus, fault) in _FAULTS.items()
        for side, table in (("importer", CONVERTERS), ("checker", HANDLERS))
        # What the checker refuses anyway cannot be read wrongly.
        if any(operator in table for operator in operators)
    ]
    found += [
        Mutant(name, side, focus, functools.partial(_planted_results, table, operator, change))
        for name, (operator, focus, change) in _CHANGES.items()
        for side, table in (("importer", CONVERTERS), ("checker", HANDLERS))
        if operator in table
    ]
    return {f"{one.side}: {one.name}": one for one in [*found, *_common()]}


def operators_with_mutants() -> set[str]:
    """The operators that have a fault of their own."""
    faults = {operator for operators, _, _ in _FAULTS.values() for operator in operators}
    return faults | {operator for operator, _, _ in _CHANGES.values()}
