"""Values of functions as sparse matrices times the variables, plus products of two such."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sparse

MOST_ENTRIES = 5_000_000  # of a matrix


class NoProgrammeError(Exception):
    """The problem is no quadratic programme, or too large a one."""


@dataclass(frozen=True)
class Products:
    """weights @ (left * right): sums of products of two affine values."""

    weights: Any
    left: "Affine"
    right: "Affine"


@dataclass(frozen=True)
class Affine:
    """matrix @ variables + constant, and products; arrays are vectors in C order."""

    shape: tuple[int, ...]
    matrix: Any
    constant: np.ndarray
    products: Products | None = None

    def mapped(self, matrix, shape) -> "Affine":
        """A linear map of it."""
        products = self.products
        if products is not None:
            weights = sparse.csr_array(matrix @ products.weights)
            products = Products(weights, products.left, products.right)
        linear = sparse.csr_array(matrix @ self.matrix)
        return Affine(tuple(shape), linear, matrix @ self.constant, products)


def size_of(shape) -> int:
    return int(np.prod(shape, dtype=int))


def wide(matrix, columns: int) -> Any:
    """The same matrix with more variables."""
    parts = (matrix.data, matrix.indices, matrix.indptr)
    return sparse.csr_array(parts, shape=(matrix.shape[0], columns))


def entries(values, rows, columns, shape) -> Any:
    if np.size(rows) > MOST_ENTRIES:
        raise NoProgrammeError
    values, rows, columns = (np.ravel(x) for x in np.broadcast_arrays(values, rows, columns))
    some = values != 0
    return sparse.csr_array((values[some], (rows[some], columns[some])), shape=shape)


def picking(places: np.ndarray, size: int) -> Any:
    """The matrix that takes entries from places."""
    places = places.ravel()
    return entries(1.0, np.arange(places.size), places, (places.size, size))


def added(shape, *parts: Affine) -> Affine:
    columns = max(part.matrix.shape[1] for part in parts)
    matrix = parts[0].matrix if len(parts) == 1 else sum(wide(p.matrix, columns) for p in parts)
    constant = np.sum([p.constant for p in parts], axis=0)
    products = [p.products for p in parts if p.products is not None]
    joined = products[0] if products else None
    if len(products) > 1:
        weights = sparse.csr_array(sparse.hstack([p.weights for p in products]))
        joined = Products(
            weights,
            stacked([p.left for p in products]),
            stacked([p.right for p in products]),
        )
    return Affine(tuple(shape), sparse.csr_array(matrix), constant, joined)


def stacked(parts: list[Affine]) -> Affine:
    columns = max(part.matrix.shape[1] for part in parts)
    matrix: Any = sparse.csr_array(sparse.vstack([wide(p.matrix, columns) for p in parts]))
    return Affine((matrix.shape[0],), matrix, np.concatenate([p.constant for p in parts]))


def negative(x: Affine) -> Affine:
    return x.mapped(-sparse.eye_array(size_of(x.shape), format="csr"), x.shape)


def affine(x, shape) -> Affine:
    """A value (or a constant) as large as a shape."""
    size = size_of(shape)
    if isinstance(x, np.ndarray):
        flat = np.broadcast_to(np.asarray(x, float), shape).ravel()
        return Affine(tuple(shape), sparse.csr_array((size, 0)), flat)
    if x.shape == tuple(shape):
        return x
    places = np.broadcast_to(np.arange(size_of(x.shape)).reshape(x.shape), shape)
    return x.mapped(picking(places, size_of(x.shape)), shape)
