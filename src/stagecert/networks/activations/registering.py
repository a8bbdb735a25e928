"""Activations of the user's own: exact hulls of what bends at most twice, or any relaxation."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert import pieces
from stagecert.errors import ProblemError
from stagecert.networks.activations import REGISTERED
from stagecert.networks.activations.hulls import Profile
from stagecert.networks.activations.smooth import Smooth, make_profile
from stagecert.networks.activations.wedges import AbstractActivation, AbstractWedge
from stagecert.validate import advice


def _name_is_free(name: str, replace: bool):
    if name in REGISTERED and not replace:
        raise ProblemError(
            f"An activation '{name}' is already registered; pass replace=True to replace it."
        )


def register(
    name: str,
    function: Callable,
    derivative: Callable | None = None,
    inflections: Sequence[float] = (),
    *,
    replace: bool = False,
) -> None:
    """Registers a function of one number that bends at most twice; its hulls are then exact.

    The function must work entry by entry on arrays, in JAX, and be finite at least on [-20, 20].
    What you give is checked by sampling, which finds mistakes but proves nothing: that the
    curvature changes sign at the inflections only is for you to know.

    Args:
        name: what networks call it.
        function: the function.
        derivative: its derivative, if you have a better one than JAX. At a kink it must lie
            between the slopes on both sides.
        inflections: where the function changes between convex and concave, in order; at most two.
            These points, and only these, may be kinks against the curvature around them.
        replace: whether a function of the same name may be replaced.

    Raises:
        ProblemError: if the name is taken, or if what was given does not fit together.

    >>> from stagecert.networks.activations import find
    >>> register("doc_logcosh", lambda x: jnp.logaddexp(x, -x))
    >>> _, most = find("doc_logcosh").image(jnp.array(-1.0), jnp.array(0.0))
    >>> round(float(most), 3)
    1.127
    """
    _name_is_free(name, replace)
    knots = tuple(float(x) for x in inflections)
    if len(knots) > 2:
        raise ProblemError(
            f"Activation '{name}' has {len(knots)} inflections, but exact hulls are made for at "
            "most two. Register a relaxation of it instead (register_relaxation)."
        )
    if not all(np.isfinite(knots)) or any(a >= b for a, b in itertools.pairwise(knots)):
        raise ProblemError(f"The inflections of '{name}' must be finite and in order: {knots}.")
    slope = derivative or _autodiff(function)
    with jax.enable_x64(True):
        profile = _survey(name, function, slope, derivative is not None, knots)
        activation = Registered(profile, _stationary(profile))
        _check_hull(name, activation)
    REGISTERED[name] = activation


def register_relaxation(
    name: str,
    function: Callable,
    lower: Callable,
    upper: Callable,
    image: Callable,
    *,
    replace: bool = False,
) -> None:
    """Registers a function of one number with a relaxation of your own.

    Soundness is then yours: every bound that is proven with this activation is only as true as the
    relaxation. What you give is checked by sampling, which finds mistakes but proves nothing.

    Args:
        name: what networks call it.
        function: the function, entry by entry on arrays, in JAX.
        lower: (x, low, high) -> a convex function of x below the function on [low, high].
        upper: (x, low, high) -> a concave one above it.
        image: (low, high) -> (least, most), which contain the values on [low, high].
        replace: whether a function of the same name may be replaced.

    Raises:
        ProblemError: if the name is taken, or if a sample contradicts what was given.
    """
    _name_is_free(name, replace)
    activation = Relaxed(function, lower, upper, image)
    with jax.enable_x64(True):
        _check_hull(name, activation)
    REGISTERED[name] = activation


class Registered(Smooth):
    """A registered function; `stationary` are the points where it may turn."""

    def __init__(self, profile, stationary):
        super().__init__(profile)
        self.stationary = stationary

    def image(self, low, high, weights=None, /):
        points = [jnp.clip(jnp.asarray(x, low.dtype), low, high) for x in self.stationary]
        at = self.profile.at(low, high, *points)
        least, most = at[0].value - at[0].rounding, at[0].value + at[0].rounding
        for other in at[1:]:
            least = jnp.minimum(least, other.value - other.rounding)
            most = jnp.maximum(most, other.value + other.rounding)
        return least, most


class _RelaxedWedge(AbstractWedge):
    low: Any
    high: Any
    functions: tuple[Callable, Callable] = eqx.field(static=True)

    def lower(self, x):
        return self.functions[0](x, self.low, self.high)

    def upper(self, x):
        return self.functions[1](x, self.low, self.high)

    def slopes(self):
        middle = self.low / 2 + self.high / 2
        exact = pieces.exactly_sloped(jnp.zeros((), middle.dtype))
        below, above = (
            pieces.evaluate(side, (middle,), exact)[1] for side in (self.lower, self.upper)
        )
        return below, above


class Relaxed(AbstractActivation):
    def __init__(self, function, lower, upper, image):
        self.function, self.functions, self.bounds = function, (lower, upper), image

    def __call__(self, x, weights=None, /):
        return self.function(x)

    def image(self, low, high, weights=None, /):
        return self.bounds(low, high)

    def wedge(self, low, high, weights=None, /):
        return _RelaxedWedge(low, high, self.functions)


# -- checks of what users register -----------------------------------------------------------------


def _autodiff(function) -> Callable:
    def derivative(x):
        return jax.jvp(function, (x,), (jnp.ones_like(x),))[1]

    return derivative


def _reach(values) -> float:
    """The largest power of ten, from 20 on, up to which samples are finite."""
    best = 20.0
    for size in (100.0, 1e3, 1e4):
        if not np.all(np.isfinite(values(size))):
            break
        best = size
    return best


def _survey(name, function, slope, own, knots) -> Profile:
    """Finds out how the function bends between its knots."""

    def at(x):
        x = jnp.asarray(x, float)
        try:
            parts = function(x), slope(x)
        except Exception as error:
            what = f"Activation '{name}' fails on an array: {error}{advice(error)}"
            raise ProblemError(what) from error
        for part, what in zip(parts, ("function", "derivative"), strict=True):
            if jnp.shape(part) != x.shape:
                raise ProblemError(
                    f"The {what} of '{name}' must work entry by entry: an array of shape {x.shape} "
                    f"gave one of shape {jnp.shape(part)}."
                )
        return tuple(np.asarray(part) for part in parts)

    low = -_reach(lambda size: at([-size]))
    high = _reach(lambda size: at([size]))
    if knots and (knots[0] <= low or knots[-1] >= high):
        raise ProblemError(f"The function '{name}' is not finite around its inflections {knots}.")
    bends = []
    for start, end in itertools.pairwise((low, *knots, high)):
        grid = np.sinh(np.linspace(np.arcsinh(start), np.arcsinh(end), 2001))
        near = np.linspace(max(start, -20), min(end, 20), 2001) if start < 20 and end > -20 else []
        x = np.unique(np.concatenate([grid, near]))[1:-1]  # knots may be kinks
        values, slopes = at(x)
        if not (np.all(np.isfinite(values)) and np.all(np.isfinite(slopes))):
            raise ProblemError(f"Activation '{name}' must be finite on [{low:g}, {high:g}].")
        if own:
            _check_derivative(name, x, values, slopes)
        steps = np.diff(slopes)
        steep = np.abs(slopes)
        central = np.max(steep[np.abs(x) <= 20], initial=0)
        noise = 1e-9 * np.maximum(steep[1:], steep[:-1]) + 1e-13 * central
        rises, falls = np.any(steps > noise), np.any(steps < -noise)
        if rises and falls:
            turn = x[
                np.argmax(np.diff(np.sign(np.where(np.abs(steps) > noise, steps, 0))) != 0) + 1
            ]
            raise ProblemError(
                f"The derivative of '{name}' both rises and falls on ({start:g}, {end:g}), near "
                f"x = {turn:g}: the function is neither convex nor concave there. Give all its "
                "inflections (at most two), or register a relaxation."
            )
        bends.append(int(rises) - int(falls))
    bend = _alternate(name, knots, bends)

    def size(x, value):  # nothing is known about the formula, but that x itself may be rounded
        return jnp.abs(value) + jnp.abs(x * slope(x))

    profile = make_profile(function, slope, knots=knots, bend=bend, size=size)
    if len(knots) < 2:
        return profile
    return dataclasses.replace(profile, bitangent=_bitangent(profile, low, high))


def _check_derivative(name, x, values, slopes):
    steps, runs = np.diff(values), np.diff(x)
    # A mean slope lies between the derivatives at the ends, as these are monotone on the grid.
    least, most = np.minimum(slopes[1:], slopes[:-1]), np.maximum(slopes[1:], slopes[:-1])
    noise = 1e-9 * (1 + np.abs(values[1:]) + np.max(np.abs(slopes)) * runs) / runs * 1e-3
    noise = noise + 1e-6 * np.max(np.abs(slopes))
    off = np.maximum(steps / runs - most, least - steps / runs) - noise
    if np.any(off > 0):
        k = int(np.argmax(off))
        raise ProblemError(
            f"The derivative of '{name}' does not match the function near x = {x[k]:g}: it says "
            f"{slopes[k]:g}, but the function's slope is {steps[k] / runs[k]:g}."
        )


def _alternate(name, knots, bends) -> int:
    """The first region's bend: regions must alternate, and straight ones fit either way."""
    for bend in (1, -1):
        wanted = [bend * (-1) ** k for k in range(len(bends))]
        if all(b in (0, w) for b, w in zip(bends, wanted, strict=True)):
            return bend
    words = {1: "convex", -1: "concave", 0: "straight"}
    raise ProblemError(
        f"Activation '{name}' is {', '.join(words[b] for b in bends)} between the inflections "
        f"{knots}: it must change between convex and concave at each."
    )


