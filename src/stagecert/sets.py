"""Input sets: convex, bounded sets of points, where a point is a pytree of arrays."""

import abc
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from stagecert.errors import ProblemError
from stagecert.tree import dot, select, subtract

Point = Any  # a pytree of arrays; a single array for Box, Ball and Simplex
Bound = tuple[Point, jax.Array]  # a point and a value
# What people write sets down with. Arrays of JAX may be batches of sets, or traced.
_WRITTEN = (np.ndarray, np.generic, float, int)
# The fields of sets that are numbers.
_NUMBERS = ("lower", "upper", "middle", "radius", "total")


class AbstractSet(eqx.Module):
    """A convex bounded set; every method but `validate` may be jitted, vmapped, differentiated."""

    @abc.abstractmethod
    def project(self, point: Point) -> Point:
        """Return the point of the set nearest to `point` in the Euclidean norm."""

    @abc.abstractmethod
    def minimise_linear(self, gradient: Point) -> Point:
        """Return a point `x` of the set that minimises `<gradient, x>`."""

    def linear_minimum(self, gradient: Point) -> jax.Array:
        """Return a lower bound, exact up to rounding, on the minimum of `<gradient, x>`."""
        return dot(gradient, self.minimise_linear(gradient))

    @abc.abstractmethod
    def sample(self, key: jax.Array) -> Point:
        """Return a random point of the set, uniform for the sets of this module."""

    @abc.abstractmethod
    def centre(self) -> Point:
        """Return a point of the set, where searches start by default."""

    @abc.abstractmethod
    def scale(self) -> Point:
        """Return the typical extent of the set per entry, zero where it has none."""

    def ends(self) -> tuple[Point, Point]:
        """Return two points between which, entry by entry, the whole set lies.

        In NumPy, for a look at the set's own numbers. A set that does not say has infinite ends.
        """
        size = jax.tree.map(lambda x: np.full(x.shape, np.inf), jax.eval_shape(self.centre))
        return jax.tree.map(np.negative, size), size

    def __check_init__(self) -> None:
        """What can be no set, nor a batch of sets, is said where it is written down.

        `solve` looks at the rest. Arrays of JAX may be traced, and are not looked at here.
        """
        held = {name: getattr(self, name) for name in _NUMBERS if hasattr(self, name)}
        if not all(isinstance(value, _WRITTEN) for value in held.values()):
            return
        arrays = {name: np.asarray(value) for name, value in held.items()}
        if any(array.dtype.kind != "f" for array in arrays.values()):
            return
        owner = type(self).__name__
        for name, array in arrays.items():
            _reject(np.isnan(array), f"{owner} has a NaN: {{}}", **{name: array})
            if name in ("radius", "total"):
                message = f"{owner}: {name} must be one positive number, got {{}}"
                _reject(array <= 0, message, **{name: array})
        ends = [arrays[name] for name in ("lower", "upper") if name in arrays]
        if len(ends) == 2 and (ends[0].shape == ends[1].shape or not all(e.ndim for e in ends)):
            lower, upper = np.broadcast_arrays(*ends)
            _reject(lower > upper, f"{owner} is empty: {{}} exceeds {{}}", lower=lower, upper=upper)

    @abc.abstractmethod
    def validate(self) -> None:
        """Raise `ProblemError` unless the set is well formed, non-empty and bounded."""

    def minimise_quadratic(self, gradient: Point, centre: Point, curvature: Point) -> Bound:
        """Bound `<gradient, x - centre> + 1/2 sum curvature * (x - centre)**2` below on the set.

        Args:
            gradient: the linear term, shaped like a point.
            centre: any point, in the set or not.
            curvature: non-negative weights that broadcast to a point.

        The point attains the value, up to rounding, where the curvature is uniform; otherwise the
        smallest curvature stands in for all entries.

        >>> x, value = Ball(jnp.zeros(2), 2.0).minimise_quadratic(jnp.array([3.0, 0.0]), 0.0, 1.0)
        >>> x.tolist(), value.item()
        ([-2.0, 0.0], -4.0)
        """
        dtype = jnp.result_type(*jax.tree.leaves((gradient, centre, curvature)), 0.0)
        centre = jax.tree.broadcast(centre, gradient)
        smallest = [jnp.min(jnp.asarray(leaf, dtype)) for leaf in jax.tree.leaves(curvature)]
        c = _drop_negligible(jnp.stack(smallest).min())
        # Where gradient / c could overflow, curvature is lost in rounding: the linear rule serves.
        largest = jnp.stack([jnp.max(jnp.abs(g)) for g in jax.tree.leaves(gradient)]).max()
        is_curved = c > jnp.finfo(dtype).eps ** 2 * largest
        divisor = jnp.where(is_curved, c, 1.0)
        near = self.project(jax.tree.map(lambda z, g: z - g / divisor, centre, gradient))
        x = select(is_curved, near, self.minimise_linear(gradient))
        # A convex function lies above its tangent, here at x: taking off the most that the tangent
        # falls within the set (or the function anywhere) bounds it below however inexact x is. By
        # Danskin's theorem the derivatives are those with x and the slope held fixed; letting them
        # through would multiply rounding by 1 / c.
        fixed = stop_gradient(x)
        move = subtract(fixed, centre)
        value = dot(jax.tree.map(lambda g, d: g + 0.5 * c * d, gradient, move), move)
        slope = stop_gradient(jax.tree.map(lambda g, d: g + c * d, gradient, move))
        within = dot(slope, subtract(fixed, self.minimise_linear(slope)))
        anywhere = dot(slope, jax.tree.map(lambda h: 0.5 * h / stop_gradient(divisor), slope))
        return x, value - jnp.minimum(within, jnp.where(is_curved, anywhere, jnp.inf))


