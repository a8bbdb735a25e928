"""Networks from JAX functions.

`from_jax` traces a function and turns its equations into a `Network`, or says which of them cannot
be handled, where they stand in the source, and why.

Calls of inner functions are opened up, and whatever does not depend on the inputs is computed. Each
equation that is left becomes a few operations. Activations that are written in several equations
(gelu, silu, a registered function) are found by comparing: what leads to a value against what the
known function is made of. Names do not count, so no function is taken for another.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.errors import ProblemError
from stagecert.networks import operations as op
from stagecert.networks.activations import REGISTERED
from stagecert.networks.graph import Network, Value
from stagecert.networks.importers.enclosures import Enclosure
from stagecert.networks.importers.jax import (
    formulas,
    moves,  # noqa: F401  (registers its primitives)
)
from stagecert.networks.importers.jax.arithmetic import TWO_VARIABLES
from stagecert.networks.importers.jax.calls import CONVERTERS, Call
from stagecert.networks.importers.jax.constants import array_of, computed
from stagecert.networks.importers.jax.recognising import (
    ENTRYWISE,
    Pattern,
    forms_of,
    matches,
    number,
    parts_of,
    use,
)
from stagecert.networks.importers.jax.walking import (
    LOOPS,
    SAME,
    Traced,
    is_constant,
    is_floating,
    places,
    walk,
)
from stagecert.networks.importers.onnx.nodes import Draft, Placeholder, Refused, words
from stagecert.validate import advice


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
    return sorted({*CONVERTERS, *SAME, "cond"} - words("copy_p pvary name"))


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


class _Conversion:
    """One pass over a traced function: every equation becomes operations, or a reason why not."""

    def __init__(self, traced):
        self.draft = Draft()
        self.refused: dict[tuple[bool, int], str] = {}
        self.inputs = []
        for k, variable in enumerate(traced.jaxpr.invars):
            value = self.draft.builder.input(f"input_{k}", variable.aval.shape, False)
            self.inputs.append(Traced(value, True))
        self.forms = functools.cache(forms_of)
        self.outputs = [
            self._output(item, k)
            for k, item in enumerate(walk(traced, self.inputs, self._step, is_constant, computed))
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
        call = Call(self.draft, equation, operands)
        try:
            made = self._made(call)
        except Refused as error:
            made = self._substitutes(call, str(error), here)
        except Exception as error:  # A reason, not a crash.
            made = self._substitutes(call, f"is not supported here: {_text(error)}", here)
        return [
            Traced(item, is_floating(dtype), call.name, call.params, call.operands)
            if isinstance(item, Value)
            else item
            for item, dtype in zip(made, call.types, strict=True)
        ]

    def _substitutes(self, call: Call, reason: str, here: Sequence[Any]) -> list:
        """What stands for the outputs of a refused equation, so that the others are checked too."""
        # One value for the equation, so that it is counted once, and one for each output.
        whole = call.add(Placeholder("refused", ()), *(x.value for x in call.variables))
        place = places(here)
        where = f" ({place})" if place else ""
        self.refused[whole.is_input, whole.index] = f"{call.name}{where} {reason}"
        return [
            np.zeros(shape, np.float32)
            if 0 in shape
            else call.add(Placeholder("refused", shape), whole)
            for shape in call.shapes
        ]

    def _made(self, call: Call) -> list:
        if call.name in LOOPS:
            raise Refused("is a loop; write it out, for example as a Python loop over the layers")
        if call.name == "cond":
            raise Refused("chooses by a condition that depends on the input")
        if all(0 in shape for shape in call.shapes):
            # What has no entries does not depend on anything.
            return [np.zeros(shape, np.float32) for shape in call.shapes]
        floating = any(map(is_floating, call.types))
        if not floating and any(x.floating for x in call.variables):
            raise Refused("is not continuous: its results are no floating-point numbers")
        if call.name in SAME:
            return list(call.operands)
        if len(call.shapes) == 1 and floating:
            value = self._activation(call)
            if value is not None:
                return [value]
        if call.name not in CONVERTERS:
            raise Refused(_unsupported(call))
        made = CONVERTERS[call.name](call)
        made = made if isinstance(made, list) else [made]
        for item, shape in zip(made, call.shapes, strict=True):
            assert tuple(item.shape) == shape, (call.name, item.shape, shape)
        return made

    def _activation(self, call: Call) -> Value | None:
        """An activation that this equation is the last part of."""
        for form in self.forms(str(call.types[0])):
            if form.pattern.primitive != call.name:
                continue
            bound: dict[str, Any] = {}
            if matches(form.pattern, call.name, call.params, call.operands, bound):
                x = bound.pop("x")
                if x.shape == call.shapes[0]:
                    value = use(call, form, x.value, bound)
                    if value is not None:
                        return value
        return self._by_formula(call)

    def _by_formula(self, call: Call) -> Value | None:
        """A registered function, however it is written; see `formulas`."""
        registered = [form for form in self.forms(str(call.types[0])) if form.formula is not None]
        if not registered or not is_floating(call.types[0]):
            return None
        whole = Pattern(call.name, call.params, tuple(call.operands))
        for x in parts_of(whole):
            if x.shape != call.shapes[0] or not x.floating:
                continue
            try:
                found = formulas.normal(
                    whole, lambda item, x=x: isinstance(item, Traced) and item.value is x.value,
                    number,
                )  # fmt: skip
            except formulas.NoFormula:
                continue
            for form in registered:
                if form.formula == found:
                    return use(call, form, x.value, {})
        return None


def _unsupported(call: Call) -> str:
    if call.name in ("log1p", "expm1", "erfc"):
        return "is only supported as a part of known activations"
    if call.name in ("sort", "top_k", "reduce_prod", "cumprod", "cummax", "cummin"):
        return "is nonlinear in several variables at once"
    if call.name in ENTRYWISE and len(call.variables) == 1:
        return "is no known activation; stagecert.networks.register can make its function known"
    return TWO_VARIABLES if len(call.variables) == 2 else "is not supported"
