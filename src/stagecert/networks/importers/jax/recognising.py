"""Activations that are written in several equations, found by comparing.

What leads to a value is compared with what the known function is made of. Names do not count, so no
function is taken for another.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks import operations as op
from stagecert.networks.activations import REGISTERED
from stagecert.networks.activations.registering import Registered, Relaxed
from stagecert.networks.graph import Value
from stagecert.networks.importers import enclosures
from stagecert.networks.importers.enclosures import Enclosure
from stagecert.networks.importers.jax import formulas
from stagecert.networks.importers.jax.calls import Call
from stagecert.networks.importers.jax.constants import array_of
from stagecert.networks.importers.jax.walking import SAME, Traced, is_floating, walk
from stagecert.networks.importers.onnx.arithmetic import is_gelu_cube, root_half_pi, root_two
from stagecert.networks.importers.onnx.nodes import Refused, words

# Parts of an expression that are tried as the variable of a registered function.
_MOST_PARTS = 64
_SWAPPABLE = words("add mul max min eq ne")
ENTRYWISE = _SWAPPABLE | words(
    "sub div neg abs sign exp exp2 log log1p expm1 tanh logistic erf erfc erf_inv sqrt rsqrt cbrt "
    "square integer_pow pow sin cos tan sinh cosh asin acos atan asinh acosh atanh atan2 lt le gt "
    "ge select_n clamp and or not is_finite floor ceil round nextafter lgamma digamma"
)


@dataclass(frozen=True)
class Pattern:
    """An equation of a known function; operands are patterns, names ("x", settings) or numbers."""

    primitive: str
    params: Any
    operands: tuple


@dataclass(frozen=True)
class Form:
    """A function that is an activation."""

    kind: str
    pattern: Pattern
    formula: tuple | None = None  # of registered functions: their normal form


def parts_of(whole: Pattern) -> list[Traced]:
    """What an expression is made of, the largest parts first."""
    found: dict[int, Traced] = {}
    level: list[Any] = list(whole.operands)
    while level and len(found) < _MOST_PARTS:
        traced = [item for item in level if isinstance(item, Traced)]
        new = [item for item in traced if id(item.value) not in found]
        found |= {id(item.value): item for item in new}
        level = [y for item in new if item.primitive in ENTRYWISE for y in item.operands]
    return list(found.values())


def number(item: Any) -> float | None:
    """The number that an item of an expression is; settings and variables are none."""
    return None if isinstance(item, (str, Traced, Pattern)) else single(item)


# As in the usual definitions of gelu; the functions that are found may have others there.
_ROOT = math.sqrt(2)
_CUBE = 0.044715
_TANH = math.sqrt(2 / math.pi)
_ROUNDED = {"inner": 1 / _ROOT, "divisor": _ROOT, "outer": _TANH, "cube": _CUBE}

# (kind, settings, function of x and the settings)
_KNOWN: list[tuple[str, str, Callable]] = [
    ("relu", "", lambda x: jnp.where(x > 0, x, 0)),
    ("relu", "", lambda x: jnp.where(x >= 0, x, 0)),
    ("relu", "", lambda x: jnp.where(x < 0, 0, x)),
    ("relu", "", lambda x: jnp.where(x <= 0, 0, x)),
    ("relu", "", lambda x: x * (x > 0)),
    ("clip", "low high", lambda x, low, high: jnp.minimum(jnp.maximum(x, low), high)),
    ("clip", "low high", lambda x, low, high: jnp.maximum(jnp.minimum(x, high), low)),
    ("clip", "low high", lambda x, a, b: jnp.where(x > b, b, jnp.where(x < a, a, x))),
    ("abs", "", lambda x: jnp.maximum(x, -x)),
    ("abs", "", lambda x: jnp.where(x >= 0, x, -x)),
    ("abs", "", lambda x: jnp.where(x < 0, -x, x)),
    ("leaky_relu", "alpha", lambda x, alpha: jnp.where(x >= 0, x, alpha * x)),
    ("leaky_relu", "alpha", lambda x, alpha: jnp.where(x > 0, x, alpha * x)),
    ("leaky_relu", "alpha", lambda x, alpha: jnp.where(x < 0, alpha * x, x)),
    ("leaky_max", "alpha", lambda x, alpha: jnp.maximum(x, alpha * x)),
    ("selu", "gamma alpha", lambda x, gamma, alpha: gamma * jax.nn.elu(x, alpha)),
    ("elu", "alpha", lambda x, alpha: jax.nn.elu(x, alpha)),
    ("elu", "alpha", lambda x, alpha: jnp.where(x > 0, x, alpha * jnp.expm1(x))),
    ("elu", "alpha", lambda x, alpha: jnp.where(x > 0, x, alpha * (jnp.exp(x) - 1))),
    ("elu", "", lambda x: jnp.where(x > 0, x, jnp.expm1(x))),
    ("elu", "", lambda x: jnp.where(x > 0, x, jnp.exp(x) - 1)),
    ("celu", "alpha", lambda x, alpha: jax.nn.celu(x, alpha)),
    ("softplus", "", jax.nn.softplus),
    ("softplus", "", lambda x: jnp.log1p(jnp.exp(x))),
    ("softplus", "", lambda x: jnp.log(1 + jnp.exp(x))),
    ("sigmoid", "", lambda x: 1 / (1 + jnp.exp(-x))),
    ("softsign", "", jax.nn.soft_sign),
    ("hard_swish", "", jax.nn.hard_swish),
    ("hard_swish", "", lambda x: x * jax.nn.relu6(x + 3) / 6),
    ("silu", "", jax.nn.silu),
    ("mish", "", jax.nn.mish),
    ("gelu_tanh", "", lambda x: jax.nn.gelu(x, approximate=True)),
    ("gelu_tanh", "", lambda x: 0.5 * x * (1 + jnp.tanh(_TANH * (x + _CUBE * x**3)))),
    ("gelu_tanh", "", lambda x: x * 0.5 * (1 + jnp.tanh(_TANH * (x + _CUBE * x * x * x)))),
    ("gelu", "", lambda x: jax.nn.gelu(x, approximate=False)),
    ("gelu", "", lambda x: 0.5 * x * (1 + jax.lax.erf(x / _ROOT))),
    ("gelu", "", lambda x: 0.5 * x * (1 + jax.lax.erf(x * (1 / _ROOT)))),
    ("gelu", "", lambda x: x * (0.5 * (1 + jax.lax.erf(x / _ROOT)))),
    ("gelu", "", lambda x: 0.5 * (x * (1 + jax.lax.erf(x / _ROOT)))),
    ("gelu", "", lambda x: x * jax.scipy.stats.norm.cdf(x)),
]


def forms_of(dtype: str) -> list[Form]:
    """All known activations as patterns, with constants as they are in a type."""
    registered = [
        # Bound to its own name: `activation` is another one in the next round.
        (kind, functools.partial(lambda known, x: known(x), activation))
        for kind, activation in REGISTERED.items()
        if isinstance(activation, (Registered, Relaxed))
    ]
    own = (_with_formula(_form(kind, "", function, dtype)) for kind, function in registered)
    x64 = bool(jax.config.read("jax_enable_x64"))
    return [*_known_forms(dtype, x64), *(form for form in own if form is not None)]


def _with_formula(form: Form | None) -> Form | None:
    if form is None:
        return None
    try:
        formula = formulas.normal(form.pattern, lambda item: isinstance(item, str), number)
    except formulas.NoFormula:
        return form
    return Form(form.kind, form.pattern, formula)


@functools.cache
def _known_forms(dtype: str, x64: bool) -> tuple[Form, ...]:
    made = (_form(*known, dtype) for known in _KNOWN)
    return tuple(form for form in made if form is not None)


def _form(kind: str, settings: str, function: Callable, dtype: str) -> Form | None:
    names = ["x", *settings.split()]

    def traced(dtype: str):
        number = jax.ShapeDtypeStruct((), dtype)
        arguments = [jax.ShapeDtypeStruct((2,), dtype), *(number for _ in names[1:])]
        with jax.numpy_dtype_promotion("standard"):
            made = jax.make_jaxpr(function)(*arguments)
        (pattern,) = walk(made, names, _pattern, lambda x: not isinstance(x, (Pattern, str)))
        return pattern

    try:
        pattern = traced(dtype)
        with jax.enable_x64(True):
            precise = traced("float64")
    except Exception:  # A registered function that cannot be compared is not found, that is all.
        return None
    if not isinstance(pattern, Pattern):
        return None
    if kind in ("gelu", "gelu_tanh"):
        return Form(kind, _named(pattern, dtype))
    # Hulls are made with the numbers in float64: those of a shorter type must be the same.
    return Form(kind, pattern) if _equal(pattern, precise) else None


def _named(pattern: Pattern, dtype: str) -> Pattern:
    """The pattern with names for the constants that no type can hold."""
    room = 4 * float(jnp.finfo(dtype).eps)

    def named(item):
        if isinstance(item, Pattern):
            return _named(item, dtype)
        number = None if isinstance(item, str) else single(item)
        for name, value in _ROUNDED.items():
            if number is not None and math.isclose(number, value, rel_tol=room):
                return name
        return item

    return Pattern(pattern.primitive, pattern.params, tuple(map(named, pattern.operands)))


def _equal(one, two) -> bool:
    """Whether two patterns have the same numbers."""
    if isinstance(one, Pattern) and isinstance(two, Pattern):
        pairs = zip(one.operands, two.operands, strict=True)
        return one.primitive == two.primitive and all(_equal(a, b) for a, b in pairs)
    if isinstance(one, (Pattern, str)) or isinstance(two, (Pattern, str)):
        return one == two
    return single(one) is not None and single(one) == single(two)


def _pattern(equation, operands, here) -> list:
    name, params = equation.primitive.name, equation.params
    if name in SAME:
        if is_floating(equation.invars[0].aval.dtype) > is_floating(equation.outvars[0].aval.dtype):
            raise Refused("rounds")
        return list(operands)
    if name == "broadcast_in_dim" and isinstance(operands[0], str) and operands[0] != "x":
        return [operands[0]]  # a setting stays what it is, in whatever shape
    if name not in ENTRYWISE:
        raise Refused("is not entrywise")
    return [Pattern(name, params, tuple(operands))]


def matches(pattern: Pattern, name: str, params, operands, bound: dict) -> bool:
    """Whether an equation is the pattern's; fills in what its names stand for."""
    if name != pattern.primitive or len(operands) != len(pattern.operands):
        return False
    if _essential(params) != _essential(pattern.params):
        return False
    orders = [operands, operands[::-1]] if name in _SWAPPABLE else [operands]
    for order in orders:
        trial = dict(bound)
        pairs = zip(pattern.operands, order, strict=True)
        if all(_match(part, item, trial) for part, item in pairs):
            bound.update(trial)
            return True
    return False