def _numbers(value: Any) -> Any:
    """Lists and whole numbers, as people type them, as floating-point numbers; arrays as given."""
    if isinstance(value, (list, tuple)) or (isinstance(value, int) and not isinstance(value, bool)):
        array = np.asarray(value)
        return array.astype(float) if array.dtype.kind in "iuf" else value
    return value


class Box(AbstractSet):
    """The points with `lower <= x <= upper`.

    Args:
        lower, upper: the ends per entry; either may be one number for all.

    >>> Box(-1.0, np.ones(2)).project(jnp.array([3.0, 0.5])).tolist()
    [1.0, 0.5]
    """

    lower: Any = eqx.field(converter=_numbers)
    upper: Any = eqx.field(converter=_numbers)

    def project(self, point: Point) -> jax.Array:
        lower, upper, point = _floats(self.lower, self.upper, point)
        return jnp.clip(point, lower, upper)

    def minimise_linear(self, gradient: Point) -> jax.Array:
        lower, upper, g = _floats(self.lower, self.upper, gradient)
        return jnp.where(g > 0, lower, jnp.where(g < 0, upper, 0.5 * lower + 0.5 * upper))

    def minimise_quadratic(self, gradient: Point, centre: Point, curvature: Point) -> Bound:
        """Return the exact minimiser and minimum; see `AbstractSet.minimise_quadratic`."""
        lower, upper, g, z, c = _floats(self.lower, self.upper, gradient, centre, curvature)
        c = _drop_negligible(c)
        stationary = jnp.clip(z - g / jnp.where(c > 0, c, 1.0), lower, upper)
        end = jnp.where(g > 0, lower, jnp.where(g < 0, upper, jnp.clip(z, lower, upper)))
        x = jnp.where(c > 0, stationary, end)
        return x, jnp.sum((g + 0.5 * c * (x - z)) * (x - z))

    def sample(self, key: jax.Array) -> jax.Array:
        lower, upper = _floats(self.lower, self.upper)
        shape = jnp.broadcast_shapes(lower.shape, upper.shape)
        t = jax.random.uniform(key, shape, lower.dtype)
        return jnp.clip((1.0 - t) * lower + t * upper, lower, upper)

    def centre(self) -> jax.Array:
        lower, upper = _floats(self.lower, self.upper)
        return 0.5 * lower + 0.5 * upper

    def scale(self) -> jax.Array:
        lower, upper = _floats(self.lower, self.upper)
        return 0.5 * upper - 0.5 * lower

    def ends(self) -> tuple[Point, Point]:
        lower, upper = np.broadcast_arrays(*_doubles(self.lower, self.upper))
        return lower, upper

    def validate(self) -> None:
        lower, upper = _check("Box", lower=self.lower, upper=self.upper)
        if lower.shape != upper.shape and lower.ndim and upper.ndim:
            raise ProblemError(f"Box: lower has shape {lower.shape} but upper {upper.shape}")
        lower, upper = np.broadcast_arrays(lower, upper)
        _reject(lower > upper, "Box is empty: {} exceeds {}", lower=lower, upper=upper)


