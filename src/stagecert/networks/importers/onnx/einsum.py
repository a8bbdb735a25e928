"""ONNX's Einsum: matrix products of two operands at a time, whose axes are moved and joined."""

import math
from typing import Any, TypeAlias

import numpy as np
import onnx

from stagecert.networks.graph import Value
from stagecert.networks.importers.enclosures import CONSTANT
from stagecert.networks.importers.onnx.constants import fold
from stagecert.networks.importers.onnx.nodes import (
    CONVERTERS,
    Call,
    Item,
    Refused,
    check_size,
    converts,
)

Term: TypeAlias = tuple[str, ...]  # the names of an operand's axes


def node(call: Call, operator: str, *items: Item, **attributes: Any) -> Any:
    """What another operator makes of variables and constants."""
    inner = Call(call.draft, operator, call.name, items, attributes, call.opset, ("y",))
    if all(isinstance(x, CONSTANT) for x in items):
        names = [f"x{k}" for k in range(len(items))]
        return fold(inner, onnx.helper.make_node(operator, names, ["y"], **attributes))[0]
    (made,) = CONVERTERS[operator](inner)
    call.added.extend(inner.added)
    return made


@converts("Einsum")
def _einsum(call: Call):
    items = [x for x in call.inputs if x is not None]
    terms, wanted = _equation(call.get("equation").decode(), [len(x.shape) for x in items])
    sizes: dict[str, int] = {}
    for x, term in zip(items, terms, strict=True):
        for name, size in zip(term, x.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise Refused(f"has an axis '{name}' of the lengths {sizes[name]} and {size}")
    if not set(wanted) <= set(sizes):
        raise Refused("names an axis of its output that no input has")
    x, term = items[0], terms[0]
    for k in range(1, len(items)):
        kept = {*wanted, *(name for later in terms[k + 1 :] for name in later)}
        x, term = _pair(call, (x, term), (items[k], terms[k]), kept, sizes)
    x, term = _summed(call, x, term, set(wanted))
    return _turned(call, x, term, wanted)


def _equation(text: str, ranks: list[int]) -> tuple[list[Term], Term]:
    """The names of the axes of all operands, and of the result."""
    left, arrow, right = text.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(ranks):
        raise Refused(f"has the equation '{text}' for {len(ranks)} inputs")
    widths = [rank - len(part.replace("...", "")) for part, rank in zip(parts, ranks, strict=True)]
    most = max((w for w, part in zip(widths, parts, strict=True) if "..." in part), default=0)

    def names(part: str, width: int) -> Term:
        before, dots, after = part.partition("...")
        if width < 0 or (width and not dots) or not (before + after + "a").isalpha():
            raise Refused(f"has the equation '{text}', which does not fit its inputs")
        # Axes that dots stand for are counted from the right.
        between = [f"...{k}" for k in range(most - width, most)] if dots else []
        found = (*before, *between, *after)
        if len(set(found)) != len(found):
            raise Refused("takes a diagonal, which is not supported")
        return found

    terms = [names(part, width) for part, width in zip(parts, widths, strict=True)]
    if arrow:
        return terms, names(right, most if "..." in right else 0)
    letters = [name for term in terms for name in term if not name.startswith("...")]
    once = sorted(name for name in set(letters) if letters.count(name) == 1)
    return terms, (*(f"...{k}" for k in range(most)), *once)


def _pair(call: Call, one, other, kept: set[str], sizes: dict[str, int]) -> tuple[Any, Term]:
    """The product of two operands, summed over what nothing else needs."""
    (x, a), (y, b) = one, other
    x, a = _summed(call, x, a, kept | set(b))
    y, b = _summed(call, y, b, kept | set(a))
    batch = tuple(name for name in a if name in b and name in kept)
    inner = tuple(name for name in a if name in b and name not in kept)
    left, right = (tuple(n for n in p if n not in q) for p, q in ((a, b), (b, a)))

    def length(names: Term) -> int:
        return math.prod(sizes[name] for name in names)

    front = [length(batch)] if batch else []
    check_size([*front, length(left), length(inner), length(right)])
    x = _turned(call, x, a, (*batch, *left, *inner))
    y = _turned(call, y, b, (*batch, *inner, *right))
    x = _shaped(call, x, [*front, length(left), length(inner)])
    y = _shaped(call, y, [*front, length(inner), length(right)])
    found = (*batch, *left, *right)
    made = node(call, "MatMul", x, y)
    return _shaped(call, made, [sizes[name] for name in found]), found


def _summed(call: Call, x: Any, term: Term, kept: set[str]) -> tuple[Any, Term]:
    axes = [k for k, name in enumerate(term) if name not in kept]
    if not axes:
        return x, term
    x = node(call, "ReduceSum", x, axes=axes, keepdims=0)
    return x, tuple(name for name in term if name in kept)


def _turned(call: Call, x: Any, term: Term, order: Term) -> Any:
    if term == order:
        return x
    return node(call, "Transpose", x, perm=[term.index(name) for name in order])


def _shaped(call: Call, x: Any, shape: list[int]) -> Any:
    if tuple(shape) == tuple(x.shape):
        return x
    if isinstance(x, Value):
        return node(call, "Reshape", x, shape=shape)
    return node(call, "Reshape", x, np.array(shape, np.int64))
