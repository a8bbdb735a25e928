"""Nonsmooth pieces (relu, abs, max, allocations) that know how to be smoothed and linearised.

Pieces must enter convex functions upwards (with a nonnegative derivative) and concave ones
downwards, as in max(x, 0) + x**2, never 2 max(x, 0) - max(x, 0): otherwise no bound is proven
(-inf). jax.numpy's own functions may be used in any way, and are linearised by their subgradients.

Every piece is a maximum: relu(x) = max(x, 0), abs(x) = max(x, -x). A JAX primitive marks it in the
user's functions, so that the library can re-run a function with the maximum *treated* in another
way: smoothed for the search, or kept exact but with a chosen slope for a certificate. A primitive,
unlike a global switch read while tracing, also survives `jax.jit` inside the user's code. There are
three: the maximum over a last axis, the entrywise maximum of a pair of arrays, and the best
allocation along a last axis. Pairs are by far the most frequent, and entrywise code on two arrays
is some 20 times faster than on a stack of them.

The conjugate of a maximum is zero on the simplex: max(x) >= w . x for any weights w >= 0 that sum
to one. So weights are slopes whose line needs no intercept, whichever way they were found. An
allocation is the same with weights that have caps: the maximum of w . x over 0 <= w <= caps that
sum to one. That is a continuous knapsack, and the maximum itself is the one whose caps are ones.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from stagecert import jaxprs
from stagecert.errors import ProblemError

max_p = Primitive("stagecert_max")
pair_p = Primitive("stagecert_maximum")
allocation_p = Primitive("stagecert_allocation")
PIECES = (max_p, pair_p, allocation_p)


class First(eqx.Module):
    """The weights of a pair: that of its first array; the second has the rest."""

    weight: Any


class Goods(eqx.Module):
    """The arguments of an allocation along the last axis: values, and how much there is of each."""

    x: Any
    caps: Any


class Shares(eqx.Module):
    """The weights of an allocation: between zero and the caps, and they sum to one."""

    shares: Any
    caps: Any


def is_weights(node) -> bool:
    """Whether a node of a tree is the weights of a pair or of an allocation."""
    return isinstance(node, (First, Shares))


def _is_pair(x) -> bool:
    return isinstance(x, tuple)


def _max_last(x):
    return jnp.max(x, axis=-1)


def value_of(x):
    """The maximum of a piece's arguments: over the last axis, or of a pair of arrays."""
    if isinstance(x, Goods):
        return allocation_p.bind(x.x, x.caps)  # not its sorting, which has no enclosure
    return jnp.maximum(*x) if _is_pair(x) else _max_last(x)


def weighted(x, weights: Any):
    """w . x."""
    if _is_pair(x):
        a, b = x
        return weights.weight * a + (1 - weights.weight) * b
    if isinstance(x, Goods):
        return jnp.sum(weights.shares * x.x, axis=-1)
    return jnp.sum(weights * x, axis=-1)


def spread(x):
    """How far apart a piece's arguments are."""
    if _is_pair(x):
        return jnp.abs(x[0] - x[1])
    x = x.x if isinstance(x, Goods) else x
    return jnp.max(x, axis=-1) - jnp.min(x, axis=-1)


def compared(x, before):
    """(what decides between a piece's arguments, how much of that changed since `before`)."""
    if _is_pair(x):
        difference = x[0] - x[1]
        return difference, jnp.abs(difference - before)
    x = x.x if isinstance(x, Goods) else x
    return x, spread(x - before)


def nothing_compared(weights, unit):
    """What `compared` gives before anything is known, for a piece with these weights."""
    if isinstance(weights, First):
        return jnp.zeros_like(unit)
    return jnp.zeros_like(weights.shares if isinstance(weights, Shares) else weights)


def uniform(x):
    """Weights in the middle of the simplex."""
    if _is_pair(x):
        return First(jnp.full_like(x[0], 0.5))
    if isinstance(x, Goods):
        return Shares(x.caps / jnp.sum(x.caps, axis=-1, keepdims=True), x.caps)
    return jnp.full_like(x, 1 / x.shape[-1])