class Ball(AbstractSet):
    """The points within Euclidean distance `radius` of `middle`.

    Args:
        middle: an array of any shape; the norm runs over all its entries.
        radius: a positive number.

    >>> Ball(jnp.zeros(2), 5.0).project(jnp.array([0.0, 8.0])).tolist()
    [0.0, 5.0]
    """

    middle: Any = eqx.field(converter=_numbers)
    radius: Any = eqx.field(converter=_numbers)

    def project(self, point: Point) -> jax.Array:
        middle, radius, point = _floats(self.middle, self.radius, point)
        direction, length = _direction(point - middle)
        return jnp.where(length > radius, middle + radius * direction, point)

    def minimise_linear(self, gradient: Point) -> jax.Array:
        middle, radius, gradient = _floats(self.middle, self.radius, gradient)
        return middle - radius * _direction(gradient)[0]

    def sample(self, key: jax.Array) -> jax.Array:
        middle, radius = _floats(self.middle, self.radius)
        key_direction, key_length = jax.random.split(key)
        normal = jax.random.normal(key_direction, middle.shape, middle.dtype)
        length = jax.random.uniform(key_length, (), middle.dtype) ** (1.0 / middle.size)
        return middle + radius * length * _direction(normal)[0]

    def centre(self) -> jax.Array:
        return _floats(self.middle, self.radius)[0]

    def scale(self) -> jax.Array:
        middle, radius = _floats(self.middle, self.radius)
        return jnp.broadcast_to(radius, middle.shape)

    def ends(self) -> tuple[Point, Point]:
        middle, radius = _doubles(self.middle, self.radius)
        reach = radius + 4 * np.finfo(float).eps * (np.abs(middle) + radius)
        return middle - reach, middle + reach

    def validate(self) -> None:
        middle, radius = _check("Ball", middle=self.middle, radius=self.radius)
        if middle.size == 0:
            raise ProblemError(f"Ball: middle has no entries, its shape is {middle.shape}")
        if radius.shape != () or radius <= 0:
            raise ProblemError(f"Ball: radius must be one positive number, got {radius}")


