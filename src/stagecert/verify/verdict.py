"""What is answered about a property: the verdict, and what is known of each of its cases."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stagecert.html import facts_table
from stagecert.verify.proving import Certified
from stagecert.verify.replay import Counterexample

Answer = Literal["unsat", "sat", "unknown", "timeout"]


@dataclass(frozen=True, eq=False)
class CaseBounds:
    """What is known of one case of the property.

    Attributes:
        case: its number in `Property.cases`.
        refuted: whether the bounds of the search prove that no point belongs to the case.
        how: what refuted it: "ibp" (one pass back on intervals), "backward" (on intervals that
            passes back have tightened), "envelope" (with planes above neurons), "nonconvex",
            "optimised", "splitting" (of the inputs), "forms" (the same, with bounds by quadratic
            forms) or "tree" (of splits of neurons).
        row: the row that did, as an index into the case's output rows followed by the rows of its
            inputs; None if there is none, or if different boxes needed different rows.
        bounds: for each of these rows a certified lower bound of row - bound over the whole box.
        proven: a certified lower bound on the violation, the largest row - bound at any point: the
            best of `bounds`, or the least that was proven on the parts of a box that was split.
        shortfall: how far the best of these bounds is from deciding the case; zero if it does.
        nearest: the smallest violation met: the largest row - bound at the best point. A
            counterexample has at most zero. Computed in single precision. Where the rows of a case
            have coefficients of different sizes, each row counts as if its largest one were about
            one.
    """

    case: int
    refuted: bool
    how: str | None
    row: int | None
    bounds: np.ndarray
    proven: float
    shortfall: float
    nearest: float


@dataclass(frozen=True, eq=False)
class Verdict:
    """The answer to "is there a counterexample?".

    Attributes:
        answer: "unsat" (proven: there is none; see `checked`), "sat" (there is one, replayed in
            ONNX Runtime), "unknown", or "timeout".
        counterexample: for "sat".
        cases: what is known of each case.
        seconds: how long it took.
        reason: one sentence about an answer that decides nothing, or about how it was decided.
        boxes: how many boxes were bounded by splitting, or nodes of the tree of splits.
        certified: the certificate of "unsat", with what the checker said of it; None if the answer
            is another one or was not to be checked.
        objection: why the checker did not accept a proof that the search believes in: the answer
            is then "unknown". `rejected` tells whether that is a fault of this program.
        rejected: the checker understood the model, and did not accept the proof.
        closed: which share of the boxes or of the tree of splits is refuted, if the parts of a
            split count alike; None if nothing was split.
        compiling: seconds of these that went into compiling programs, or reading compiled ones.
        without: the Softmax or LogSoftmax that the model ends in and that was left out, because
            the property is about the order of outputs only. Bounds and violations are then about
            what it reads, the logits. None if nothing was.
    """

    answer: Answer
    counterexample: Counterexample | None
    cases: tuple[CaseBounds, ...]
    seconds: float
    reason: str
    boxes: int = 0
    certified: Certified | None = None
    objection: str | None = None
    rejected: bool = False
    closed: float | None = None
    compiling: float = 0.0
    without: str | None = None

    @property
    def checked(self) -> bool:
        """Whether the checker has accepted a certificate of the answer, which is "unsat"."""
        return self.certified is not None

    @property
    def certificate(self) -> bytes | None:
        """The certificate that the checker accepted: what its file holds."""
        return None if self.certified is None else self.certified.certificate

    @property
    def decided(self) -> bool:
        """Whether the answer is "unsat" or "sat"."""
        return self.answer in ("unsat", "sat")

    @property
    def gap(self) -> float | None:
        """How far the least violation that was met is from the least one that is proven.

        None if one of them is not known. That is also so where splits of neurons, or quadratic
        forms, prove that a violation is above zero: they do not say how far.
        """
        worst = min(
            self.cases, key=lambda one: np.nan_to_num(one.proven, nan=-np.inf), default=None
        )
        if worst is None or (worst.how in ("tree", "forms") and worst.proven == 0):
            return None
        return _plain(min(one.nearest for one in self.cases) - worst.proven)

    @property
    def standing(self) -> str | None:
        """How far an answer that decides nothing is from a proof; None if there is no such case."""
        left = [one for one in self.cases if not one.refuted]
        if self.decided or not left:
            return None
        worst = max(left, key=lambda one: one.shortfall)
        if not np.isfinite(worst.proven):
            text = f"Case {worst.case} has no bound yet"
        else:
            text = (
                f"The weakest bound is {worst.proven:.4g} (case {worst.case}), "
                f"{worst.shortfall:.4g} short of a proof"
            )
        nearest = min(one.nearest for one in left)
        if np.isfinite(nearest):
            text += f"; the input nearest to a counterexample misses by {nearest:.4g}"
        if self.closed is not None:
            text += f"; {self.boxes} nodes were seen, {100 * self.closed:.4g} % of the tree closed"
        return text + "."

    def __repr__(self) -> str:
        refuted = sum(one.refuted for one in self.cases)
        known = f"{refuted} of {len(self.cases)} cases refuted"
        if self.counterexample is not None:
            known = f"counterexample to case {self.counterexample.case}"
        checked = ", checked" if self.checked else ""
        return f"Verdict({self.answer}{checked}, {known}, {self.seconds:.3g} s: {self.reason})"

    def _repr_html_(self) -> str:
        """What notebooks show."""
        point = self.counterexample
        facts = {
            "answer": self.answer,
            "checked": self.checked if self.answer == "unsat" else None,
            "cases refuted": f"{sum(one.refuted for one in self.cases)} of {len(self.cases)}",
            "counterexample": None if point is None else f"to case {point.case}",
            "reason": self.reason,
            "objection": self.objection,
            "standing": self.standing,
            "seconds": f"{self.seconds:.3g}",
        }
        return facts_table("Verdict", facts)

    def to_dict(self) -> dict[str, Any]:
        """The verdict as plain data, for JSON; numbers that are not finite become None."""
        point = self.counterexample
        return {
            "answer": self.answer,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "compiling_seconds": round(self.compiling, 3),
            "boxes": self.boxes,
            "closed": self.closed and round(self.closed, 6),
            "checked": self.checked,
            "without": self.without,
            "proving_seconds": self.certified and round(self.certified.proving, 3),
            "checking_seconds": self.certified and round(self.certified.checking, 3),
            "counterexample": None
            if point is None
            else {
                "inputs": [float(v) for v in point.inputs],
                "outputs": [float(v) for v in point.outputs],
                "case": point.case,
                "tolerance": point.tolerance,
            },
            "cases": [
                {
                    "case": one.case,
                    "refuted": one.refuted,
                    "how": one.how,
                    "row": one.row,
                    "bounds": [_plain(v) for v in one.bounds],
                    "proven": _plain(one.proven),
                    "shortfall": _plain(one.shortfall),
                    "nearest": _plain(one.nearest),
                }
                for one in self.cases
            ],
        }


def _plain(value) -> float | None:
    return float(value) if np.isfinite(value) else None
