"""Why a lane of a search stopped, as numbers that fit into arrays."""

RUNNING, STUCK, REACHED, PROVEN, MET, CROSSED, NOT_FINITE, OUT_OF_STEPS = range(8)
