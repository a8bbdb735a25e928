"""What must hold for every random graph, whatever stagecert makes of it.

- The importer refuses a model with a ProblemError, or its network computes the same in real
  arithmetic: exactly, or within what its weights say of how loose they are.
- Bounds hold: at every point, the exact value of a row is no less than the bound, without any
  tolerance. One of the boxes is a single point, where bounds are as tight as they get.
- The checker's own bounds hold likewise; it accepts no certificate for a property with a
  counterexample, whatever slopes it has; and `verify` does not say "unsat".
- ONNX Runtime agrees with the exact evaluation where all numbers are moderate.
"""

import collections
import hashlib
import random
import re
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flint import arb, ctx, fmpq

from benchmarks.fuzz import network_exact
from benchmarks.fuzz.exact import PRECISION, Vague, number, surely_greater
from benchmarks.fuzz.graphs import Graph
from benchmarks.fuzz.runtime import Runtime
from stagecert import networks
from stagecert.errors import Disagreement, ProblemError
from stagecert.networks.bounding.bounds import Method
from stagecert.verify import certificates, verify
from stagecert.verify.models import OpenModel
from stagecert.verify.proving import NotCovered, OutOfTime, Rejected, certify
from stagecert_check import check, checker, properties
from stagecert_check import graph as rigor_graph
from stagecert_check.functions import Refused
from stagecert_check.numbers import Arithmetic

ROWS = 6
_ROOT = Path(__file__).parents[2]
_JUMPS = frozenset(
    [
        "Floor",
        "Ceil",
        "Round",
        "Sign",
        "ThresholdedRelu",
        "Shrink",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
    ]
)
_LONGEST = 1500  # characters of a number in a property


@dataclass(frozen=True)
class Shares:
    """On which share of the graphs the dearer checks are made."""

    # Reading, values and the checker's bounds take 0.04 s a graph, each of the first three seconds.
    ibp: float = 0.004
    backward: float = 0.001
    compiled: float = 0.0002  # "nonconvex", compiled
    forged: float = 0.05
    rational: float = 0.02  # the checker in rationals
    proofs: float = 0.001
    verify: float = 0.001


@dataclass
class Findings:
    """What became of a graph: what was done with it, and what must not have happened."""

    seen: frozenset[str]
    refused: tuple[str, ...] = ()  # operators, or other reasons
    checker_refused: str = ""
    done: collections.Counter = field(default_factory=collections.Counter)
    violations: list[dict[str, str]] = field(default_factory=list)
    example: Any = None  # a case with a counterexample that a wrong bound excludes

    def wrong(self, check: str, what: str) -> None:
        """Notes a violation."""
        self.violations.append({"check": check, "what": what[:1500]})


