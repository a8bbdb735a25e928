"""The walk through a jaxpr with intervals in place of numbers, with its loops and branches.

`enclose` walks a jaxpr with arrays of intervals; what real arithmetic would give lies inside the
results. A primitive that is not in the table is refused by name before any work.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from stagecert import jaxprs
from stagecert.enclosure import functions, moving
from stagecert.enclosure import intervals as iv
from stagecert.enclosure.intervals import Interval
from stagecert.enclosure.rules import TABLE, both
from stagecert.errors import ProblemError


class UnknownPrimitives(ProblemError):
    """A function uses primitives of JAX that have no enclosure."""


def refuse_unknown(jaxpr, where: str) -> None:
    """Raises UnknownPrimitives, with the names of all of them, unless a jaxpr can be enclosed."""
    unknown = sorted(set(filter(None, map(_unknown_name, jaxprs.equations(jaxpr)))))
    if unknown:
        raise UnknownPrimitives(
            f"{where} uses {', '.join(repr(name) for name in unknown)}, for which stagecert has no "
            "enclosure: rigorous=True is not possible. Write it with other functions, or do "
            "without rigorous."
        )


def _unknown_name(equation) -> str | None:
    """How messages call a primitive that cannot be enclosed."""
    name = equation.primitive.name
    if name == "sort" and len(equation.invars) > 1:
        return "sort of several arrays"
    if equation.params.get("batch_group_count", 1) != 1:
        return f"{name} with batch groups"
    return None if name in TABLE or name in _SEVERAL else name


def enclose(jaxpr, constants, arguments: list[Interval]) -> list[Interval]:
    """Intervals that contain what the jaxpr gives in real arithmetic for numbers in `arguments`."""
    return jaxprs.walk(jaxpr, constants, arguments, _equation, functions.literal)


def _equation(equation, values: list[Interval]) -> list[Interval] | None:
    if jaxprs.body_of_call(equation) is not None:
        return None
    name = equation.primitive.name
    several = _SEVERAL.get(name)
    if several is not None:
        return several(equation, values)
    return [TABLE[name](equation, *values)]


# -- several outputs, loops ------------------------------------------------------------------------


def _split(equation, values):
    (x,) = values
    ends = np.cumsum(equation.params["sizes"])[:-1]
    axis = equation.params["axis"]
    lows = np.split(x.low, ends, axis)
    if x.is_point:
        return [Interval(a) for a in lows]
    return [Interval(a, b) for a, b in zip(lows, np.split(x.high, ends, axis), strict=True)]


def _unstack(equation, values):
    (x,), axis = values, equation.params["axis"]
    return [x.map(lambda a, k=k: np.take(a, k, axis)) for k in range(x.shape[axis])]


def _sort(equation, values):
    # The k-th smallest number rises with every number: the ends of one array are sorted alone.
    (x,), axis = values, equation.params["dimension"]
    bad = np.isnan(x.low).any(axis=axis, keepdims=True)
    sorted_ends = x.map(lambda a: np.sort(a, axis=axis))
    return [iv.undefined_where(bad, sorted_ends) if bad.any() else sorted_ends]


def _scan(equation, values):
    p = equation.params
    closed, length = p["jaxpr"], p["length"]
    constants = values[: p["num_consts"]]
    carry = values[p["num_consts"] : p["num_consts"] + p["num_carry"]]
    fed = values[p["num_consts"] + p["num_carry"] :]
    collected: list = [None] * length
    for t in range(length)[:: -1 if p["reverse"] else 1]:
        slices = [x.map(lambda a, t=t: a[t]) for x in fed]
        out = enclose(closed.jaxpr, closed.consts, [*constants, *carry, *slices])
        carry, collected[t] = out[: p["num_carry"]], out[p["num_carry"] :]
    stacked = []
    for k, variable in enumerate(equation.outvars[p["num_carry"] :]):
        if length == 0:
            stacked.append(Interval(np.zeros(variable.aval.shape)))
        else:
            parts = [row[k] for row in collected]
            stacked.append(both(lambda *arrays: np.stack(arrays), *parts))
    return [*carry, *stacked]


def _while(equation, values):
    p = equation.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    of_condition, of_body, carry = values[:n], values[n : n + m], values[n + m :]
    test, body = p["cond_jaxpr"], p["body_jaxpr"]
    while True:
        (goes_on,) = enclose(test.jaxpr, test.consts, [*of_condition, *carry])
        if not moving.whole_numbers(goes_on, "the condition of a loop"):
            return list(carry)
        carry = enclose(body.jaxpr, body.consts, [*of_body, *carry])


def _cond(equation, values):
    which, *arguments = values
    branches = equation.params["branches"]
    last = len(branches) - 1
    first, final = (min(max(int(k), 0), last) for k in (which.low, which.high))
    result: Any = None
    for branch in branches[first : final + 1]:
        out = enclose(branch.jaxpr, branch.consts, arguments)
        result = out if result is None else list(map(iv.union, result, out))
    return result


_SEVERAL: dict[str, Callable] = {
    "split": _split,
    "unstack": _unstack,
    "sort": _sort,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
