"""`sweep`: whole lists of instances, with a store that an interrupted run goes on from."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stagecert import __version__
from stagecert.errors import ProblemError
from stagecert.files import write_csv, write_whole
from stagecert.sweeps import Item, Store
from stagecert.sweeps.report import About, Entry, write_report
from stagecert.sweeps.sweep import Campaign
from stagecert.sweeps.tables import write_table
from stagecert.verify.contents import digest_of
from stagecert.verify.instances import Instance, stem
from stagecert.verify.judging import VERDICTS, Attached, Hashes, Judging

COLUMNS = {
    "index": int, "set": str, "model": str, "property": str, "timeout": float, "verdict": str,
    "expected": str, "wrong": bool, "bound": float, "nearest": float, "gap": float, "cases": int,
    "refuted": int, "boxes": int, "how": str, "certificate": str, "file": str, "note": str,
}  # fmt: skip
CERTIFICATES = ("accepted", "rejected", "missing", "unchecked")
# Folders and endings of the files that belong to instances.
_FILES = {"certificate": ("certificates", "cert"), "counterexample": ("counterexamples", "txt")}


@dataclass(frozen=True)
class Summary:
    """What a sweep found.

    Attributes:
        instances: how many there are.
        done: how many have a verdict.
        sets: for each list, how many have which verdict.
        wrong: how many contradict the answer that is known.
        known: how many have a known answer, sat or unsat.
        certificates: how many answers have which entry in the column `certificate`.
        seconds: the time that all of it took, in all runs and workers together.
        configuration: everything that influenced the results, apart from the lists.
    """

    instances: int
    done: int
    sets: dict[str, dict[str, int]]
    wrong: int
    known: int
    certificates: dict[str, int]
    seconds: float
    configuration: dict[str, Any]

    @property
    def verdicts(self) -> dict[str, int]:
        """How many instances of all lists have which verdict."""
        return {name: sum(one[name] for one in self.sets.values()) for name in VERDICTS}

    @property
    def sound(self) -> bool:
        """Whether no answer is known to be wrong and no certificate was rejected."""
        return not self.wrong and not self.certificates.get("rejected")

    def to_dict(self) -> dict[str, Any]:
        """The summary as plain data."""
        return {
            "instances": self.instances,
            "done": self.done,
            "complete": self.done == self.instances,
            "verdicts": self.verdicts,
            "sets": self.sets,
            "known_answers": self.known,
            "wrong": self.wrong,
            "certificates": self.certificates,
            "configuration": self.configuration,
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Line:
    """One instance of the table: the columns, its times, and what its file is called."""

    data: dict[str, Any]
    seconds: float
    times: dict[str, float] = field(default_factory=dict)
    size: int | None = None  # of the certificate


class Sweep(Campaign):
    """A sweep over instances in parts: what there is to do, doing it, and writing it down.

    Args:
        instances: see `read_lists`.
        check: say "unsat" only where the checker accepts a certificate.
        certificates: keep these certificates.
        seed: for the starting points of attacks.
        memory: GiB that the arrays of one worker may take.
        processes: that share the search of an instance, as for `verify`; with several workers, one
            each is fastest.

    >>> from stagecert.verify.instances import read_lists
    >>> work = Sweep(read_lists(["instances.csv"]))  # doctest: +SKIP
    >>> with work.store("results") as store:  # doctest: +SKIP
    ...     work.run(store)
    ...     summary = work.export(store)
    """

    work: Judging
    verdict = "verdict"

    def __init__(
        self,
        instances: Sequence[Instance],
        *,
        check: bool = True,
        certificates: bool = False,
        seed: int = 0,
        memory: float = 1.0,
        processes: int | None = 1,
    ):
        if not 0 < memory < float("inf"):
            raise ProblemError(f"memory must be a positive number of GiB, not {memory!r}.")
        if seed < 0:
            raise ProblemError(f"seed must be at least 0, not {seed!r}.")
        if certificates and not check:
            raise ProblemError("Certificates are checked proofs: there are none without the check.")
        self.instances = list(instances)
        self.configuration = {
            "task": "sweep",
            "stagecert": __version__,
            "checked": check,
            "certificates": certificates,
            "seed": seed,
            "memory": memory,
        }
        contents = _Contents()
        hashes = [contents.of(one) for one in self.instances]
        # Two lines that are the same instance have one row.
        self.keys = [_key(one, h) for one, h in zip(self.instances, hashes, strict=True)]
        first: dict[str, int] = {}
        for place, key in enumerate(self.keys):
            first.setdefault(key, place)
        self.items = [Item(place, key) for key, place in first.items()]
        self.work = Judging(
            {key: self.instances[place] for key, place in first.items()},
            {key: hashes[place] for key, place in first.items()},
            check=check,
            certificates=certificates,
            seed=seed,
            memory=memory,
            processes=processes,
        )

    @property
    def longest(self) -> float:
        """The largest time limit of all instances."""
        return max(one.timeout for one in self.instances)

    def lines(self, store: Store, *, attached: bool = False) -> Iterator[Line]:
        """The table of all instances that have a row, in the order of the lists.

        Args:
            store: where the rows are.
            attached: with their times besides that of the verdict, and sizes of certificates.
        """
        held = {}
        wanted = set(self.keys)
        for row in store.rows(blobs=attached):
            if row.key in wanted:
                more = Attached.unpacked(row.blob)
                size = len(more.files["certificate"]) if "certificate" in more.files else None
                held[row.key] = row, more.times, size
        for place, (key, one) in enumerate(zip(self.keys, self.instances, strict=True)):
            if key in held:
                row, times, size = held[key]
                yield Line(self._columns(place, key, one, row.data), row.seconds, times, size)

    def _columns(self, place: int, key: str, one: Instance, found: dict) -> dict[str, Any]:
        there = None
        if found["verdict"] == "sat":
            there = "counterexample"
        elif found["certificate"] == "accepted" and self.configuration["certificates"]:
            there = "certificate"
        held = {
            "index": place,
            "set": one.set,
            "model": one.model,
            "property": one.property,
            "timeout": one.timeout,
            "expected": one.expected,
            "wrong": {found["verdict"], one.expected} == {"sat", "unsat"},
            "file": there and self._file(there, key),
            **found,
        }
        return {name: held[name] for name in COLUMNS}

    def _file(self, kind: str, key: str) -> str:
        """Where a file of an instance is, seen from the folder of the results."""
        folder, ending = _FILES[kind]
        one = self.work.instances[key]
        name = f"{one.model_name()[:80]}-{stem(one.property)[:80]}"
        name = re.sub(r"[^\w.-]+", "_", name)
        return f"{folder}/{name}-{key[:8]}.{ending}"

    def summary(self, store: Store) -> Summary:
        """What the store says of the instances."""
        sets: dict[str, dict[str, int]] = {
            one.set: {name: 0 for name in VERDICTS} for one in self.instances
        }
        certificates: dict[str, int] = dict.fromkeys(CERTIFICATES, 0)
        done = wrong = 0
        for line in self.lines(store):
            done += 1
            sets[line.data["set"]][line.data["verdict"]] += 1
            wrong += line.data["wrong"]
            if line.data["certificate"] is not None:
                certificates[line.data["certificate"]] += 1
        wanted = set(self.keys)
        seconds = sum(row.seconds for row in store.rows() if row.key in wanted)
        return Summary(
            instances=len(self.instances),
            done=done,
            sets=sets,
            wrong=wrong,
            known=sum(one.expected in ("sat", "unsat") for one in self.instances),
            certificates={name: count for name, count in certificates.items() if count},
            seconds=seconds,
            configuration=self.configuration,
        )

    def export(self, store: Store, format: str = "csv") -> Summary:
        """Writes the files into the store's folder, each whole or not at all."""
        folder = store.folder
        assert folder is not None
        table = (line.data for line in self.lines(store))
        write_table(folder / "results", COLUMNS, table, format)
        names = ("index", "seconds", "proving", "checking")
        times = (
            {"index": line.data["index"], "seconds": round(line.seconds, 6)}
            | {name: _rounded(line.times.get(name)) for name in names[2:]}
            for line in self.lines(store, attached=True)
        )
        write_csv(folder / "times.csv", names, times)
        self._write_files(store, folder)
        found = self.summary(store)
        write_whole(folder / "summary.json", json.dumps(found.to_dict(), indent=2) + "\n")
        return found

    def _write_files(self, store: Store, folder: Path) -> None:
        """Certificates and counterexamples that are not there yet."""
        wanted = set(self.keys)
        for row in store.rows(blobs=True):
            if row.key in wanted:
                for kind, data in Attached.unpacked(row.blob).files.items():
                    path = folder / self._file(kind, row.key)
                    if not path.exists():
                        path.parent.mkdir(exist_ok=True)
                        write_whole(path, data)


