"""Why a lane of a search stopped, as numbers that fit into arrays."""

(
    RUNNING,
    STUCK,
    REACHED,
    PROVEN,
    MET,
    CROSSED,
    NOT_FINITE,
    OUT_OF_STEPS,
    CONTRADICTED,
    INFEASIBLE,
) = range(10)

# A bound this much above a value, relative to both, is no rounding.
CONTRADICTION = 1e3


def contradicts(value, bound, eps):
    """Whether a lower bound exceeds the value of a feasible point by more than rounding."""
    return bound - value > CONTRADICTION * eps * (abs(bound) + abs(value))