class BoxBall(AbstractSet):
    """The points of a box within Euclidean distance `radius` of `middle`, which is in the box.

    Args:
        lower, upper: the ends of the box per entry.
        middle: an array within the box.
        radius: a positive number.

    >>> box_ball = BoxBall(jnp.zeros(2), jnp.ones(2), jnp.zeros(2), 0.5)
    >>> box_ball.project(jnp.array([-1.0, 8.0])).tolist()
    [0.0, 0.5]
    """

    lower: Any = eqx.field(converter=_numbers)
    upper: Any = eqx.field(converter=_numbers)
    middle: Any = eqx.field(converter=_numbers)
    radius: Any = eqx.field(converter=_numbers)

    def _parts(self, *points: Point) -> list[jax.Array]:
        return _floats(self.lower, self.upper, self.middle, self.radius, *points)

    def _pulled(self, away: Callable) -> jax.Array:
        """The point away(t) in the ball, brought into it by bisection on t in [0, 1].

        `away` is a path in the box from the middle (t = 0) whose distance from it does not fall.
        """
        _, _, middle, radius = self._parts()

        def halve(_, ends):
            low, high = ends
            t = 0.5 * low + 0.5 * high
            inside = _direction(away(t) - middle)[1] <= radius
            return jnp.where(inside, t, low), jnp.where(inside, high, t)

        one = jnp.ones((), middle.dtype)
        whole = _direction(away(one) - middle)[1] <= radius
        steps = jnp.finfo(middle.dtype).nmant + 12
        low, _ = jax.lax.fori_loop(0, steps, halve, (0 * one, one))
        return jnp.where(whole, 1, stop_gradient(low))

    def project(self, point: Point) -> jax.Array:
        lower, upper, middle, _, point = self._parts(point)

        def away(t):  # the minimiser of |x - point|^2 + (1 / t - 1) |x - middle|^2 over the box
            return jnp.clip(middle + t * (point - middle), lower, upper)

        return away(self._pulled(away))

    def _towards(self, gradient: jax.Array) -> tuple[Callable, jax.Array]:
        """The path of minimisers of <gradient, x> + |x - middle|^2 / (2 t reach) over the box."""
        lower, upper, middle, radius = self._parts()
        size = jnp.max(jnp.abs(gradient))
        # Beyond this reach every entry with a slope of any consequence is at an end of the box.
        reach = jnp.maximum(jnp.max(upper - lower), radius) * 1e8 / jnp.where(size > 0, size, 1)

        def away(t):
            # A power of t, so that bisection resolves small and large steps alike.
            return jnp.clip(middle - t**4 * reach * gradient, lower, upper)

        return away, reach

    def minimise_linear(self, gradient: Point) -> jax.Array:
        *_, gradient = self._parts(gradient)
        away, _ = self._towards(gradient)
        return away(self._pulled(away))

    def multiplier(self, gradient: Point) -> jax.Array:
        """Return twice the multiplier of the ball's constraint at the least of `<gradient, x>`."""
        *_, gradient = self._parts(gradient)
        away, reach = self._towards(gradient)
        return 1 / (jnp.maximum(self._pulled(away), 1e-3) ** 4 * reach)

    def linear_minimum(self, gradient: Point) -> jax.Array:
        """Return a lower bound by duality, valid for any multiplier of the ball's constraint."""
        lower, upper, middle, radius, gradient = self._parts(gradient)
        curvature = self.multiplier(gradient)
        move = jnp.clip(middle - gradient / curvature, lower, upper) - middle
        quadratic = 0.5 * curvature * move**2
        with_ball = jnp.sum(gradient * move + quadratic) - 0.5 * curvature * radius**2
        size = jnp.sum(jnp.abs(gradient * move) + quadratic) + 0.5 * curvature * radius**2
        corner = jnp.where(gradient > 0, lower, upper) - middle
        in_box = jnp.sum(gradient * corner)
        rounding = (gradient.size + 8) * jnp.finfo(gradient.dtype).eps
        least = jnp.maximum(
            with_ball - rounding * size, in_box - rounding * jnp.sum(jnp.abs(gradient * corner))
        )
        return jnp.sum(gradient * middle) + least

    def sample(self, key: jax.Array) -> jax.Array:
        lower, upper, middle, radius = self._parts()
        return self.project(Ball(jnp.clip(middle, lower, upper), radius).sample(key))

    def centre(self) -> jax.Array:
        lower, upper, middle, _ = self._parts()
        return jnp.clip(middle, lower, upper)

    def scale(self) -> jax.Array:
        lower, upper, middle, radius = self._parts()
        extent = jnp.minimum(0.5 * (upper - lower), radius)
        return jnp.broadcast_to(extent, middle.shape)

    def ends(self) -> tuple[Point, Point]:
        lowest, highest = Ball(self.middle, self.radius).ends()
        lower, upper = _doubles(self.lower, self.upper)
        return np.maximum(lower, lowest), np.minimum(upper, highest)

    def validate(self) -> None:
        Box(self.lower, self.upper).validate()
        Ball(self.middle, self.radius).validate()
        lower, upper, middle, _ = (np.asarray(x) for x in self._parts())
        outside = (middle < lower) | (middle > upper)
        _reject(outside, "BoxBall: {} is outside of the box", middle=middle)


