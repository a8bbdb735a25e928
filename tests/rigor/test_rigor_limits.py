"""What a certificate may cost: limits that are checked first, and work that is done once."""

import hashlib
import io
import json
import time
import types
import zipfile
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import rigor_models as models

from stagecert import ProblemError
from stagecert_check import bounds, cases, check, checker, graph, objectives, properties, tree
from stagecert_check import certificate as format_
from stagecert_check.bounds import Facts, few
from stagecert_check.certificate import Certificate
from stagecert_check.checker import Checker, Task
from stagecert_check.functions import Refused
from stagecert_check.numbers import Arithmetic


class Small:
    """y = relu(x) on [0, 1]^2, where y_0 <= -0.5 has no point, and certificates for that."""

    def __init__(self, folder: Path, size: int = 2):
        make = models.Maker()
        self.model = make.model(
            [("x", [1, size])], [(make.node("Relu", make.node("Relu", "x")), [1, size])]
        ).SerializeToString()
        self.text = models.vnnlib([0] * size, [1] * size, size, "(assert (<= Y_0 -0.5))").encode()
        self.paths = [folder / name for name in ("m.onnx", "p.vnnlib", "c.cert")]
        self.paths[0].write_bytes(self.model)
        self.paths[1].write_bytes(self.text)

    def write(self, splits=((-1, 0.0),), leaves=(), arrays=None, multipliers=None) -> None:
        axes, cuts = zip(*splits, strict=True)
        count = axes.count(-1)
        held = {
            "a": np.array(axes, "<i4"),
            "b": np.array(cuts, "<f8"),
            "c": np.ones((count, 1)) if multipliers is None else multipliers,
        }
        case = {"axes": "a", "cuts": "b", "multipliers": "c", "leaves": list(leaves)}
        header = {"format": "stagecert certificate", "version": 1, "stagecert": "0",
                  "cases": [case]}  # fmt: skip
        models.write(self.paths[2], header, held | (arrays or {}), self.model, self.text)

    def check(self, **options):
        return check(self.paths[0], self.paths[1], self.paths[2], **options)

    def checker(self) -> Checker:
        return Checker(graph.read(self.model, Arithmetic()), properties.load(self.text))


@pytest.fixture
def small(tmp_path) -> Small:
    return Small(tmp_path)