def nearest_weights(weights) -> Any:
    """The nearest weights that are nonnegative and sum to one."""
    if isinstance(weights, First):
        return First(jnp.clip(weights.weight, 0, 1))
    if isinstance(weights, Shares):
        return Shares(_capped(weights.shares, weights.caps), weights.caps)
    middle = jnp.full_like(weights, 1 / weights.shape[-1])
    return smooth_weights(weights - middle, 1, middle)


def exact_weights(x) -> Any:
    """A subgradient of the maximum; ties share the weight equally."""
    if _is_pair(x):
        a, b = x
        return First(jnp.where(a > b, 1, jnp.where(a < b, 0, 0.5)).astype(a.dtype))
    if isinstance(x, Goods):
        return Shares(_filled(x.x, x.caps), x.caps)
    # Not `x == max(x)`: compiled code may round the two sides differently, and find no equal entry.
    if x.shape[-1] > 16:  # pairs would be too many; one of the largest entries takes all
        return jax.nn.one_hot(jnp.argmax(x, axis=-1), x.shape[-1], dtype=x.dtype)
    gap = x[..., :, None] - x[..., None, :]
    top = jnp.all(gap >= 0, axis=-1).astype(x.dtype)
    return top / jnp.sum(top, axis=-1, keepdims=True)


def _filled(x, caps):
    """The best allocation: the entries that are worth most are taken first."""
    order = jnp.argsort(-x, axis=-1)
    most = jnp.take_along_axis(caps, order, axis=-1)
    taken = jnp.clip(1 - (jnp.cumsum(most, axis=-1) - most), 0, most)
    return jnp.take_along_axis(taken, jnp.argsort(order, axis=-1), axis=-1)


def _best_allocation(x, caps):
    # Caps that do not make a whole leave nothing to choose from: that shall be noticed.
    slip = 8 * x.shape[-1] * jnp.finfo(x.dtype).eps
    enough = jnp.sum(caps, axis=-1) >= 1 - slip
    return jnp.where(enough, jnp.sum(_filled(x, caps) * x, axis=-1), jnp.nan)


def _capped(wanted, caps):
    """The nearest weights between zero and caps that sum to one: the wanted ones, shifted."""

    def shifted(shift):
        return jnp.clip(wanted - shift[..., None], 0, caps)

    def halve(_, ends):
        low, high = ends
        middle = 0.5 * low + 0.5 * high
        much = jnp.sum(shifted(middle), axis=-1) > 1
        return jnp.where(much, middle, low), jnp.where(much, high, middle)

    ends = jnp.min(wanted - caps, axis=-1), jnp.max(wanted, axis=-1)
    halvings = 60 if wanted.dtype == jnp.float64 else 30
    low, high = jax.lax.fori_loop(0, halvings, halve, ends)
    # One end is a little too much and the other too little: what is between them is right.
    more, less = shifted(low), shifted(high)
    over, under = jnp.sum(more, axis=-1) - 1, 1 - jnp.sum(less, axis=-1)
    share = jnp.where(over + under > 0, under / jnp.where(over + under > 0, over + under, 1), 1)
    return less + jnp.clip(share, 0, 1)[..., None] * (more - less)


def _max_jvp(primals, tangents):
    (x,), (t,) = primals, tangents
    t = ad.instantiate_zeros(t)
    return max_p.bind(x), jnp.sum(exact_weights(x) * t, axis=-1)


def _max_batch(args, axes):
    return max_p.bind(jnp.moveaxis(args[0], axes[0], 0)), 0


max_p.def_impl(jax.jit(_max_last))
max_p.def_abstract_eval(lambda x: x.update(shape=x.shape[:-1]))
mlir.register_lowering(max_p, mlir.lower_fun(_max_last, multiple_results=False))
ad.primitive_jvps[max_p] = _max_jvp
batching.primitive_batchers[max_p] = _max_batch


def _pair_jvp(primals, tangents):
    ta, tb = map(ad.instantiate_zeros, tangents)
    weight = exact_weights(primals).weight
    return pair_p.bind(*primals), weight * ta + (1 - weight) * tb


def _pair_batch(args, axes):
    size = next(x.shape[k] for x, k in zip(args, axes, strict=True) if k is not None)
    a, b = (
        jnp.broadcast_to(x, (size, *x.shape)) if k is None else jnp.moveaxis(x, k, 0)
        for x, k in zip(args, axes, strict=True)
    )
    return pair_p.bind(a, b), 0


