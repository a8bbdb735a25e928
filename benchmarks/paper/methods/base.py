"""One interface for every method: problems in, an `Outcome` out.

Bounds are lower bounds on margins (true logit minus another). All methods work on the paper's
relaxation: intervals of the activations' arguments by interval arithmetic, the convex hull of each
activation on its interval. So their bounds have one common limit, the optimum of the relaxation.

Times are wall times on warm code: `prepare` compiles most of it, and the time in which JAX traces
and XLA compiles during `run` all the same is measured and taken off.
"""

import abc
import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np

from benchmarks.networks.peers.common import load_problems
from stagecert import networks
from stagecert.networks.graph import Network

BINS = 50  # of histograms of distances, which are shares of an interval in [0, 0.5]


@dataclass(frozen=True)
class PaperProblems:
    """Boxes around images, and the rows `true logit - other logit` to be minimised over each.

    Attributes:
        name: of the network.
        network: the network.
        lower, upper: the boxes, (images, *input_shape).
        rows: (images, targets, outputs).
        path, data, eps: where the network and the images came from, for tools that read them
            themselves; these take the first images of the file, so `first` says which ours are.
        first: number of the first image.
    """

    name: str
    network: Network
    lower: np.ndarray
    upper: np.ndarray
    rows: np.ndarray
    path: Path | None = None
    data: Path | None = None
    eps: str = "8/255"
    first: int = 0

    @staticmethod
    def load(path: Path, data: Path, images: int, eps: str = "8/255") -> "PaperProblems":
        """The first images of an .npz file, for the network in an ONNX file."""
        given = load_problems(data, images, float(Fraction(eps)))
        return PaperProblems(
            Path(path).stem, networks.load(path), given.lower, given.upper, given.rows,
            Path(path), Path(data), eps,
        )  # fmt: skip

    def __getitem__(self, some: slice) -> "PaperProblems":
        """Some of the images."""
        first = range(len(self.lower))[some].start
        arrays = {name: getattr(self, name)[some] for name in ("lower", "upper", "rows")}
        return dataclasses.replace(self, **arrays, first=self.first + first)

    @property
    def shape(self) -> tuple[int, int]:
        """(images, targets)."""
        return self.rows.shape[0], self.rows.shape[1]


@dataclass(frozen=True)
class Stop:
    """When a problem is finished; each method looks at what it can.

    Attributes:
        rtol, atol: once value - bound <= atol + rtol * |bound|.
        target: (images, targets), or a number: once the bound is at least this.
        iterations: after so many; None is the method's own limit.
        seconds: for one problem of solvers that take one problem at a time; else for the whole run.
    """

    rtol: float = 1e-2
    atol: float = 0.0
    target: np.ndarray | float | None = None
    iterations: int | None = None
    seconds: float | None = None

    def __getitem__(self, some: slice) -> "Stop":
        """The same for some of the images."""
        if np.ndim(self.target) == 0:
            return self
        return dataclasses.replace(self, target=np.asarray(self.target)[some])


@dataclass(frozen=True)
class Trace:
    """The best bounds and values so far, against iterations and time.

    Attributes:
        iteration: (records,), the numbers of the iterations that were recorded; 0 is the start.
        seconds: (records,), since the start; all problems of a batch advance together.
        bound: (records, images, targets).
        value: likewise, or None if the method knows no feasible points.
        distances: (records, BINS), how many neurons of all problems that still ran were how near
            to an end of their interval: counts of min(x - l, u - x) / (u - l) in equal bins of
            [0, 0.5]; or None.
        least: (records,), the least of these distances; or None.
    """

    iteration: np.ndarray
    seconds: np.ndarray
    bound: np.ndarray
    value: np.ndarray | None = None
    distances: np.ndarray | None = None
    least: np.ndarray | None = None


@dataclass(frozen=True)
class Outcome:
    """What a method found.

    Attributes:
        bound: lower bounds, (images, targets); NaN where nothing was found in time.
        value: the relaxation's objective at feasible points, (images, targets), or None.
        iterations: how many each problem took, (images, targets).
        early: whether the problem stopped before its limit because its goal was reached.
        seconds: wall time of all problems together, compilation excluded.
        compiling: seconds of compilation that were taken off.
        trace: if asked for, and if the method has one.
        about: what else should be on record (settings, versions, solver messages).
    """

    bound: np.ndarray
    value: np.ndarray | None
    iterations: np.ndarray
    early: np.ndarray
    seconds: float
    compiling: float = 0.0
    trace: Trace | None = None
    about: dict = dataclasses.field(default_factory=dict)


