"""What is done for a batch of images: predict, attack, bounds of rising cost, and the check."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from typing import Any

import numpy as np

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.networks import Network
from stagecert.networks.bounding import bounds
from stagecert.networks.bounding.jobs import boxes_at_once, default_memory
from stagecert.powers import power_below
from stagecert.robust.boxes import Boxes, Preparation, boxes_around
from stagecert.robust.data import DataSet
from stagecert.verify import agreement, attack, ladder
from stagecert.verify.descents import Descents, Found, ahead
from stagecert.verify.models import OpenModel
from stagecert.verify.proving import Rejected, certify
from stagecert.verify.verify import verify
from stagecert_check import properties
from stagecert_check.functions import Refused

METHODS = (*ladder.METHODS, "complete")
# What is tried, by the last method: the complete search needs no longer searches of one relaxation.
TRIED = {
    **{method: METHODS[: k + 1] for k, method in enumerate(ladder.METHODS)},
    "complete": ("ibp", "backward", "complete"),
}
# The attack aims at this many classes at most: those that come nearest on the image itself.
AIMS = 9
# Images in a batch. Accelerators want thousands at once: what they take together of these is
# limited by the memory where it is needed.
LARGEST_BATCH, ON_ACCELERATORS = 128, 4096
# There, so many boxes are searched together, and so many images get passes back for every neuron
# before it is asked whether that pays.
SEARCHED, TRIAL = 256, 16


@dataclass
class Finding:
    """What is known of one image; the columns of the table, apart from its index.

    Attributes:
        label, predicted: the classes; `predicted` is what ONNX Runtime makes of the image.
        status: "misclassified", "attacked", "certified", "unknown", or "error".
        correct: whether the image itself is classified correctly.
        attacked: whether there is a counterexample, which ONNX Runtime confirmed.
        certified: whether it is proven that there is none.
        checked: whether the checker has accepted the proof.
        becomes: the class that ONNX Runtime gives to the counterexample.
        method: what proved it.
        bound: a certified lower bound on the smallest margin (label minus any other class) over
            the box; None if none was computed. Zero where the complete search proved that it is
            positive, and no more.
        attack: the smallest margin that ONNX Runtime computed for a point of the box.
        gap: attack - bound; None where that zero is.
        note: what went wrong, for "error"; for "unknown" why the checker rejects a proof, or why
            the complete search has no answer.
    """

    label: int
    predicted: int | None = None
    status: str = "unknown"
    correct: bool = False
    attacked: bool = False
    certified: bool = False
    checked: bool = False
    becomes: int | None = None
    method: str | None = None
    bound: float | None = None
    attack: float | None = None
    gap: float | None = None
    note: str | None = None


@dataclass
class _Case:
    """An image under way."""

    finding: Finding
    point: np.ndarray | None = None  # the counterexample
    seconds: float = 0.0
    aims: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    bounds: Any = -np.inf  # the best bound on each margin
    rejected: bool = False  # whether the checker did not accept the proof

    @property
    def open(self) -> bool:
        # What the checker rejects is not tried by other methods: something is wrong.
        return self.finding.status == "unknown" and not self.rejected


def open_classifier(source) -> OpenModel:
    """A model with one input and an output for each class, without a last Softmax.

    Raises:
        ProblemError: it is something else.
    """
    model = OpenModel(source, logits=True)
    if len(model.network.input_shapes) != 1:
        raise ProblemError(
            f"The model has {len(model.network.input_shapes)} inputs; one is needed."
        )
    if model.network.output_size < 2:
        raise ProblemError("The model has one output; it needs one for each class.")
    ((_, shape, kind),) = model.session.inputs
    if kind == np.float16:
        # Counterexamples in float32 would be rounded, possibly out of their boxes.
        raise ProblemError("The model's input is float16; float32 or float64 is needed.")
    if prod(shape) != prod(model.shape):
        raise ProblemError(
            f"The model takes several images at once, {shape}; one at a time is needed."
        )
    return model


def must_be_covered(model: OpenModel) -> None:
    """Says if the checker does not understand the model: it could accept no proof."""
    try:
        model.program  # noqa: B018
    except Refused as error:
        raise ProblemError(
            f"The checker cannot follow this model, so nothing could be certified: {error}. "
            "Without the check (--unchecked, check=False) bounds are computed all the same."
        ) from None


def accelerated() -> bool:
    """Whether there is a device that takes many images in the time of a few."""
    return bounds.opens()


def memory_or_default(memory: float | None) -> float:
    """GiB that arrays may take: one on CPUs, half of what the device lends elsewhere."""
    if memory is not None:
        return memory
    return default_memory() if accelerated() else 1.0


def largest_batch(network: Network, memory: float) -> int:
    """How many images fill the memory (GiB): a power of two."""
    if accelerated():
        return ON_ACCELERATORS
    neurons = sum(prod(node.shape) for node in network.nodes)
    inputs = sum(prod(shape) for shape in network.input_shapes)
    # The search holds about 40 numbers of 4 bytes for each neuron of each margin.
    of_image = 160 * (neurons + 2 * inputs) * (network.output_size - 1)
    return power_below(min(int(memory * 2**30 / of_image), LARGEST_BATCH))


@dataclass(frozen=True)
class Options:
    """What is tried on images; see `robust`."""

    method: str
    check: bool
    restarts: int
    seed: int
    memory: float | None
    batch: int
    time_limit: float


class Work:
    """Decides images in batches of up to `batch`, all with the same compiled programs.

    Raises:
        Disagreement: the network does not compute what ONNX Runtime does.
    """

    def __init__(self, model: OpenModel, data: DataSet, how: Preparation, options: Options):
        self.model, self.data, self.how = model, data, how
        self.methods, self.time_limit = TRIED[options.method], options.time_limit
        self.check, self.restarts = options.check, options.restarts
        self.seed, self.memory = options.seed, memory_or_default(options.memory)
        self.classes = model.network.output_size
        self.ladder = ladder.Ladder(model.network, self.memory, searching=accelerated())
        fitting = boxes_at_once(
            self.ladder.parts, model.network.input_shapes, self.classes - 1, self.memory
        )
        # So many images are bounded together: one number for each method, so that nothing is
        # compiled twice.
        width = min(options.batch, fitting)
        self.widths: dict[str, int] = dict.fromkeys(ladder.METHODS, width)
        if accelerated():
            self.widths = dict.fromkeys(ladder.METHODS, min(width, SEARCHED))
            self.widths["backward"] = min(width, TRIAL)
        self._compare()

    def _compare(self) -> None:
        """Compares the network with ONNX Runtime: unchecked, there is no gate behind the bounds."""
        found = []
        for place in agreement.chosen(len(self.data)):
            try:
                box = boxes_around(self.data.images[[place]], self.how)
            except ProblemError:  # the image's row will say so
                continue
            found.append((box.lower.reshape(-1), box.upper.reshape(-1)))
        if found:
            agreement.compare(self.model, found)

    def __call__(self, places: Sequence[int]) -> list[tuple[Finding, float, np.ndarray | None]]:
        """For each image what was found, the seconds it took, and the counterexample."""
        begin = time.perf_counter()
        cases = [_Case(Finding(int(label))) for label in self.data.labels[list(places)]]
        boxes = boxes_around(self.data.images[list(places)], self.how)
        for case, outputs in zip(cases, self.model.run(boxes.centre), strict=True):
            self._predict(case, outputs)
        labels = np.array([case.finding.label for case in cases])
        aims = np.stack([case.aims for case in cases])
        self._descents = Descents(
            self.model.network, boxes, labels, aims, np.array(places), self.seed
        )
        self._attack(cases, boxes)
        begin = _charge(cases, begin)
        self.ladder.forget()
        first, *dearer = [method for method in self.methods if method != "complete"]
        begin = self._bound(cases, boxes, first, _open(cases), begin)
        for group in self._groups(cases):
            for method in dearer:
                some = [k for k in group if cases[k].open]
                begin = self._bound(cases, boxes, method, some, begin)
            if self.ladder.searching and not any(cases[k].finding.certified for k in group):
                break  # these were the most promising ones: it would not pay for the others
        if "complete" in self.methods:
            for k in _open(cases):
                self._search_completely(cases[k], cases, boxes, k)
                begin = _charge([cases[k]], begin)
        return [(_finished(case.finding), case.seconds, case.point) for case in cases]

    def _groups(self, cases: list[_Case]) -> list[list[int]]:
        """The open images as they get dearer bounds: all, or the best first, a few at a time."""
        waiting = _open(cases)
        if not self.ladder.searching:
            return [waiting]
        waiting.sort(key=lambda k: -np.min(cases[k].bounds))
        size = self.widths["backward"]
        return [waiting[begin : begin + size] for begin in range(0, len(waiting), size)]

    def _predict(self, case: _Case, outputs: np.ndarray) -> None:
        found = case.finding
        case.aims = _nearest(outputs, found.label)
        if not np.all(np.isfinite(outputs)):
            found.status = "error"
            found.note = "the model's outputs for the image itself are not finite"
            return
        found.predicted = int(np.argmax(outputs))
        found.correct = found.predicted == found.label
        if found.correct:
            found.attack = _margin(outputs, found.label)
        else:
            found.status = "misclassified"

    # -- counterexamples ------------------------------------------------------------------------

    def _attack(self, cases: list[_Case], boxes: Boxes) -> None:
        """From the images, from corners, from random points, towards the nearest classes."""
        for turn in range(self.restarts):
            for found in ahead(self._descents.from_scratch(np.array(_open(cases), int), turn)):
                self._replay_best(cases, boxes, found)

    def _replay_best(self, cases: list[_Case], boxes: Boxes, found: Found) -> None:
        """Runs the best point of each image, and others where it does not do what it should."""
        margins = np.asarray(found.margins)[: len(found.images)]
        points = np.asarray(found.best)[: len(found.images)]
        usable = np.isfinite(margins)
        first = usable[:, 0]
        if first.any():
            self._replay(cases, found.images[first], points[first], boxes)
        still_open = [cases[k].open for k in found.images]
        rest = usable[:, 1:] & (np.array(still_open) & (margins[:, 0] <= 0))[:, None]
        if rest.any():
            lanes, ranks = np.nonzero(rest)
            points = np.asarray(found.others)[lanes, ranks]
            self._replay(cases, found.images[lanes], points, boxes)

    def _replay(self, cases, images: np.ndarray, points: np.ndarray, boxes: Boxes) -> None:
        """Whether ONNX Runtime misclassifies points of images, moved into their boxes."""
        least, most = boxes.least[images], boxes.most[images]
        points = np.clip(points.reshape(least.shape), least, most)
        for k, point, outputs in zip(images, points, self.model.run(points), strict=True):
            case, found = cases[k], cases[k].finding
            if not case.open or not np.all(np.isfinite(outputs)):
                continue
            assert found.attack is not None
            found.attack = min(found.attack, _margin(outputs, found.label))
            if np.argmax(outputs) != found.label:
                found.status, found.attacked, case.point = "attacked", True, point
                found.becomes = int(np.argmax(outputs))

    # -- bounds -----------------------------------------------------------------------------------

    def _bound(
        self, cases: list[_Case], boxes: Boxes, method: str, waiting: list[int], begin: float
    ) -> float:
        """Bounds all margins of some images; charges them, and returns the time now."""
        minima, width = [], self.widths[method]
        for first in range(0, len(waiting), width):
            some = waiting[first : first + width]
            found = self.ladder.bound(method, self._asked(cases, boxes, some, width))
            assert found is not None  # there is no time limit
            for k, bound in zip(some, found.bound, strict=False):
                case, known = cases[k], cases[k].finding
                # A bound that is not a number says nothing.
                case.bounds = np.fmax(case.bounds, bound)
                known.bound = float(case.bounds.min())
                if 0 < known.bound < np.inf and self._passes_the_gate(case, boxes, k):
                    known.status, known.certified = "certified", True
                    known.checked, known.method = self.check, method
            minima.append(found.points[: len(some)])
        if waiting and (method != "ibp" or self.ladder.searching):
            self._descend_from_minima(cases, boxes, waiting, np.concatenate(minima))
        return _charge([cases[k] for k in waiting], begin)

    def _asked(self, cases: list[_Case], boxes: Boxes, some: list[int], width: int) -> ladder.Boxes:
        """All margins of some images, as many as are always bounded together."""
        # Filled up with the first one, with a limit that ends its search at once.
        filled = some + some[:1] * (width - len(some))
        limits = np.zeros((len(filled), 1))
        limits[len(some) :] = float(np.finfo(np.float32).min)
        labels = [cases[k].finding.label for k in filled]
        return ladder.Boxes(
            filled,
            boxes.lower[filled].reshape(len(filled), -1),
            boxes.upper[filled].reshape(len(filled), -1),
            networks.margins(labels, self.classes),
            limits,
        )

    def _passes_the_gate(self, case: _Case, boxes: Boxes, k: int) -> bool:
        """Whether the checker accepts what the bounds say; if not, the reason is noted."""
        if not self.check:
            return True
        wanted = property_of(boxes.lower[k], boxes.upper[k], case.finding.label, self.classes)
        try:
            certify(self.model, wanted, memory=self.memory)
        except Rejected as error:
            case.rejected = True
            case.finding.note = f"the checker rejects the proof: {error}"
            return False
        return True

    def _search_completely(self, case: _Case, cases: list[_Case], boxes: Boxes, k: int) -> None:
        """Decides one image by splits, as `verify` decides a property, within the time limit."""
        found = case.finding
        wanted = property_of(boxes.lower[k], boxes.upper[k], found.label, self.classes)
        verdict = verify(
            self.model, wanted, self.time_limit, check=self.check, seed=self.seed,
            memory=self.memory,
        )  # fmt: skip
        proven = np.array([one.proven for one in verdict.cases])
        case.bounds = np.fmax(case.bounds, proven)
        found.bound = float(np.min(case.bounds))
        if verdict.counterexample is not None:
            # Points of the property's box may lie outside of the image's, by rounding.
            inputs = np.asarray(verdict.counterexample.inputs, np.float32)
            self._replay(cases, np.array([k]), inputs[None], boxes)
        if verdict.answer == "unsat":
            found.status, found.certified = "certified", True
            found.checked, found.method = verdict.checked, "complete"
        elif case.open:
            case.rejected = verdict.rejected
            found.note = verdict.reason
            if verdict.answer == "sat":
                found.note = "two classes have the same output at a point of the box"

    def _descend_from_minima(self, cases, boxes: Boxes, waiting: list[int], points) -> None:
        """Attacks from where the relaxation is smallest."""
        places = [b for b, k in enumerate(waiting) if cases[k].open]
        if not places:
            return
        some = np.array(waiting)[places]
        others = np.stack([
            np.delete(np.arange(self.classes), cases[k].finding.label) for k in some
        ])  # fmt: skip
        order = np.argsort([cases[k].bounds for k in some], axis=1, kind="stable")[:, :AIMS]
        starts = np.asarray(points, np.float32)[np.array(places)[:, None], order]
        aims = np.take_along_axis(others, order, axis=1)
        for found in ahead(self._descents.from_points(some, aims, starts, attack.NEAR)):
            self._replay_best(cases, boxes, found)


def _open(cases: list[_Case]) -> list[int]:
    return [k for k, case in enumerate(cases) if case.open]


def property_of(lower, upper, label: int, classes: int) -> properties.Property:
    """No other class reaches the label's output on a box, as a property for the checker."""
    lower, upper = (np.asarray(end, np.float64).reshape(-1) for end in (lower, upper))
    least, most = (np.array([Fraction(v) for v in end], object) for end in (lower, upper))
    box = properties.InputSet(least, most, lower, upper)
    sizes = (len(lower), classes, 0)
    one = Fraction(1)
    cases = tuple(
        properties.Case(
            box,
            (properties.Row((), ((label, one), (other, -one)), (), Fraction(0), False),),
            sizes,
        )
        for other in range(classes)
        if other != label
    )
    network = properties.Network(
        "classifier",
        (properties.Tensor("X", "Real", (sizes[0],)),),
        (properties.Tensor("Y", "Real", (sizes[1],)),),
    )
    return properties.Property("an image", "2.0", (network,), cases)


def _charge(those: list[_Case], begin: float) -> float:
    """Shares the time since `begin` out among some images; returns the time now."""
    now = time.perf_counter()
    if not those:
        return begin
    for case in those:
        case.seconds += (now - begin) / len(those)
    return now


def _finished(found: Finding) -> Finding:
    if found.bound is not None and not np.isfinite(found.bound):
        found.bound = None
    # A complete search proves that margins are above zero, not by how much.
    sign_only = found.method == "complete" and found.bound == 0
    if found.bound is not None and found.attack is not None and not sign_only:
        found.gap = found.attack - found.bound
    return found


def _margin(outputs: np.ndarray, label: int) -> float:
    """The label's output minus the largest of the others."""
    outputs = outputs.astype(np.float64)
    return float(outputs[label] - np.delete(outputs, label).max())


def _nearest(outputs: np.ndarray, label: int) -> np.ndarray:
    """The classes with the largest outputs, apart from the label."""
    order = np.argsort(-outputs.astype(np.float64), kind="stable")
    return order[order != label][:AIMS]
