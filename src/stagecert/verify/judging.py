"""What is done for one instance of a sweep: verify it, and keep what the answer is worth."""

import hashlib
import io
import json
import math
import re
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stagecert.errors import ProblemError
from stagecert.sweeps import Item, Row
from stagecert.verify.instances import Instance

VERDICTS = ("unsat", "sat", "unknown", "timeout", "error")
# Bytes of model files, and of property files, whose contents a worker keeps.
KEPT = 1 << 29
LONGEST_NOTE = 500
# What engines say of an item whose worker they ended because of the time that it took.
LATE = re.compile(r"took more than (\S+) s")


@dataclass
class Finding:
    """What is known of one instance.

    Attributes:
        verdict: "unsat", "sat", "unknown", "timeout" or "error".
        bound: a certified lower bound on the violation over all inputs: above zero, none violates
            the property. Of boxes that were split, the least over the parts, once all are decided.
        nearest: the smallest violation met, in single precision; a counterexample has at most zero.
        gap: nearest - bound. None if the bound is a 0 that stands for "above zero", or if the rows
            of a case have coefficients of different sizes, as `nearest` is then in other units.
        cases, refuted: how many cases there are, and how many are proven to have no point.
        boxes: how many boxes were bounded by splitting.
        how: what refuted the cases, separated by spaces.
        certificate: "accepted" for an "unsat" whose proof the checker accepted, and "unchecked" for
            one that it has not seen. "rejected" or "missing" for what the search believes to be
            proven, where the checker does not accept it or does not understand the model: the
            verdict is then "unknown".
        note: why there is an error, or no decision.
    """

    verdict: str
    bound: float | None = None
    nearest: float | None = None
    gap: float | None = None
    cases: int | None = None
    refuted: int | None = None
    boxes: int | None = None
    how: str | None = None
    certificate: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Attached:
    """What belongs to an instance but not to the table.

    Attributes:
        times: parts of the seconds of the verdict: "proving", which is finding a certificate, and
            "checking" it.
        files: "certificate" and "counterexample".
    """

    times: dict[str, float] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)

    def packed(self) -> bytes:
        """As bytes."""
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in {"times": json.dumps(self.times).encode(), **self.files}.items():
                archive.writestr(zipfile.ZipInfo(name), data)
        return out.getvalue()

    @staticmethod
    def unpacked(data: bytes | None) -> "Attached":
        """From bytes."""
        if data is None:
            return Attached()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            held = {name: archive.read(name) for name in archive.namelist()}
        return Attached(json.loads(held.pop("times")), held)


@dataclass(frozen=True)
class Hashes:
    """What an instance's files contained when the sweep began; None if they could not be read."""

    model: str | None
    property: str | None


class Judging:
    """The work of a sweep over instances; it is sent to the workers, the files are not.

    Every worker reads the files where the list says, so they have to be there on every node. A file
    with another content than the one that the sweep was started with is an error.

    Args:
        instances: {key: instance}.
        hashes: {key: contents of its files}.
        check: whether "unsat" needs a certificate that the checker accepts.
        certificates: keep the certificates.
        seed: for the starting points of attacks.
        memory: GiB that arrays may take.
        processes: that share the search of an instance, as for `verify`.
    """

    def __init__(
        self,
        instances: Mapping[str, Instance],
        hashes: Mapping[str, Hashes],
        *,
        check: bool,
        certificates: bool,
        seed: int,
        memory: float,
        processes: int | None = 1,
    ):
        self.instances, self.hashes = dict(instances), dict(hashes)
        self.check, self.certificates = check, certificates
        self.seed, self.memory, self.processes = seed, memory, processes

    def prepare(self) -> Callable[[Sequence[Item]], list[Row]]:
        """What makes rows, in the process that calls this."""
        return _Judge(self).rows

    def failed(self, item: Item, why: str) -> Row:
        """The row of an instance that ended its worker."""
        late = LATE.fullmatch(why)
        verdict, seconds = ("timeout", float(late[1])) if late else ("error", 0.0)
        return _row(item, Finding(verdict, note=why[:LONGEST_NOTE]), seconds)


