"""Reads the text of a VNN-LIB file, version 1 or 2.

One pass over the tokens, with a stack of its own instead of recursion. `not` is pushed inwards
on the way down, and every closing bracket turns its expression into disjunctive normal form. So
no syntax tree is kept, and nesting costs no interpreter stack.
"""

import re
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple, NoReturn

from stagecert_check.properties.errors import PropertyError
from stagecert_check.properties.model import KIND, Network, Tensor

INPUT, OUTPUT, HIDDEN = 0, KIND, 2 * KIND

MAX_VARIABLES = 1 << 26  # of one kind; the largest public benchmarks have a few hundred thousand
MAX_DEPTH = 1000  # brackets; sums of a layer's width, nested to one side, still pass
MAX_TOKEN = 2000  # characters; the longest exact decimal of a float64 has fewer than 1100
MAX_EXPONENT = 400  # float64 ends at 1e308 and 5e-324
MAX_BITS = 10_000  # of a numerator or denominator, so that one operation stays cheap
MAX_PRODUCTS = 10_000  # of variables
MAX_WORK = 10_000_000  # steps of normalisation in all: seconds, and below a gigabyte

# An index or a shape belongs to the word before it, as in X[0,3]. A stray character is a token of
# its own, which no rule accepts. White space falls between the matches.
TOKEN = re.compile(
    r'[()]|;[^\n]*|"(?:[^"\\\n]|\\.)*"|[^\s()\[\],;"]+(?:\s*\[[\d\s,]*\])?|\S', re.ASCII
)
NUMBER = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?(?:[eE]([+-]?\d+))?", re.ASCII)
WORD = re.compile(r"([A-Za-z][\w.\-]*)(?:\s*\[([\d\s,]*)\])?", re.ASCII)
OLD_NAME = re.compile(r"([XY])_(0|[1-9]\d*)", re.ASCII)
VERSION = re.compile(r"<(\d+)\.(\d+)>", re.ASCII)
# Characters that end a line for some programs but not in VNN-LIB, with something behind them.
HALF_A_LINE_END = re.compile(
    "[\v\f\x1c-\x1e\x85\u2028\u2029]\\s*[^\\s\v\f\x1c-\x1e\x85\u2028\u2029]"
)

OPPOSITE = {"<=": ">", ">": "<=", ">=": "<", "<": ">=", "=": "!=", "==": "!=", "!=": "=="}
CONNECTIVES = {"and", "or", "not"}
BOOLEAN = CONNECTIVES | OPPOSITE.keys()
ARITHMETIC = {"+", "-", "*", "/"}
DTYPES = (
    {"real", "bfloat16"}
    | {f"float{n}" for n in (16, 32, 64)}
    | {f"{sign}int{n}" for sign in ("", "u") for n in (8, 16, 32, 64)}
)

ONE, MINUS_ONE, ZERO = Fraction(1), Fraction(-1), Fraction(0)
CONSTANT = -1  # the key of the constant in a linear expression

Operand = int | Fraction | dict[int, Fraction]


class Atom(NamedTuple):
    """sum of coefficient · variable <= bound, or < if strict; terms in order of the variables."""

    terms: tuple[tuple[int, Fraction], ...]
    bound: Fraction
    strict: bool


Clause = list[Atom]  # all of these
Dnf = list[Clause]  # one of these


@dataclass
class Budget:
    """Counts steps, and stops a file that asks for too many."""

    source: str
    left: int = MAX_WORK

    def spend(self, steps: int) -> None:
        """Takes the steps off what is left."""
        self.check(steps)
        self.left -= steps

    def check(self, steps: int) -> None:
        """Stops if fewer steps are left."""
        if steps > self.left:
            raise PropertyError(
                f"{self.source}: multiplied out, the assertions have more than {MAX_WORK:,} "
                "constraints and terms. Split the property into several files, or write it with "
                "fewer `or` inside `and`.",
                source=self.source,
            )


@dataclass
class Parsed:
    """A file's declarations and assertions: all of `common`, and one clause of each `choices`."""

    version: str
    networks: list[Network]
    budget: Budget
    common: Clause = field(default_factory=list)
    choices: list[Dnf] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # Pairs of variables; products are variables too, which follow the hidden values.
    products: dict[tuple[int, int], int] = field(default_factory=dict)