class _Contents:
    """Hashes of files, each of which is read once."""

    def __init__(self):
        self._known: dict[tuple[Any, Callable], str | None] = {}

    def of(self, one: Instance) -> Hashes:
        return Hashes(self._hash(one.model_path, digest_of), self._hash(one.property_path, _hash))

    def _hash(self, path: Any, how: Callable[[Any], str]) -> str | None:
        if (path, how) not in self._known:
            try:
                self._known[path, how] = how(path)
            except (OSError, ValueError):
                self._known[path, how] = None  # the instance's own error, once it is its turn
        return self._known[path, how]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _key(one: Instance, hashes: Hashes) -> str:
    """Identifies an instance by the contents of its files, or by their names if there are none."""
    parts = [
        hashes.model or f"no file {one.model_path}",
        hashes.property or f"no file {one.property_path}",
        repr(one.timeout),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


# -- the report ------------------------------------------------------------------------------------


def report_of_instances(
    sweep: Sweep, store: Store, summary: Summary, path: Path, *, command: str = ""
) -> None:
    """Writes the report of a sweep.

    Args:
        sweep: the instances.
        store: where their rows are.
        summary: of these rows.
        path: of the report.
        command: what started the sweep.
    """
    answers = (
        f"{summary.known} have known answers; {summary.wrong} verdicts contradict them."
        if summary.known
        else "No answers to compare with were given."
    )
    about = About(
        title="Sweep over " + ", ".join(summary.sets),
        lead=(
            "unsat: proven that no input violates the property. sat: ONNX Runtime confirms an "
            f"input that does. {summary.instances} instances. {answers}"
        ),
        items="instances",
        groups="set",
        verdicts=VERDICTS,
        total=summary.instances,
        bound=(
            "The bound is a proven lower bound on the violation over all inputs: above zero, there "
            "is no counterexample. Of inputs that were split it is the least over the parts or, "
            "if not all of these are decided, what holds without splitting. A 0 of an unsat: "
            "proven to be above zero, by splits of neurons, which do not say how much."
        ),
        gap=(
            "The gap is the smallest violation met at an input, minus the bound. The former is "
            "computed in single precision, whose rounding can make it less than the latter. The "
            "search ends once an instance is decided, so the gap could often be smaller."
        ),
        facts=_certificates(sweep, store, summary),
        command=command,
        configuration=sweep.configuration,
    )
    write_report(path, about, _entries(sweep, store))


def _entries(sweep: Sweep, store: Store):
    for line in sweep.lines(store):
        found = line.data
        yield Entry(
            name=sweep.instances[found["index"]].name(),
            group=found["set"],
            verdict=found["verdict"],
            solved=found["verdict"] in ("sat", "unsat"),
            seconds=line.seconds,
            bound=found["bound"],
            gap=found["gap"],
            note=found["note"],
            wrong=found["wrong"],
        )


def _certificates(sweep: Sweep, store: Store, summary: Summary):
    if not summary.certificates:
        return ()
    facts: dict[str, str] = {name: str(count) for name, count in summary.certificates.items()}
    lines = [line for line in sweep.lines(store, attached=True) if line.times]
    for name, values, unit in (
        ("size", [line.size / 1000 for line in lines if line.size is not None], "kB"),
        ("seconds to prove", [line.times.get("proving", 0.0) for line in lines], "s"),
        ("seconds to check", [line.times.get("checking", 0.0) for line in lines], "s"),
    ):
        if values:
            facts[name] = f"median {np.median(values):.3g} {unit}, largest {max(values):.3g} {unit}"
    return (("Proofs of unsat, by the independent checker", facts),)
