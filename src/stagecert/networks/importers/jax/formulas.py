"""Formulas of one variable in a normal form, so that a function is found however it is written.

sqrt(1 + x * x), (x**2 + 1) ** 0.5 and sqrt(1.0 + square(x)) have the same one: a sum of products of
powers, with rational coefficients, of the variable and of functions of such sums. What is rewritten
are identities of real arithmetic that hold for every number. Two formulas with the same normal
form are the same function; two with different ones may still be.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeAlias

# A product is a sorted tuple of (factor, exponent); a sum maps products to their coefficients.
Sum: TypeAlias = dict[tuple, Fraction]

MOST_TERMS = 40
DEEPEST = 24
LARGEST_POWER = 8
_ONE = ()  # the empty product


class NoFormula(Exception):
    """Something that has no normal form here."""


def normal(item: Any, variable: Callable[[Any], bool], number: Callable[[Any], Any]) -> tuple:
    """The normal form of an expression.

    Args:
        item: a number, or an object with `primitive`, `params` and `operands`, named as in JAX.
        variable: whether something is the variable.
        number: the number that something is, or None.

    Raises:
        NoFormula: it depends on something else, or is too long.
    """
    return _frozen(_Reader(variable, number).sum(item, 0))


def _frozen(found: Sum) -> tuple:
    return tuple(sorted(found.items(), key=repr))


def _plus(a: Sum, b: Sum, factor: Fraction = Fraction(1)) -> Sum:
    total = dict(a)
    for product, coefficient in b.items():
        total[product] = total.get(product, Fraction(0)) + factor * coefficient
    if not all(total.values()):
        # What cancels may not be a number everywhere: log(x) - log(x) is no zero.
        raise NoFormula("terms that cancel")
    if len(total) > MOST_TERMS:
        raise NoFormula("too many terms")
    return total


def _times(a: Sum, b: Sum) -> Sum:
    total: Sum = {}
    for one, c in a.items():
        for two, d in b.items():
            powers = dict(one)
            for factor, exponent in two:
                powers[factor] = powers.get(factor, 0) + exponent
            product = tuple(sorted(powers.items(), key=repr))
            total = _plus(total, {product: c * d})
    return total


def _constant(value: Fraction) -> Sum:
    return {_ONE: value} if value else {}


def _atom(*parts: Any) -> Sum:
    return {((tuple(parts), 1),): Fraction(1)}


class _Reader:
    def __init__(self, variable: Callable[[Any], bool], number: Callable[[Any], Any]):
        self.variable, self.number = variable, number

    def sum(self, item: Any, depth: int) -> Sum:
        if depth > DEEPEST:
            raise NoFormula("too deep")
        if self.variable(item):
            return _atom("x")
        name = getattr(item, "primitive", None)
        if not name:
            value = None if hasattr(item, "primitive") else self.number(item)
            if value is None:
                raise NoFormula("not a number")
            try:
                return _constant(Fraction(value))
            except (ValueError, OverflowError):
                raise NoFormula("not finite") from None
        parts = [self.sum(operand, depth + 1) for operand in item.operands]
        return self._made(name, dict(item.params or {}), parts)

    def _made(self, name: str, params: dict, parts: list[Sum]) -> Sum:
        one = _constant(Fraction(1))
        if name in ("add", "add_any"):
            return _plus(parts[0], parts[1])
        if name == "sub":
            return _plus(parts[0], parts[1], Fraction(-1))
        if name == "neg":
            return _plus({}, parts[0], Fraction(-1))
        if name == "mul":
            if not all(parts):
                raise NoFormula("a product with zero")
            return _times(*parts)
        if name == "div":
            return _times(parts[0], _power(parts[1], Fraction(-1)))
        if name == "square":
            return _power(parts[0], Fraction(2))
        if name == "integer_pow":
            return _power(parts[0], Fraction(params["y"]))
        if name in ("sqrt", "rsqrt"):
            return _power(parts[0], Fraction(1, 2) if name == "sqrt" else Fraction(-1, 2))
        if name == "pow" and set(parts[1]) <= {_ONE}:
            return _power(parts[0], parts[1].get(_ONE, Fraction(0)))
        if name == "log1p":
            return _atom("log", _frozen(_plus(parts[0], one)))
        if name == "expm1":
            return _plus(_atom("exp", _frozen(parts[0])), one, Fraction(-1))
        if name == "logistic":
            falling = _atom("exp", _frozen(_plus({}, parts[0], Fraction(-1))))
            return _power(_plus(one, falling), Fraction(-1))
        essential = {k: v for k, v in params.items() if k not in ("accuracy", "sharding")}
        operands = [_frozen(part) for part in parts]
        if name in ("max", "min"):
            operands.sort(key=repr)
        return _atom(name, repr(sorted(essential.items())), *operands)


def _power(base: Sum, exponent: Fraction) -> Sum:
    if exponent.denominator == 1 and 0 <= exponent <= LARGEST_POWER:
        total = _constant(Fraction(1))
        for _ in range(int(exponent)):
            total = _times(total, base)
        return total
    if set(base) == {_ONE} and exponent == -1:
        return _constant(1 / base[_ONE])
    if not base:
        raise NoFormula("a power of zero")
    return _atom("pow", _frozen(base), exponent)