def _zero(function, low, high) -> float | None:
    """Where a monotone function of a float is zero, or None if its sign does not change."""
    below, above = function(low), function(high)
    if not below * above < 0:
        return None
    while low < (middle := (low + high) / 2) < high:
        if (function(middle) < 0) == (below < 0):
            low = middle
        else:
            high = middle
    return middle


def _host(function) -> Callable[[float], float]:
    compiled = jax.jit(function)
    return lambda x: float(compiled(jnp.asarray(x, float)))


_FAR = 1e4


def _regions(profile):
    nudged = [
        (knot - 1e-13 * (1 + abs(knot)), knot + 1e-13 * (1 + abs(knot))) for knot in profile.knots
    ]
    ends = [-_FAR, *(x for pair in nudged for x in pair), _FAR]
    return list(zip(ends[::2], ends[1::2], strict=True))


def _stationary(profile: Profile) -> tuple[float, ...]:
    """Where the function may turn: zeros of the derivative, and kinks."""
    slope = _host(profile.derivative)
    zeros = [_zero(slope, low, high) for low, high in _regions(profile)]
    return (*profile.knots, *(x for x in zeros if x is not None))


def _bitangent(profile: Profile, low, high) -> tuple[float, float] | None:
    """The line that touches both outer regions, found by its slope."""
    f, d = _host(profile.function), _host(profile.derivative)
    sign = profile.bend
    (_, first), _, (last, _) = _regions(profile)

    def places(m):
        one = _zero(lambda x: d(x) - m, low, first)
        two = _zero(lambda x: d(x) - m, last, high)
        return (low if one is None else one), (high if two is None else two)

    def gap(m):
        one, two = places(m)
        return sign * (f(one) - m * one - f(two) + m * two)

    slopes = [sorted((d(low), d(first))), sorted((d(last), d(high)))]
    least, most = max(slopes[0][0], slopes[1][0]), min(slopes[0][1], slopes[1][1])
    room = 1e-9 * (most - least)
    m = _zero(gap, least + room, most - room) if room > 0 else None
    return None if m is None else places(m)


