"""What a neuron sees of the values before it: windows, which grow on the way back.

An entry of a convolution depends on a patch of its argument, that patch on a larger one before it.
So the way back from one neuron needs no whole arrays until its patch has grown to about the image.
Neurons of one layer see patches of one size at different places: their windows differ in where they
begin, and nothing else. `Plan` says, for the neurons of a layer, what they see of everything before
it; `Sight` how a segment looks from there: the same nodes, with settings that fit the windows.

All of this is known before a number is computed, and decided by counting entries. Whole arrays are
windows too.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from stagecert.networks import operations as op
from stagecert.networks.bounding.relaxation import Layer, Segment
from stagecert.networks.operations import Operation

# Windows with more than this share of an array's entries are not worth what gathering costs.
WORTHWHILE = 0.6


@dataclass(frozen=True)
class Stretch:
    """Entries start + step * t, ..., + size - 1 along an axis, where t is the neuron's place along
    its axis `along`; with step 0, the same for all neurons."""

    start: int
    size: int
    step: int = 0
    along: int = 0

    def back(self, stride: int, reach: int, before: int) -> "Stretch":
        """What sliding windows read that begin at stride * k - before, and have `reach` entries."""
        return Stretch(
            stride * self.start - before, stride * (self.size - 1) + reach, stride * self.step,
            self.along,
        )  # fmt: skip


@dataclass(frozen=True)
class Window:
    """Stretches of all axes of an array; `of` is the shape of the neurons' own array."""

    of: tuple[int, ...]
    axes: tuple[Stretch, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of what is seen."""
        return tuple(axis.size for axis in self.axes)

    @property
    def moves(self) -> bool:
        """Whether different neurons see different parts."""
        return any(axis.step for axis in self.axes)

    def begin(self, place) -> list:
        """Where the window of the neuron at a place begins."""
        return [
            axis.start + axis.step * place[axis.along] if axis.step else jnp.int32(axis.start)
            for axis in self.axes
        ]

    def margins(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """By how many entries windows leave an array of this shape on either side."""
        found = []
        for axis, n in zip(self.axes, shape, strict=True):
            last = axis.start + axis.step * (self.of[axis.along] - 1 if axis.step else 0)
            found.append((max(-axis.start, 0), max(last + axis.size - n, 0)))
        return found

    def leaves(self, shape: tuple[int, ...]) -> bool:
        """Whether some neuron's window leaves the array."""
        return any(max(pair) > 0 for pair in self.margins(shape))

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Whether this is the whole array."""
        return self.axes == whole(shape).axes

    def like(self, axes: Sequence[Stretch]) -> "Window":
        """Other stretches for the same neurons."""
        return Window(self.of, tuple(axes))


def whole(shape: tuple[int, ...]) -> Window:
    """The window that is the array itself: the same for all neurons, whatever their array is."""
    return Window((), tuple(Stretch(0, n) for n in shape))


def joined(windows: Sequence[Window], shape: tuple[int, ...]) -> Window:
    """The smallest window that contains all; the whole array if they move differently."""
    axes = []
    for stretches in zip(*(window.axes for window in windows), strict=True):
        if len({(s.step, s.along) for s in stretches}) > 1:
            return whole(shape)
        start = min(s.start for s in stretches)
        end = max(s.start + s.size for s in stretches)
        axes.append(dataclasses.replace(stretches[0], start=start, size=end - start))
    return windows[0].like(axes)


def look(x, have: Window, want: Window, shape: tuple[int, ...], place):
    """What `want` shows of an array of which `x` is what `have` shows; zeros outside of the array.

    `have` contains `want` where both are in the array.
    """
    if have == want:
        return x
    same = all((a.step, a.along) == (b.step, b.along)
               for a, b in zip(have.axes, want.axes, strict=True))  # fmt: skip
    if same:
        begin = [b.start - a.start for a, b in zip(have.axes, want.axes, strict=True)]
        widths = [
            (max(-k, 0), max(k + b.size - a.size, 0), 0)
            for k, a, b in zip(begin, have.axes, want.axes, strict=True)
        ]
        padded = jax.lax.pad(x, jnp.zeros((), x.dtype), widths)
        first = [max(k, 0) for k in begin]
        last = [k + b.size for k, b in zip(first, want.axes, strict=True)]
        return jax.lax.slice(padded, first, last)
    assert have.covers(shape)
    margins = want.margins(shape)
    padded = jnp.pad(x, margins)
    begin = [k + before for k, (before, _) in zip(want.begin(place), margins, strict=True)]
    return jax.lax.dynamic_slice(padded, begin, want.sizes)


def inside(window: Window, shape: tuple[int, ...], place):
    """Which entries of a window are in the array; an array that broadcasts to the window."""
    result: jax.Array = jnp.ones((), bool)
    for k, (axis, begin, n) in enumerate(zip(window.axes, window.begin(place), shape, strict=True)):
        at = begin + jnp.arange(axis.size, dtype=jnp.int32)
        one = (at >= 0) & (at < n)
        result = result & one.reshape([-1 if j == k else 1 for j in range(len(shape))])
    return result


# -- operations ------------------------------------------------------------------------------------

Shape = tuple[int, ...]
Seen = tuple[Operation, tuple[Window, ...]]


@functools.singledispatch
def seen_by(
    operation: Operation, window: Window, weights, shapes: list[Shape], shape: Shape
) -> Seen | None:
    """What a window of an operation's output shows of the arguments, and how it is computed there.

    `shapes` are those of the arguments, `shape` that of the output. None if an operation needs more
    than windows can tell: its arguments are taken whole.
    """
    return None


def _still(stretch: Stretch, size: int) -> bool:
    return stretch == Stretch(0, size)


@seen_by.register
def _(operation: op.Conv, window: Window, weights, shapes, shape):
    (read,) = shapes
    still = [_still(axis, n) for axis, n in zip(window.axes, shape, strict=True)]
    if not (still[0] and still[1]) or set(operation.input_dilation) != {1}:
        return None
    axes, padding = [Stretch(0, read[0]), Stretch(0, read[1])], []
    for k, axis in enumerate(window.axes[2:]):
        reach = (jnp.shape(weights)[k + 2] - 1) * operation.dilation[k] + 1
        seen = axis.back(operation.strides[k], reach, operation.padding[k][0])
        axes.append(Stretch(0, read[k + 2]) if still[k + 2] else seen)
        padding.append(operation.padding[k] if still[k + 2] else (0, 0))
    return dataclasses.replace(operation, padding=tuple(padding)), (window.like(axes),)


@seen_by.register
def _(operation: op.WindowSum, window: Window, weights, shapes, shape):
    axes, padding = [], []
    for k, (axis, n) in enumerate(zip(window.axes, shape, strict=True)):
        reach = (operation.window[k] - 1) * operation.dilation[k] + 1
        seen = axis.back(operation.strides[k], reach, operation.padding[k][0])
        axes.append(Stretch(0, shapes[0][k]) if _still(axis, n) else seen)
        padding.append(operation.padding[k] if _still(axis, n) else (0, 0))
    return dataclasses.replace(operation, padding=tuple(padding)), (window.like(axes),)


@seen_by.register
def _(operation: op.Windows, window: Window, weights, shapes, shape):
    if not _still(window.axes[-1], shape[-1]):
        return None
    axes = []
    for k, (axis, n) in enumerate(zip(window.axes[:-1], shape[:-1], strict=True)):
        reach = (operation.window[k] - 1) * operation.dilation[k] + 1
        seen = axis.back(operation.strides[k], reach, 0)
        axes.append(Stretch(0, shapes[0][k]) if _still(axis, n) else seen)
    return operation, (window.like(axes),)


@seen_by.register
def _(operation: op.Shift, window: Window, weights, shapes, shape):
    # The constant part is not seen here: what is left is the argument.
    return (op.Sum((1,)), (window,)) if shapes[0] == shape else None


@seen_by.register
def _(operation: op.Scale, window: Window, weights, shapes, shape):
    factors = (1,) * (len(shape) - jnp.ndim(weights)) + jnp.shape(weights)
    fits = all(f == 1 or _still(axis, f) for f, axis in zip(factors, window.axes, strict=True))
    return (operation, (window,)) if fits and shapes[0] == shape else None


@seen_by.register
def _(operation: op.Sum, window: Window, weights, shapes, shape):
    return (operation, (window,) * len(shapes)) if set(shapes) == {shape} else None


@seen_by.register
def _(operation: op.Pad, window: Window, weights, shapes, shape):
    axes, widths = [], []
    for axis, n, read, pair in zip(window.axes, shape, shapes[0], operation.widths, strict=True):
        axes.append(Stretch(0, read) if _still(axis, n) else axis.back(1, 1, pair[0]))
        widths.append(pair if _still(axis, n) else (0, 0))
    return op.Pad(tuple(widths)), (window.like(axes),)


@seen_by.register
def _(operation: op.Slice, window: Window, weights, shapes, shape):
    axes = [
        axis.back(step, 1, -start)
        for axis, start, step in zip(window.axes, operation.starts, operation.steps, strict=True)
    ]
    zeros, sizes = (0,) * len(axes), tuple(axis.size for axis in axes)
    return op.Slice(zeros, sizes, operation.steps), (window.like(axes),)


@seen_by.register
def _(operation: op.Transpose, window: Window, weights, shapes, shape):
    axes = [window.axes[operation.axes.index(k)] for k in range(len(shape))]
    return operation, (window.like(axes),)


@seen_by.register
def _(operation: op.Concat, window: Window, weights, shapes, shape):
    axis = operation.axis % len(shape)
    if not _still(window.axes[axis], shape[axis]):
        return None
    return operation, tuple(
        window.like([*window.axes[:axis], Stretch(0, read[axis]), *window.axes[axis + 1 :]])
        for read in shapes
    )


@seen_by.register
def _(operation: op.Reshape, window: Window, weights, shapes, shape):
    """Axes of length one may come and go."""
    (read,) = shapes
    if [n for n in read if n > 1] != [n for n in shape if n > 1]:
        return None
    pairs = list(zip(window.axes, shape, strict=True))
    if any(n == 1 and not _still(axis, 1) for axis, n in pairs):
        return None
    long = iter([axis for axis, n in pairs if n > 1])
    axes = [next(long) if n > 1 else Stretch(0, 1) for n in read]
    return op.Reshape(window.sizes), (window.like(axes),)


# -- segments and whole ways back ------------------------------------------------------------------


@dataclass(frozen=True)
class Sight:
    """A segment as it looks through windows: what compiled programs depend on.

    Attributes:
        shapes, windows: of all values, first the sources.
        operations: one for each node.
        needs: for each node the windows of its arguments.
        output, out: which value is the output, and what is wanted of it.
    """

    shapes: tuple[Shape, ...]
    windows: tuple[Window, ...]
    operations: tuple[Operation, ...]
    needs: tuple[tuple[Window, ...], ...]
    output: int
    out: Window

    @property
    def moves(self) -> bool:
        """Whether different neurons see different parts of anything here."""
        every = (self.out, *self.windows, *(window for pair in self.needs for window in pair))
        return any(window.moves for window in every)

    def run(self, segment: Segment, sources: tuple, place):
        """The segment without its constant part, from what is seen of its sources."""
        values = list(sources)
        count = len(sources)
        for k, node in enumerate(segment.nodes):
            arguments = [
                look(values[a], self.windows[a], need, self.shapes[a], place)
                for a, need in zip(node.arguments, self.needs[k], strict=True)
            ]
            value = self.operations[k](node.weights, *arguments)
            window, shape = self.windows[count + k], self.shapes[count + k]
            # Next to the array there are zeros, not what a node would compute there.
            if window.leaves(shape):
                value = jnp.where(inside(window, shape, place), value, 0)
            values.append(value)
        end = self.output
        return look(values[end], self.windows[end], self.out, self.shapes[end], place)


def sight(segment: Segment, out: Window, shapes: tuple[Shape, ...]) -> Sight:
    """How a segment looks through a window of its output."""
    count = len(shapes)
    shapes = (*shapes, *segment.node_shapes(shapes))
    wanted: list[list[Window]] = [[] for _ in shapes]
    wanted[segment.output].append(out)
    windows: list[Window] = [whole(shape) for shape in shapes]
    operations: list[Operation] = [node.operation for node in segment.nodes]
    needs: list[tuple[Window, ...]] = [()] * len(segment.nodes)
    for index in reversed(range(len(shapes))):
        if wanted[index]:
            windows[index] = _worthwhile(joined(wanted[index], shapes[index]), shapes[index])
        if index < count:
            continue
        k, node = index - count, segment.nodes[index - count]
        read = [shapes[a] for a in node.arguments]
        seen = None
        if not windows[index].covers(shapes[index]):
            seen = seen_by(node.operation, windows[index], node.weights, read, shapes[index])
        if seen is None:
            windows[index] = whole(shapes[index])
            linear = not isinstance(node.operation, op.Shift)
            seen = (
                node.operation if linear else op.Broadcast(shapes[index]),
                tuple(whole(shape) for shape in read),
            )
        operations[k], needs[k] = seen
        for a, need in zip(node.arguments, needs[k], strict=True):
            wanted[a].append(need)
    return Sight(shapes, tuple(windows), tuple(operations), tuple(needs), segment.output, out)


def _worthwhile(window: Window, shape: Shape) -> Window:
    few = math.prod(window.sizes) <= WORTHWHILE * math.prod(shape)
    return window if few else whole(shape)


Source = tuple[bool, int]


@dataclass(frozen=True)
class Plan:
    """What neurons of a layer see of everything before it.

    Attributes:
        first: the neurons' own segment.
        steps: (layer, its segment) for all layers on the way back, the last one first.
        inputs: windows of the inputs; whole ones where nothing is seen.
        entries: of all windows of blocks and inputs together.
    """

    first: Sight
    steps: tuple[tuple[int, Sight], ...]
    inputs: tuple[Window, ...]
    entries: int


class Planner:
    """Plans for the layers of a network.

    Args:
        layers: with segments as the network has them.
        inputs: the inputs' shapes.
        boxed: whether the inputs are in boxes: parts of other sets are not sets of their kind.
    """

    def __init__(self, layers: Sequence[Layer], inputs: Sequence[Shape], boxed: bool):
        self.layers, self.boxed = layers, boxed
        self.shapes: dict[Source, Shape] = {(True, k): tuple(s) for k, s in enumerate(inputs)}
        self.shapes |= {(False, k): tuple(layer.shape) for k, layer in enumerate(layers)}
        self.inputs = len(inputs)

    def entries(self, plan: Plan) -> int:
        """How many entries there were if everything that a plan sees were whole."""
        blocks = sum(math.prod(self.shapes[False, k]) for k, _ in plan.steps)
        return blocks + sum(math.prod(self.shapes[True, k]) for k in range(self.inputs))

    def read(self, segment: Segment) -> tuple[Shape, ...]:
        """The shapes of what a segment reads."""
        return tuple(self.shapes[source] for source in segment.sources)

    def plan(self, segment: Segment, shape: Shape, windows: bool = True) -> Plan:
        """The cheapest plan for entries of a segment's output, which has this shape.

        Without `windows`, all arrays are whole.
        """
        if not windows:
            return self._plan(segment, whole(shape))
        rank = len(shape)
        # Which axes are space is not written anywhere: behind the channels, and not those that a
        # maximum is taken over.
        moving = [range(rank, rank), range(2, rank), range(2, rank - 1)]
        outs = dict.fromkeys(_start(shape, axes) for axes in moving)
        return min((self._plan(segment, out) for out in outs), key=lambda plan: plan.entries)

    def _plan(self, segment: Segment, out: Window) -> Plan:
        wanted: dict[Source, list[Window]] = {}

        def through(segment: Segment, out: Window) -> Sight:
            seen = sight(segment, out, self.read(segment))
            for source, window in zip(segment.sources, seen.windows, strict=False):
                wanted.setdefault(source, []).append(window)
            return seen

        first = through(segment, out)
        steps = []
        final: dict[Source, Window] = {}
        for index in reversed(range(len(self.layers))):
            source, layer = (False, index), self.layers[index]
            if source in wanted:
                final[source] = self._final(source, wanted[source])
                argument = final[source]
                if isinstance(layer.operation, op.Joint):
                    entries = layer.segment.shape(self.read(layer.segment))[-1]
                    argument = argument.like([*argument.axes, Stretch(0, entries)])
                steps.append((index, through(layer.segment, argument)))
        for k in range(self.inputs):
            seen = wanted.get((True, k), [whole(self.shapes[True, k])])
            final[True, k] = self._final((True, k), seen)

        def settled(segment: Segment, seen: Sight) -> Sight:
            sources = tuple(final[source] for source in segment.sources)
            return dataclasses.replace(seen, windows=(*sources, *seen.windows[len(sources) :]))

        return Plan(
            settled(segment, first),
            tuple((k, settled(self.layers[k].segment, seen)) for k, seen in steps),
            tuple(final[True, k] for k in range(self.inputs)),
            sum(math.prod(window.sizes) for window in final.values()),
        )

    def _final(self, source: Source, wanted: list[Window]) -> Window:
        shape = self.shapes[source]
        if source[0] and not self.boxed:
            return whole(shape)
        return _worthwhile(joined(wanted, shape), shape)


def _start(shape: Shape, moving: Sequence[int]) -> Window:
    """Single entries along some axes, all of the others."""
    axes = [
        Stretch(0, 1, 1, k) if k in moving and n > 1 else Stretch(0, n) for k, n in enumerate(shape)
    ]
    return Window(shape if any(axis.step for axis in axes) else (), tuple(axes))
