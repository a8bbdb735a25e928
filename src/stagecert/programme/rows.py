"""The rows of a programme, collected while a problem is read."""

from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sparse

from stagecert.programme.quadratic import Quadratic
from stagecert.programme.values import (
    Affine,
    NoProgrammeError,
    added,
    affine,
    entries,
    negative,
    size_of,
    stacked,
    wide,
)


@dataclass
class Written:
    """A problem as a programme: rows collected so far, and where everything is found again."""

    count: int = 0  # of variables
    equal: list[Affine] = field(default_factory=list)  # = 0
    below: list[Affine] = field(default_factory=list)  # <= 0
    objective: Affine | None = None
    inputs: list[Affine] = field(default_factory=list)
    blocks: list[Affine] = field(default_factory=list)
    # For each stage: which entries have two bounds, and the rows of both in `below`.
    stages: list[tuple] = field(default_factory=list)
    # For each nonsmooth piece: the rows of its arguments, or its weights if these are constant.
    of_stages: list = field(default_factory=list)
    of_objective: list = field(default_factory=list)
    of_constraints: list = field(default_factory=list)
    constraints: list[int] = field(default_factory=list)
    pieces: list = field(default_factory=list)  # the one of the three that is being written

    def variable(self, shape) -> Affine:
        size = size_of(shape)
        eye = entries(1.0, np.arange(size), self.count + np.arange(size), (size, self.count + size))
        self.count += size
        return Affine(tuple(shape), eye, np.zeros(size))

    def no_more_than_zero(self, value: Affine) -> int:
        """Adds rows; which of `below` they are."""
        if value.products is not None:
            raise NoProgrammeError
        self.below.append(value)
        return len(self.below) - 1

    def maximum(self, arguments: list, shape) -> tuple[Affine, list[int]]:
        """A variable above its arguments, and their rows."""
        top = self.variable(shape)
        under = negative(top)
        return top, [
            self.no_more_than_zero(added(shape, affine(x, shape), under)) for x in arguments
        ]

    def quadratic(self) -> Quadratic:
        """Minimise what the objective says of the variables."""
        value = self.objective
        assert value is not None
        n = self.count
        linear, bent = wide(value.matrix, n).toarray().ravel(), sparse.csr_array((n, n))
        if value.products is not None:
            one, two = value.products.left, value.products.right
            weights = value.products.weights.toarray().ravel()
            a, b = wide(one.matrix, n), wide(two.matrix, n)
            half = a.T @ (sparse.diags_array(weights) @ b)
            bent = sparse.csr_array(half + half.T)
            linear = linear + a.T @ (weights * two.constant) + b.T @ (weights * one.constant)
        empty = Affine((0,), sparse.csr_array((0, n)), np.zeros(0))
        equal, below = (stacked([empty, *rows]) for rows in (self.equal, self.below))
        return Quadratic(
            bent, linear, equal.matrix, -equal.constant, below.matrix, -below.constant
        )  # fmt: skip