pair_p.def_impl(jax.jit(jnp.maximum))
pair_p.def_abstract_eval(lambda a, b: a)
mlir.register_lowering(pair_p, mlir.lower_fun(jnp.maximum, multiple_results=False))
ad.primitive_jvps[pair_p] = _pair_jvp
batching.primitive_batchers[pair_p] = _pair_batch


def _allocation_jvp(primals, tangents):
    x, caps = primals
    along_x, along_caps = map(ad.instantiate_zeros, tangents)
    shares = _filled(x, caps)
    # One more of what has a cap replaces the worst of what is taken.
    worst = jnp.min(jnp.where(shares > 0, x, jnp.inf), axis=-1, keepdims=True)
    slope = jnp.sum(shares * along_x + jnp.maximum(x - worst, 0) * along_caps, axis=-1)
    return allocation_p.bind(x, caps), slope


def _allocation_batch(args, axes):
    size = next(x.shape[k] for x, k in zip(args, axes, strict=True) if k is not None)
    x, caps = (
        jnp.broadcast_to(x, (size, *x.shape)) if k is None else jnp.moveaxis(x, k, 0)
        for x, k in zip(args, axes, strict=True)
    )
    return allocation_p.bind(x, caps), 0


allocation_p.def_impl(jax.jit(_best_allocation))
allocation_p.def_abstract_eval(lambda x, caps: x.update(shape=x.shape[:-1]))
mlir.register_lowering(allocation_p, mlir.lower_fun(_best_allocation, multiple_results=False))
ad.primitive_jvps[allocation_p] = _allocation_jvp
batching.primitive_batchers[allocation_p] = _allocation_batch


# -- what users write ---------------------------------------------------------------------------


def _float(x):
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(float)


def max(x, axis: int = -1):
    """The maximum along an axis, convex.

    >>> float(max([1.0, 3.0, 2.0]))
    3.0
    """
    return max_p.bind(jnp.moveaxis(_float(x), axis, -1))


def min(x, axis: int = -1):
    """The minimum along an axis, concave.

    >>> float(min([1.0, 3.0, 2.0]))
    1.0
    """
    return -max(-_float(x), axis)


def maximum(first, *rest):
    """The entrywise maximum of two or more arrays, convex.

    >>> maximum(jnp.array([1.0, 5.0]), 3.0).tolist()
    [3.0, 5.0]
    """
    arrays = map(_float, (first, *rest))
    dtype = jnp.result_type(first, *rest, 0.0)
    arrays = [x.astype(dtype) for x in jnp.broadcast_arrays(*arrays)]
    return pair_p.bind(*arrays) if len(arrays) == 2 else max_p.bind(jnp.stack(arrays, axis=-1))


def minimum(first, *rest):
    """The entrywise minimum of two or more arrays, concave.

    >>> minimum(jnp.array([1.0, 5.0]), 3.0).tolist()
    [1.0, 3.0]
    """
    return -maximum(*(-_float(x) for x in (first, *rest)))


