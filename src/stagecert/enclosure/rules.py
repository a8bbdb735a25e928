"""The rules of primitives with one output: what each makes of intervals.

Conversions between floating-point types are read as what they are in real arithmetic: nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from stagecert.enclosure import functions, moving
from stagecert.enclosure import intervals as iv
from stagecert.enclosure.intervals import Interval
from stagecert.errors import ProblemError

Rule = Callable[..., Interval]  # (equation, *values) -> the equation's one output

TABLE: dict[str, Rule] = {}


def _rule(*names: str):
    def keep(rule: Rule) -> Rule:
        TABLE.update(dict.fromkeys(names, rule))
        return rule

    return keep


def _entrywise(function: Callable[..., Interval]) -> Rule:
    return lambda equation, *values: function(*values)


# -- arithmetic and functions ----------------------------------------------------------------------

for _names, _function in (
    ("add add_any", iv.add),
    ("neg", iv.negative),
    ("max stagecert_maximum", iv.maximum),
    ("min", iv.minimum),
    ("abs", iv.absolute),
    ("square", iv.square),
    ("sign", functions.sign),
    ("exp", functions.exp),
    ("expm1", functions.expm1),
    ("log", functions.log),
    ("log1p", functions.log1p),
    ("sqrt", functions.sqrt),
    ("rsqrt", functions.rsqrt),
    ("tanh", functions.tanh),
    ("logistic", functions.logistic),
    ("pow", functions.power),
    ("copy copy_p optimization_barrier stop_gradient reduce_precision real", lambda x: x),
    ("clamp", lambda low, x, high: iv.minimum(iv.maximum(low, x), high)),
):
    _rule(*_names.split())(_entrywise(_function))

for _name, _function in functions.BY_ARB.items():
    _rule(_name)(_entrywise(_function))


def _same(equation) -> bool:
    return equation.invars[0] is equation.invars[1]


@_rule("sub")
def _sub(equation, x, y):
    if _same(equation) and x.is_float and np.all(np.isfinite(x.low) & np.isfinite(x.high)):
        return Interval(np.zeros(x.shape))
    return iv.subtract(x, y)


@_rule("mul")
def _mul(equation, x, y):
    return iv.square(x) if _same(equation) else iv.multiply(x, y)


@_rule("div")
def _div(equation, x, y):
    if x.is_float:
        return iv.divide(x, y)
    a, b = (moving.whole_numbers(v, "a quotient of whole numbers") for v in (x, y))
    return Interval(np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b)))


@_rule("rem")
def _rem(equation, x, y):
    return Interval(np.fmod(*(moving.whole_numbers(v, "a remainder") for v in (x, y))))


@_rule("integer_pow")
def _integer_pow(equation, x):
    return functions.integer_power(x, equation.params["y"])


@_rule("floor", "ceil", "round")
def _whole(equation, x):
    away = equation.params.get("rounding_method")
    if equation.primitive.name == "round" and away is not None and int(away) == 0:
        return x.map(
            lambda a: np.trunc(a) + np.where(np.abs(a - np.trunc(a)) >= 0.5, np.sign(a), 0)
        )
    return x.map({"floor": np.floor, "ceil": np.ceil, "round": np.rint}[equation.primitive.name])


@_rule("convert_element_type")
def _convert(equation, x):
    kind = np.dtype(equation.params["new_dtype"]).kind
    if kind == "b":
        zero = Interval(np.zeros(x.shape, x.low.dtype))
        return _not_equal(x, zero)
    if kind in "iu":
        most = 2.0**62
        low = np.clip(np.trunc(np.where(np.isnan(x.low), -most, x.low)), -most, most)
        high = np.clip(np.trunc(np.where(np.isnan(x.high), most, x.high)), -most, most)
        return Interval(low.astype(np.int64), high.astype(np.int64))
    if kind == "c":
        raise ProblemError("Complex numbers have no order: no bound can be proven with them.")
    y = x.map(lambda a: a.astype(np.float64))
    y.note = x.note
    return y


# -- comparisons -----------------------------------------------------------------------------------


def _unknown(x: Interval, y: Interval):
    """Where nothing can be decided: NaN."""
    return np.isnan(x.low) | np.isnan(y.low) if x.is_float else np.array(False)


def _less(x: Interval, y: Interval) -> Interval:
    return Interval(x.high < y.low, (x.low < y.high) | _unknown(x, y))


def _at_most(x: Interval, y: Interval) -> Interval:
    return Interval(x.high <= y.low, (x.low <= y.high) | _unknown(x, y))


def _equal(x: Interval, y: Interval) -> Interval:
    certain = (x.low == x.high) & (y.low == y.high) & (x.low == y.low)
    return Interval(certain, ((x.low <= y.high) & (y.low <= x.high)) | _unknown(x, y))


def _not(x: Interval) -> Interval:
    return Interval(~x.high, ~x.low)


def _not_equal(x: Interval, y: Interval) -> Interval:
    return _not(_equal(x, y))


@dataclass(frozen=True, eq=False)
class _Extreme:
    """The note of a largest (sign 1) or least (sign -1) entry, and of the mask of its places."""

    among: Interval
    axes: tuple[int, ...]
    sign: int
    is_mask: bool = False


def _places_of_extreme(x: Interval, note: _Extreme) -> Interval:
    """Where the largest entry is, as derivatives of maxima ask: somewhere it is."""
    if note.sign < 0:
        x = iv.negative(x)
    possible = ~(x.high < x.low.max(axis=note.axes, keepdims=True))
    certain = possible & (possible.sum(axis=note.axes, keepdims=True) == 1)
    if x.is_point:
        certain = possible
    return Interval(certain, possible, replace(note, is_mask=True))


# Of one number with itself, the answer is certain.
for _name, _function, _of_itself in (
    ("lt", _less, False),
    ("le", _at_most, True),
    ("gt", lambda x, y: _less(y, x), False),
    ("ge", lambda x, y: _at_most(y, x), True),
    ("eq", _equal, True),
    ("ne", _not_equal, False),
):

    def _compare(equation, x, y, function=_function, of_itself=_of_itself):
        if _same(equation):
            return Interval(np.full(x.shape, of_itself))
        if function is _equal and isinstance(y.note, _Extreme) and y.note.among is x:
            return _places_of_extreme(x, y.note)
        return function(x, y)

    _rule(_name)(_compare)


@_rule("is_finite")
def _is_finite(equation, x):
    certain = np.isfinite(x.low) & np.isfinite(x.high)
    return Interval(certain, np.ones(x.shape, bool))


def _logical(function) -> Rule:
    """and, or: increasing in both, so the ends are what the ends give."""

    def rule(equation, x, y):
        if x.low.dtype.kind != "b":
            raise ProblemError("Bitwise operations on numbers have no enclosure.")
        return Interval(function(x.low, y.low), function(x.high, y.high))

    return rule


_rule("and")(_logical(np.logical_and))
_rule("or")(_logical(np.logical_or))


@_rule("not")
def _negated(equation, x):
    return _not(x)


@_rule("xor")
def _xor(equation, x, y):
    return _not_equal(x, y)


@_rule("select_n")
def _select(equation, which, *cases):
    if which.low.dtype.kind == "b":
        return iv.select(which, *cases) if len(cases) == 2 else cases[0]
    result = cases[0]
    for k, case in enumerate(cases[1:], 1):
        result = iv.select(_at_most(Interval(np.int64(k)), which), result, case)
    return result


# -- reductions ------------------------------------------------------------------------------------


def _last(x: Interval, axes) -> Interval:
    """The axes to reduce as one last axis."""
    kept = [k for k in range(x.low.ndim) if k not in axes]
    shape = [x.shape[k] for k in kept]
    count = int(np.prod([x.shape[k] for k in axes], dtype=int))
    return x.map(lambda a: a.transpose((*kept, *axes)).reshape((*shape, count)))


@_rule("reduce_sum")
def _reduce_sum(equation, x):
    total = iv.sum_last(_last(x, equation.params["axes"]))
    note = x.note
    if isinstance(note, _Extreme) and note.is_mask and note.axes == tuple(equation.params["axes"]):
        total = Interval(np.maximum(total.low, 1), total.high)
    return total


def _reduce(function) -> Rule:
    sign = {np.max: 1, np.min: -1}.get(function)

    def rule(equation, x):
        axes = tuple(equation.params["axes"])
        found = _last(x, axes).map(lambda a: function(a, axis=-1))
        found.note = None if sign is None else _Extreme(x, axes, sign)
        return found

    return rule


for _names, _function in (
    ("reduce_max", np.max),
    ("reduce_min", np.min),
    ("reduce_and", np.all),
    ("reduce_or", np.any),
):
    _rule(_names)(_reduce(_function))


@_rule("stagecert_max")
def _max_last(equation, x):
    return x.map(lambda a: a.max(axis=-1))


@_rule("stagecert_allocation")
def _allocation(equation, x, caps):
    """The most that a whole is worth, where there is so much of each (`pieces.max_allocation`).

    Any allocation a is a lower bound, with what it leaves at the least of all values; any price p
    an upper one: p + caps . max(x - p, 0). Good ones are found in floating point.
    """
    size = max(x.shape[-1], 1)
    slip = 8 * size * float(np.finfo(equation.invars[0].aval.dtype).eps)  # as the piece has it
    most = np.maximum(caps.low, 0)
    order = np.argsort(-x.low, axis=-1, kind="stable")
    sorted_caps = np.take_along_axis(most, order, axis=-1)
    taken = np.clip(1 - (np.cumsum(sorted_caps, axis=-1) - sorted_caps), 0, sorted_caps)
    # So much less that it is no more than a whole in real arithmetic either.
    a = np.take_along_axis(taken, np.argsort(order, axis=-1), axis=-1) * (1 - 16 * size * iv.EPS)
    left = iv.subtract(Interval(np.ones(a.shape[:-1])), iv.sum_last(Interval(a)))
    left = Interval(np.zeros_like(left.low), np.maximum(left.high, 0))
    worth = iv.sum_last(iv.multiply(Interval(a), Interval(x.low)))
    low = iv.add(worth, iv.multiply(left, Interval(x.low.min(axis=-1)))).low
    # The price is the least value that anything was taken of.
    price = np.where(taken > 0, np.take_along_axis(x.low, order, axis=-1), np.inf).min(axis=-1)
    price = Interval(np.where(np.isfinite(price), price, 0.0))
    gain = iv.subtract(Interval(x.high), price.map(lambda p: p[..., None]))
    gain = iv.maximum(gain, Interval(np.zeros(x.shape)))
    total = iv.sum_last(caps)
    whole = Interval(np.where(total.low >= 1, 1.0, 1 - slip), np.ones(total.shape))
    paid = iv.sum_last(iv.multiply(Interval(np.maximum(caps.high, 0)), gain))
    high = iv.add(iv.multiply(whole, price), paid).high
    # Caps that may not make a whole, or are negative, leave nothing to say.
    unknown = ~(total.low >= iv.up(1 - slip)) | (caps.low < 0).any(axis=-1)
    return iv.undefined_where(unknown, Interval(low, high))


@_rule("reduce_prod")
def _reduce_prod(equation, x):
    x = _last(x, equation.params["axes"])
    result = Interval(np.ones(x.shape[:-1]))
    for k in range(x.shape[-1]):
        result = iv.multiply(result, x.map(lambda a, k=k: a[..., k]))
    return result


def _cumulative(function) -> Rule:
    def rule(equation, x):
        axis = equation.params["axis"]
        turn = (lambda a: np.flip(a, axis)) if equation.params["reverse"] else (lambda a: a)
        return function(x.map(turn), axis).map(turn)

    return rule


_rule("cumsum")(_cumulative(iv.cumulative_sum))
_rule("cummax")(_cumulative(lambda x, axis: x.map(lambda a: np.maximum.accumulate(a, axis))))
_rule("cummin")(_cumulative(lambda x, axis: x.map(lambda a: np.minimum.accumulate(a, axis))))


@_rule("argmax", "argmin")
def _argument(equation, x):
    (axis,) = equation.params["axes"]
    if equation.primitive.name == "argmin":
        x = iv.negative(x)
    n = x.shape[axis]
    shape = [1] * x.low.ndim
    shape[axis] = n
    count = np.broadcast_to(np.arange(n).reshape(shape), x.shape)
    possible = ~(x.high < x.low.max(axis=axis, keepdims=True))  # all, where one is NaN
    first = np.where(possible, count, n).min(axis=axis)
    last = np.where(possible, count, -1).max(axis=axis)
    if x.is_point and not (x.is_float and np.isnan(x.low).any()):  # the first of equal ones
        last = first
    return Interval(first, last)


# -- products --------------------------------------------------------------------------------------


@_rule("dot_general")
def _dot_general(equation, x, y):
    contracting, batch = equation.params["dimension_numbers"]
    return iv.dot_general(x, y, contracting, batch)


@_rule("conv_general_dilated")
def _convolution(equation, x, y):
    return moving.convolution(x, y, equation.params)


# -- moving entries --------------------------------------------------------------------------------


def _shape(equation) -> tuple[int, ...]:
    return tuple(equation.outvars[0].aval.shape)


@_rule("reshape", "squeeze", "expand_dims")
def _reshape(equation, x, *rest):
    y = x.map(lambda a: a.reshape(_shape(equation)))
    axes = [k for k, n in enumerate(y.shape) if n != 1]
    if (
        isinstance(x.note, _Extreme)
        and not x.note.is_mask
        and len(x.note.among.shape) == y.low.ndim
    ):
        # The same numbers with the reduced axes kept, if those are the ones of length one.
        y.note = x.note if not set(axes) & set(x.note.axes) else None
    return y


@_rule("transpose")
def _transpose(equation, x):
    return x.map(lambda a: a.transpose(equation.params["permutation"]))


@_rule("rev")
def _rev(equation, x):
    return x.map(lambda a: np.flip(a, equation.params["dimensions"]))


@_rule("broadcast_in_dim")
def _broadcast(equation, x, *rest):
    shape, axes = _shape(equation), equation.params["broadcast_dimensions"]
    expanded = [1] * len(shape)
    for axis, n in zip(axes, x.shape, strict=True):
        expanded[axis] = n
    y = x.map(lambda a: np.broadcast_to(a.reshape(expanded), shape))
    if isinstance(x.note, _Extreme) and not x.note.is_mask and x.note.among.shape == shape:
        kept = tuple(k for k in range(len(shape)) if k not in x.note.axes)
        y.note = x.note if tuple(int(k) for k in axes) == kept else None
    return y


@_rule("iota")
def _iota(equation, *rest):
    shape, axis = _shape(equation), equation.params["dimension"]
    expanded = [n if k == axis else 1 for k, n in enumerate(shape)]
    is_float = np.dtype(equation.params["dtype"]).kind == "f"
    numbers = np.arange(shape[axis], dtype=np.float64 if is_float else np.int64)
    return Interval(np.broadcast_to(numbers.reshape(expanded), shape))


@_rule("slice")
def _slice(equation, x):
    p = equation.params
    strides = p["strides"] or [1] * x.low.ndim
    at = tuple(map(slice, p["start_indices"], p["limit_indices"], strides))
    return x.map(lambda a: a[at])


@_rule("dynamic_slice")
def _dynamic_slice(equation, x, *indices):
    sizes = equation.params["slice_sizes"]
    starts = moving.starts_of(list(indices), x.shape, sizes)
    at = tuple(slice(first, first + n) for first, n in zip(starts, sizes, strict=True))
    return x.map(lambda a: a[at])


@_rule("dynamic_update_slice")
def _dynamic_update_slice(equation, x, update, *indices):
    starts = moving.starts_of(list(indices), x.shape, update.shape)
    at = tuple(slice(first, first + n) for first, n in zip(starts, update.shape, strict=True))

    def written(a, b):
        out = np.array(a)
        out[at] = b
        return out

    return both(written, x, update)


def both(function, *values: Interval) -> Interval:
    """A function that only moves entries of several arrays."""
    low = function(*(v.low for v in values))
    is_point = all(v.is_point for v in values)
    return Interval(low, None if is_point else function(*(v.high for v in values)))


@_rule("concatenate")
def _concatenate(equation, *values):
    axis = equation.params["dimension"]
    return both(lambda *arrays: np.concatenate(arrays, axis), *values)


@_rule("stack")
def _stack(equation, *values):
    return both(lambda *arrays: np.stack(arrays, equation.params["axis"]), *values)


@_rule("tile")
def _tile(equation, x):
    return x.map(lambda a: np.tile(a, equation.params["reps"]))


@_rule("pad")
def _pad(equation, x, value):
    return both(lambda a, v: moving.pad(a, v, equation.params["padding_config"]), x, value)


@_rule("gather")
def _gather(equation, x, indices):
    return moving.gather(x, indices, _shape(equation), equation.params)


@_rule("scatter-add", "scatter_add")
def _scatter_add(equation, x, indices, updates):
    return moving.scatter_add(x, indices, updates, equation.params)