def _unwrap(size: int | tuple[int]) -> int:
    # A shape (n,) means n; anything else is for `validate` to judge.
    return size[0] if isinstance(size, tuple) and len(size) == 1 else size  # type: ignore


class Simplex(AbstractSet):
    """The points `x` of shape `(size,)` with `x >= 0` and `sum(x) == total`.

    Args:
        size: number of entries, or a shape `(size,)`.
        total: what the entries add up to, a positive number.

    >>> Simplex(3).project(jnp.array([1.5, 1.0, -2.0])).tolist()
    [0.75, 0.25, 0.0]
    """

    size: int = eqx.field(static=True, converter=_unwrap)
    total: Any = eqx.field(default=1.0, converter=_numbers)

    def project(self, point: Point) -> jax.Array:
        total, point = _floats(self.total, point)
        # A constant added to all entries leaves the projection alone, and entries more than `total`
        # below the largest project to zero: using both keeps every digit that matters.
        x = jnp.maximum(point - stop_gradient(jnp.max(point)), -2.0 * total)
        counts = jnp.arange(1, self.size + 1, dtype=x.dtype)
        # The threshold that k active entries would need is largest at the true number of them.
        threshold = jnp.max((jnp.cumsum(jnp.sort(x, descending=True)) - total) / counts)
        return jnp.maximum(x - threshold, 0.0)

    def minimise_linear(self, gradient: Point) -> jax.Array:
        total, gradient = _floats(self.total, gradient)
        return total * jax.nn.one_hot(jnp.argmin(gradient), self.size, dtype=total.dtype)

    def sample(self, key: jax.Array) -> jax.Array:
        (total,) = _floats(self.total)
        # Normalised exponentials are uniform; a Gumbel variate is minus the log of one.
        return total * jax.nn.softmax(-jax.random.gumbel(key, (self.size,), total.dtype))

    def centre(self) -> jax.Array:
        return jnp.broadcast_to(_floats(self.total)[0] / self.size, (self.size,))

    def scale(self) -> jax.Array:
        extent = 1.0 if self.size > 1 else 0.0
        return jnp.broadcast_to(extent * _floats(self.total)[0], (self.size,))

    def ends(self) -> tuple[Point, Point]:
        (total,) = _doubles(self.total)
        # A projected entry may exceed the total by rounding.
        most = total * (1 + 4 * self.size * np.finfo(float).eps)
        return np.zeros(self.size), np.broadcast_to(most, (self.size,))

    def validate(self) -> None:
        if not isinstance(self.size, int | np.integer) or self.size < 1:
            raise ProblemError(f"Simplex: size must be a positive integer, got {self.size!r}")
        (total,) = _check("Simplex", total=self.total)
        if total.shape != () or total <= 0:
            raise ProblemError(f"Simplex: total must be one positive number, got {total}")


