"""Counterexamples count only once ONNX Runtime, on the original model, confirms them."""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from stagecert.verify.runtime import Session
from stagecert_check.properties import Case, InputSet, Property
from stagecert_check.properties.model import with_products

# How far outside its box an input may lie, relative where it is larger than one, and only if the
# box holds no float32 at all in some coordinate.
TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Counterexample:
    """Inputs that violate the property, and what ONNX Runtime computes for them.

    Attributes:
        inputs, outputs: float32, flattened and joined in the order of the property.
        case: which case of the property they belong to.
        tolerance: how far inputs may lie outside the box: zero unless the box holds no float32.
        hidden: the hidden values, if the property has rows on any.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    case: int
    tolerance: float
    hidden: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    def text(self) -> str:
        """The counterexample as VNN-COMP writes it: ((X_0 v) ... (Y_0 v) ...)."""
        lines = [f"(X_{k} {_number(v)})" for k, v in enumerate(self.inputs)]
        lines += [f"(Y_{k} {_number(v)})" for k, v in enumerate(self.outputs)]
        return "(" + "\n".join(lines) + ")"


class Replay:
    """Runs the original model in ONNX Runtime and checks points against the property.

    >>> replay = Replay(Session("model.onnx"), property)  # doctest: +SKIP
    >>> replay.check(point, 0)  # doctest: +SKIP
    """

    def __init__(self, session: Session, property: Property, logits: Session | None = None):
        """Takes the model, and the model without a last Softmax where that is what is searched.

        A softmax in floating point makes ties of numbers that differ: both must be counterexamples.
        """
        self.property, self._logits = property, logits
        self._boxes: dict[int, Float32Box] = {}
        self._session = session

    def run(self, point: np.ndarray) -> np.ndarray:
        """The flattened outputs for one flat float32 point."""
        return self._session.run(point[None])[0]

    def box(self, inputs: InputSet) -> "Float32Box":
        """The float32 points of an input set."""
        return self._boxes.setdefault(id(inputs), Float32Box(inputs))

    def check(self, point: np.ndarray, case: int) -> Counterexample | None:
        """The point moved into the case's box, if it is a counterexample there; else None."""
        what: Case = self.property.cases[case]
        box = self.box(what.inputs)
        x = box.clip(point)
        y = self.run(x)
        if not (np.all(np.isfinite(x)) and np.all(np.isfinite(y))):
            return None
        exact_x = [Fraction(float(v)) for v in x]
        exact_y = [Fraction(float(v)) for v in y]
        # Hidden values follow the outputs. So do products, which are computed anew, exactly.
        _, own, hidden = self.property.sizes
        exact_y, rest = exact_y[:own], exact_y[own : own + hidden]
        rest = with_products(self.property.products, (exact_x, exact_y, rest))
        if not all(row.holds(exact_x, exact_y, rest) for row in what.outputs):
            return None
        if self._logits is not None:
            logits = self._logits.run(x[None])[0]
            if not np.all(np.isfinite(logits)):
                return None
            exact = [Fraction(float(v)) for v in logits]
            if not all(row.holds(exact_x, exact, ()) for row in what.outputs):
                return None
        slack = Fraction(box.tolerance)
        if not all(row.holds(exact_x, (), (), slack) for row in what.inputs.rows):
            return None
        if not box.holds(exact_x):
            return None
        return Counterexample(x, y[:own], case, box.tolerance, y[own : own + hidden])


class Float32Box:
    """The float32 numbers in each coordinate of a box.

    Where a coordinate has none, the nearest one stands in, within TOLERANCE.
    """

    def __init__(self, inputs: InputSet):
        self.inputs = inputs
        low = np.array([_up32(v) for v in inputs.lower], np.float32)
        high = np.array([-_up32(-v) for v in inputs.upper], np.float32)
        none = low > high
        # Low is then the next float32 above the interval, and high the next one below it.
        for k in np.flatnonzero(none):
            above = Fraction(float(low[k])) - inputs.upper[k]
            below = inputs.lower[k] - Fraction(float(high[k]))
            low[k] = high[k] = low[k] if above < below else high[k]
        self.lower, self.upper = low, high
        self.tolerance = TOLERANCE if np.any(none) else 0.0

    def clip(self, point) -> np.ndarray:
        """The nearest float32 point of the box."""
        # First in float64, so that nothing is rounded out of the box.
        inside = np.clip(np.asarray(point, np.float64).reshape(-1), self.lower, self.upper)
        return np.clip(inside.astype(np.float32), self.lower, self.upper)

    def holds(self, x: list[Fraction]) -> bool:
        """Whether an exact point is in the box, or within the tolerance of it if there is one."""
        for low, value, high in zip(self.inputs.lower, x, self.inputs.upper, strict=True):
            slack = Fraction(self.tolerance) * max(1, abs(value)) if self.tolerance else 0
            if not low - slack <= value <= high + slack:
                return False
        return True


def _up32(x: Fraction) -> np.float32:
    """The smallest float32 that is not below x."""
    with np.errstate(over="ignore"):
        value = np.float32(float(x))
    if np.isfinite(value) and Fraction(float(value)) < x:
        value = np.nextafter(value, np.float32(np.inf))
    return value


def _number(v) -> str:
    # The shortest digits that give the same float32 back, and the same float64 too where read so.
    return repr(float(v))
