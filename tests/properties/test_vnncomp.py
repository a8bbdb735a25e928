"""Properties of the VNN-COMP benchmark sets, against an evaluator that shares no code."""

import csv
import gzip
import os
import random
from fractions import Fraction
from math import prod
from pathlib import Path

import numpy as np
import pytest

from stagecert_check.properties import load

DATA = Path(os.environ.get("STAGECERT_DATA", Path(__file__).parents[3] / "shared" / "data"))
ROOT = DATA / "vnncomp"
pytestmark = pytest.mark.skipif(
    not ROOT.is_dir(), reason="the benchmark sets are not here; STAGECERT_DATA names their folder"
)
SETS = sorted(path.name for path in ROOT.iterdir()) if ROOT.is_dir() else []


# Properties of two networks.
PAIRS = ("isomorphic_acasxu", "monotonic_acasxu")


def files(name):
    return sorted([*(ROOT / name).rglob("*.vnnlib"), *(ROOT / name).rglob("*.vnnlib.gz")])


def text_of(path):
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()


def forms(text):
    """The bracketed expressions of a file as nested lists."""
    text = "\n".join(line.split(";")[0] for line in text.splitlines())
    stack = [[]]
    for token in text.replace("(", " ( ").replace(")", " ) ").split():
        if token == "(":
            stack.append([])
        elif token == ")":
            last = stack.pop()
            stack[-1].append(last)
        else:
            stack[-1].append(token)
    return stack[0]


def value(form, names):
    if isinstance(form, str):
        return names[form] if form in names else Fraction(form)
    if form[0] == "and":
        return all(value(part, names) for part in form[1:])
    if form[0] == "or":
        return any(value(part, names) for part in form[1:])
    left, right = (value(part, names) for part in form[1:])
    return left <= right if form[0] == "<=" else left >= right


def clauses(form):
    """How many conjunctions the normal form of a formula has."""
    if form[0] == "and":
        return prod(map(clauses, form[1:]))
    return sum(map(clauses, form[1:])) if form[0] == "or" else 1


@pytest.mark.parametrize("name", sorted({*SETS} & {*PAIRS}))
def test_properties_of_two_networks_are_read(name):
    assert files(name)
    for path in files(name):
        property = load(path)
        assert (len(property.networks), property.version) == (2, "2.0")
        if name == "isomorphic_acasxu":
            # As published, g is to be both above and below f: no output can be.
            assert property.status == "empty"
            continue
        # (Y_f[3] < Y_g[3]) is no comparison of the standard; what it means is plain.
        (case,) = property.cases
        assert "is read as (< Y_f[3] Y_g[3])" in property.notes[0]
        assert [row.outputs for row in case.outputs] == [((3, 1), (8, -1))]
        assert [row.strict for row in case.outputs] == [True]
        # One row for the first input, and two for each of the four that are equal.
        assert len(case.input_rows) == 9


@pytest.mark.parametrize("name", sorted({*SETS} - {*PAIRS}))
def test_every_file_is_read(name):
    rng = random.Random(name)
    paths = files(name)
    assert paths
    for path in paths:
        property = load(path)
        assert property.status == "ready"
        assert property.version == ("2.0" if name == "acasxu_v2" else "1.0")
    # The evaluator is slow, so it looks at a few of the long files only.
    long = [path for path in paths if len(text_of(path)) > 20_000]
    verdicts = set()
    for path in set(paths) - set(long[3:]):
        property = load(path)
        text = text_of(path)
        if name == "acasxu_v2":  # close enough to version 1 once the indices are names
            text = text[text.index("; ") :]
            text = text.replace("X[0,0,0,", "X_").replace("Y[0,", "Y_").replace("]", "")
        formulas = [form[1] for form in forms(text) if form[0] == "assert"]
        assert len(property.cases) + property.dropped == prod(map(clauses, formulas))
        for attempt in range(3):
            case = rng.choice(property.cases)
            x = [
                l + (u - l) * rng.choice((Fraction(0), Fraction(1, 3), Fraction(1)))
                for l, u in zip(case.input_lower, case.input_upper, strict=True)
            ]
            if attempt == 2:
                k = rng.randrange(len(x))
                x[k] = case.input_upper[k] + Fraction(1, 10**12)
            y = [Fraction(rng.randint(-400, 400), 100) for _ in range(property.sizes[1])]
            names = {f"X_{i}": v for i, v in enumerate(x)} | {f"Y_{i}": v for i, v in enumerate(y)}
            expected = all(value(formula, names) for formula in formulas)
            assert property.counterexample(x, y) == expected
            verdicts.add(expected)
    assert False in verdicts


@pytest.mark.skipif("acasxu_v2" not in SETS, reason="acasxu_v2 is not here")
def test_both_versions_of_acasxu_agree():
    for path in files("acasxu_v2"):
        new, old = load(path), load(ROOT / "acasxu" / "vnnlib" / path.name)
        assert new.inputs[0].shape == (1, 1, 1, 5)
        assert new.sizes == old.sizes == (5, 5, 0)
        assert len(new.cases) == len(old.cases)
        for a, b in zip(new.cases, old.cases, strict=True):
            assert list(a.input_lower) == list(b.input_lower)
            assert list(a.input_upper) == list(b.input_upper)
            assert a.outputs == b.outputs


def holds_within_rounding(case, x, y):
    """Whether the outputs belong to the case exactly, and the inputs but for their rounding.

    The witnesses are float32, and many lie on a bound that the file gives with more digits.
    """
    exact = [Fraction(float(v)) for v in x]
    box = zip(case.input_lower, exact, case.input_upper, strict=True)
    clipped = [min(max(l, v), u) for l, v, u in box]
    ulp = Fraction(1, 2**24)
    near = all(abs(a - b) <= ulp * abs(b) for a, b in zip(exact, clipped, strict=True))
    return near and case.counterexample(clipped, y)


@pytest.mark.parametrize("name", [s for s in SETS if (ROOT / s / "witnesses.npz").exists()])
def test_known_counterexamples(name):
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    sessions = {}
    folder = ROOT / name
    witnesses = np.load(folder / "witnesses.npz")
    checked = 0
    with (folder / "expected.csv").open() as file:
        for line in csv.DictReader(file):
            key = f"{Path(line['onnx']).stem}_{Path(line['vnnlib']).stem}"
            if key not in witnesses:
                continue
            assert line["expected"] == "sat"
            if line["onnx"] not in sessions:
                path = str(folder / line["onnx"])
                sessions[line["onnx"]] = ort.InferenceSession(
                    path, options, providers=["CPUExecutionProvider"]
                )
            session = sessions[line["onnx"]]
            x = witnesses[key]
            node = session.get_inputs()[0]
            shape = [size if isinstance(size, int) else 1 for size in node.shape]
            y = session.run(None, {node.name: x.reshape(shape)})[0]
            property = load(folder / line["vnnlib"])
            assert any(holds_within_rounding(case, x, y) for case in property.cases), key
            assert property.counterexample(x, y, tolerance=1e-5), key
            checked += 1
    assert checked == len(witnesses.files)