class Method(abc.ABC):
    """A way to bound the problems.

    Attributes:
        name: a key for files and options.
        label: how tables call it.
    """

    name: ClassVar[str]
    label: ClassVar[str]

    def refusal(self, problems: PaperProblems) -> str | None:
        """Why the method is not run on these problems; None if it is."""
        return None

    def prepare(self, problems: PaperProblems, stop: Stop | None = None) -> None:
        """Compiles what `run` needs on problems of these shapes, or most of it."""
        self.run(problems, stop)

    @abc.abstractmethod
    def run(
        self,
        problems: PaperProblems,
        stop: Stop | None = None,
        *,
        trace: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Outcome:
        """Bounds all problems; `progress` is called with (problems finished, all)."""


_COMPILING = (
    "jaxpr_trace_duration",
    "jaxpr_to_mlir_module_duration",
    "backend_compile_duration",
)


class Compilations:
    """Sums up times of which some stand inside of others: a trace contains those of its parts."""

    def __init__(self):
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []  # (begin, length), apart and in order

    def note(self, end: float, length: float) -> None:
        """Counts what ended just now; what it contains ended before, and was counted then."""
        begin = end - length
        while self._spans and self._spans[-1][0] >= begin:
            self.seconds -= self._spans.pop()[1]
        self._spans.append((begin, length))
        self.seconds += length


_compilations = Compilations()


def _note_compilation(event: str, seconds: float, **_) -> None:
    if event.removeprefix("/jax/core/compile/") in _COMPILING:
        _compilations.note(time.perf_counter(), seconds)


jax.monitoring.register_event_duration_secs_listener(_note_compilation)


class Stopwatch:
    """Wall time without compilation."""

    def __init__(self):
        self.begin, self.compiled = time.perf_counter(), _compilations.seconds

    @property
    def compiling(self) -> float:
        """Seconds of compilation since the start."""
        return _compilations.seconds - self.compiled

    @property
    def seconds(self) -> float:
        """Seconds since the start, without compilation."""
        return time.perf_counter() - self.begin - self.compiling


def even(count: int, most: int) -> int:
    """How many of `count` things are taken at a time, at most `most`.

    Of one size if that is not much less than `most`: every size is compiled.

    >>> even(20, 8), even(3, 8), even(13, 8)
    (5, 3, 8)
    """
    most = min(count, most)
    return next((k for k in range(most, most // 2, -1) if count % k == 0), most)


def chunks(problems: PaperProblems, at_once: int) -> Iterator[slice]:
    """Slices of at most so many images."""
    for begin in range(0, len(problems.rows), at_once):
        yield slice(begin, min(begin + at_once, len(problems.rows)))


def joined(outcomes: list[Outcome]) -> Outcome:
    """The outcomes of consecutive chunks as one; traces must have been made chunk by chunk."""
    if len(outcomes) == 1:
        return outcomes[0]

    def join(name):
        parts = [getattr(outcome, name) for outcome in outcomes]
        return None if parts[0] is None else np.concatenate(parts)

    return Outcome(
        join("bound"), join("value"), join("iterations"), join("early"),
        sum(o.seconds for o in outcomes), sum(o.compiling for o in outcomes),
        joined_traces([o.trace for o in outcomes if o.trace is not None]), outcomes[0].about,
    )  # fmt: skip


def joined_traces(traces: list[Trace]) -> Trace | None:
    """Traces of chunks that ran one after the other, as if their iterations had gone in step.

    A chunk that ended keeps its last bounds; the seconds of a record are the sum over the chunks.
    """
    if not traces:
        return None
    length = max(len(trace.iteration) for trace in traces)
    longest = max(traces, key=lambda trace: len(trace.iteration))

    def held(array, count=length):
        return np.concatenate([array, np.repeat(array[-1:], count - len(array), axis=0)])

    def summed(name):
        parts = [getattr(trace, name) for trace in traces]
        if parts[0] is None:
            return None
        empty = [np.zeros((length - len(p), *p.shape[1:]), p.dtype) for p in parts]
        return sum(np.concatenate(pair) for pair in zip(parts, empty, strict=True))

    return Trace(
        longest.iteration,
        np.sum([held(trace.seconds) for trace in traces], axis=0),
        np.concatenate([held(trace.bound) for trace in traces], axis=1),
        None
        if traces[0].value is None
        else np.concatenate([held(trace.value) for trace in traces], axis=1),
        summed("distances"),
        None
        if traces[0].least is None
        else np.min(
            [np.pad(t.least, (0, length - len(t.least)), constant_values=np.inf) for t in traces],
            axis=0,
        ),
    )
