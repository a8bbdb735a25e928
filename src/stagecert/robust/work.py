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
from stagecert.networks.bounding.jobs import boxes_at_once
from stagecert.powers import power_below
from stagecert.robust.boxes import Boxes, Preparation, boxes_around
from stagecert.robust.data import DataSet
from stagecert.verify import agreement, attack, ladder
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
# Points of each image that are run in ONNX Runtime after an attack, the most promising ones.
REPLAYED = 4
LARGEST_BATCH = 128


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


def largest_batch(network: Network, memory: float) -> int:
    """How many images fill the memory (GiB): a power of two."""
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
    memory: float
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
        self.seed, self.memory = options.seed, options.memory
        self.classes = model.network.output_size
        self.ladder = ladder.Ladder(model.network, self.memory)
        # Numbers of images that are multiples of this have the same compiled programs.
        self.width = min(
            options.batch,
            boxes_at_once(
                self.ladder.parts, model.network.input_shapes, self.classes - 1, self.memory
            ),
        )
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
        self._attack(cases, boxes, [np.random.default_rng([self.seed, p]) for p in places])
        begin = _charge(cases, begin)
        self.ladder.forget()
        for method in self.methods:
            waiting = [case for case in cases if case.open]
            if not waiting:
                break
            if method == "complete":
                for k, case in enumerate(cases):
                    if case.open:
                        self._search_completely(case, cases, boxes, k)
                        begin = _charge([case], begin)
            else:
                self._bound(cases, boxes, method)
                begin = _charge(waiting, begin)
        return [(_finished(case.finding), case.seconds, case.point) for case in cases]

    def _predict(self, case: _Case, outputs: np.ndarray) -> None:
        found = case.finding
        if not np.all(np.isfinite(outputs)):
            found.status = "error"
            found.note = "the model's outputs for the image itself are not finite"
            return
        found.predicted = int(np.argmax(outputs))
        found.correct = found.predicted == found.label
        case.aims = _nearest(outputs, found.label)
        if found.correct:
            found.attack = _margin(outputs, found.label)
        else:
            found.status = "misclassified"

    # -- counterexamples ------------------------------------------------------------------------

    def _attack(self, cases: list[_Case], boxes: Boxes, draws) -> None:
        """Descends from the image itself, corners and random points towards the nearest classes."""
        lanes, starts = [], []
        for k, case in enumerate(cases):
            if not case.open:
                continue
            aims = len(case.aims)
            least, most = boxes.least[k].reshape(-1), boxes.most[k].reshape(-1)
            points = attack.start_points(least, most, aims * self.restarts, draws[k])
            points[:aims] = boxes.centre[k].reshape(-1)
            lanes += [(k, int(case.aims[j % aims])) for j in range(len(points))]
            starts.append(points)
        if lanes:
            self._descend(cases, boxes, lanes, np.concatenate(starts), attack.SHORT[0])

    def _descend(self, cases, boxes: Boxes, lanes, starts, plan: attack.Plan) -> None:
        """Follows gradients for lanes (image, other class), and replays the best points."""
        points, margins = [], []
        for some, count in attack.in_lanes(self.model.network, len(lanes)):
            goal = self._targets(cases, boxes, [lanes[k] for k in some])
            found = attack.descend(self.model.network, starts[some], goal, plan)
            points.append(found.points[:count])
            margins.append(found.violation[:count])
        points, margins = np.concatenate(points), np.concatenate(margins)
        margins = np.where(np.isnan(margins), np.inf, margins)
        images = np.array([k for k, _ in lanes])
        chosen = []
        for k in np.unique(images):
            mine = np.flatnonzero(images == k)
            best = mine[np.argsort(margins[mine], kind="stable")[:REPLAYED]]
            chosen += best[np.isfinite(margins[best])].tolist()
        if chosen:
            self._replay(cases, images[chosen], points[chosen], boxes)

    def _targets(self, cases, boxes: Boxes, lanes) -> attack.Targets:
        images = [k for k, _ in lanes]
        rows = np.zeros((len(lanes), 1, self.classes), np.float32)
        for lane, (k, other) in enumerate(lanes):
            rows[lane, 0, cases[k].finding.label] = 1
            rows[lane, 0, other] = -1
        return attack.Targets(
            boxes.least[images].reshape(len(lanes), -1),
            boxes.most[images].reshape(len(lanes), -1),
            rows,
            np.zeros((len(lanes), 1), np.float32),
            np.ones((len(lanes), 1), bool),
        )

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

    def _bound(self, cases: list[_Case], boxes: Boxes, method: str) -> None:
        """Bounds all margins of the open images."""
        waiting, minima = [k for k, case in enumerate(cases) if case.open], []
        for begin in range(0, len(waiting), self.width):
            some = waiting[begin : begin + self.width]
            found = self.ladder.bound(method, self._asked(cases, boxes, some))
            assert found is not None  # there is no time limit
            for k, bounds in zip(some, found.bound, strict=False):
                case, known = cases[k], cases[k].finding
                # A bound that is not a number says nothing.
                case.bounds = np.fmax(case.bounds, bounds)
                known.bound = float(case.bounds.min())
                if 0 < known.bound < np.inf and self._passes_the_gate(case, boxes, k):
                    known.status, known.certified = "certified", True
                    known.checked, known.method = self.check, method
            minima.append(found.points[: len(some)])
        if method != "ibp":
            self._descend_from_minima(cases, boxes, waiting, np.concatenate(minima))

    def _asked(self, cases: list[_Case], boxes: Boxes, some: list[int]) -> ladder.Boxes:
        """All margins of some images, as many as are always bounded together."""
        # Filled up with the first one, with a limit that ends its search at once.
        filled = some + some[:1] * (self.width - len(some))
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
        lanes, starts = [], []
        for b, k in enumerate(waiting):
            if cases[k].open:
                others = np.delete(np.arange(self.classes), cases[k].finding.label)
                for row in np.argsort(cases[k].bounds, kind="stable")[:AIMS]:
                    lanes.append((k, int(others[row])))
                    starts.append(points[b, row])
        if lanes:
            self._descend(cases, boxes, lanes, np.array(starts), attack.NEAR)


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