class _Judge:
    """A worker: keeps what it has read and compiled."""

    def __init__(self, work: Judging):
        self.work = work
        self.models, self.properties = _Kept(KEPT), _Kept(KEPT)

    def rows(self, items: Sequence[Item]) -> list[Row]:
        return [self._row(item) for item in items]

    def _row(self, item: Item) -> Row:
        begin = time.monotonic()
        try:
            found, attached, seconds = self._judged(item.key)
        except Exception as error:  # whatever it is, it concerns this instance only
            found, attached = Finding("error", note=_said(error)), None
            seconds = time.monotonic() - begin
        if found.note is not None:
            # Files are called what the list calls them, wherever that is.
            one = self.work.instances[item.key]
            models = one.model_path if isinstance(one.model_path, tuple) else ()
            names = [(one.model_path, one.model), (one.property_path, one.property)]
            for path, name in (*names, *((path, path.name) for _, path in models)):
                found.note = found.note.replace(str(path), name)
        return _row(item, found, seconds, attached)

    def _judged(self, key: str) -> tuple[Finding, Attached | None, float]:
        from stagecert.verify.verify import Verification

        work, instance = self.work, self.work.instances[key]
        begin = time.monotonic()
        model = self._model(instance, work.hashes[key].model)
        property = self._property(instance, work.hashes[key].property)
        run = Verification(
            model,
            property,
            max(instance.timeout - (time.monotonic() - begin), 1e-3),
            check=work.check,
            seed=work.seed,
            memory=work.memory,
            processes=work.processes,
        )
        verdict = run.run()
        seconds = time.monotonic() - begin
        found = _finding(verdict, property)
        if verdict.decided and seconds > instance.timeout:
            # A step that is under way is finished, but time is up all the same.
            found.verdict = "timeout"
            found.note = f"The answer {verdict.answer} came too late."
            return found, None, seconds
        if verdict.counterexample is not None:
            text = f"{verdict.answer}\n{verdict.counterexample.text()}\n"
            return found, Attached(files={"counterexample": text.encode()}), seconds
        if verdict.certified is not None:
            times = {"proving": verdict.certified.proving, "checking": verdict.certified.checking}
            files = {"certificate": verdict.certified.certificate} if work.certificates else {}
            return found, Attached(times, files), seconds
        return found, None, seconds

    def _model(self, instance: Instance, wanted: str | None):
        from stagecert.verify.contents import digest_of
        from stagecert.verify.models import OpenModel

        path = instance.model_path
        if wanted is None or wanted not in self.models:
            # Errors of files that could not be read at the start are raised here, too.
            files = [path] if isinstance(path, Path) else [file for _, file in path]
            size = sum(file.stat().st_size for file in files)
            there = digest_of(path)
            if wanted is not None and there != wanted:
                raise ProblemError(f"{path} has changed since the sweep began.")
            wanted = there
            self.models.keep(wanted, OpenModel(path), size)
        return self.models[wanted]

    def _property(self, instance: Instance, wanted: str | None):
        from stagecert_check import properties

        path = instance.property_path
        if wanted is None or wanted not in self.properties:
            data = path.read_bytes()
            there = hashlib.sha256(data).hexdigest()
            if wanted is not None and there != wanted:
                raise ProblemError(f"{path} has changed since the sweep began.")
            wanted = there
            try:
                property = properties.load(data)
            except ProblemError as error:
                raise ProblemError(f"{path}: {error}") from None
            self.properties.keep(wanted, property, len(data))
        return self.properties[wanted]


class _Kept:
    """The values used last, as many as their sizes allow."""

    def __init__(self, most: int):
        self._most, self._size = most, 0
        self._values: OrderedDict[str, tuple[Any, int]] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        self._values.move_to_end(name)
        return self._values[name][0]

    def keep(self, name: str, value: Any, size: int) -> None:
        if name in self._values:
            return
        self._values[name] = value, size
        self._size += size
        while self._size > self._most and len(self._values) > 1:
            _, (_, less) = self._values.popitem(last=False)
            self._size -= less


def _finding(verdict, property) -> Finding:
    cases = verdict.cases
    # A bound that is not a number says nothing.
    proven = [-math.inf if math.isnan(one.proven) else one.proven for one in cases]
    bound = min(proven, default=math.inf)
    nearest = min((one.nearest for one in cases), default=math.inf)
    bound, nearest = _plain(bound), _plain(nearest)
    gap = verdict.gap if _same_units(property) else None
    hows = sorted({one.how for one in cases if one.how})
    certificate = None
    if verdict.answer == "unsat":
        certificate = "accepted" if verdict.checked else "unchecked"
    elif verdict.objection is not None:
        certificate = "rejected" if verdict.rejected else "missing"
    return Finding(
        verdict.answer,
        bound=bound,
        nearest=nearest,
        gap=gap,
        cases=len(property.cases),
        refuted=sum(one.refuted for one in cases),
        boxes=verdict.boxes,
        how=" ".join(hows) or None,
        certificate=certificate,
        note=None if verdict.decided else verdict.reason,
    )


def _same_units(property) -> bool:
    """Whether no case has rows that were scaled differently."""
    from stagecert.verify.queries import scaled_row

    _, outputs, _ = property.sizes
    return all(
        len({scaled_row(row, outputs).scale for row in (*case.outputs, *case.inputs.rows)}) <= 1
        for case in property.cases
    )


def _said(error: Exception) -> str:
    if isinstance(error, ProblemError):
        text = str(error)
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename} cannot be read: {error.strerror}."
    else:
        text = f"{type(error).__name__}: {error}"
    return text[:LONGEST_NOTE]


def _plain(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _row(item: Item, found: Finding, seconds: float, attached: Attached | None = None) -> Row:
    blob = None if attached is None else attached.packed()
    return Row(item.key, item.place, asdict(found), seconds, blob)