class Product(AbstractSet):
    """The points whose components lie each in a set of its own.

    Args:
        parts: one pytree container of sets (tuple, list, dict, NamedTuple, nested), which points
            share; or the sets themselves, for points that are tuples.

    >>> Product({"a": Box(0.0, np.ones(2)), "b": Simplex(2)}).centre()["b"].tolist()
    [0.5, 0.5]
    """

    parts: Any

    def __init__(self, *parts: Any):
        is_container = len(parts) == 1 and not _is_set(parts[0])
        self.parts = parts[0] if is_container else parts

    def _map(self, function: Callable, *trees: Any) -> Any:
        return jax.tree.map(function, self.parts, *trees, is_leaf=_is_set)

    def project(self, point: Point) -> Point:
        return self._map(lambda part, x: part.project(x), point)

    def minimise_linear(self, gradient: Point) -> Point:
        return self._map(lambda part, g: part.minimise_linear(g), gradient)

    def linear_minimum(self, gradient: Point) -> jax.Array:
        return jax.tree.reduce(jnp.add, self._map(lambda part, g: part.linear_minimum(g), gradient))

    def minimise_quadratic(self, gradient: Point, centre: Point, curvature: Point) -> Bound:
        """Add up the bounds of the parts; see `AbstractSet.minimise_quadratic`."""
        trees = [gradient, *(jax.tree.broadcast(t, gradient) for t in (centre, curvature))]
        both = self._map(lambda part, g, z, c: part.minimise_quadratic(g, z, c), *trees)
        values = self._map(lambda _, pair: pair[1], both)
        return self._map(lambda _, pair: pair[0], both), jax.tree.reduce(jnp.add, values)

    def sample(self, key: jax.Array) -> Point:
        structure = jax.tree.structure(self.parts, is_leaf=_is_set)
        keys = structure.unflatten(jax.random.split(key, structure.num_leaves))
        return self._map(lambda part, k: part.sample(k), keys)

    def centre(self) -> Point:
        return self._map(lambda part: part.centre())

    def scale(self) -> Point:
        return self._map(lambda part: part.scale())

    def ends(self) -> tuple[Point, Point]:
        low, high = (self._map(lambda part, k=k: part.ends()[k]) for k in (0, 1))
        return low, high

    def validate(self) -> None:
        parts = jax.tree_util.tree_leaves_with_path(self.parts, is_leaf=_is_set)
        if not parts:
            raise ProblemError("Product has no parts")
        for path, part in parts:
            where = f"Product part {jax.tree_util.keystr(path)}"
            if not _is_set(part):
                raise ProblemError(f"{where} is not a set but {part!r}")
            try:
                part.validate()
            except ProblemError as error:
                raise ProblemError(f"{where}: {error}") from error


def _is_set(x: Any) -> bool:
    return isinstance(x, AbstractSet)


def _floats(*values: Any) -> list[jax.Array]:
    # One strong dtype for all: weakly typed results would change type inside loops.
    dtype = jnp.result_type(*values, 0.0)
    return [jnp.asarray(value, dtype) for value in values]


def _doubles(*values: Any) -> list[np.ndarray]:
    return [np.asarray(value, float) for value in values]


def _drop_negligible(curvature: jax.Array) -> jax.Array:
    # Derivatives divide by the square of it, and processors may read subnormals as zero. A smaller
    # curvature keeps lower bounds valid; the derivative stays one.
    is_negligible = curvature**2 < jnp.finfo(curvature.dtype).tiny
    return curvature - stop_gradient(jnp.where(is_negligible, curvature, 0.0))


def _direction(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `x / |x|` and `|x|`, zeros at zero, without overflow, underflow or NaN derivatives."""
    largest = stop_gradient(jnp.max(jnp.abs(x)))
    is_zero = largest < jnp.finfo(x.dtype).tiny
    scaled = jnp.where(is_zero, 1.0, x) / jnp.where(is_zero, 1.0, largest)
    length = jnp.sqrt(jnp.sum(scaled * scaled))
    return jnp.where(is_zero, 0.0, scaled / length), jnp.where(is_zero, 0.0, largest * length)


def _check(owner: str, **fields: Any) -> list[np.ndarray]:
    """Return the fields as the methods see them, once they are known to be finite floats."""
    values = fields.values()
    kinds = [getattr(value, "dtype", type(value)) for value in values]
    is_numeric = all(map(eqx.is_array_like, values))
    if not is_numeric or not jnp.issubdtype(np.result_type(*kinds), jnp.floating):
        names = " and ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise ProblemError(f"{owner}: {' and '.join(fields)} must be floating, got {names}")
    arrays = [np.asarray(array) for array in _floats(*values)]
    for field, array in zip(fields, arrays, strict=True):
        _reject(np.isnan(array), f"{owner} has a NaN: {{}}", **{field: array})
        _reject(np.isinf(array), f"{owner} is unbounded: {{}}", **{field: array})
    return arrays


def _reject(mask: np.ndarray, message: str, **arrays: np.ndarray) -> None:
    """Raise if the mask holds anywhere, naming the first such entry of each array."""
    if mask.any():
        at = tuple(np.argwhere(mask)[0].tolist())
        index = list(at) if at else ""
        raise ProblemError(message.format(*(f"{n}{index} = {a[at]}" for n, a in arrays.items())))