def relu(x):
    """max(x, 0), convex.

    >>> relu(jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return maximum(x, 0.0)


def abs(x):
    """max(x, -x), convex.

    >>> abs(jnp.array([-1.0, 2.0])).tolist()
    [1.0, 2.0]
    """
    return maximum(x, -_float(x))


def piecewise_linear(x, slopes, intercepts):
    """max over k of slopes[k] * x + intercepts[k], convex; entrywise in x.

    >>> float(piecewise_linear(2.0, [-1.0, 0.5], [0.0, 1.0]))
    2.0
    """
    slopes, intercepts = _float(slopes), _float(intercepts)
    return max_p.bind(_float(x)[..., None] * slopes + intercepts)


def max_allocation(x, caps, total):
    """The most that an allocation is worth, along the last axis; convex in x.

    The maximum of a . x over 0 <= a <= caps with sum(a) = total: a budget that is spent where x is
    largest, with a limit on each entry (a continuous knapsack). `caps` and `total` must not depend
    on variables; no bound is proven (-inf) where they do, nor where caps add up to less than total.

    >>> float(max_allocation([1.0, 3.0, 2.0], [1.0, 1.0, 1.0], 1.5))
    4.0
    """
    x, caps, total = _float(x), _float(caps), _float(total)
    dtype = jnp.result_type(x, caps, total)
    # Of nothing any share will do. A negative total makes negative caps, which are never enough.
    some = (total != 0)[..., None]
    caps = jnp.where(some, caps / jnp.where(some, total[..., None], 1), 1)
    x, caps = (y.astype(dtype) for y in jnp.broadcast_arrays(x, caps))
    return total.astype(dtype) * allocation_p.bind(x, caps)


def min_allocation(x, caps, total):
    """The least that an allocation costs, along the last axis; concave in x. See `max_allocation`.

    >>> float(min_allocation([1.0, 3.0, 2.0], [1.0, 1.0, 1.0], 1.5))
    2.0
    """
    return -max_allocation(-_float(x), caps, total)


# -- smoothing ----------------------------------------------------------------------------------


def smooth_weights(x, width, centre) -> Any:
    """Slopes of the smoothed maximum: argmax over the simplex of w . x - width/2 |w - centre|^2.

    Two entries have a closed form, the Huber slope clip(centre_0 + (x_0 - x_1) / (2 width), 0, 1).
    """
    if _is_pair(x):
        return First(jnp.clip(centre.weight + (x[0] - x[1]) / (2 * width), 0, 1))
    width = jnp.asarray(width)[..., None]
    if isinstance(x, Goods):
        wanted = centre.shares + (x.x - jnp.max(x.x, axis=-1, keepdims=True)) / width
        return Shares(_capped(wanted, x.caps), x.caps)
    # Projection of centre + x / width onto the simplex; the shift only prevents overflow.
    u = centre + (x - jnp.max(x, axis=-1, keepdims=True)) / width
    down = jnp.flip(jnp.sort(u, axis=-1), axis=-1)
    excess = (jnp.cumsum(down, axis=-1) - 1) / jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    support = jnp.sum(down > excess, axis=-1, keepdims=True)
    shift = jnp.take_along_axis(excess, jnp.maximum(support - 1, 0), axis=-1)
    weights = jnp.maximum(u - shift, 0)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def smooth_max(x, width, centre):
    """An under-estimate of the maximum, at most `width` below it, and its slopes."""
    w = smooth_weights(jax.lax.stop_gradient(x), width, centre)
    # w maximises w . x - width/2 |w - centre|^2, so it is the gradient: no need to differentiate w.
    if _is_pair(x):
        distance = 2 * (w.weight - centre.weight) ** 2
    elif isinstance(w, Shares):
        distance = jnp.sum((w.shares - centre.shares) ** 2, axis=-1)
    else:
        distance = jnp.sum((w - centre) ** 2, axis=-1)
    return weighted(x, w) - width / 2 * distance, w


@jax.custom_vjp
def sloped_max(x, weights, slack_share):
    """The exact maximum, differentiated with the given weights.

    The true maximum is w . x + e with a slack e >= 0. `slack_share` is a dummy scalar: its
    cotangent collects (cotangent of the output) * e, by which a linearisation with slopes w lies
    lower than one with exact slopes.
    """
    return value_of(x)


def _sloped_fwd(x, weights, slack_share):
    top = value_of(x)
    slack = jnp.maximum(top - weighted(x, weights), 0)
    return top, (weights, slack, slack_share)


def _sloped_bwd(residuals, cotangent):
    weights, slack, slack_share = residuals
    # A piece that enters with a negative sign may not be replaced by a line from below.
    loss = jnp.where(cotangent >= 0, cotangent * slack, jnp.inf)
    if isinstance(weights, First):
        of_x = (weights.weight * cotangent, (1 - weights.weight) * cotangent)
    elif isinstance(weights, Shares):
        # Caps are no variables; whoever differentiates by them shall notice.
        of_x = Goods(weights.shares * cotangent[..., None], jnp.full_like(weights.caps, jnp.nan))
    else:
        of_x = weights * cotangent[..., None]
    nothing = jax.tree.map(jnp.zeros_like, weights)
    return of_x, nothing, jnp.sum(loss).astype(slack_share.dtype)


sloped_max.defvjp(_sloped_fwd, _sloped_bwd)


# -- treatments: (arguments of a piece, datum) -> (value of the maximum, record) -------------------
# The arguments are an array, for the maximum over its last axis, a pair of arrays, or Goods.


def measured(slack_share):
    """Exact values and slopes; records (how far apart the pieces are, weights, uniform weights)."""
    exact = exactly_sloped(slack_share)

    def treat(x, datum):
        value, w = exact(x, datum)
        return value, (spread(x), w, uniform(x))

    return treat


def smoothed(tau):
    """Smoothed; `datum` is (the piece's unit of length, centre); records the weights."""

    def treat(x, datum):
        unit, centre = datum
        return smooth_max(x, tau * unit, centre)

    return treat


def exactly_sloped(slack_share):
    """Exact values, exact slopes; records the weights."""

    def treat(x, datum):
        w = jax.lax.stop_gradient(exact_weights(x))
        return sloped_max(x, w, slack_share), w

    return treat


def on_simplex(x, weights):
    """Any numbers as weights of a piece's arguments; those of a pair may be stacked, too."""
    if isinstance(x, Goods):
        given = weights.shares if isinstance(weights, Shares) else weights
        given = jnp.clip(jnp.nan_to_num(given, nan=0), 0, x.caps)
        # Too much is scaled down; what is missing is taken from what is left.
        total, left = (jnp.sum(y, axis=-1, keepdims=True) for y in (given, x.caps - given))
        lacking = jnp.maximum(1 - total, 0) / jnp.where(left > 0, left, 1)
        more = given + jnp.minimum(lacking, 1) * (x.caps - given)
        return Shares(jnp.where(total > 1, given / jnp.maximum(total, 1), more), x.caps)
    if isinstance(weights, First):
        return First(jnp.clip(jnp.nan_to_num(weights.weight, nan=0.5), 0, 1))
    w = jnp.maximum(weights, 0)
    total = jnp.sum(w, axis=-1, keepdims=True)
    w = jnp.where(total > 0, w / jnp.where(total > 0, total, 1), 1 / w.shape[-1])
    return First(w[..., 0]) if _is_pair(x) else w


def given_slopes(slack_share):
    """Exact values; `datum` is the weights (any numbers: they are brought to the simplex)."""

    def treat(x, datum):
        w = on_simplex(x, datum)
        return sloped_max(x, w, slack_share), w

    return treat


Treatment = Callable[[Any, Any], tuple[Any, Any]]


def evaluate(function, arguments: tuple, treatment: Treatment | None = None, data=None):
    """Runs function(*arguments) with its nonsmooth pieces treated; returns (output, records).

    `data` and `records` are tuples with one entry for each piece, in program order.
    """
    if treatment is None:
        return function(*arguments), ()
    leaves, structure = jax.tree.flatten(arguments)
    is_array = [isinstance(leaf, (jax.Array, float)) or hasattr(leaf, "dtype") for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]

    def on_arrays(*arrays):
        values = iter(arrays)
        filled = [
            next(values) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)
        ]
        return function(*jax.tree.unflatten(structure, filled))

    closed, shape = jax.make_jaxpr(on_arrays, return_shape=True)(*arrays)
    if not _has_pieces(closed.jaxpr):
        return function(*arguments), ()
    records: list = []

    def handle(primitive, values):
        x = Goods(*values) if primitive is allocation_p else tuple(values)
        x = values[0] if primitive is max_p else x
        datum = None if data is None else data[len(records)]
        value, record = treatment(x, datum)
        records.append(record)
        return value

    out = _interpret(closed, arrays, handle)
    return jax.tree.unflatten(jax.tree.structure(shape), out), tuple(records)


def _has_pieces(jaxpr) -> bool:
    return any(equation.primitive in PIECES for equation in jaxprs.equations(jaxpr))


def _interpret(closed, arguments, handle):
    def rule(equation, values):
        if equation.primitive in PIECES:
            return [handle(equation.primitive, values)]
        if not any(_has_pieces(body) for body, _ in jaxprs.inner_jaxprs(equation)):
            return jaxprs.bind(equation, values)
        if jaxprs.body_of_call(equation) is not None:
            return None
        raise ProblemError(
            f"A nonsmooth piece of stagecert stands inside '{equation.primitive.name}'. Move "
            "it out of the loop or branch (a ScanStage can be the loop), or use jax.numpy's "
            "own maximum there, which is then linearised by its subgradient."
        )

    return jaxprs.walk(closed.jaxpr, closed.consts, arguments, rule)
