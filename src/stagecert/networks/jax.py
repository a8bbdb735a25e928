"""Networks from JAX functions.

`from_jax` traces a function and turns its equations into a `Network`, or says which of them cannot
be handled, where they stand in the source, and why.

Calls of inner functions are opened up, and whatever does not depend on the inputs is computed. Each
equation that is left becomes a few operations. Activations that are written in several equations
(gelu, silu, a registered function) are found by comparing: what leads to a value against what the
known function is made of. Names do not count, so no function is taken for another.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.source_info_util import summarize

from stagecert.errors import ProblemError
from stagecert.networks import enclosures, jax_formulas
from stagecert.networks import operations as op
from stagecert.networks.activations import REGISTERED
from stagecert.networks.enclosures import Constant, Enclosure
from stagecert.networks.graph import Network, Value
from stagecert.networks.jax_constants import array_of, bound_to, computed, looped
from stagecert.networks.onnx_arithmetic import is_gelu_cube, root_half_pi, root_two
from stagecert.networks.onnx_nodes import Draft, Placeholder, Refused, check_size, words
from stagecert.networks.registering import Registered, Relaxed
from stagecert.networks.smooth import MOST_EXPONENT
from stagecert.validate import advice

_CALLS = words(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr remat "
    "remat2 checkpoint"
)
_LOOPS = words("scan while")
# What changes how numbers are stored, or nothing at all.
_SAME = words(
    "copy copy_p stop_gradient convert_element_type reduce_precision optimization_barrier "
    "device_put sharding_constraint name pvary"
)
# Parts of an expression that are tried as the variable of a registered function.
_MOST_PARTS = 64
_SWAPPABLE = words("add mul max min eq ne")
_ENTRYWISE = _SWAPPABLE | words(
    "sub div neg abs sign exp exp2 log log1p expm1 tanh logistic erf erfc erf_inv sqrt rsqrt cbrt "
    "square integer_pow pow sin cos tan sinh cosh asin acos atan asinh acosh atanh atan2 lt le gt "
    "ge select_n clamp and or not is_finite floor ceil round nextafter lgamma digamma"
)
_TWO_VARIABLES = "is nonlinear in two variables: both of its arguments depend on the input"


def from_jax(function: Callable, example: Any) -> Network:
    """The network that a JAX function computes.

    Args:
        function: takes one input point, without a batch axis, to an array or a tree of arrays (the
            outputs, in the order in which JAX flattens the tree). It may close over its weights or
            be an Equinox module. Switch dropout and batch normalisation to inference first.
        example: an input point, of which only shape and type matter: an array or a
            jax.ShapeDtypeStruct; a tuple of these if the function takes several inputs.

    Raises:
        ProblemError: if the function cannot be traced, or for all its equations that are not
            supported.

    >>> net = from_jax(lambda x: jax.nn.relu(x @ np.array([[1.0], [-1.0]])), np.zeros(2))
    >>> net(np.array([[3.0, 1.0], [1.0, 3.0]])).tolist()
    [[2.0], [0.0]]
    """
    points = example if isinstance(example, tuple) else (example,)
    if not points:
        raise ProblemError("from_jax: the example is an empty tuple; a network needs an input.")
    structs = [_struct(point, k) for k, point in enumerate(points)]
    try:
        traced = jax.make_jaxpr(function)(*structs)
    except ProblemError:
        raise
    except Exception as error:
        raise ProblemError(
            f"JAX cannot trace the function at one point of shape "
            f"{', '.join(str(s.shape) for s in structs)} (without a batch axis): {_text(error)}"
            f"{advice(error)}"
        ) from error
    if not traced.jaxpr.outvars:
        raise ProblemError("The function has no outputs.")
    return _Conversion(traced).network()


def supported() -> list[str]:
    """The JAX primitives that `from_jax` knows, in alphabetical order."""
    return sorted({*_CONVERTERS, *_SAME, "cond"} - words("copy_p pvary name"))


def _struct(point: Any, k: int) -> jax.ShapeDtypeStruct:
    if not isinstance(point, jax.ShapeDtypeStruct):
        try:
            point = jnp.asarray(point)
        except (TypeError, ValueError) as error:
            raise ProblemError(
                f"from_jax: input {k + 1} of the example must be an array or a "
                f"jax.ShapeDtypeStruct, not {type(point).__name__}."
            ) from error
    if not jnp.issubdtype(point.dtype, jnp.floating):
        raise ProblemError(
            f"from_jax: input {k + 1} of the example is of type {point.dtype}, but networks need "
            "floating-point inputs, which vary continuously."
        )
    if 0 in point.shape:
        raise ProblemError(f"from_jax: input {k + 1} of the example is empty: {point.shape}.")
    return jax.ShapeDtypeStruct(point.shape, point.dtype)


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]


# -- walking through equations ---------------------------------------------------------------------


@dataclass(eq=False)
class Traced:
    """What depends on the inputs: a value of the network, and the equation that made it."""

    value: Value
    floating: bool
    primitive: str = ""
    params: Any = None
    operands: tuple = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


def _walk(
    closed,
    arguments: Sequence[Any],
    step: Callable,
    constant: Callable,
    compute: Callable = bound_to,
    places=(),
) -> list:
    """The outputs, where `step` is called for each equation that does not have a body of its own.

    Equations whose operands are all `constant` are left to `compute`.
    """
    known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(closed.jaxpr.invars, arguments, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    for equation in closed.jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        if not equation.outvars:  # debugging output
            continue
        body, inputs = _body(equation, operands, constant)
        here = (*places, equation)
        if body is not None:
            made = _walk(body, inputs, step, constant, compute, here)
        elif all(map(constant, operands)):
            if equation.primitive.name in _LOOPS:

                def run(body, inputs, here=here):
                    return _walk(body, inputs, step, constant, compute, here)

                made = looped(equation, operands, run)
            else:
                made = compute(equation, operands)
        else:
            made = step(equation, operands, here)
        known.update(zip(equation.outvars, made, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _body(equation, operands, constant) -> tuple[Any, Sequence[Any]]:
    """The inner function of a call and its arguments; None if the equation is no call."""
    params = equation.params
    if equation.primitive.name == "cond" and constant(operands[0]):
        branch = min(max(int(operands[0]), 0), len(params["branches"]) - 1)
        return params["branches"][branch], operands[1:]
    if equation.primitive.name not in _CALLS:
        return None, ()
    body = next(params[k] for k in ("jaxpr", "call_jaxpr", "fun_jaxpr") if k in params)
    return (body if hasattr(body, "consts") else core.ClosedJaxpr(body, ())), operands


def _places(here: Sequence[Any]) -> str:
    """Where an equation stands in the source, and from where that was called."""
    found = [text for text in (summarize(e.source_info) for e in reversed(here)) if text]
    if not found:
        return ""
    return found[0] if found[-1] == found[0] else f"{found[0]}, called at {found[-1]}"


class _Conversion:
    """One pass over a traced function: every equation becomes operations, or a reason why not."""

    def __init__(self, traced):
        self.draft = Draft()
        self.refused: dict[tuple[bool, int], str] = {}
        self.inputs = []
        for k, variable in enumerate(traced.jaxpr.invars):
            value = self.draft.builder.input(f"input_{k}", variable.aval.shape, False)
            self.inputs.append(Traced(value, True))
        self.forms = functools.cache(_forms)
        self.outputs = [
            self._output(item, k)
            for k, item in enumerate(_walk(traced, self.inputs, self._step, _is_constant, computed))
        ]

    def network(self) -> Network:
        """The network, if nothing was refused that the outputs need."""
        live = self.draft.live(self.outputs)
        reasons: dict[str, int] = {}
        for key, reason in self.refused.items():
            if key in live:
                reasons[reason] = reasons.get(reason, 0) + 1
        if reasons:
            lines = [f"  {r}" + (f" ({n} times)" if n > 1 else "") for r, n in reasons.items()]
            total = sum(reasons.values())
            raise ProblemError(
                f"The function has {total} equation{'s' if total > 1 else ''} that stagecert "
                "cannot handle:\n"
                + "\n".join(lines)
                + f"\nSupported primitives: {', '.join(supported())}. Supported activations: "
                + f"{', '.join(REGISTERED)}; others can be registered "
                "(stagecert.networks.register)."
            )
        return self.draft.builder.network(self.outputs)

    def _output(self, item, k: int) -> Value:
        if isinstance(item, Traced):
            return item.value
        array = item if isinstance(item, Enclosure) else array_of(item)
        if not array.size or (isinstance(array, np.ndarray) and array.dtype.kind != "f"):
            raise ProblemError(
                f"Output {k + 1} of the function does not depend on the inputs, and is empty or not"
                " made of floating-point numbers."
            )
        # A network has no constants of its own: this is zero times an input, shifted.
        add = self.draft.add
        x = add(op.Reshape((-1,)), self.inputs[0].value)
        x = add(op.Slice((0,), (1,), (1,)), x)
        x = add(op.Scale(), x, weights=np.zeros((), np.float32))
        x = add(op.Broadcast(array.shape), add(op.Reshape(()), x))
        try:
            return self.draft.apply(op.Shift, x, array)
        except Refused as error:
            raise ProblemError(f"Output {k + 1} of the function {error}.") from error

    def _step(self, equation, operands: list, here: Sequence[Any]) -> list:
        call = _Call(self.draft, equation, operands)
        try:
            made = self._made(call)
        except Refused as error:
            made = self._substitutes(call, str(error), here)
        except Exception as error:  # A reason, not a crash.
            made = self._substitutes(call, f"is not supported here: {_text(error)}", here)
        return [
            Traced(item, _is_floating(dtype), call.name, call.params, call.operands)
            if isinstance(item, Value)
            else item
            for item, dtype in zip(made, call.types, strict=True)
        ]

    def _substitutes(self, call: "_Call", reason: str, here: Sequence[Any]) -> list:
        """What stands for the outputs of a refused equation, so that the others are checked too."""
        # One value for the equation, so that it is counted once, and one for each output.
        whole = call.add(Placeholder("refused", ()), *(x.value for x in call.variables))
        place = _places(here)
        where = f" ({place})" if place else ""
        self.refused[whole.is_input, whole.index] = f"{call.name}{where} {reason}"
        return [
            np.zeros(shape, np.float32)
            if 0 in shape
            else call.add(Placeholder("refused", shape), whole)
            for shape in call.shapes
        ]

    def _made(self, call: "_Call") -> list:
        if call.name in _LOOPS:
            raise Refused("is a loop; write it out, for example as a Python loop over the layers")
        if call.name == "cond":
            raise Refused("chooses by a condition that depends on the input")
        if all(0 in shape for shape in call.shapes):
            # What has no entries does not depend on anything.
            return [np.zeros(shape, np.float32) for shape in call.shapes]
        floating = any(map(_is_floating, call.types))
        if not floating and any(x.floating for x in call.variables):
            raise Refused("is not continuous: its results are no floating-point numbers")
        if call.name in _SAME:
            return list(call.operands)
        if len(call.shapes) == 1 and floating:
            value = self._activation(call)
            if value is not None:
                return [value]
        if call.name not in _CONVERTERS:
            raise Refused(_unsupported(call))
        made = _CONVERTERS[call.name](call)
        made = made if isinstance(made, list) else [made]
        for item, shape in zip(made, call.shapes, strict=True):
            assert tuple(item.shape) == shape, (call.name, item.shape, shape)
        return made

    def _activation(self, call: "_Call") -> Value | None:
        """An activation that this equation is the last part of."""
        for form in self.forms(str(call.types[0])):
            if form.pattern.primitive != call.name:
                continue
            bound: dict[str, Any] = {}
            if _match_equation(form.pattern, call.name, call.params, call.operands, bound):
                x = bound.pop("x")
                if x.shape == call.shapes[0]:
                    value = _use(call, form, x.value, bound)
                    if value is not None:
                        return value
        return self._by_formula(call)

    def _by_formula(self, call: "_Call") -> Value | None:
        """A registered function, however it is written; see `jax_formulas`."""
        registered = [form for form in self.forms(str(call.types[0])) if form.formula is not None]
        if not registered or not _is_floating(call.types[0]):
            return None
        whole = Pattern(call.name, call.params, tuple(call.operands))
        for x in _parts_of(whole):
            if x.shape != call.shapes[0] or not x.floating:
                continue
            try:
                found = jax_formulas.normal(
                    whole, lambda item, x=x: isinstance(item, Traced) and item.value is x.value,
                    _number,
                )  # fmt: skip
            except jax_formulas.NoFormula:
                continue
            for form in registered:
                if form.formula == found:
                    return _use(call, form, x.value, {})
        return None


def _unsupported(call: "_Call") -> str:
    if call.name in ("log1p", "expm1", "erfc"):
        return "is only supported as a part of known activations"
    if call.name in ("sort", "top_k", "reduce_prod", "cumprod", "cummax", "cummin"):
        return "is nonlinear in several variables at once"
    if call.name in _ENTRYWISE and len(call.variables) == 1:
        return "is no known activation; stagecert.networks.register can make its function known"
    return _TWO_VARIABLES if len(call.variables) == 2 else "is not supported"


def _is_constant(item) -> bool:
    return not isinstance(item, Traced)


def _is_floating(dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


# -- recognising activations -----------------------------------------------------------------------


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


def _parts_of(whole: Pattern) -> list["Traced"]:
    """What an expression is made of, the largest parts first."""
    found: dict[int, Traced] = {}
    level: list[Any] = list(whole.operands)
    while level and len(found) < _MOST_PARTS:
        traced = [item for item in level if isinstance(item, Traced)]
        new = [item for item in traced if id(item.value) not in found]
        found |= {id(item.value): item for item in new}
        level = [y for item in new if item.primitive in _ENTRYWISE for y in item.operands]
    return list(found.values())


def _number(item: Any) -> float | None:
    """The number that an item of an expression is; settings and variables are none."""
    return None if isinstance(item, (str, Traced, Pattern)) else _single(item)


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


def _forms(dtype: str) -> list[Form]:
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
        formula = jax_formulas.normal(form.pattern, lambda item: isinstance(item, str), _number)
    except jax_formulas.NoFormula:
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
        (pattern,) = _walk(made, names, _pattern, lambda x: not isinstance(x, (Pattern, str)))
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
        number = None if isinstance(item, str) else _single(item)
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
    return _single(one) is not None and _single(one) == _single(two)


def _pattern(equation, operands, here) -> list:
    name, params = equation.primitive.name, equation.params
    if name in _SAME:
        if _is_floating(equation.invars[0].aval.dtype) > _is_floating(
            equation.outvars[0].aval.dtype
        ):
            raise Refused("rounds")
        return list(operands)
    if name == "broadcast_in_dim" and isinstance(operands[0], str) and operands[0] != "x":
        return [operands[0]]  # a setting stays what it is, in whatever shape
    if name not in _ENTRYWISE:
        raise Refused("is not entrywise")
    return [Pattern(name, params, tuple(operands))]


def _match_equation(pattern: Pattern, name: str, params, operands, bound: dict) -> bool:
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
        return isinstance(item, Traced) and _match_equation(
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
        return _single(item) is not None and _single(before) == _single(item)
    return _single(item) is not None and _single(item) == _single(pattern)


def _essential(params) -> dict:
    # How precise a function is computed does not change the function.
    return {key: value for key, value in params.items() if key not in ("accuracy", "sharding")}


def _single(item) -> float | None:
    """The number that all entries of a constant are."""
    if isinstance(item, Enclosure):
        return None
    array = np.asarray(item)
    if not array.size or array.dtype.kind not in "fiubV":
        return None
    first = array.flat[0]
    return float(first) if array.size == 1 or np.all(array == first) else None


def _use(call: "_Call", form: Form, x: Value, bound: dict[str, Any]) -> Value | None:
    """The activation of a form with its settings; None if these are beyond it."""
    numbers = {name: _single(item) for name, item in bound.items()}
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


def _gelu(call: "_Call", kind: str, x: Value, **settings: float) -> Value | None:
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


# -- one equation ----------------------------------------------------------------------------------


class _Call:
    """One equation: its operands (constants are arrays), and the operations that it adds."""

    def __init__(self, draft: Draft, equation, operands: Sequence[Any]):
        self.draft, self.primitive, self.params = draft, equation.primitive, equation.params
        self.name = equation.primitive.name
        self.operands = tuple(operands)
        self.shapes = [tuple(variable.aval.shape) for variable in equation.outvars]
        self.types = [variable.aval.dtype for variable in equation.outvars]

    @property
    def variables(self) -> list[Traced]:
        """The operands that depend on the inputs."""
        return [x for x in self.operands if isinstance(x, Traced)]

    def variable(self, k: int = 0) -> Value:
        """An operand that has to depend on the inputs."""
        item = self.operands[k]
        if not isinstance(item, Traced):
            raise Refused(f"needs its argument {k + 1} to depend on the input")
        return item.value

    def constant(self, k: int, what: str) -> np.ndarray:
        """An operand that must not depend on the inputs."""
        item = self.operands[k]
        if isinstance(item, Traced):
            raise Refused(f"needs {what} that do not depend on the input")
        if isinstance(item, Enclosure):
            raise Refused(f"needs {what} that are not the rounded result of a calculation")
        return array_of(item)

    def enclosed(self, k: int, what: str) -> Constant:
        """The same, where numbers need not be exact."""
        item = self.operands[k]
        return item if isinstance(item, Enclosure) else self.constant(k, what)

    def add(self, operation: op.Operation, *arguments: Value, weights=None) -> Value:
        """Adds an operation to the network."""
        return self.draft.add(operation, *arguments, weights=weights, name=self.name)

    def activation(self, kind: str, x: Value, weights=None, **settings: float) -> Value:
        """Adds an activation."""
        pairs = tuple(sorted((name, float(number)) for name, number in settings.items()))
        return self.add(op.Activation(kind, pairs), x, weights=weights)

    def negate(self, x: Value) -> Value:
        """Minus x."""
        return self.add(op.Scale(), x, weights=np.float32(-1))

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """The entries in another shape."""
        shape = tuple(int(n) for n in shape)
        return x if shape == x.shape else self.add(op.Reshape(shape), x)

    def transpose(self, x: Value, axes: Sequence[int]) -> Value:
        """The axes in another order."""
        axes = tuple(int(k) for k in axes)
        return x if axes == tuple(range(len(axes))) else self.add(op.Transpose(axes), x)

    def broadcast(self, x: Value, shape: Sequence[int]) -> Value:
        """Repeated along axes of length one and new leading axes."""
        shape = tuple(int(n) for n in shape)
        return x if shape == x.shape else self.add(op.Broadcast(shape), x)

    def pad(self, x: Value, widths: Sequence[tuple[int, int]]) -> Value:
        """Zeros around x; negative widths cut."""
        widths = tuple((int(a), int(b)) for a, b in widths)
        return self.add(op.Pad(widths), x) if any(map(any, widths)) else x

    def spread(self, x: Value, steps: Sequence[int]) -> Value:
        """Zeros between the entries, so that they are `steps` apart along each axis."""
        for axis, step in enumerate(steps):
            n = x.shape[axis]
            if step > 1 and n > 1:
                before, after = x.shape[:axis], x.shape[axis + 1 :]
                none = ((0, 0),)
                x = self.reshape(x, (*before, n, 1, *after))
                x = self.pad(x, (*none * (axis + 1), (0, step - 1), *none * len(after)))
                x = self.reshape(x, (*before, n * step, *after))
                x = self.pad(x, (*none * axis, (0, 1 - step), *none * len(after)))
        return x

    def product(self, x: Value, y: Value, shape: Sequence[int]) -> Value:
        """x * y, repeated to a shape."""
        shape = tuple(int(n) for n in shape)
        check_size((*shape, 2))
        pair = [self.reshape(self.broadcast(v, shape), (*shape, 1)) for v in (x, y)]
        return self.add(op.Product(), self.add(op.Concat(len(shape)), *pair))

    def maximum(self, x: Value) -> Value:
        """Over the last axis."""
        return self.reshape(x, x.shape[:-1]) if x.shape[-1] == 1 else self.add(op.Max(), x)


Converted: TypeAlias = Value | Traced | np.ndarray | list
_CONVERTERS: dict[str, Callable[[_Call], Converted]] = {}


def _converts(*primitives: str) -> Callable:
    """Registers a function for some primitives; it returns the output, or a list of several."""

    def register(function: Callable[[_Call], Converted]):
        _CONVERTERS.update(dict.fromkeys(primitives, function))
        return function

    return register


# -- arithmetic ------------------------------------------------------------------------------------


@_converts("add", "add_any", "sub")
def _add(call: _Call):
    signs = (1, -1 if call.name == "sub" else 1)
    if len(call.variables) == 2:
        return call.add(op.Sum(signs), *(x.value for x in call.variables))
    place = 0 if isinstance(call.operands[0], Traced) else 1
    x, shift = call.variable(place), call.enclosed(1 - place, "terms")
    x = x if signs[place] > 0 else call.negate(x)
    x = call.broadcast(x, call.shapes[0])
    if enclosures.uniform(shift) == 0:
        return x
    shift = shift if signs[1 - place] > 0 else enclosures.negative(shift)
    return call.draft.apply(op.Shift, x, shift, name=call.name)


@_converts("neg")
def _neg(call: _Call):
    return call.negate(call.variable())


@_converts("mul")
def _mul(call: _Call):
    if len(call.variables) == 2:
        x, y = call.variables
        if x.value is y.value:
            return call.activation("square", x.value)
        return call.product(x.value, y.value, call.shapes[0])
    place = 0 if isinstance(call.operands[0], Traced) else 1
    return _scaled(call, call.variable(place), call.enclosed(1 - place, "factors"))


@_converts("div")
def _div(call: _Call):
    if isinstance(call.operands[1], Traced):
        inverse = call.activation("reciprocal", call.variable(1))
        if len(call.variables) == 2:
            return call.product(call.variable(), inverse, call.shapes[0])
        return _scaled(call, inverse, call.enclosed(0, "dividends"))
    return _scaled(call, call.variable(), enclosures.reciprocal(call.enclosed(1, "divisors")))


def _scaled(call: _Call, x: Value, factor: Constant) -> Value:
    if enclosures.uniform(factor) == 1:
        return call.broadcast(x, call.shapes[0])
    return call.draft.apply(op.Scale, x, factor, name=call.name)


_PLAIN = {
    "tanh": "tanh", "logistic": "sigmoid", "abs": "abs", "exp": "exp", "square": "square",
    "sin": "sin", "cos": "cos", "log": "log", "sqrt": "sqrt", "erf": "erf", "floor": "floor",
    "ceil": "ceil", "sign": "sign",
}  # fmt: skip


@_converts(*_PLAIN)
def _plain(call: _Call):
    return call.activation(_PLAIN[call.name], call.variable())


@_converts("rsqrt")
def _rsqrt(call: _Call):
    return call.activation("reciprocal", call.activation("sqrt", call.variable()))


@_converts("round")
def _round(call: _Call):
    if call.params["rounding_method"] != jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        raise Refused("is only supported where halves are rounded to even numbers")
    return call.activation("round", call.variable())


@_converts("integer_pow", "pow")
def _pow(call: _Call):
    power = call.params.get("y")
    if call.name == "pow":
        power = _single(call.constant(1, "exponents"))
    x = call.broadcast(call.variable(), call.shapes[0])
    return _raised(call, x, power)


def _raised(call: _Call, x: Value, power) -> Value:
    """x to the power of a number."""
    if power == 1:
        return x
    if power == 2:
        return call.activation("square", x)
    if power == 0.5:
        return call.activation("sqrt", x)
    if power < 0:
        return call.activation("reciprocal", _raised(call, x, -power))
    if power != int(power) or not 3 <= power <= MOST_EXPONENT:
        raise Refused(f"is only supported with whole exponents up to {MOST_EXPONENT}, and 0.5")
    return call.activation("power", x, exponent=power)


@_converts("max", "min")
def _max(call: _Call):
    sign = 1 if call.name == "max" else -1
    shape = call.shapes[0]
    if len(call.variables) == 2:
        x, y = (call.broadcast(v.value, shape) for v in call.variables)
        if call.variables[0] is call.variables[1]:
            return x
        columns = [v if sign > 0 else call.negate(v) for v in (x, y)]
        columns = [call.reshape(v, (*shape, 1)) for v in columns]
        largest = call.maximum(call.add(op.Concat(len(shape)), *columns))
        return largest if sign > 0 else call.negate(largest)
    place = 0 if isinstance(call.operands[0], Traced) else 1
    x, bound = call.variable(place), call.constant(1 - place, "bounds")
    return _bounded(call, call.broadcast(x, shape), bound, sign)


def _bounded(call: _Call, x: Value, bound: np.ndarray, sign: int) -> Value:
    """The maximum of x and a constant, or the minimum if the sign is negative."""
    if np.all(bound == -sign * np.inf):
        return x
    if not np.isfinite(bound).all():
        raise Refused("has a bound that is NaN or infinite")
    number = _single(bound)
    if number is not None:
        if sign > 0 and number == 0:
            return call.activation("relu", x)
        low, high = (number, math.inf) if sign > 0 else (-math.inf, number)
        return call.activation("clip", x, low=low, high=high)
    # max(x, c) = c + relu(x - c), and min(x, c) = c - relu(c - x)
    x = call.add(op.Shift(), x, weights=-bound)
    x = call.activation("relu", x if sign > 0 else call.negate(x))
    return call.add(op.Shift(), x if sign > 0 else call.negate(x), weights=bound)


@_converts("clamp")
def _clamp(call: _Call):
    x, low, high = call.variable(1), call.constant(0, "bounds"), call.constant(2, "bounds")
    least, most = _single(low), _single(high)
    finite = [b is not None and math.isfinite(b) for b in (least, most)]
    if least is not None and most is not None and all(finite) and least <= most:
        return call.activation("clip", x, low=least, high=most)
    return _bounded(call, _bounded(call, x, low, 1), high, -1)


@_converts("reduce_sum")
def _reduce_sum(call: _Call):
    axes = tuple(int(k) for k in call.params["axes"])
    return call.add(op.Reduce(axes, False), call.variable()) if axes else call.operands[0]


@_converts("reduce_max", "reduce_min")
def _reduce_max(call: _Call):
    axes = tuple(int(k) for k in call.params["axes"])
    x = call.variable() if call.name == "reduce_max" else call.negate(call.variable())
    rest = [k for k in range(len(x.shape)) if k not in axes]
    x = call.reshape(call.transpose(x, (*rest, *axes)), (*(x.shape[k] for k in rest), -1))
    largest = call.maximum(x)
    return largest if call.name == "reduce_max" else call.negate(largest)


@_converts("dot_general")
def _dot_general(call: _Call):
    if len(call.variables) == 2:
        return _products_summed(call)
    contracted, batches = call.params["dimension_numbers"]
    place = 0 if isinstance(call.operands[0], Traced) else 1
    x = call.variable(place)
    weights, loose = enclosures.weights_of(call.enclosed(1 - place, "weights"))
    shared, own = contracted[place], [*contracted[place], *batches[place]]
    free = [k for k in range(len(x.shape)) if k not in own]
    others = [*contracted[1 - place], *batches[1 - place]]
    new = [k for k in range(weights.ndim) if k not in others]
    batch = tuple(x.shape[k] for k in batches[place])
    rows = tuple(x.shape[k] for k in free)
    columns = tuple(weights.shape[k] for k in new)
    length = math.prod(x.shape[k] for k in shared)
    ahead = (math.prod(batch),) if batch else ()
    # Batch axes, what is left of x, and the axis that is summed over.
    x = call.transpose(x, (*batches[place], *free, *shared))
    x = call.reshape(x, (*ahead, *((math.prod(rows),) if batch else rows), length))
    weights = weights.transpose((*batches[1 - place], *contracted[1 - place], *new))
    weights = np.ascontiguousarray(weights.reshape(*ahead, length, math.prod(columns)))
    y = call.add(op.MatMul(loose=loose), x, weights=weights)
    y = call.reshape(y, (*batch, *rows, *columns))
    if place == 0:
        return y
    first, second = len(batch), len(batch) + len(rows)
    order = [*range(first), *range(second, second + len(columns)), *range(first, second)]
    return call.transpose(y, order)


def _products_summed(call: _Call) -> Value:
    """The product of two variables along some axes: all products of entries, added up."""
    contracted, batches = call.params["dimension_numbers"]
    batch = tuple(call.variable(0).shape[k] for k in batches[0])
    sides, free = [], []
    for k in range(2):
        x, own = call.variable(k), [*contracted[k], *batches[k]]
        rest = [axis for axis in range(len(x.shape)) if axis not in own]
        length = math.prod(x.shape[axis] for axis in contracted[k])
        free.append(tuple(x.shape[axis] for axis in rest))
        x = call.transpose(x, (*batches[k], *rest, *contracted[k]))
        # Batch axes, the axes of the first variable, those of the second, what is summed over.
        sides.append((x, length))
    (x, length), (y, _) = sides
    x = call.reshape(x, (*batch, *free[0], *(1 for _ in free[1]), length))
    y = call.reshape(y, (*batch, *(1 for _ in free[0]), *free[1], length))
    shape = (*batch, *free[0], *free[1], length)
    return call.add(op.Reduce((len(shape) - 1,), False), call.product(x, y, shape))


@_converts("conv_general_dilated")
def _conv(call: _Call):
    if len(call.variables) == 2:
        raise Refused(_TWO_VARIABLES)
    params = call.params
    if params["batch_group_count"] != 1:
        raise Refused("is not supported with batch groups")
    x, weights = call.variable(), call.constant(1, "weights")
    numbers = params["dimension_numbers"]
    x = call.transpose(x, numbers.lhs_spec)
    weights = np.ascontiguousarray(weights.transpose(numbers.rhs_spec))
    dilation = tuple(int(d) for d in params["rhs_dilation"])
    spread = tuple(int(d) for d in params["lhs_dilation"])
    padding = tuple((int(a), int(b)) for a, b in params["padding"])
    most = [(k - 1) * d for k, d in zip(weights.shape[2:], dilation, strict=True)]
    if any(min(pad) < 0 or max(pad) > n for pad, n in zip(padding, most, strict=True)):
        # XLA's convolutions on CPUs get negative padding wrong, and wide padding is negative in the
        # adjoint: both are done before.
        x = call.spread(x, (1, 1, *spread))
        x = call.pad(x, ((0, 0), (0, 0), *padding))
        spread, padding = (1,) * len(spread), ((0, 0),) * len(padding)
    strides = tuple(int(s) for s in params["window_strides"])
    groups = int(params["feature_group_count"])
    y = call.add(op.Conv(strides, padding, dilation, spread, groups), x, weights=weights)
    return call.transpose(y, [numbers.out_spec.index(k) for k in range(len(y.shape))])


@_converts("cumsum")
def _cumsum(call: _Call):
    x, axis = call.variable(), call.params["axis"]
    n, rank = x.shape[axis], len(x.shape)
    pad = (0, n - 1) if call.params["reverse"] else (n - 1, 0)
    ones = (1,) * rank
    window = tuple(n if k == axis else 1 for k in range(rank))
    padding = tuple(pad if k == axis else (0, 0) for k in range(rank))
    return call.add(op.WindowSum(window, ones, ones, padding), x)


@_converts("reduce_window_sum")
def _window_sum(call: _Call):
    params = call.params
    x = call.spread(call.variable(), params["base_dilation"])
    padding = tuple((int(a), int(b)) for a, b in params["padding"])
    if any(min(pad) < 0 for pad in padding):
        x, padding = call.pad(x, padding), ((0, 0),) * len(padding)
    window, strides, dilation = (
        tuple(int(n) for n in params[key])
        for key in ("window_dimensions", "window_strides", "window_dilation")
    )
    return call.add(op.WindowSum(window, strides, dilation, padding), x)


@_converts("reduce_window_max", "reduce_window_min")
def _window_max(call: _Call):
    params = call.params
    x = call.variable()
    if any(d != 1 for d in params["base_dilation"]):
        raise Refused("is not supported with base_dilation")
    x = x if call.name == "reduce_window_max" else call.negate(x)
    if any(map(any, params["padding"])):
        windows = call.add(op.Take(), x, weights=_padded_windows(call, x.shape))
    else:
        keys = ("window_dimensions", "window_strides", "window_dilation")
        windows = call.add(op.Windows(*(tuple(map(int, params[key])) for key in keys)), x)
    largest = call.maximum(windows)
    return largest if call.name == "reduce_window_max" else call.negate(largest)


def _padded_windows(call: _Call, read) -> np.ndarray:
    """Which entries of a flattened array each window covers, along a last axis."""
    params, shape = call.params, call.shapes[0]
    rank = len(shape)
    flat = np.zeros((1,) * (2 * rank), np.int64)
    for axis, n in enumerate(read):
        start = np.arange(shape[axis])[:, None] * params["window_strides"][axis]
        inside = np.arange(params["window_dimensions"][axis]) * params["window_dilation"][axis]
        at = start - params["padding"][axis][0] + inside
        valid = (at >= 0) & (at < n)
        if not valid.any(1).all():
            raise Refused("has a window that covers padding only")
        # Padding must not win: in its place stands an entry that the window has already.
        at = np.where(valid, at, np.take_along_axis(at, valid.argmax(1)[:, None], axis=1))
        places = [1] * (2 * rank)
        places[axis], places[rank + axis] = at.shape
        flat = flat * n + at.reshape(places)
    return flat.reshape(*shape, -1).astype(np.int32)


# -- entries that only move ------------------------------------------------------------------------


@_converts("reshape", "squeeze", "expand_dims")
def _reshape(call: _Call):
    if call.params.get("dimensions") is not None and call.name == "reshape":
        raise Refused("is not supported with dimensions")
    return call.reshape(call.variable(), call.shapes[0])


@_converts("transpose")
def _transpose(call: _Call):
    return call.transpose(call.variable(), call.params["permutation"])


@_converts("broadcast_in_dim")
def _broadcast_in_dim(call: _Call):
    x, shape = call.variable(), call.shapes[0]
    lengths = [1] * len(shape)
    for n, axis in zip(x.shape, call.params["broadcast_dimensions"], strict=True):
        lengths[axis] = n
    return call.broadcast(call.reshape(x, lengths), shape)


@_converts("slice")
def _slice(call: _Call):
    x, params = call.variable(), call.params
    steps = params["strides"] or (1,) * len(x.shape)
    numbers = (params["start_indices"], params["limit_indices"], steps)
    starts, stops, steps = (tuple(int(n) for n in each) for each in numbers)
    return call.add(op.Slice(starts, stops, steps), x)


@_converts("split")
def _split(call: _Call):
    x, axis = call.variable(), call.params["axis"]
    parts: list[Any] = []
    start = 0
    for shape in call.shapes:
        starts = tuple(start if k == axis else 0 for k in range(len(shape)))
        stops = tuple(a + n for a, n in zip(starts, shape, strict=True))
        if 0 in shape:
            parts.append(np.zeros(shape, np.float32))
        else:
            parts.append(call.add(op.Slice(starts, stops, (1,) * len(shape)), x))
        start += shape[axis]
    return parts


@_converts("dynamic_slice")
def _dynamic_slice(call: _Call):
    x, sizes = call.variable(), call.params["slice_sizes"]
    indices = [int(call.constant(k, "indices")) for k in range(1, len(call.operands))]
    # As in JAX, a slice is moved until it is inside.
    starts = tuple(min(max(i, 0), n - m) for i, n, m in zip(indices, x.shape, sizes, strict=True))
    stops = tuple(i + int(m) for i, m in zip(starts, sizes, strict=True))
    return call.add(op.Slice(starts, stops, (1,) * len(starts)), x)


@_converts("rev")
def _rev(call: _Call):
    x = call.variable()
    for axis in call.params["dimensions"]:
        order = np.arange(x.shape[axis] - 1, -1, -1, dtype=np.int32)
        x = call.add(op.Take(int(axis)), x, weights=order)
    return x


@_converts("pad")
def _pad(call: _Call):
    if not isinstance(call.operands[0], Traced) or isinstance(call.operands[1], Traced):
        return _moved(call, (0, 1))
    x, value = call.variable(), call.constant(1, "padding")
    config = call.params["padding_config"]
    if np.any(value != 0):
        return _moved(call, (0, 1))
    x = call.spread(x, [inside + 1 for _, _, inside in config])
    return call.pad(x, [(before, after) for before, after, _ in config])


@_converts("concatenate", "stack")
def _concatenate(call: _Call):
    if len(call.variables) < len(call.operands):
        return _moved(call, range(len(call.operands)))
    if call.name == "stack":
        axis, shape = call.params["axis"], call.shapes[0]
        wide = (*shape[:axis], 1, *shape[axis + 1 :])
        parts = [call.reshape(x.value, wide) for x in call.variables]
    else:
        axis, parts = call.params["dimension"], [x.value for x in call.variables]
    return parts[0] if len(parts) == 1 else call.add(op.Concat(int(axis)), *parts)


@_converts("gather", "tile")
def _gather(call: _Call):
    if isinstance(call.operands[-1], Traced) and call.name == "gather":
        raise Refused("needs indices that do not depend on the input")
    return _moved(call, (0,))


@_converts("select_n")
def _select(call: _Call):
    if isinstance(call.operands[0], Traced):
        raise Refused("chooses by a condition that depends on the input")
    return _moved(call, range(1, len(call.operands)))


@_converts("scatter")
def _scatter(call: _Call):
    call.constant(1, "indices")
    return _moved(call, (0, 2))


@_converts("dynamic_update_slice")
def _dynamic_update_slice(call: _Call):
    for k in range(2, len(call.operands)):
        call.constant(k, "indices")
    return _moved(call, (0, 1))


def _moved(call: _Call, places: Sequence[int]) -> Converted:
    """Any primitive whose results are entries of some operands (`places`), unchanged.

    Which entry goes where is found by running it on numbers that tell the entries apart.
    """
    numbered = list(call.operands)
    # For every entry: its place among the variables' entries, or -1 and its constant.
    position, constants, variables = [], [], []
    length = offset = 0
    for k in places:
        item = call.operands[k]
        size = math.prod(np.shape(item) if _is_constant(item) else item.shape)
        entries = np.arange(length, length + size, dtype=np.int32)
        length += size
        if isinstance(item, Enclosure):
            raise Refused("mixes in constants that are the rounded result of a calculation")
        if isinstance(item, Traced):
            numbered[k] = entries.reshape(item.shape)
            variables.append(call.reshape(item.value, (-1,)))
            position.append(np.arange(offset, offset + size, dtype=np.int32))
            constants.append(np.zeros(size, np.float32))
            offset += size
        else:
            numbered[k] = entries.reshape(np.shape(item))
            position.append(np.full(size, -1, np.int32))
            constants.append(array_of(item).ravel())
    params = dict(call.params)
    if call.name == "gather":
        params["fill_value"] = -1
    source = np.asarray(call.primitive.bind(*map(jnp.asarray, numbered), **params))
    if np.any(source < 0):
        raise Refused("has indices out of bounds")
    index = np.concatenate(position)[source]
    shift = np.concatenate(constants)[source]
    if np.all(index < 0):
        return shift
    x = variables[0] if len(variables) == 1 else call.add(op.Concat(0), *variables)
    if np.array_equal(index.ravel(), np.arange(offset)):
        return call.reshape(x, index.shape)
    x = call.add(op.Take(), x, weights=np.maximum(index, 0))
    if np.all(index >= 0):
        return x
    x = call.add(op.Scale(), x, weights=(index >= 0).astype(np.float32))
    return call.add(op.Shift(), x, weights=shift)
