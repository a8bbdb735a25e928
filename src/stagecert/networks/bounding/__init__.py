"""Bounds on the outputs of a network: intervals, passes back, search; `bounds` has the way in."""
