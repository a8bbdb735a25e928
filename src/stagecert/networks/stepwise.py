"""One pass back, compiled layer by layer: for deep networks and many boxes.

The same bounds as `backward.dual_bound` on the intervals of `intermediate.enclose`, with the same
charges for rounding. There, every layer has programs of its own that go back through all layers
before it; so the time to compile grows with the square of the depth. Here, a program goes through
one layer only. Layers of the same kind and shape share it, and so does every pass that crosses
them, wherever it began. Rows are worked off in portions of one size, each row with its own box.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from stagecert.networks.backward import Lines, Span, _terms, lines_at, segment_span
from stagecert.networks.intermediate import _exact
from stagecert.networks.intervals import segment_interval
from stagecert.networks.regions import Regions
from stagecert.networks.relaxation import Layer, Segment, Split, copied
from stagecert.networks.search import magnitude

Source = tuple[bool, int]


class Sums(eqx.Module):
    """What a pass back has added up so far, for each row; see `backward.dual_bound`."""

    total: Any
    slip: Any
    size: Any


@dataclass(frozen=True)
class Found:
    """Results for every row that was asked: NumPy arrays.

    Attributes:
        bound: lower bounds.
        coefficients: of the inputs in the linear bound, flattened and joined.
        minimisers: where that is smallest in the row's box, flattened and joined.
    """

    bound: np.ndarray
    coefficients: np.ndarray
    minimisers: np.ndarray


class Passes:
    """Intervals of all activations' arguments for a batch of boxes, and passes back from there.

    Args:
        parts: the network in float64.
        regions: the boxes.
        rows_at_once: how many rows go back at a time.
        refine: whether intervals are tightened by passes back where that can help.
        count: only the first so many boxes matter; the others fill up the batch.
        stop: asked between steps; once it says so, `complete` is False and nothing else counts.
        share: called with how many of how many layers are done.

    Attributes:
        arguments: (low, high) of every layer's argument, each with a leading axis of boxes.
        complete: False if `stop` came first.
    """

    def __init__(
        self,
        parts: Split,
        regions: Regions,
        rows_at_once: int,
        *,
        refine: bool = True,
        count: int | None = None,
        stop: Callable[[], bool] = lambda: False,
        share: Callable[[int, int], None] = lambda done, size: None,
    ):
        self.sets, self.width = regions.sets, rows_at_once
        self.count = regions.count if count is None else count
        self.boxed = regions.boxed
        self.layers = [
            eqx.tree_at(lambda layer: layer.segment, layer, local(layer.segment))
            for layer in parts.layers
        ]
        self.sources = [layer.segment.sources for layer in parts.layers]
        self.last, self.last_sources = local(parts.last), parts.last.sources
        self.consumers = len(parts.layers) + 1
        self.pairs: dict[Source, Any] = {(True, k): p for k, p in enumerate(regions.boxes)}
        self.sizes: dict[Source, Any] = {k: magnitude(*p) for k, p in self.pairs.items()}
        self.inputs = len(regions.boxes)
        self.spans: list[Span] = []
        self.lines: list[Lines] = []
        self.arguments: tuple = ()
        self.complete = False
        for index, layer in enumerate(self.layers):
            if stop() or not self._add(index, layer, refine, stop):
                return
            share(index + 1, len(self.layers))
        self.last_span = _span(self.last, self._of(self.sizes, self.last_sources))
        self.complete = True

    def _of(self, known: dict, sources) -> tuple:
        return tuple(known[source] for source in sources)

    def _add(self, index: int, layer: Layer, refine: bool, stop) -> bool:
        sources = self.sources[index]
        pairs, sizes = self._of(self.pairs, sources), self._of(self.sizes, sources)
        low, high, bent, span = _reach(layer, pairs, sizes)
        of_inputs = all(is_input for is_input, _ in sources)
        if refine and not (of_inputs and self.boxed and _exact(layer.segment)):
            of_box, entry = np.nonzero(np.asarray(bent)[: self.count])
            if len(of_box):
                low, high = np.array(low), np.array(high)
                first = copied(layer.segment, self._shapes(sources))
                size = len(first)
                of_box, entry = np.divmod(np.unique(of_box * size + first[entry]), size)
                done = self._refine(index, layer, span, (low, high), of_box, entry, stop)
                if not done:
                    return False
                # What holds for the first of several copies holds for all of them.
                low, high = (
                    jnp.asarray(x.reshape(len(x), -1)[:, first].reshape(x.shape))
                    for x in (low, high)
                )
        self.spans.append(span)
        image, size, lines = _block(layer, low, high, span)
        self.lines.append(lines)
        self.pairs[False, index], self.sizes[False, index] = image, size
        self.arguments = (*self.arguments, (low, high))
        return True

    def _refine(self, index, layer: Layer, span, ends, of_box, entry, stop) -> bool:
        """Tightens the chosen entries of a layer's argument; False if there is no time."""
        flat_low, flat_high = (x.reshape(len(x), -1) for x in ends)
        shape = span.magnitude.shape[1:]
        half = max(self.width // 2, 1)
        for begin in range(0, len(of_box), half):
            if stop():
                return False
            b, e = of_box[begin : begin + half], entry[begin : begin + half]
            pad = half - len(b)
            boxes = jnp.asarray(np.tile(np.pad(b, (0, pad)), 2))
            rows = _units(jnp.asarray(np.pad(e, (0, pad))), shape)
            found, _, _ = self._back(layer.segment, self.sources[index], span, boxes, rows)
            least, most = np.split(np.asarray(found), 2)
            flat_low[b, e] = np.maximum(flat_low[b, e], least[: len(b)])
            flat_high[b, e] = np.minimum(flat_high[b, e], -most[: len(b)])
        return True

    def _back(self, segment: Segment, sources, span: Span, boxes, rows):
        """Bounds of rows of a segment, each on its own box: one pass back."""
        zero = jnp.zeros(len(rows))
        reached: dict[Source, Any] = {}

        def send(sources, cotangents) -> None:
            for source, g in zip(sources, cotangents, strict=True):
                reached[source] = _add(reached[source], g) if source in reached else g

        start = Sums(zero, zero, zero)
        shapes = self._shapes(sources)
        out, sums = _pull(segment, shapes, self.consumers, span, boxes, rows, start)
        send(sources, out)
        for index in reversed(range(len(self.lines))):
            g = reached.pop((False, index), None)
            if g is None:
                continue
            out, sums = _cross(
                self.layers[index].segment, self._shapes(self.sources[index]), self.consumers,
                self.spans[index], self.lines[index], boxes, g, sums,
            )  # fmt: skip
            send(self.sources[index], out)
        of_inputs = tuple(
            reached[True, k]
            if (True, k) in reached
            else jnp.zeros((len(rows), *self.sizes[True, k].shape[1:]))
            for k in range(self.inputs)
        )
        return _finish(self.sets, self.consumers, boxes, of_inputs, sums)

    def _shapes(self, sources) -> tuple:
        return tuple(self.sizes[source].shape[1:] for source in sources)

    def bound(self, of_box: np.ndarray, rows: np.ndarray) -> Found:
        """Lower bounds of rows . outputs, each row (count, outputs) over the box given with it."""
        parts = []
        for begin in range(0, len(of_box), self.width):
            b, r = of_box[begin : begin + self.width], rows[begin : begin + self.width]
            pad = self.width - len(b)
            boxes = jnp.asarray(np.pad(b, (0, pad)))
            some = jnp.asarray(np.pad(r, ((0, pad), (0, 0))))
            found = self._back(self.last, self.last_sources, self.last_span, boxes, some)
            parts.append([np.asarray(x)[: len(b)] for x in found])
        if not parts:
            entries = sum(math.prod(self.sizes[True, k].shape[1:]) for k in range(self.inputs))
            return Found(np.zeros(0), np.zeros((0, entries)), np.zeros((0, entries)))
        return Found(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def local(segment: Segment) -> Segment:
    """The segment with its sources numbered from zero: equal layers look equal."""
    return Segment(
        segment.nodes, tuple((False, k) for k in range(len(segment.sources))), segment.output
    )


@eqx.filter_jit
def _reach(layer: Layer, pairs: tuple, sizes: tuple):
    """Interval of a layer's argument by intervals, where its activation bends there, its span."""

    def one(pairs, sizes):
        low, high = segment_interval(layer.segment, (), pairs)
        bent = layer.bent(low, high).reshape(-1)
        return low, high, bent, segment_span(layer.segment, (), sizes)

    return jax.vmap(one)(pairs, sizes)


@eqx.filter_jit
def _span(segment: Segment, sizes: tuple) -> Span:
    return jax.vmap(lambda sizes: segment_span(segment, (), sizes))(sizes)


@eqx.filter_jit
def _block(layer: Layer, low, high, span: Span):
    """What a layer puts out: its interval, how large it gets, and lines around it."""

    def one(low, high, span):
        image = layer.image(low, high)
        wedge = layer.wedge(low, high)
        lines = lines_at(wedge, 0.5 * low + 0.5 * high, wedge.slopes(), span)
        return image, magnitude(*image), lines

    return jax.vmap(one)(low, high, span)


@eqx.filter_jit
def _units(entry, shape: tuple):
    """Rows that pick entries, and the same rows negated."""
    unit = jax.nn.one_hot(entry, math.prod(shape), dtype=jnp.float64).reshape(-1, *shape)
    return jnp.concatenate([unit, -unit])


@jax.jit
def _add(a, b):
    return a + b


def _pulled(segment: Segment, shapes: tuple, consumers: int, span: Span, cotangent, sums: Sums):
    """One row through a segment, as in `backward.dual_bound`."""
    dtype = cotangent.dtype
    eps, tiny = jnp.finfo(dtype).eps, jnp.finfo(dtype).tiny
    zeros = tuple(jnp.zeros(shape, dtype) for shape in shapes)
    constant, back = jax.vjp(lambda blocks: segment((), blocks), zeros)
    (out,) = back(cotangent)
    reach = jnp.sum(jnp.abs(cotangent) * span.magnitude)
    terms = _terms(segment, list(shapes), math.prod(cotangent.shape), consumers)
    return out, Sums(
        sums.total + jnp.sum(cotangent * constant),
        sums.slip + terms * (eps * reach + 4 * tiny * (1 + span.total)),
        sums.size + reach,
    )


@eqx.filter_jit
def _pull(segment: Segment, shapes: tuple, consumers: int, span: Span, boxes, rows, sums: Sums):
    """Rows through a segment: cotangents of what it reads."""
    span = jax.tree.map(lambda x: x[boxes], span)
    return jax.vmap(lambda s, g, sums: _pulled(segment, shapes, consumers, s, g, sums))(
        span, rows, sums
    )


@eqx.filter_jit
def _cross(
    segment: Segment, shapes: tuple, consumers: int, span: Span, lines: Lines, boxes, g, sums: Sums
):
    """Cotangents of a block through its activation's lines and through the segment before."""
    dtype = g.dtype
    eps, tiny = jnp.finfo(dtype).eps, jnp.finfo(dtype).tiny

    def one(span, line, g, sums):
        up, down = jnp.maximum(g, 0), jnp.maximum(-g, 0)
        absolute = jnp.sum(up * jnp.abs(line.low_offset) + down * jnp.abs(line.high_offset))
        sums = Sums(
            sums.total + jnp.sum(up * line.low_offset - down * line.high_offset),
            sums.slip + (g.size + 8) * (eps * absolute + 4 * tiny),
            sums.size + absolute,
        )
        if line.low_slope.ndim > g.ndim:
            up, down = up[..., None], down[..., None]
        cotangent = up * line.low_slope - down * line.high_slope
        return _pulled(segment, shapes, consumers, span, cotangent, sums)

    span, lines = jax.tree.map(lambda x: x[boxes], (span, lines))
    return jax.vmap(one)(span, lines, g, sums)


@eqx.filter_jit
def _finish(sets, consumers: int, boxes, of_inputs: tuple, sums: Sums):
    """The bounds, the coefficients of the inputs, and the minimisers."""

    def one(inputs, of_inputs, sums):
        gradient = of_inputs if len(of_inputs) > 1 else of_inputs[0]
        eps, tiny = jnp.finfo(sums.total.dtype).eps, jnp.finfo(sums.total.dtype).tiny
        minimiser = inputs.minimise_linear(gradient)
        term = inputs.linear_minimum(gradient)
        sizes = jax.tree.map(
            lambda g, x, c: jnp.sum(jnp.abs(g) * (jnp.abs(x) + jnp.abs(c))),
            gradient, minimiser, inputs.centre(),
        )  # fmt: skip
        size = jax.tree.reduce(jnp.add, sizes) + jnp.abs(term)
        entries = sum(math.prod(x.shape) for x in of_inputs)
        slip = sums.slip + (entries + 8) * (eps * size + 4 * tiny)
        slip = slip + 4 * (consumers + 4) * eps * (sums.size + size)
        bound = sums.total + term - slip * (1 + 1e-6)
        flat = lambda tree: jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])  # noqa: E731
        return jnp.where(jnp.isnan(bound), -jnp.inf, bound), flat(gradient), flat(minimiser)

    return jax.vmap(one)(jax.tree.map(lambda x: x[boxes], sets), of_inputs, sums)
