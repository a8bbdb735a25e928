"""What is run: which method on which network, on how many images, until when."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.networks.__main__ import NETWORKS
from benchmarks.paper.methods import METHODS, Stop

EPS = "8/255"
SIZES = ("tiny", "small", "medium")
ACTIVATIONS = {"relu": "ReLU", "softplus": "SoftPlus"}
TRAININGS = {"adv": "adversarial training", "ibp": "interval-bound training"}
CHUNK = 20  # images of one item: what is lost when the benchmark is stopped

PAPER_ADVERSARIAL = Stop(rtol=1e-2, atol=0.0)
PAPER_INTERVALS = Stop(rtol=0.0, atol=1e-4)


@dataclass(frozen=True)
class Run:
    """A method with its settings.

    Attributes:
        name: a key for files and options.
        method: its name in `METHODS`.
        label: how tables call it; by default as the method does.
        adversarial, intervals: when it stops on networks of adversarial and of interval training.
        most: on how many images of each size of network it runs at most; sizes that are not there
            have no limit. Dear methods have few.
        limits: how many iterations for each size of network, where not the method's own limit.
        training: "adv" or "ibp", if it runs on such networks only.
        target: the run whose bounds end this one as soon as they are reached.
        kind: "method" for the tables, "trace" for the figures.
        group: "first-order", "solver", "peer" (a tool from outside: its values are not taken for
            feasible ones) or "other".
    """

    name: str
    method: str
    label: str = ""
    adversarial: Stop = PAPER_ADVERSARIAL
    intervals: Stop = PAPER_INTERVALS
    most: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    training: str = ""
    target: str | None = None
    kind: str = "method"
    group: str = "other"

    @property
    def title(self) -> str:
        """How tables call it."""
        return self.label or METHODS[self.method].label

    def stop(self, network: str) -> Stop:
        """When it stops on a network."""
        stop = self.intervals if network.endswith("_ibp") else self.adversarial
        return replace(stop, iterations=self.limits.get(network.split("_")[0]))

    def images(self, network: str, images: int, unlimited: bool) -> int:
        """On how many images it runs."""
        if not network.endswith(self.training):
            return 0
        if unlimited and self.kind == "method":
            return images
        return min(images, self.most.get(network.split("_")[0], images))


_FEW = {"tiny": 2, "small": 0, "medium": 0}
_FAR = Stop(rtol=1e-5, atol=1e-7)  # traces go on beyond the point where the tables' runs stop
_TIGHT = Stop(rtol=1e-5, atol=1e-6)


def _trace(name: str, method: str, **more) -> Run:
    return Run(name, method, adversarial=_FAR, intervals=_FAR, kind="trace", **more)


RUNS = {
    run.name: run
    for run in (
        Run("ibp", "ibp"),
        Run("backward", "backward"),
        Run("paper", "paper", group="first-order"),
        Run(
            "paper-fixed",
            "paper_fixed",
            most={"small": 5, "medium": 4},
            training="ibp",
            group="first-order",
        ),
        Run(
            "deepverify",
            "deepverify",
            most={"small": 10, "medium": 4},
            target="paper",
            group="first-order",
        ),
        Run("pdhg", "pdhg", most={"small": 1, "medium": 1}, group="first-order"),
        Run("ours", "ours", "stagecert"),
        Run(
            "ours-tight",
            "ours",
            "stagecert (tight)",
            adversarial=_TIGHT,
            intervals=_TIGHT,
            limits={"small": 60, "medium": 40},
        ),
        Run("auto_lirpa", "auto_lirpa", most={"small": 10, "medium": 4}, group="peer"),
        Run(
            "jax_verify",
            "jax_verify",
            most={"tiny": 10, "small": 2, "medium": 1},
            group="peer",
        ),
        Run("scs", "scs", most={**_FEW, "tiny": 1}, group="solver"),
        Run("ecos", "ecos", most=_FEW, group="solver"),
        Run("clarabel", "clarabel", most={**_FEW, "tiny": 1}, group="solver"),
        Run("highs", "highs", most=_FEW, group="solver"),
        _trace("trace-paper", "paper", most=dict.fromkeys(SIZES, 2)),
        _trace("trace-deepverify", "deepverify", most=dict.fromkeys(SIZES, 2)),
        _trace(
            "trace-ours",
            "ours_traced",
            most=dict.fromkeys(SIZES, 2),
            limits=dict.fromkeys(SIZES, 200),
        ),
    )
}
TRACED = ("medium_softplus_adv", "medium_softplus_ibp")  # the paper's figures


@dataclass(frozen=True)
class Work:
    """One item: a run on some images of a network."""

    network: str
    run: Run
    first: int
    count: int

    @property
    def mark(self) -> str:
        """Stands for the settings: other settings are another item."""
        settings = repr(
            (self.run.method, self.run.kind, self.run.target, self.run.stop(self.network))
        )
        return hashlib.sha256(settings.encode()).hexdigest()[:8]

    @property
    def key(self) -> str:
        """Identifies it."""
        return f"{self.network}/{self.run.name}/{self.first}+{self.count}/{self.mark}"


def planned(
    networks: Sequence[str],
    runs: Sequence[str],
    traced: Sequence[str],
    images: int,
    unlimited: bool = False,
) -> Iterator[Work]:
    """All items, network by network; a run comes after the one whose bounds it needs."""
    for network in networks:
        for name in ordered(runs):
            run = RUNS[name]
            if run.kind == "trace" and network not in traced:
                continue
            count = run.images(network, images, unlimited)
            for first in range(0, count, CHUNK):
                yield Work(network, run, first, min(CHUNK, count - first))


def ordered(runs: Sequence[str]) -> list[str]:
    """The runs, and those whose bounds they need, in the order of `RUNS`."""
    wanted = set(runs)
    wanted |= {target for name in runs if (target := RUNS[name].target)}
    return [name for name in RUNS if name in wanted]


def title_of(network: str) -> str:
    """A network's name as tables have it.

    >>> title_of("tiny_relu_adv")
    'Tiny ReLU'
    """
    size, activation, _ = network.split("_")
    return f"{size.capitalize()} {ACTIVATIONS[activation]}"


__all__ = [
    "ACTIVATIONS", "EPS", "NETWORKS", "RUNS", "SIZES", "TRACED", "TRAININGS", "Run", "Work",
    "ordered", "planned", "title_of",
]  # fmt: skip