def conjunction(parts: list[Dnf], budget: Budget) -> Dnf:
    """The disjunctive normal form of all parts together."""
    if not all(parts):
        return []
    several = [part for part in parts if len(part) > 1]
    common = [atom for part in parts if len(part) == 1 for atom in part[0]]
    # The size of the result is known before it is built.
    count = 1
    for part in several:
        count *= len(part)
        budget.check(count)
    size = sum(sum(map(len, part)) * (count // len(part)) for part in several)
    budget.spend(count * (1 + len(common)) + size)
    out = [common]
    for part in several:
        out = [clause + other for clause in out for other in part]
    return out


def disjunction(parts: list[Dnf], budget: Budget) -> Dnf:
    """The disjunctive normal form of at least one of the parts."""
    budget.spend(sum(map(len, parts)))
    return [clause for part in parts for clause in part]


class _Frame(NamedTuple):
    operator: str
    negated: bool
    operands: list[Any]
    position: int


class Reader:
    """Reads one file."""

    def __init__(self, text: str, source: str):
        # A line ends at a line feed, a carriage return or both, and so does a comment.
        self.text = text = text.replace("\r\n", "\n").replace("\r", "\n")
        self.source = source
        self.tokens = TOKEN.finditer(text)
        self.budget = Budget(source)
        self.values: dict[str, int | Fraction] = {}  # numbers and variables, by their token
        # First variable and shape. The names of networks are here too, with a negative variable.
        self.tensors: dict[str, tuple[int, tuple[int, ...]]] = {}
        self.networks: dict[str, Network] = {}
        self.sizes = {"input": 0, "output": 0, "hidden": 0}
        self.old = True  # version 1
        self.parsed = Parsed("1.0", [], self.budget)

    # Tokens and errors

    def next(self) -> tuple[str, int]:
        """The next token and its position; an empty token at the end of the file."""
        for match in self.tokens:
            token = match[0]
            if token[0] != ";":
                if len(token) > MAX_TOKEN:
                    self.fail(token, match.start(), f"a word of at most {MAX_TOKEN} characters")
                return token, match.start()
            if doubt := HALF_A_LINE_END.search(token):
                # Who wrote it may have meant an assertion, which must not get lost.
                self.fail(
                    doubt[0],
                    match.start() + doubt.start(),
                    "a comment that ends at a line feed or a carriage return",
                )
        return "", len(self.text)

    def fail(self, token: str, position: int, expected: str, why: str = "") -> NoReturn:
        """Stops with the place, what was found there and what was expected."""
        line = self.text.count("\n", 0, position) + 1
        column = position - self.text.rfind("\n", 0, position)
        shown = token if len(token) <= 40 else token[:37] + "..."
        found = ascii(shown) if token else "the end of the file"
        message = f"{self.source}:{line}:{column}: found {found}{why}; expected {expected}."
        raise PropertyError(
            message,
            source=self.source,
            line=line,
            column=column,
            found=shown if token else "end of file",
            expected=expected,
        )

    def take(self, wanted: str) -> int:
        token, position = self.next()
        if token != wanted:
            self.fail(token, position, repr(wanted))
        return position

    # Commands

    def read(self) -> Parsed:
        """The whole file."""
        first = True
        inputs: dict[int, int] = {}  # of version 1: index and position
        outputs: dict[int, int] = {}
        asserted = False
        while True:
            token, position = self.next()
            if not token:
                break
            if token != "(":
                self.fail(token, position, "'(', the start of a command")
            command, position = self.next()
            if command == "assert":
                if not asserted and not self.old and not self.parsed.networks:
                    self.fail(command, position, "declare-network before the first assertion")
                asserted = True
                clauses = self.formula()
                self.take(")")
                if len(clauses) == 1:
                    self.parsed.common += clauses[0]
                else:
                    self.parsed.choices.append(clauses)
            elif command == "declare-const" and self.old:
                self.declare_const(inputs, outputs)
            elif command == "declare-network" and not self.old:
                if asserted:
                    self.fail(command, position, "assert: all networks come before the assertions")
                self.declare_network()
            elif command == "vnnlib-version" and first:
                self.version()
            else:
                known = "declare-const" if self.old else "declare-network"
                expected = f"one of the commands {known} and assert"
                if command in ("declare-network", "vnnlib-version"):
                    expected += "; files of version 2 start with (vnnlib-version <2.0>)"
                self.fail(command, position, expected)
            first = False
        if self.old:
            self.old_network(inputs, outputs)
        elif not self.parsed.networks:
            self.fail("", len(self.text), "declare-network")
        return self.parsed

    def version(self) -> None:
        token, position = self.next()
        match = VERSION.fullmatch(token)
        if match is None or match[1] not in ("1", "2"):
            self.fail(token, position, "a version such as <2.0>; versions 1 and 2 can be read")
        self.old = match[1] == "1"
        self.parsed.version = f"{match[1]}.{match[2]}"
        self.take(")")

    # Declarations of version 1

    def declare_const(self, inputs: dict[int, int], outputs: dict[int, int]) -> None:
        token, position = self.next()
        match = OLD_NAME.fullmatch(token)
        if match is None:
            self.fail(token, position, "a variable X_0, X_1, ... or Y_0, Y_1, ...")
        if token in self.values:
            self.fail(token, position, "a name that is not declared yet")
        if len(match[2]) > 9 or int(match[2]) >= MAX_VARIABLES:
            self.fail(token, position, f"an index below {MAX_VARIABLES:,}")
        index = int(match[2])
        (inputs if match[1] == "X" else outputs)[index] = position
        self.values[token] = index + (INPUT if match[1] == "X" else OUTPUT)
        token, position = self.next()
        if token != "Real":
            self.fail(token, position, "the sort Real")
        self.take(")")

    def old_network(self, inputs: dict[int, int], outputs: dict[int, int]) -> None:
        tensors = []
        for name, indices in (("X", inputs), ("Y", outputs)):
            if not indices:
                self.fail("", len(self.text), f"a declaration of {name}_0")
            last = max(indices)
            if last >= len(indices):
                gap = next(i for i in range(last) if i not in indices)
                self.fail(
                    f"{name}_{last}",
                    indices[last],
                    f"a declaration of {name}_{gap} as well: indices count from 0 without gaps",
                )
            tensors.append(Tensor(name, "Real", (len(indices),)))
        self.parsed.networks.append(Network("network", (tensors[0],), (tensors[1],)))

    # Declarations of version 2

    def name(self) -> str:
        """A new name of a network or tensor."""
        token, position = self.next()
        match = WORD.fullmatch(token)
        if match is None or match[2] is not None:
            self.fail(token, position, "a name (letters, digits and _, a letter first)")
        if token in self.tensors:
            self.fail(token, position, "a name that is not declared yet")
        return token

    def declare_network(self) -> None:
        name = self.name()
        self.tensors[name] = (-1, ())  # so that the network's own tensors cannot take its name
        found: dict[str, list[Tensor]] = {"input": [], "output": [], "hidden": []}
        relation: dict[str, str] = {}
        relation_position = 0
        while True:
            token, position = self.next()
            if token == ")":
                break
            if token != "(":
                self.fail(token, position, "'(' or ')' in declare-network")
            command, command_position = self.next()
            if command in ("equal-to", "isomorphic-to"):
                if relation:
                    self.fail(command, command_position, "at most one equal-to or isomorphic-to")
                relation_position = command_position
                relation[command] = self.related()
            elif command in ("declare-input", "declare-output", "declare-hidden"):
                kind = command.removeprefix("declare-")
                found[kind].append(self.declare_tensor(kind))
            else:
                expected = "declare-input, declare-output, declare-hidden, equal-to, isomorphic-to"
                self.fail(command, command_position, f"one of {expected}")
        for kind in ("input", "output"):
            if not found[kind]:
                self.fail(token, position, f"at least one declare-{kind} in network {name}")
        network = Network(
            name,
            tuple(found["input"]),
            tuple(found["output"]),
            tuple(found["hidden"]),
            relation.get("equal-to"),
            relation.get("isomorphic-to"),
        )
        if relation:
            self.check_relation(network, relation_position)
        self.networks[name] = network
        self.parsed.networks.append(network)

    def related(self) -> str:
        token, position = self.next()
        network = self.networks.get(token)
        if network is None:
            self.fail(token, position, "the name of an earlier network")
        if network.equal_to or network.isomorphic_to:
            self.fail(token, position, "a network that has no equal-to or isomorphic-to itself")
        self.take(")")
        return token

    def check_relation(self, network: Network, position: int) -> None:
        word = "equal-to" if network.equal_to else "isomorphic-to"
        other = self.networks[network.equal_to or network.isomorphic_to or ""]
        self.budget.spend(len(other.inputs) + len(other.outputs) + len(other.hidden))

        def signature(tensors: Any):
            return [(t.shape, t.dtype if network.equal_to else "") for t in tensors]

        for kind in ("inputs", "outputs"):
            if signature(getattr(network, kind)) != signature(getattr(other, kind)):
                self.fail(word, position, f"the same {kind} in {network.name} as in {other.name}")
        if network.equal_to:
            nodes = {t.node: (t.shape, t.dtype) for t in other.hidden}
            for tensor in network.hidden:
                if nodes.get(tensor.node, here := (tensor.shape, tensor.dtype)) != here:
                    self.fail(word, position, f"the same shape and type for {tensor.node!r}")

    def declare_tensor(self, kind: str) -> Tensor:
        name = self.name()
        token, position = self.next()
        match = WORD.fullmatch(token)
        if match is None or match[2] is None:
            self.fail(token, position, "an element type and a shape, such as float32 [1,5]")
        if match[1].lower() not in DTYPES:
            self.fail(token, position, f"an element type: one of {', '.join(sorted(DTYPES))}")
        shape = self.integers(match[2], token, position)
        if 0 in shape:
            self.fail(token, position, "a shape without zeros")
        start = self.sizes[kind]
        self.sizes[kind] += prod(shape)
        if self.sizes[kind] > MAX_VARIABLES:
            self.fail(token, position, f"at most {MAX_VARIABLES:,} {kind} entries")
        node = None
        if kind == "hidden":
            string, string_position = self.next()
            if len(string) < 2 or string[0] != '"':
                self.fail(string, string_position, "the name of a node in double quotes")
            node = re.sub(r"\\(.)", lambda m: {"n": "\n", "t": "\t"}.get(m[1], m[1]), string[1:-1])
        token, position = self.next()
        if token != ")":
            why = " (inputs that take the model's default are not supported)"
            self.fail(token, position, "')'", why if token == "initialized" else "")
        base = {"input": INPUT, "output": OUTPUT, "hidden": HIDDEN}[kind]
        self.tensors[name] = (base + start, shape)
        return Tensor(name, match[1], shape, node)

    def integers(self, text: str, token: str, position: int) -> tuple[int, ...]:
        """Indices or sizes, separated by commas (the standard) or spaces (its examples)."""
        words = text.split(",") if "," in text else text.split()
        try:
            return tuple(map(int, words))
        except ValueError:
            self.fail(token, position, "whole numbers in the brackets, such as [0,3]")

    # Expressions

    def formula(self) -> Dnf:
        """One boolean expression, in disjunctive normal form."""
        frames: list[_Frame] = []
        negated, boolean = False, True  # what the innermost bracket wants of its operands
        while True:
            token, position = self.next()
            if token == "(":
                operator, where = self.next()
                if operator not in (BOOLEAN if boolean else ARITHMETIC):
                    if boolean and (value := self.infix(operator, where, negated)) is not None:
                        if not frames:
                            return value
                        frames[-1].operands.append(value)
                        continue
                    self.fail(
                        operator,
                        where,
                        "a comparison (<=, >=, <, >, =, ==, !=), and, or, not"
                        if boolean
                        else "an arithmetic operator (+, -, *, /)",
                    )
                if len(frames) == MAX_DEPTH:
                    self.fail(token, position, f"at most {MAX_DEPTH} nested brackets")
                frames.append(_Frame(operator, negated, [], position))
                boolean = operator in CONNECTIVES
                negated ^= operator == "not"
            elif token == ")":
                if not frames:
                    self.fail(token, position, "a formula")
                frame = frames.pop()
                if boolean or frame.operator in OPPOSITE:
                    value = self.logic(frame, token, position)
                    if not frames:
                        return value
                else:
                    value = self.arithmetic(frame, token, position)
                frames[-1].operands.append(value)
                negated = frame.negated
                boolean = frames[-1].operator in CONNECTIVES
            elif boolean:
                self.fail(token, position, "'(' and a comparison or connective")
            else:
                value = self.values.get(token)
                if value is None:
                    value = self.values[token] = self.operand(token, position)
                frames[-1].operands.append(value)

    def infix(self, first: str, position: int, negated: bool) -> Dnf | None:
        """The comparison (a < b) after its bracket, as published files have it; or None.

        The standard writes (< a b). Between two operands without brackets there is nothing else
        that the file could mean.
        """
        word = WORD.fullmatch(first)
        if word is None or word[1] not in self.tensors:
            return None
        left = self.operand(first, position)
        operator, where = self.next()
        if operator not in OPPOSITE:
            self.fail(operator, where, f"a comparison after {first}")
        token, where = self.next()
        right = self.operand(token, where)
        self.take(")")
        if not self.parsed.notes:
            line = self.text.count("\n", 0, position) + 1
            self.parsed.notes.append(
                f"Line {line}: ({first} {operator} {token}) is read as ({operator} {first} {token})"
                ", which is how the standard writes it."
            )
        return self.compare(OPPOSITE[operator] if negated else operator, [left, right], position)

    def operand(self, token: str, position: int) -> int | Fraction:
        """A number, or a variable."""
        match = NUMBER.fullmatch(token)
        if match is not None and (match[2] or match[3]):
            exponent, fraction = match[4] or "0", match[3] or ""
            if len(exponent) > 9 or abs(int(exponent)) > MAX_EXPONENT:
                self.fail(token, position, f"an exponent of at most {MAX_EXPONENT} in size")
            digits, scale = int(match[1] + match[2] + fraction), int(exponent) - len(fraction)
            return Fraction(digits * 10**scale) if scale >= 0 else Fraction(digits, 10**-scale)
        word = WORD.fullmatch(token)
        if word is None or self.old or word[1] not in self.tensors:
            self.fail(token, position, "a number, a declared variable or '('")
        start, shape = self.tensors[word[1]]
        if start < 0:
            self.fail(token, position, "a tensor, which the name of a network is not")
        indices = self.integers(word[2] or "", token, position)
        if len(indices) != len(shape) or any(i >= n for i, n in zip(indices, shape, strict=True)):
            size = f"[{','.join(map(str, shape))}]"
            self.fail(token, position, f"an index into {word[1]}, which has the shape {size}")
        flat = 0
        for index, length in zip(indices, shape, strict=True):
            flat = flat * length + index
        return start + flat

    def logic(self, frame: _Frame, token: str, position: int) -> Dnf:
        """The value of a closed comparison or connective."""
        operator, negated, operands, start = frame
        if operator in OPPOSITE:
            if len(operands) != 2:
                self.fail(token, position, f"two operands of {operator!r}, not {len(operands)}")
            return self.compare(OPPOSITE[operator] if negated else operator, operands, start)
        if not operands or (operator == "not" and len(operands) > 1):
            wanted = "one operand" if operator == "not" else "at least one operand"
            self.fail(token, position, f"{wanted} of {operator!r}")
        if len(operands) == 1:  # a negation has reached the comparisons already
            return operands[0]
        together = (operator == "and") != negated
        return (conjunction if together else disjunction)(operands, self.budget)

    def compare(self, operator: str, operands: list[Operand], start: int) -> Dnf:
        left, right = operands
        if type(left) is int and type(right) is Fraction:  # nearly every line of a box
            if operator in ("<=", "<"):
                return [[Atom(((left, ONE),), right, operator == "<")]]
            if operator in (">=", ">"):
                return [[Atom(((left, MINUS_ONE),), -right, operator == ">")]]
        terms = self.add(operands, [ONE, MINUS_ONE], start)
        constant = terms.pop(CONSTANT, ZERO)
        below = sorted(terms.items())
        above = [(k, -c) for k, c in below]
        if operator in ("<=", "<"):
            return _atom(below, -constant, operator == "<")
        if operator in (">=", ">"):
            return _atom(above, constant, operator == ">")
        strict = operator == "!="
        both = [_atom(below, -constant, strict), _atom(above, constant, strict)]
        return (disjunction if strict else conjunction)(both, self.budget)

    def arithmetic(self, frame: _Frame, token: str, position: int) -> Operand:
        """The value of a closed sum, difference, product or quotient."""
        operator, _, operands, start = frame
        if not operands:
            self.fail(token, position, f"at least one operand of {operator!r}")
        if operator == "+":
            return self.add(operands, [ONE] * len(operands), start)
        if operator == "-":
            first = MINUS_ONE if len(operands) == 1 else ONE
            return self.add(operands, [first] + [MINUS_ONE] * (len(operands) - 1), start)
        if operator == "/":
            if len(operands) != 2:
                self.fail(token, position, f"two operands of '/', not {len(operands)}")
            divisor = _constant(operands[1])
            if not divisor:
                what = "a divisor other than zero" if divisor == 0 else "a constant divisor"
                self.fail("/", start, what)
            return self.add(operands[:1], [1 / divisor], start)
        factor, others = ONE, []
        for operand in operands:
            constant = _constant(operand)
            if constant is None:
                others.append(operand)
            else:
                factor = self.short(factor * constant, start)
        while len(others) > 1:
            others.append(self.product(others.pop(), others.pop(), start))
        return self.add(others, [factor], start) if others else factor

    def product(self, one: Operand, other: Operand, start: int) -> dict[int, Fraction]:
        """The product of two expressions, term by term."""
        left, right = self.add([one], [ONE], start), self.add([other], [ONE], start)
        self.budget.spend(len(left) * len(right))
        parts = []
        for a, weight in left.items():
            for b, factor in right.items():
                both = self.short(weight * factor, start)
                variable = max(a, b) if CONSTANT in (a, b) else self.variable(a, b, start)
                parts.append({variable: both})
        return self.add(parts, [ONE] * len(parts), start)

    def variable(self, a: int, b: int, start: int) -> int:
        """The variable that stands for the product of two."""
        known = self.parsed.products
        pair = min(a, b), max(a, b)
        if pair not in known:
            if len(known) == MAX_PRODUCTS:
                self.fail("*", start, f"at most {MAX_PRODUCTS:,} products of variables")
            known[pair] = HIDDEN + self.sizes["hidden"] + len(known)
        return known[pair]

    def add(
        self, operands: list[Operand], factors: list[Fraction], start: int
    ) -> dict[int, Fraction]:
        """A weighted sum, without terms that cancel. It may change its operands."""
        total: dict[int, Fraction] = {}
        for operand, factor in zip(operands, factors, strict=True):
            if type(operand) is int:
                operand = {operand: ONE}
            elif type(operand) is Fraction:
                operand = {CONSTANT: operand}
            assert type(operand) is dict
            if factor == 1 and len(operand) > len(total):
                total, operand = operand, total
            elif factor != 1:
                self.budget.spend(len(operand))
                operand = {key: factor * value for key, value in operand.items()}
            self.budget.spend(len(operand))
            for key, value in operand.items():
                value = total[key] + value if key in total else value
                if value:
                    total[key] = self.short(value, start)
                else:
                    total.pop(key, None)
        return total

    def short(self, value: Fraction, position: int) -> Fraction:
        """The value, unless its exact digits have grown out of hand."""
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            self.fail("(", position, f"numbers of at most {MAX_BITS} bits")
        return value


def _atom(terms: list[tuple[int, Fraction]], bound: Fraction, strict: bool) -> Dnf:
    if not terms:  # the variables cancel: true or false everywhere
        return [[]] if (bound > 0 if strict else bound >= 0) else []
    if len(terms) == 1:  # a bound on one variable
        variable, coefficient = terms[0]
        size = abs(coefficient)
        terms, bound = [(variable, coefficient / size)], bound / size
    return [[Atom(tuple(terms), bound, strict)]]


def _constant(operand: Operand) -> Fraction | None:
    """The value of an operand without variables."""
    if type(operand) is dict:
        return operand.get(CONSTANT, ZERO) if operand.keys() <= {CONSTANT} else None
    return operand if type(operand) is Fraction else None