def _check_hull(name: str, activation: AbstractActivation):
    """Looks for points that contradict a relaxation."""
    random = np.random.default_rng(0)
    middle, width = random.normal(size=256) * 3, np.abs(random.normal(size=256)) * 4
    width[:8] = 0
    low, high = jnp.asarray(middle - width / 2), jnp.asarray(middle + width / 2)
    x = low + (high - low) * jnp.linspace(0, 1, 41)[:, None]

    @jax.jit
    def everything(low, high, x):
        wedge = activation.wedge(low, high)
        sides = [
            jax.vmap(lambda x, side=side: jax.jvp(side, (x,), (jnp.ones_like(x),)))(x)
            for side in (wedge.lower, wedge.upper)
        ]
        return sides, activation.image(low, high), activation(x)

    try:
        ((below, left), (above, right)), (least, most), value = everything(low, high, x)
    except Exception as error:
        raise ProblemError(f"The relaxation of '{name}' fails on arrays: {error}") from error
    slack = 1e-9 * (1 + jnp.abs(value))
    shape = value.shape
    for part, what in ((below, "lower"), (above, "upper"), (least, "image"), (most, "image")):
        if jnp.shape(part) not in (shape, shape[1:]):
            raise ProblemError(
                f"The {what} of '{name}' must work entry by entry: it gave shape "
                f"{jnp.shape(part)[-1:]} for {shape[-1:]}."
            )

    def chords(side):
        return side[1:-1] - (side[:-2] + side[2:]) / 2

    faults = {
        "lower is not finite": ~jnp.isfinite(below) | ~jnp.isfinite(left),
        "upper is not finite": ~jnp.isfinite(above) | ~jnp.isfinite(right),
        "lower is above the function": ~(below <= value + slack),
        "upper is below the function": ~(above >= value - slack),
        "lower is not convex": chords(below) > slack[1:-1],
        "upper is not concave": chords(above) < -slack[1:-1],
        "the image misses a value": ~((least - slack <= value) & (value <= most + slack)),
    }
    for fault, found in faults.items():
        if bool(jnp.any(found)):
            entry = int(jnp.argmax(jnp.any(found, axis=0)))
            place = x[int(jnp.argmax(found[:, entry])), entry]
            raise ProblemError(
                f"Activation '{name}' on [{float(low[entry]):g}, {float(high[entry]):g}]: {fault}, "
                f"near x = {float(place):g}."
            )