def _match(pattern, item, bound: dict) -> bool:
    if isinstance(pattern, Pattern):
        return isinstance(item, Traced) and matches(
            pattern, item.primitive, item.params, item.operands, bound
        )
    if isinstance(pattern, str) and pattern == "x":
        if not isinstance(item, Traced) or not item.floating:
            return False
        return bound.setdefault("x", item).value is item.value
    if isinstance(item, Traced):
        return False
    if isinstance(pattern, str):
        if isinstance(item, Enclosure):
            return False
        before = bound.setdefault(pattern, item)
        if before is item or np.array_equal(np.asarray(before), np.asarray(item)):
            return True
        return single(item) is not None and single(before) == single(item)
    return single(item) is not None and single(item) == single(pattern)


def _essential(params) -> dict:
    # How precise a function is computed does not change the function.
    return {key: value for key, value in params.items() if key not in ("accuracy", "sharding")}


def single(item) -> float | None:
    """The number that all entries of a constant are."""
    if isinstance(item, Enclosure):
        return None
    array = np.asarray(item)
    if not array.size or array.dtype.kind not in "fiubV":
        return None
    first = array.flat[0]
    return float(first) if array.size == 1 or np.all(array == first) else None


def use(call: Call, form: Form, x: Value, bound: dict[str, Any]) -> Value | None:
    """The activation of a form with its settings; None if these are beyond it."""
    numbers = {name: single(item) for name, item in bound.items()}
    settings = {name: number for name, number in numbers.items() if number is not None}
    alpha = settings.get("alpha")
    if form.kind in ("leaky_relu", "leaky_max"):
        slopes = array_of(bound["alpha"])
        if not np.isfinite(slopes).all() or (form.kind == "leaky_max" and np.any(slopes > 1)):
            return None
        if alpha is not None:
            return call.activation("leaky_relu", x, alpha=alpha)
        if np.broadcast_shapes(slopes.shape, x.shape) != x.shape:
            return None
        return call.activation("prelu", x, weights=slopes)
    if len(settings) < len(numbers) or not all(map(math.isfinite, settings.values())):
        return None
    if form.kind == "clip" and not settings["low"] <= settings["high"]:
        return None
    if form.kind in ("celu", "selu") and not min(settings.values()) > 0:
        return None
    if form.kind in ("gelu", "gelu_tanh"):
        return _gelu(call, form.kind, x, **settings)
    return call.activation(form.kind, x, **settings)


def _gelu(call: Call, kind: str, x: Value, **settings: float) -> Value | None:
    """gelu(k x) / k, where k is one but for the rounding of the function's constants."""
    numbers = {name: Fraction(number) for name, number in settings.items()}
    if not all(numbers.values()):
        return None
    if kind == "gelu":
        inner = numbers["inner"] if "inner" in numbers else 1 / numbers["divisor"]
        unit = root_two
    else:
        inner, unit = numbers["outer"], root_half_pi
        if not is_gelu_cube(inner, inner * numbers["cube"]):
            return None
    ahead = enclosures.irrational(lambda: enclosures.ball(inner) * unit())
    behind = enclosures.irrational(lambda: 1 / (enclosures.ball(inner) * unit()))
    argument = call.draft.apply(op.Scale, x, ahead, name=call.name)
    return call.draft.apply(op.Scale, call.activation(kind, argument), behind, name=call.name)