class Checks:
    """Checks graphs one after the other."""

    def __init__(self, shares: Shares = Shares(), folder: Path | None = None):
        self.shares = shares
        self.runtime = Runtime()
        self._temporary = None if folder else tempfile.TemporaryDirectory()
        self.folder = folder or Path(self._temporary.name)  # type: ignore[union-attr]

    def close(self) -> None:
        """Ends what was started."""
        self.runtime.close()
        if self._temporary:
            self._temporary.cleanup()

    def run(self, graph: Graph, draw: random.Random, only: str = "") -> Findings:
        """Everything that is checked of one graph, or `only` the importer or the checker."""
        found = Findings(graph.seen)
        rows = graph.rows(draw, ROWS)
        values = row_values(graph, rows)
        for name, step in (
            ("runtime", lambda: self._runtime(graph, found)),
            ("importer", lambda: self._importer(graph, rows, values, found, draw)),
            ("checker", lambda: self._checker(graph, rows, values, found, draw)),
        ):
            if only not in ("", name):
                continue
            try:
                step()
            except Exception:
                text = traceback.format_exc(limit=-5).replace(f"{_ROOT}/", "")
                found.wrong(f"{name} crash", text)
        return found

    # -- the exact evaluation itself -------------------------------------------------------------

    def _runtime(self, graph: Graph, found: Findings) -> None:
        if not graph.tame or graph.dtype == np.float16 or graph.largest > 1e6:
            return
        if graph.seen & _JUMPS:  # where a function jumps, rounding decides
            return
        feeds = [
            {name: x.astype(graph.dtype) for name, x in graph.feeds(point).items()}
            for point in graph.points
        ]
        outputs = self.runtime.run(graph.model.SerializeToString(), feeds)
        if isinstance(outputs, str):
            found.done["runtime crashed" if "crash" in outputs else "runtime refused"] += 1
            return
        found.done["runtime"] += 1
        single = graph.dtype == np.float32
        allowed = (1e-3 if single else 1e-6) * (1 + graph.largest)
        for exact, given in zip(graph.values, outputs, strict=True):
            flat = np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in given])
            true = np.asarray([nearest(x) for x in exact])
            if flat.shape != true.shape or not np.all(np.abs(flat - true) <= allowed):
                found.wrong("runtime", f"ONNX Runtime: {flat}, exact evaluation: {true}")
                return

    # -- importer and bounds -----------------------------------------------------------------------

    def _importer(self, graph: Graph, rows, values, found: Findings, draw) -> None:
        batched: Any = [False if shape and shape[0] > 1 else None for shape in graph.shapes]
        try:
            network = networks.load(graph.model, batched=batched)
        except ProblemError as error:
            found.refused = _reasons(str(error))
            return
        found.done["loaded"] += 1
        self._network(graph, network, found)
        low, high = (_inputs(network, graph, x) for x in (graph.low, graph.high))
        methods: tuple[tuple[Method, float], ...] = (
            ("ibp", self.shares.ibp), ("backward", self.shares.backward),
            ("nonconvex", self.shares.compiled),
        )  # fmt: skip
        for method, share in methods:
            if draw.random() >= share:
                continue
            settings: dict[str, Any] = {"intermediate": draw.choice(("ibp", "backward"))}
            if method == "ibp":
                settings["intermediate"] = "ibp"
            if method == "nonconvex":
                settings["max_iterations"] = 20
                bounds = networks.bound(network, low, high, rows, method, **settings)
            else:
                with jax.disable_jit():
                    bounds = networks.bound(network, low, high, rows, method, **settings)
            found.done[method] += 1
            found.done["finite bounds"] += int(np.isfinite(bounds.bound).sum())
            found.done["bounds"] += bounds.bound.size
            self._compare(graph, rows, values, bounds.bound, method, found)
        if draw.random() < self.shares.verify:
            self._verify(graph, rows, values, found, draw)

    def _network(self, graph: Graph, network, found: Findings) -> None:
        """The network's own value in real arithmetic, at the single point and at two others."""
        for point in (0, 4, len(graph.points) - 1):
            inputs = list(graph.feeds(graph.points[point]).values())
            try:
                made = network_exact.outputs(network, inputs)
            except Vague:  # weights are enclosed, and what they lead to is compared
                found.done["vague"] += 1
                return
            if made.shape != graph.values[point].shape:
                found.wrong("network sizes", f"{made.shape} for {graph.values[point].shape}")
                return
            for place, (mine, true) in enumerate(zip(made, graph.values[point], strict=True)):
                over, under = surely_greater(mine, true), surely_greater(true, mine)
                if over or under:
                    row = np.zeros(len(made))
                    row[place] = 1 if over else -1
                    value = true if over else -true
                    found.example = (int(graph.of[point]), row, _ceiling(value))
                    found.wrong("network", f"output {place} at {graph.points[point].tolist()}: "
                                f"{nearest(mine)!r} instead of {nearest(true)!r}")  # fmt: skip
                    return

    def _compare(self, graph: Graph, rows, values, bounds, method: str, found: Findings) -> None:
        for point, box in enumerate(graph.of):
            for row in range(len(rows)):
                bound = float(bounds[box, row])
                if np.isnan(bound) or bound == np.inf:
                    found.wrong(f"{method} is not a number", f"box {box}, row {rows[row]}: {bound}")
                    return
                value = values[point, row]
                if bound > -np.inf and surely_greater(number(bound), value):
                    found.example = (int(box), rows[row], _ceiling(value))
                    found.wrong(
                        f"{method} bound",
                        f"box {box}, point {graph.points[point].tolist()}, row "
                        f"{rows[row].tolist()}: bound {bound!r} > exact {nearest(value)!r}",
                    )
                    return

    # -- checker and verify ------------------------------------------------------------------------

    def _checker(self, graph: Graph, rows, values, found: Findings, draw) -> None:
        data = graph.model.SerializeToString()
        exact = graph.exact and draw.random() < self.shares.rational
        try:
            with np.errstate(all="ignore"):
                program = rigor_graph.read(data, Arithmetic(exact))
        except Refused as error:
            found.checker_refused = str(error)[:200]
            return
        found.done["checker read"] += 1
        cases = [(box, rows[row], _ceiling(values[point, row]))
                 for point, box in enumerate(graph.of) for row in range(len(rows))
                 if point in (0, 1, 6)]  # fmt: skip
        wanted = properties.load(property_text(graph, cases))
        try:
            judge = checker.Checker(program, wanted, exact)
        except Refused as error:
            found.wrong("checker sizes", str(error))
            return
        tasks = [
            checker.Task(n, 0, np.array(c.inputs.lower64, float), np.array(c.inputs.upper64, float),
                         (1.0,) * len(c.outputs))
            for n, c in enumerate(wanted.cases)
        ]  # fmt: skip
        try:
            with np.errstate(all="ignore"):
                judged = [
                    (task, bound)
                    for some, bounds in judge.bounds(certificates.Arrays(), tasks)
                    for task, bound in zip(some, bounds, strict=True)
                ]
        except Refused as error:
            found.checker_refused = str(error)[:200]
            return
        found.done["checker"] += 1
        for task, bound in judged:
            self._judge(graph, wanted.cases[task.case], task, bound, found)
        if draw.random() < self.shares.forged:
            self._forge(graph, data, program, draw.choice(cases), found, draw)
        if draw.random() < self.shares.proofs:
            self._prove(graph, data, cases, found, draw)

    def _judge(self, graph: Graph, case, task, bound, found: Findings) -> None:
        """A lower bound of row - threshold, against the exact values in the case's box."""
        if not isinstance(bound, fmpq):
            bound = float(bound)
            if np.isnan(bound) or bound == -np.inf:
                found.done["checker without bound"] += 1
                return
            bound = number(bound)
        found.done["checker bounds"] += 1
        (row,) = case.outputs
        for point in range(len(graph.points)):
            x = graph.points[point]
            if np.any(x < task.low) or np.any(x > task.high):
                continue
            with ctx.workprec(PRECISION):
                value = -_rational(row.bound)
                for place, factor in row.outputs:
                    value = value + _rational(factor) * graph.values[point, place]
            if surely_greater(bound, value):
                found.wrong("checker bound", f"{row}: bound {nearest(bound)!r} > exact "
                            f"{nearest(value)!r} at {x.tolist()}")  # fmt: skip
                return

    def files(self, data: bytes, graph: Graph, cases) -> tuple[Path, Path]:
        """A model and a property on disk."""
        model, wanted = self.folder / "model.onnx", self.folder / "property.vnnlib"
        model.write_bytes(data)
        wanted.write_text(property_text(graph, cases))
        return model, wanted

    def _forge(self, graph, data, program, case, found: Findings, draw) -> None:
        """A certificate for a property with a counterexample, with some slopes."""
        model, wanted = self.files(data, graph, [case])
        slopes = []
        for index in program.activations:
            shape = program.nodes[program.nodes[index].arguments[0]].shape
            pair = tuple(np.asarray([draw.choice((0.0, 1.0, 0.5, draw.uniform(-1, 2)))
                                     for _ in range(int(np.prod(shape)))]).reshape(shape)
                         for _ in range(2))  # fmt: skip
            slopes.append(pair if draw.random() < 0.7 else None)
        leaf = certificates.Leaf(np.ones(1), tuple(slopes))
        one, other = (hashlib.sha256(x).hexdigest() for x in (data, wanted.read_bytes()))
        proof = certificates.Proof(one, other, (certificates.CaseProof((None,), (leaf,)),))
        (self.folder / "forged.cert").write_bytes(certificates.packed(proof))
        report = check(model, wanted, self.folder / "forged.cert")
        found.done["forged"] += 1
        if report.accepted:
            found.wrong("forged certificate", wanted.read_text())
        elif report.reasons and "cannot be followed" in report.reasons[0]:
            found.wrong("forged certificate crash", report.reasons[0])

    def _prove(self, graph: Graph, data, cases, found: Findings, draw) -> None:
        """No proof of what is false; how often there is one of what is true by a margin."""
        false = draw.choice(cases)
        model, wanted = self.files(data, graph, [false])
        if self.certification(model, wanted) == "accepted":
            found.wrong("certificate", wanted.read_text())
        _, row, value = next(case for case in cases if case[0] == 0)
        model, wanted = self.files(data, graph, [(0, row, value - abs(value) / 1000 - 1)])
        found.done["true properties"] += 1
        proven = self.certification(model, wanted) == "accepted"
        found.done["true properties proven"] += proven

    def certification(self, model: Path, wanted: Path) -> str:
        """ "accepted" if a property is proven and the proof is accepted, or what prevents that."""
        end = time.monotonic() + 15
        try:
            certify(OpenModel(model), properties.load(wanted), stop=lambda: time.monotonic() > end)
        except (NotCovered, Rejected, OutOfTime, ProblemError) as error:
            return type(error).__name__
        return "accepted"

    def _verify(self, graph: Graph, rows, values, found: Findings, draw) -> None:
        point = draw.choice((0, 1, 6))
        row = draw.randrange(len(rows))
        case = (graph.of[point], rows[row], _ceiling(values[point, row]))
        model, wanted = self.files(graph.model.SerializeToString(), graph, [case])
        self.ask(model, wanted, found, checked=draw.random() < 0.5)

    def ask(self, model: Path, wanted: Path, found: Findings, checked: bool) -> None:
        """`verify` must not prove a property with a counterexample."""
        try:
            verdict = verify(model, wanted.read_text(), timeout=15, check=checked)
        except Disagreement as error:
            found.wrong("disagreement", str(error))
            return
        except ProblemError:
            found.done["verify refused"] += 1
            return
        found.done[f"verify {verdict.answer}"] += 1
        if verdict.answer == "unsat":
            found.wrong("verify" if checked else "verify unchecked", wanted.read_text())


