"""One walk through the equations of a traced function, shared by all that read functions.

A reader says what a value is (an array, an interval, a curvature, a CVXPY expression, ...) and what
an equation makes of values. What is common is here: the environment, literals and constants, and
calls (jit, custom derivatives, remat), whose bodies are walked in place.
"""

from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import Literal

# Primitives that only call a function: their first jaxpr is what they compute.
CALLS = {
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call",
}  # fmt: skip


def inner_jaxprs(equation) -> list[tuple[Any, Any]]:
    """The jaxprs that an equation carries (bodies of calls, loops, branches), with constants."""
    found: list[tuple[Any, Any]] = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            # A closed jaxpr has equations, too, so it must be asked for its constants first.
            if hasattr(item, "jaxpr") and hasattr(item.jaxpr, "eqns"):
                found.append((item.jaxpr, item.consts))
            elif hasattr(item, "eqns"):
                found.append((item, ()))
    return found


def body_of_call(equation) -> tuple[Any, Any] | None:
    """(jaxpr, constants) of what a call computes; None for any other equation."""
    inner = inner_jaxprs(equation) if equation.primitive.name in CALLS else []
    return inner[0] if inner else None


def equations(jaxpr) -> Iterator[Any]:
    """All equations, those of loops and branches included, calls replaced by their bodies."""
    for equation in jaxpr.eqns:
        body = body_of_call(equation)
        if body is None:
            yield equation
        for inner, _ in inner_jaxprs(equation) if body is None else [body]:
            yield from equations(inner)


def walk(
    jaxpr,
    constants,
    arguments,
    rule: Callable[[Any, list], list | None],
    constant: Callable[[Any], Any] = lambda x: x,
) -> list:
    """The values of a jaxpr's outputs, given those of its arguments.

    Args:
        rule: (equation, values of its arguments) -> values of its outputs. None says that a call's
            body shall be walked in its place; a rule answers for everything else, or raises.
        constant: makes a value of a literal or a constant array.
    """
    known: dict = dict(zip(jaxpr.constvars, map(constant, constants), strict=True))
    known.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom):
        return constant(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        out = rule(equation, values)
        if out is None:
            body = body_of_call(equation)
            if body is None:
                raise TypeError(f"The rule has no answer for '{equation.primitive.name}'.")
            out = walk(*body, values, rule, constant)
        known.update(zip(equation.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def bind(equation, values) -> list:
    """What JAX itself makes of an equation's arguments."""
    parameters = equation.primitive.get_bind_params(equation.params)
    # Releases of JAX differ in where they put the functions that a primitive calls.
    functions, parameters = parameters if isinstance(parameters, tuple) else ((), parameters)
    out = equation.primitive.bind(*functions, *values, **parameters)
    return list(out) if equation.primitive.multiple_results else [out]
