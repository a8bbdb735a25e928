"""What a traced function makes of what is known about its arguments."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special

from stagecert.curvature.functions import logarithm, root
from stagecert.curvature.lattice import (
    CONCAVE,
    CONSTANT,
    CONVEX,
    NOTHING_KNOWN,
    ROOT_CONVEX,
    RULES,
    Known,
    Origin,
    cleared,
    constant,
    known,
    outward,
    unknown,
)
from stagecert.curvature.moving import STRUCTURAL, parts, structural
from stagecert.curvature.sums import plus, times, whole_power
from stagecert.jaxprs import bind, body_of_call, walk


class Walk:
    """One walk, which gives equal expressions equal numbers, so that x - 1 is known to be x - 1."""

    def __init__(self, recognise: bool = True, other: "Walk | None" = None):
        self.recognise = recognise
        self.steep = False  # whether a slope may be infinite at the border of a range
        self.gentle = True  # whether none could be, whatever the ranges
        self.numbers: dict = {} if other is None else other.numbers
        self.made: dict[int, tuple[str, list[Known]]] = {} if other is None else other.made

    def plainly(self, closed, arguments: list[Known]) -> list[Known]:
        """The same walk through another function, without recognising anything."""
        return Walk(recognise=False, other=self).follow(closed, arguments)

    def follow(self, closed, arguments: list[Known]) -> list[Known]:
        return walk(closed.jaxpr, closed.consts, arguments, self.apply, constant)

    def apply(self, equation, values: list[Known]) -> list[Known] | None:
        """What one equation makes of its arguments; None: walk the body of a call."""
        out = self._made(equation, values)
        whole = all(v.whole for v in values) and not _leaves_domain(equation, values)
        return out if out is None or whole else [replace(o, whole=False) for o in out]

    def _made(self, equation, values: list[Known]) -> list[Known] | None:
        name = equation.primitive.name
        shapes = [v.aval.shape for v in equation.outvars]
        if all(value.exact for value in values):
            return computed(equation, values)
        if any(value.lo.size == 0 for value in values) and body_of_call(equation) is None:
            return [unknown(shape) for shape in shapes]
        if name in MAY_BE_STEEP and not _is_smooth(name, values, equation.params):
            argument, end = MAY_BE_STEEP[name]
            self._may_be_steep(values[argument], end)
        if body_of_call(equation) is not None:
            atom = recognised(equation, values)
            if atom is None:
                return None
            if atom[0] == "xlogy":
                self._may_be_steep(values[1], 0.0)
            return [self._numbered(*atom, {}, values)]
        if name == "scan":
            return scan(self, equation, values)
        if name == "cond":
            return cond(self, equation, values)
        if name in ("split", "unstack"):
            return parts(equation, values[0])
        if name in RULES:
            with np.errstate(all="ignore"):
                out = RULES[name](*values, **equation.params)
            out = self._numbered(name, out, equation.params, values)
            if name == "select_n" and self.recognise and (out.doubts == NOTHING_KNOWN).any():
                out = relative_entropy(self, out)
            return [out]
        if name in STRUCTURAL:
            return [self._numbered(name, structural(equation, values), equation.params, values)]
        if all(value.constant for value in values):
            return [known(np.full(s, -np.inf), np.full(s, np.inf), 0) for s in shapes]
        out = [unknown(shape) for shape in shapes]
        if len(out) == 1:
            return [self._numbered(name, out[0], equation.params, values)]
        return out

    def _may_be_steep(self, x: Known, end: float) -> None:
        self.gentle = self.gentle and x.constant
        self.steep = self.steep or _touches(x, end)

    def _numbered(self, name: str, out: Known, parameters, values: list[Known]) -> Known:
        """The value with the number of the first equal expression."""
        inherited = {v.origin.number for v in values}
        if out.origin.number in inherited or out.exact:
            return out  # entries that were only moved know already where they are from
        what = tuple(sorted((k, str(v)) for k, v in parameters.items()))
        key = (name, what, tuple(_identity(v) for v in values))
        number = self.numbers.setdefault(key, out.origin.number)
        self.made.setdefault(number, (name, values))
        return replace(out, origin=Origin(number, out.origin.index))


# Primitives with an infinite slope at an end of where they are defined: which argument, which end.
MAY_BE_STEEP = {
    "log": (0, 0.0),
    "log1p": (0, -1.0),
    "sqrt": (0, 0.0),
    "rsqrt": (0, 0.0),
    "cbrt": (0, 0.0),
    "pow": (0, 0.0),
    "integer_pow": (0, 0.0),
    "div": (1, 0.0),
}


def _touches(x: Known, end: float) -> bool:
    """Whether a variable value may reach the end, and nothing beyond it but by rounding."""
    near = (x.lo <= end) & (x.lo > end - 1e-9) & (x.hi > end) & ~x.has(CONSTANT)
    return bool(near.any())


def _is_smooth(name: str, values: list[Known], parameters) -> bool:
    if name == "integer_pow":
        return parameters["y"] > 0
    if name == "pow":
        return bool((values[1].lo >= 1).all())
    # The root of a sum of squares is a norm: a kink inside, if anywhere.
    return name == "sqrt" and bool(values[0].has(ROOT_CONVEX).all())


def _leaves_domain(equation, values: list[Known]) -> bool:
    """Whether an entry may become infinite or not a number."""
    name = equation.primitive.name
    if name in ("exp", "exp2", "expm1", "sinh", "cosh"):
        return bool((values[0].hi > 700).any() or (values[0].lo < -700).any())
    if name not in MAY_BE_STEEP or (name == "integer_pow" and equation.params["y"] > 0):
        return False
    argument, end = MAY_BE_STEEP[name]
    x = values[argument]
    if name in ("sqrt", "cbrt"):
        return name == "sqrt" and bool((x.lo < 0).any())
    return bool(((x.lo <= end) & (x.hi >= end)).any() or ((x.hi <= end) & (name != "div")).any())


def _identity(x: Known):
    if x.exact and x.lo.size <= 64:
        return x.shape, x.lo.tobytes()
    return x.origin.number, x.shape, hash(x.origin.index.tobytes())


def follow(closed, arguments: list[Known]) -> list[Known]:
    """What is known about the outputs of a traced function, given what is about its arguments."""
    return Walk().follow(closed, arguments)


def computed(equation, values: list[Known]) -> list[Known]:
    """An equation between known numbers: let JAX compute it."""
    arrays = [
        np.asarray(value.lo).astype(atom.aval.dtype)
        for value, atom in zip(values, equation.invars, strict=True)
    ]
    simple = NUMPY.get(equation.primitive.name)
    if simple is None and equation.primitive.name in STRUCTURAL:
        return [structural(equation, values)]
    floating = all(a.dtype == np.float64 or a.dtype == bool for a in arrays)
    if simple is not None and floating:
        with np.errstate(all="ignore"):
            return [constant(simple(*arrays))]
    return [constant(x) for x in bind(equation, [jnp.asarray(a) for a in arrays])]


# What is plain in NumPy is faster there: JAX compiles every primitive that it runs by itself.
NUMPY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "max": np.maximum, "min": np.minimum, "square": np.square, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "exp": np.exp,
    "log": np.log, "sqrt": np.sqrt, "stop_gradient": np.asarray, "copy": np.asarray,
    "div": np.divide, "and": np.bitwise_and, "or": np.bitwise_or, "logistic": scipy.special.expit,
    "tanh": np.tanh,
}  # fmt: skip


# -- loops and branches ----------------------------------------------------------------------------


def _joined(a: Known, b: Known) -> Known:
    """What holds of both."""
    lo, hi = np.minimum(a.lo, b.lo), np.maximum(a.hi, b.hi)
    return known(lo, hi, a.doubts | b.doubts, whole=a.whole and b.whole)


def _widened(old: Known, new: Known) -> Known:
    """An end that still moves goes to zero, if it may, and else to infinity."""
    lo = np.where(new.lo >= old.lo, old.lo, np.where(new.lo >= 0, 0, -np.inf))
    hi = np.where(new.hi <= old.hi, old.hi, np.where(new.hi <= 0, 0, np.inf))
    return known(lo, hi, old.doubts | new.doubts, whole=old.whole and new.whole)


def scan(walker: Walk, equation, values: list[Known]) -> list[Known]:
    """By induction: what holds of the carry before a step and after it holds for ever."""
    parameters = equation.params
    closed = parameters["jaxpr"]
    consts, carries = parameters["num_consts"], parameters["num_carry"]
    fixed, carry = values[:consts], values[consts : consts + carries]
    sliced = values[consts + carries :]
    # A step reads any slice: what holds of all of them.
    slices = [
        known(x.lo.min(0), x.hi.max(0), np.bitwise_or.reduce(x.doubts, 0), whole=x.whole)
        for x in sliced
    ]
    for _ in range(8):
        carry = [known(c.lo, c.hi, c.doubts, whole=c.whole) for c in carry]
        out = walker.follow(closed, [*fixed, *carry, *slices])
        new = [_widened(c, o) for c, o in zip(carry, out, strict=False)]
        if all(
            n.whole == c.whole
            and np.array_equal(n.doubts, c.doubts)
            and np.array_equal(n.lo, c.lo)
            and np.array_equal(n.hi, c.hi)
            for n, c in zip(new, carry, strict=True)
        ):
            break
        carry = new
    else:
        return [unknown(v.aval.shape) for v in equation.outvars]
    length = parameters["length"]
    stacked = [
        known(*(np.broadcast_to(p, (length, *p.shape)) for p in (y.lo, y.hi, y.doubts)))
        for y in out[carries:]
    ]
    return [*carry, *stacked]


def cond(walker: Walk, equation, values: list[Known]) -> list[Known]:
    which, *arguments = values
    branches = equation.params["branches"]
    if not which.constant:
        return [unknown(v.aval.shape) for v in equation.outvars]
    if which.exact:
        branches = [branches[int(np.clip(which.lo, 0, len(branches) - 1))]]
    outs = [walker.follow(branch, arguments) for branch in branches]
    joined = outs[0]
    for out in outs[1:]:
        joined = [_joined(a, b) for a, b in zip(joined, out, strict=True)]
    return joined


# -- functions of JAX that are known by their bodies -----------------------------------------------


def _logaddexp(x: Known, y: Known) -> Known:
    lo = np.maximum(x.lo, y.lo)
    hi = np.logaddexp(x.hi, y.hi)
    lo, hi = outward(lo, hi, np.where(np.isfinite(hi), np.abs(hi), 0) + 1, 4)
    lo = np.maximum(lo, np.maximum(x.lo, y.lo))
    convex = x.has(CONVEX) & y.has(CONVEX)
    return known(lo, hi, np.where(convex, NOTHING_KNOWN ^ CONVEX, NOTHING_KNOWN))


def _hypot(x: Known, y: Known) -> Known:
    return root(plus(whole_power(x, 2), whole_power(y, 2)))


def _xlogy(x: Known, y: Known) -> Known:
    if x.constant:
        return times(x, logarithm(y))
    if x.origin.same(y.origin):
        shape = np.broadcast_shapes(x.shape, y.shape)
        affine = x.has(CONVEX | CONCAVE)
        return known(
            np.full(shape, -1.0), np.inf, np.where(affine, NOTHING_KNOWN ^ CONVEX, NOTHING_KNOWN)
        )
    return unknown(np.broadcast_shapes(x.shape, y.shape))


_ATOMS: dict[str, tuple[Callable, Callable]] = {
    "logaddexp": (jnp.logaddexp, _logaddexp),
    "hypot": (jnp.hypot, _hypot),
    "xlogy": (jax.scipy.special.xlogy, _xlogy),
}


@lru_cache(maxsize=256)
def _genuine(avals: tuple) -> dict[str, str]:
    """The bodies of JAX's own functions for arguments of the given kinds."""
    arguments = [jax.ShapeDtypeStruct(s, d, weak_type=w) for s, d, w in avals]
    bodies = {}
    for name, (function, _) in _ATOMS.items():
        for equation in jax.make_jaxpr(function)(*arguments).jaxpr.eqns:
            body = body_of_call(equation)
            if body is not None and len(equation.invars) == len(avals):
                bodies[str(body[0])] = name
    return bodies


