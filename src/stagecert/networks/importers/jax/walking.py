"""Walking through the equations of a traced function: calls are opened up, constants computed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend import core
from jax.extend.source_info_util import summarize

from stagecert.jaxprs import body_of_call
from stagecert.networks.graph import Value
from stagecert.networks.importers.jax.constants import bound_to, looped
from stagecert.networks.importers.onnx.nodes import words

LOOPS = words("scan while")
# What changes how numbers are stored, or nothing at all.
SAME = words(
    "copy copy_p stop_gradient convert_element_type reduce_precision optimization_barrier "
    "device_put sharding_constraint name pvary"
)


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


def walk(
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
            made = walk(body, inputs, step, constant, compute, here)
        elif all(map(constant, operands)):
            if equation.primitive.name in LOOPS:

                def run(body, inputs, here=here):
                    return walk(body, inputs, step, constant, compute, here)

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
    body = body_of_call(equation)
    return (None, ()) if body is None else (core.ClosedJaxpr(*body), operands)


def places(here: Sequence[Any]) -> str:
    """Where an equation stands in the source, and from where that was called."""
    found = [text for text in (summarize(e.source_info) for e in reversed(here)) if text]
    if not found:
        return ""
    return found[0] if found[-1] == found[0] else f"{found[0]}, called at {found[-1]}"


def is_constant(item) -> bool:
    return not isinstance(item, Traced)


def is_floating(dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))