def _tree(leaves: int, dimensions: int = 2):
    """Halves of halves along all axes, in preorder."""
    found, stack = [], [(np.zeros(dimensions), np.ones(dimensions), leaves)]
    while stack:
        low, high, count = stack.pop()
        if count == 1:
            found.append((-1, 0.0))
            continue
        axis = int(np.argmax(high - low))
        left, right = high.copy(), low.copy()
        left[axis] = right[axis] = 0.5 * (low + high)[axis]
        found.append((axis, float(left[axis])))
        stack += [(right, high, count - count // 2), (low, left, count // 2)]
    return found


def test_leaves_cover_the_box_and_nothing_else(small):
    small.write(_tree(37))
    case = Certificate(small.paths[2]).cases(2, [1])[0]
    tasks = list(small.checker().tasks(0, case))
    assert [task.number for task in tasks] == list(range(37))
    areas = [
        (Fraction(t.high[0]) - Fraction(t.low[0])) * (Fraction(t.high[1]) - Fraction(t.low[1]))
        for t in tasks
    ]
    assert sum(areas) == 1
    points = np.random.default_rng(0).uniform(size=(500, 2))
    inside = [np.all((task.low <= points) & (points <= task.high), axis=1) for task in tasks]
    assert np.all(np.sum(inside, axis=0) == 1)  # no point of these is on an edge


def test_a_deep_tree_needs_little_memory(tmp_path):
    # Every node of the way used to hold two arrays: 4 GB for this one.
    size, deep = 1000, 20_000
    small = Small(tmp_path, size)
    splits = [(k % size, 0.5) for k in range(deep)] + [(-1, 0.0)] * (deep + 1)
    small.write(splits)
    case = Certificate(small.paths[2]).cases(2, [1])[0]
    tasks = small.checker().tasks(0, case)
    begin, count = time.process_time(), sum(1 for _ in tasks)
    assert count == deep + 1
    assert time.process_time() - begin < 20


def _chain(deep: int) -> dict[str, np.ndarray]:
    """A neuron that is split again and again, always the part above: half of deep^2 forces."""
    axes = np.array([0, -1] * deep + [-1], "<i4")
    forces = np.zeros(deep * (deep + 1) // 2 + deep)
    return {"axes": axes, "cuts": np.zeros(len(axes)), "forces": forces}


@pytest.mark.parametrize("lemmas", [False, True])
def test_many_splits_on_the_ways_to_leaves_are_not_held_at_once(small, monkeypatch, lemmas):
    # A file of 80 kB took more than a gigabyte.
    held, deep = [], 600
    real = tree.windows

    def counted(*given, **settings):
        for some in real(*given, **settings):
            held.append(sum(len(task.path.neurons) for task in some))
            yield some

    monkeypatch.setattr(tree, "_SPLITS_AT_ONCE", 1000)
    for module in (checker, cases):
        monkeypatch.setattr(module, "windows", counted)
    chain = _chain(deep)
    arrays = {f"l{name}": array for name, array in chain.items()}
    arrays |= {"one": np.ones(1, "<i4"), "zero": np.zeros(1, "<i4")}
    arrays |= {"none": np.zeros(0), "leaf": np.array([-1], "<i4"), "end": np.zeros(1)}
    names = {name: f"l{name}" for name in chain}
    lemma = names | {"entries": "zero", "sides": "one", "slopes": [None]}
    few, count = {"axes": "leaf", "cuts": "end", "forces": "none"}, 1 if lemmas else deep + 1
    if not lemmas:
        arrays["laxes"] = np.where(chain["axes"] == 0, 2, -1).astype("<i4")  # after two inputs
    arrays |= {"m": np.ones((count, 1)), "empty": np.zeros(0, "<i4")}
    rows = {"entries": "empty", "sides": "empty", "slopes": [None], "cases": lemma}
    case = (few if lemmas else names) | {"multipliers": "m", "slopes": []}
    case |= {"boxes": [None, rows] if lemmas else [], "stations": []}
    used, make = json.dumps(case), models.Maker()
    hidden = make.node("MatMul", make.node("Relu", "x"), make.constant(np.eye(2)))
    ends = [("x", [1, 2])], [(make.node("Relu", hidden), [1, 2])]
    small.model = make.model(*ends).SerializeToString()
    small.paths[0].write_bytes(small.model)
    arrays = {name: array for name, array in arrays.items() if json.dumps(name) in used}
    header = {"format": "stagecert certificate", "version": 4, "stagecert": "0", "cases": [case]}
    models.write(small.paths[2], header, arrays, small.model, small.text)
    report = small.check()
    assert report.accepted, report.reasons
    assert sum(held) == len(chain["forces"])
    assert max(held) < 1000 + deep + 1


def test_many_leaves(small):
    # 65,536 leaves took 138 s where each was worked in Python by itself.
    small.write(_tree(20_000))
    calls = []
    begin = time.process_time()
    report = small.check(progress=lambda *counts: calls.append(counts))
    assert time.process_time() - begin < 30
    assert report.accepted
    assert len(report.bounds[0]) == 20_000
    assert calls[-1] == (20_000, 20_000)
    assert len(calls) > 20


def test_there_are_not_too_many_leaves_or_multipliers(small, monkeypatch):
    small.write(_tree(9))
    assert small.check().accepted
    for limit in ("_MOST_LEAVES", "_MOST_MULTIPLIERS"):
        with monkeypatch.context() as patch:
            patch.setattr(format_, limit, 8)
            report = small.check()
            assert "there are more than 8" in report.reasons[0]


def test_a_small_file_has_few_leaves(small):
    # 17 kB of equal numbers, packed, were worked on as half a million leaves.
    count = 2**19
    small.write([(0, 0.5)] * (count - 1) + [(-1, 0.0)] * count)
    size = small.paths[2].stat().st_size
    assert size < 2**15
    begin = time.process_time()
    report = small.check()
    assert time.process_time() - begin < 2
    most = 4096 + 8 * size
    assert f"more than {most} leaves, too many for the size" in report.reasons[0]


@pytest.mark.parametrize(("dimensions", "leaves"), [(2, 2**13), (5, 2**14)])
def test_regular_trees_are_within_the_limit(tmp_path, dimensions, leaves):
    """Equal parts pack best of all that a search makes."""
    small = Small(tmp_path, dimensions)
    small.write(_tree(leaves, dimensions))
    (case,) = Certificate(small.paths[2]).cases(2, [1])
    assert len(case.multipliers) == leaves


def test_a_small_file_has_few_stations(small):
    # Every station may ask for passes back from all neurons, with arrays that are named once.
    count = 2**12
    splits = [(2, 0.0)] * count + [(-1, 0.0)] * (count + 1)
    axes, cuts = zip(*splits, strict=True)
    arrays = {"a": np.array(axes, "<i4"), "b": np.array(cuts, "<f8"),
              "c": np.ones((count + 1, 1)), "d": np.zeros(0)}  # fmt: skip
    given = [{"node": node, "boxes": [None, None]} for node in range(count)]
    case = {"axes": "a", "cuts": "b", "multipliers": "c", "forces": "d", "slopes": [], "boxes": [],
            "stations": given}  # fmt: skip
    header = {"format": "stagecert certificate", "version": 2, "stagecert": "0", "cases": [case]}
    models.write(small.paths[2], header, arrays, small.model, small.text)
    most = 1024 + small.paths[2].stat().st_size // 4
    assert most < count
    with pytest.raises(Refused, match=f"more than {most} stations, too many for the size"):
        Certificate(small.paths[2]).cases(2, [1])
    del given[1024:]
    models.write(small.paths[2], header, arrays, small.model, small.text)
    (found,) = Certificate(small.paths[2]).cases(2, [1])
    assert len(found.stations) == 1024


def _boxes(entries, sides, rows=None):
    """A leaf with slopes for entries of the second activation's argument."""
    count = len(entries) if rows is None else rows
    arrays = {"e": np.array(entries, "<i4"), "s": np.array(sides, "<i4"),
              "l": np.ones((count, 1, 2), "<f4")}  # fmt: skip
    given = {"entries": "e", "sides": "s", "slopes": [["l", None]]}
    return [{"number": 0, "slopes": [None, None], "boxes": [None, given]}], arrays


def test_entries_of_a_box_come_once(small):
    leaves, arrays = _boxes([0, 1, 0, 1], [1, 1, -1, -1])
    small.write(leaves=leaves, arrays=arrays)
    assert small.check().accepted
    leaves, arrays = _boxes([0, 0, 1, 1], [-1, 1, 1, -1])
    small.write(leaves=leaves, arrays=arrays)
    assert small.check().accepted
    leaves, arrays = _boxes([], [])
    small.write(leaves=leaves, arrays=arrays)
    assert small.check().accepted
    for entries, sides, reason in (
        ([0, 0], [1, 1], "do not increase"),
        ([1, 0], [-1, -1], "do not increase"),
        ([2], [1], "not there"),
        ([-1], [1], "not there"),
        ([1], [0], "sides"),
    ):
        leaves, arrays = _boxes(entries, sides)
        small.write(leaves=leaves, arrays=arrays)
        report = small.check()
        assert not report.accepted
        assert reason in report.reasons[0]


def test_millions_of_equal_entries_are_refused_at_once(small):
    # 24.5 kB of zeros, packed, used to take 70 s.
    count = 3_000_000
    leaves, arrays = _boxes(np.zeros(count), np.ones(count), rows=1)
    small.write(leaves=leaves, arrays=arrays)
    begin = time.process_time()
    assert "do not increase" in small.check().reasons[0]
    assert time.process_time() - begin < 5


def test_sizes_of_files_headers_arrays_and_members(small, monkeypatch):
    small.write()
    assert small.check().accepted
    for limit, value, reason in (
        ("_LARGEST_FILE", 100, "larger than 100 bytes"),
        ("_LARGEST_HEADER", 10, "the header is larger"),
        ("_LARGEST_ARRAY", 10, "it is larger than 10 bytes"),
        ("_LARGEST_TOTAL", 300, "more than 300 bytes when unpacked"),
        ("_MOST_MEMBERS", 3, "4 members, more than 3"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(format_, limit, value)
            report = small.check()
            assert not report.accepted
            assert reason in report.reasons[0]


def test_bombs_are_not_unpacked(small, monkeypatch):
    monkeypatch.setattr(format_, "_LARGEST_TOTAL", 2**22)
    small.write()
    header = zipfile.ZipFile(small.paths[2]).read("header.json")
    zeros = bytes(2**18)
    with zipfile.ZipFile(small.paths[2], "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("header.json", header)
        for k in range(17):
            file.writestr(f"{k}.npy", zeros)
    assert small.paths[2].stat().st_size < 2**14
    assert "when unpacked" in small.check().reasons[0]
    # Other ways of packing can ask for much memory by themselves.
    with zipfile.ZipFile(small.paths[2], "w", zipfile.ZIP_LZMA) as file:
        file.writestr("header.json", header)
    with pytest.raises(ProblemError, match="packed neither by deflate nor not at all"):
        small.check()


def test_splits_without_leaves_are_refused_when_they_are_read(small):
    small.write([(0, 0.5)] * 10 + [(-1, 0.0)])
    with pytest.raises(Refused, match="one split less than leaves"):
        Certificate(small.paths[2]).cases(2, [1])


def test_certificates_from_bytes_and_open_files(small):
    small.write(_tree(3))
    data = small.paths[2].read_bytes()
    for source in (data, io.BytesIO(data), small.paths[2], str(small.paths[2])):
        report = small.checker().accepts(Certificate(source))
        assert report.accepted
        assert report == small.check()


def _zip(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, data in files.items():
            file.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (b"hello\n", "it is a text file"),
        (b"; x\n(declare-const X_0 Real)", "it is a VNN-LIB property"),
        (b"\x1f\x8b\x08junk", "it is a gzip file"),
        (b"PK\x03\x04junk", "it is a damaged zip file"),
        (b"\x08\x0a\x12junk", "it is no zip file"),
        (_zip({"a.npy": b""}), "the zip file has no member header.json"),
        (_zip({"header.json": b"{"}), "header.json cannot be read"),
        (_zip({"header.json": b"[" * 10**6}), "header.json cannot be read"),
        (_zip({"header.json": b"[1]"}), "does not have the format"),
        (_zip({"header.json": json.dumps({"format": "other"}).encode()}), "the format"),
    ],
)
def test_what_a_junk_file_is_not(data, said, small):
    small.paths[2].write_bytes(data)
    with pytest.raises(ProblemError, match="is no stagecert certificate") as error:
        small.check()
    assert said in str(error.value)
    assert str(small.paths[2]) in str(error.value)
    with pytest.raises(ProblemError, match="the certificate: is no stagecert certificate"):
        Certificate(data)


# -- work that is done once ------------------------------------------------------------------------


@pytest.fixture
def derived(monkeypatch) -> list:
    """How many boxes facts are derived for, and whether with passes back."""
    calls, derive = [], Facts.derive

    def counted(self, tighter=None, passes=True):
        calls.append((len(self.inputs[0]), passes))
        return derive(self, tighter, passes)

    monkeypatch.setattr(Facts, "derive", counted)
    return calls


def test_what_was_bounded_before_is_remembered(small, derived):
    leaves, arrays = _boxes([0, 1], [1, 1])
    small.write(_tree(5), leaves, arrays)
    made = small.checker()
    first = made.accepts(Certificate(small.paths[2]))
    assert first.accepted
    assert derived
    derived.clear()
    assert made.accepts(Certificate(small.paths[2])) == first
    assert not derived
    # Whatever a bound depends on: another box, multiplier, slope or entry is another bound.
    for splits, entries, slope, multiplier in (
        ([(1, 0.25), *_tree(2), (-1, 0.0)], [0, 1], 1.0, 1.0),
        (_tree(5), [0, 1], 1.0, 2.0),
        (_tree(5), [0, 1], 0.5, 1.0),
        (_tree(5), [1], 1.0, 1.0),
    ):
        leaves, arrays = _boxes(entries, [1] * len(entries))
        arrays["l"] = np.float32(slope) * arrays["l"]
        count = sum(axis == -1 for axis, _ in splits)
        small.write(splits, leaves, arrays, np.full((count, 1), multiplier))
        assert made.accepts(Certificate(small.paths[2])).accepted
        assert derived
        derived.clear()


def test_arrays_are_remembered_by_what_is_in_them(small, derived):
    """A writer holds arrays in memory under names of its own."""
    leaves, arrays = _boxes([0, 1], [1, 1])
    small.write(leaves=leaves, arrays=arrays)
    made = small.checker()
    held = types.SimpleNamespace(
        array=lambda name, kinds, shape: {"x": arrays["e"], "y": arrays["s"]}[name],
        slopes=lambda name, shape: {"z": arrays["l"].astype(float)}[name],
    )
    rows = format_.Rows("x", "y", (("z", None),))
    leaf = format_.Leaf((None, None), (None, rows))
    task = Task(0, 0, np.zeros(2), np.ones(2), (1.0,), leaf)
    ((_, (bound,)),) = made.bounds(held, [task])  # type: ignore
    derived.clear()
    report = made.accepts(Certificate(small.paths[2]))
    assert report.accepted
    assert report.bounds == ((float(bound),),)
    assert not derived


def test_a_remembered_bound_that_refutes_nothing_refutes_nothing(small):
    small.text = small.text.replace(b"-0.5", b"0.5")
    small.paths[1].write_bytes(small.text)
    small.write()
    made = small.checker()
    for _ in range(2):
        report = made.accepts(Certificate(small.paths[2]))
        assert not report.accepted
        assert "refutes nothing" in report.reasons[0]


def test_a_bound_that_overflows_refutes_nothing(small):
    """Infinity would be above zero."""
    box = np.zeros((1, 2)), np.ones((1, 2))
    facts = Facts(Arithmetic(), small.checker().program, *box).derive()
    going = bounds._Pass(facts, np.zeros(1, int), {}, {})
    going.total = np.array([np.inf])
    with pytest.raises(Refused, match="overflows"):
        going.bounds()
    large = np.array([[1e300, 1e300]])
    facts.high[0] = facts.high[0] * 1e30
    facts.low[0] = facts.high[0] / 2
    with np.errstate(all="ignore"), pytest.raises(Refused, match="overflows"):
        bounds.lower_bounds(facts, np.zeros(1, int), lambda _: {0: large}, {})


def test_memory_is_bounded(small, monkeypatch):
    monkeypatch.setattr(checker, "_MOST_REMEMBERED", 10)
    monkeypatch.setattr(objectives, "_MOST_OBJECTIVES", 10)
    multipliers = 1 + np.random.default_rng(0).uniform(size=(40, 1))
    small.write(_tree(40), multipliers=multipliers)
    made = small.checker()
    assert made.accepts(Certificate(small.paths[2])).accepted
    assert len(made._remembered) == 10
    assert len(made.objectives._held) == 10


def test_leaves_come_in_windows(small, monkeypatch):
    monkeypatch.setattr(checker, "_NUMBERS_AT_ONCE", 64 * 6)
    small.write(_tree(40))
    assert small.check().accepted


def test_who_watches_can_end_a_check(small):
    small.write(_tree(5))

    def late(finished, total):
        raise TimeoutError("late")

    with pytest.raises(TimeoutError, match="late"):
        small.check(progress=late)


def test_large_networks_try_intervals_first(small, derived, monkeypatch):
    monkeypatch.setattr(checker, "_LARGE", 1)
    small.write(_tree(3))
    report = small.check()
    assert report.accepted
    assert derived == [(3, False)]
    # Where intervals do not do, passes back follow, and after some boxes intervals are left out.
    derived.clear()
    monkeypatch.setattr(checker, "_MOST_BOXES", 4)
    make = models.Maker()
    x = make.node("Relu", "x")
    x = make.node("Relu", make.node("Sub", x, x))  # zero, which intervals do not see
    small.model = make.model([("x", [1, 2])], [(x, [1, 2])]).SerializeToString()
    small.paths[0].write_bytes(small.model)
    small.text = small.text.replace(b"(<= Y_0 -0.5)", b"(>= Y_0 0.01)")
    small.paths[1].write_bytes(small.text)
    small.write(_tree(20))
    assert small.check().accepted
    assert derived == [(4, False), (4, True)] * 2 + [(4, True)] * 3


def _replaced(small, make, y: str) -> None:
    small.model = make.model([("x", [1, 2])], [(y, [1, 2])]).SerializeToString()
    small.paths[0].write_bytes(small.model)
    small.text = small.text.replace(b"(<= Y_0 -0.5)", b"(>= Y_0 1.5)")
    small.paths[1].write_bytes(small.text)
    small.write()


def test_intervals_that_are_too_wide_are_no_objection(small, derived, monkeypatch):
    monkeypatch.setattr(checker, "_LARGE", 1)
    make = models.Maker()
    steep = make.node("Mul", "x", make.constant(np.float32(100)))
    # The exponential of zero, which intervals take to be between -100 and 100.
    _replaced(small, make, make.node("Exp", make.node("Sub", steep, steep)))
    assert small.check().accepted
    assert derived == [(1, False), (1, True)]


def test_large_networks_with_products_try_few_passes_first(small, derived, monkeypatch):
    monkeypatch.setattr(checker, "_LARGE", 1)
    # Quadratic forms see at once that the difference is zero.
    monkeypatch.setattr(checker.Checker, "quadratics", lambda *_: None)
    make = models.Maker()
    steep = make.node("Mul", "x", make.constant(np.float32(2)))
    zero = make.node("Relu", make.node("Sub", steep, steep))  # intervals say at most 2
    _replaced(small, make, make.node("Mul", zero, "x"))
    assert small.check().accepted
    assert derived == [(1, False), (1, few)]


def test_the_digest_of_a_leaf_tells_parts_apart():
    assert checker._digest(b"1", b"23") != checker._digest(b"12", b"3")
    assert checker._digest(1, (1.0,)) == hashlib.sha256(b"1:16:(1.0,)").digest()
