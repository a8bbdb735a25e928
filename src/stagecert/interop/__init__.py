"""Other libraries' forms of our problems: for a second opinion, or another solver."""

from stagecert.interop.cvxpy import Exported, networks_to_cvxpy, to_cvxpy

__all__ = ["Exported", "networks_to_cvxpy", "to_cvxpy"]