def recognised(equation, values: list[Known]) -> tuple[str, Known] | None:
    """The rule of one of JAX's functions, if this call has the same body."""
    body, consts = body_of_call(equation) or (None, ())
    if body is None or len(values) != 2 or len(consts) or len(body.eqns) > 40:
        return None
    avals = tuple(
        (a.aval.shape, str(a.aval.dtype), bool(getattr(a.aval, "weak_type", False)))
        for a in equation.invars
    )
    if not all(d.startswith("float") for _, d, _ in avals):
        return None
    try:
        name = _genuine(avals).get(str(body))
    except (TypeError, ValueError):  # shapes that do not go together
        return None
    if name is None:
        return None
    with np.errstate(all="ignore"):
        return name, _ATOMS[name][1](*values)


@lru_cache(maxsize=64)
def _traced_relative_entropy(avals: tuple):
    arguments = [jax.ShapeDtypeStruct(s, np.float64) for s in avals]
    return jax.make_jaxpr(jax.scipy.special.rel_entr)(*arguments)


def relative_entropy(walker, out: Known) -> Known:
    """x log(x / y), which JAX writes out in cases: recognised if it is the same expression.

    It is convex in both together, and falls with y.
    """
    try:
        _, (_, _, where_positive) = walker.made[out.origin.number]
        _, (_, second) = walker.made[where_positive.origin.number]
        _, (first, other) = walker.made[second.origin.number]
        _, (_, _, x) = walker.made[first.origin.number]
        _, (_, _, y) = walker.made[other.origin.number]
    except (KeyError, ValueError):
        return out
    if x.shape != out.shape or y.shape != out.shape:
        return out
    (same,) = walker.plainly(_traced_relative_entropy((x.shape, y.shape)), [x, y])
    if not out.origin.same(same.origin):
        return out
    return cleared(out, x.has(CONVEX | CONCAVE) & y.has(CONCAVE), CONVEX)