# -- numbers and texts -----------------------------------------------------------------------------


def row_values(graph: Graph, rows: np.ndarray) -> np.ndarray:
    """(points, rows): the exact values of rows."""
    out = np.empty((len(graph.points), len(rows)), object)
    with ctx.workprec(PRECISION):
        for point, row in np.ndindex(*out.shape):
            total: Any = fmpq(0)
            for place in np.flatnonzero(rows[row]):
                total = total + number(rows[row, place]) * graph.values[point, place]
            out[point, row] = total
    return out


def nearest(x: Any) -> float:
    """A float near a number, for messages."""
    if isinstance(x, arb):
        return float(x.mid())
    return int(x.p) / int(x.q) if abs(x) < fmpq(2) ** 1023 else float("inf")


def _rational(x) -> fmpq:
    return fmpq(x.numerator, x.denominator)


def _ceiling(x: Any) -> fmpq:
    """A rational number that is no less, and has a finite decimal."""
    if isinstance(x, arb):
        with ctx.workprec(PRECISION):
            mantissa, exponent = x.upper().man_exp()
        if int(exponent) < -5000:  # nothing that a decimal in a property can be
            mantissa, exponent = (1, -1200) if int(mantissa) > 0 else (0, 0)
        x = fmpq(int(mantissa)) * fmpq(2) ** int(exponent)
    return _decimal(x)[0]


