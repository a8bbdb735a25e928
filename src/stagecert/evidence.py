"""How well the assumptions behind a bound are known."""

import enum
from dataclasses import dataclass


class Evidence(enum.Enum):
    """What is known of one assumption; each value is the sentence a user reads."""

    PROVEN = "The rules of disciplined convex programming prove it."
    SAMPLED = "It is not proven; random segments showed nothing against it."
    UNCHECKED = "Nobody looked."


_ORDER = (Evidence.PROVEN, Evidence.SAMPLED, Evidence.UNCHECKED)


@dataclass(frozen=True)
class Assumptions:
    """What is known of the assumptions that a bound rests on, part by part.

    Attributes:
        objective: that the objective is convex.
        lower, upper: for each stage, that its lower bound is convex and its upper bound concave,
            what a ScanStage feeds into them included.
        curvature: that the objective's declared curvature is not overstated; None where none is
            declared.
        constraints: for each side constraint, that it is convex.
    """

    objective: Evidence
    lower: tuple[Evidence, ...]
    upper: tuple[Evidence, ...]
    curvature: Evidence | None = None
    constraints: tuple[Evidence, ...] = ()

    @staticmethod
    def unchecked(stages: int, curvature: bool = False, constraints: int = 0) -> "Assumptions":
        """Nothing is known of a problem with so many stages and side constraints."""
        nothing = (Evidence.UNCHECKED,) * stages
        declared = Evidence.UNCHECKED if curvature else None
        sides = (Evidence.UNCHECKED,) * constraints
        return Assumptions(Evidence.UNCHECKED, nothing, nothing, declared, sides)

    @property
    def weakest(self) -> Evidence:
        """The least that is known of any part: what the bound as a whole rests on."""
        declared = () if self.curvature is None else (self.curvature,)
        parts = (self.objective, *self.lower, *self.upper, *declared, *self.constraints)
        return max(parts, key=_ORDER.index)

    def __str__(self) -> str:
        return self.weakest.name.lower()

    def as_names(self) -> dict:
        """Plain names, as they are written to files."""
        names = {
            "objective": self.objective.name,
            "lower": [e.name for e in self.lower],
            "upper": [e.name for e in self.upper],
            "curvature": None if self.curvature is None else self.curvature.name,
        }
        sides = [e.name for e in self.constraints]
        return names | ({"constraints": sides} if sides else {})

    @staticmethod
    def from_names(names: dict) -> "Assumptions":
        """What `as_names` wrote; ValueError if it is not that."""
        try:
            declared = names["curvature"]
            held = Assumptions(
                Evidence[names["objective"]],
                tuple(Evidence[n] for n in names["lower"]),
                tuple(Evidence[n] for n in names["upper"]),
                None if declared is None else Evidence[declared],
                tuple(Evidence[n] for n in names.get("constraints", [])),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"unknown assumptions {names!r}") from error
        if len(held.lower) != len(held.upper):
            raise ValueError(f"{len(held.lower)} lower and {len(held.upper)} upper bounds")
        return held
