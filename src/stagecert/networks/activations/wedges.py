"""What activations are: a value, a range, and the tightest convex wedge around each."""

import abc
from typing import Any, ClassVar

import equinox as eqx

from stagecert.networks.activations.hulls import AbstractSide


class AbstractWedge(eqx.Module):
    """A convex function below and a concave one above an activation on an interval, entrywise.

    `straight` says that both are made of lines alone.
    """

    straight: ClassVar[bool] = False

    @abc.abstractmethod
    def lower(self, x) -> Any:
        """Convex, and below the activation on the interval."""

    @abc.abstractmethod
    def upper(self, x) -> Any:
        """Concave, and above the activation on the interval."""

    @abc.abstractmethod
    def slopes(self) -> tuple[tuple, tuple]:
        """First weights for the nonsmooth pieces of `lower` and of `upper`, in program order."""

    def lines(self, slopes) -> tuple[Any, Any, Any, Any] | None:
        """Slope and offset of the line below with these weights, and of the line above.

        In real arithmetic they are below and above the activation on the interval. None: the wedge
        does not know such lines, and whoever wants some has to touch its sides.
        """
        return None


class AbstractActivation(abc.ABC):
    """One nonlinear function of each entry."""

    @abc.abstractmethod
    def __call__(self, x, weights=None, /, **settings) -> Any:
        """The function."""

    @abc.abstractmethod
    def image(self, low, high, weights=None, /, **settings) -> tuple[Any, Any]:
        """An interval that contains the function's values on [low, high]."""

    @abc.abstractmethod
    def wedge(self, low, high, weights=None, /, **settings) -> AbstractWedge:
        """The convex hull of the function on [low, high].

        If a bound is not finite (or near overflow), the wedge is infinite there: it proves nothing.
        """


class HullWedge(AbstractWedge):
    """The two sides of a convex hull."""

    below: AbstractSide
    above: AbstractSide

    def lower(self, x):
        return self.below(x)

    def upper(self, x):
        return self.above(x)

    def slopes(self):
        return self.below.first(), self.above.first()


class StraightWedge(HullWedge):
    """A hull made of lines alone."""

    straight: ClassVar[bool] = True