def _decimal(x: fmpq) -> tuple[fmpq, str]:
    """The number rounded up to a decimal, exactly if that is short, and the decimal."""
    top, bottom = int(x.p), int(x.q)
    digits = bottom.bit_length() - 1
    if bottom == 1 << digits and digits < 1200 and abs(top) < 10**300:
        whole = Decimal(top * 5**digits).scaleb(-digits, Context(prec=3000))
        text = format(whole, "f")
        if len(text) < _LONGEST:
            return x, text
    context = Context(prec=60, rounding=ROUND_CEILING)
    up = context.divide(Decimal(top), Decimal(bottom))
    if up and up.adjusted() < -390:
        up = Decimal("1e-390") if up > 0 else Decimal(0)
    return fmpq(*up.as_integer_ratio()), f"{up:e}" if abs(up.adjusted()) > 50 else format(up, "f")


def property_text(graph: Graph, cases) -> str:
    """VNN-LIB: in one of the boxes, a row is at most a threshold, for one of the cases."""
    inputs, outputs = graph.low.shape[1], graph.values.shape[1]
    lines = [f"(declare-const X_{k} Real)" for k in range(inputs)]
    lines += [f"(declare-const Y_{k} Real)" for k in range(outputs)]
    parts = []
    for box, row, threshold in cases:
        ends = " ".join(
            f"(>= X_{k} {_text(graph.low[box, k])}) (<= X_{k} {_text(graph.high[box, k])})"
            for k in range(inputs)
        )
        terms = [f"(* {_text(row[k])} Y_{k})" for k in np.flatnonzero(row)]
        total = terms[0] if len(terms) == 1 else f"(+ {' '.join(terms)})"
        parts.append(f"(and {ends} (<= {total} {_decimal(threshold)[1]}))")
    return "\n".join([*lines, f"(assert (or {' '.join(parts)}))"]) + "\n"


def _text(x: float) -> str:
    return _decimal(number(float(x)))[1]


def _inputs(network, graph: Graph, flat: np.ndarray) -> Any:
    """Boxes' ends as `networks.bound` takes them."""
    shapes = network.input_shape if len(graph.shapes) > 1 else (network.input_shape,)
    parts, start = [], 0
    for shape, whole in zip(shapes, graph.shapes, strict=True):
        size = int(np.prod(whole))
        parts.append(flat[:, start : start + size].reshape(len(flat), *shape))
        start += size
    return tuple(parts) if len(parts) > 1 else parts[0]


def _reasons(text: str) -> tuple[str, ...]:
    """The operators that were refused, with the kind of reason; or the message's beginning."""
    found = re.findall(r"^  (\w+) '[^']*' (.*)$", text, re.MULTILINE)
    return tuple(f"{name} {why[:60]}" for name, why in found) or (text[:80],)
