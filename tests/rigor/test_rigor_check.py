"""Whole certificates: real ones are accepted, changed ones are rejected or still true."""

import contextlib
import copy
import io
import json
import subprocess
import sys
import textwrap
import types
import zipfile
from fractions import Fraction

import numpy as np
import onnx
import pytest
import rigor_models as models
from test_rigor_functions import KINDS
from typer.testing import CliRunner

from stagecert import ProblemError, networks, properties
from stagecert.cli import app
from stagecert.rigor import check, graph
from stagecert.rigor.bounds import Facts
from stagecert.rigor.functions import Activation, Maximum, Piecewise
from stagecert.rigor.numbers import Arithmetic
from stagecert.verify import certificates
from stagecert.verify.queries import groups_of
from stagecert.verify.splitting import Tree


class Files:
    """A model, a property and a certificate on disk."""

    def __init__(self, folder, model: onnx.ModelProto, text: str):
        self.model, self.text = model, text
        self.paths = [folder / name for name in ("m.onnx", "p.vnnlib", "c.cert")]
        self.paths[0].write_bytes(model.SerializeToString())
        self.paths[1].write_text(text)

    def changed(self, folder, header, arrays, model=None, text=None):
        """Checks a changed certificate; hashes follow changed files."""
        paths = list(self.paths)
        paths[2] = folder / "changed.cert"
        data = None if model is None else model.SerializeToString()
        if data is not None:
            paths[0] = folder / "changed.onnx"
            paths[0].write_bytes(data)
        if text is not None:
            paths[1] = folder / "changed.vnnlib"
            paths[1].write_text(text)
        models.write(paths[2], header, arrays, data, None if text is None else text.encode())
        return check(*paths)


def _ball(model, centre, radius):
    label = int(models.run(model, [centre])[0].argmax())
    return models.vnnlib(centre - radius, centre + radius, 3, models.robust(label, 3))


@pytest.fixture(scope="module")
def proven(tmp_path_factory) -> Files:
    """A real proof that needs lines for its boxes: relu."""
    model = models.mlp(seed=3)
    files = Files(
        tmp_path_factory.mktemp("proven"), model, _ball(model, np.array([0.3, -0.2, 0.5, 0.1]), 0.1)
    )
    certificates.write(files.paths[2], certificates.proof_of(*files.paths[:2]))
    return files


def test_a_real_proof_is_accepted(proven):
    report = check(*proven.paths)
    assert report.accepted, report.reasons
    exact = check(*proven.paths, exact=True)
    assert exact.accepted
    for one, other in zip(report.bounds, exact.bounds, strict=True):
        assert 0 < one[0] <= other[0] < one[0] + 1e-12
    header, _ = models.read(proven.paths[2])
    assert any(how != "ibp" for how in header["cases"][0]["leaves"][0]["justify"])


def test_a_smooth_network_with_a_maximum_is_accepted(tmp_path):
    make = models.Maker(5)
    x = make.node("Conv", "x", make.weights(3, 1, 3, 3), make.weights(3, size=9))
    x = make.node("MaxPool", make.node("Tanh", x), kernel_shape=[2, 2], strides=[2, 2])
    x = make.node("MatMul", make.node("Flatten", x), make.weights(12, 3, size=12))
    model = make.model([("x", [1, 1, 6, 6])], [(x, [1, 3])])
    centre = np.random.default_rng(0).uniform(size=36)
    files = Files(tmp_path, model, _ball(model, centre, 0.001))
    certificates.write(files.paths[2], certificates.proof_of(*files.paths[:2]))
    report = check(*files.paths)
    assert report.accepted, report.reasons
    assert check(*files.paths, exact=True).accepted


# Lines without the library: chords, moved until samples (and a little more) are inside.


def _function(operation):
    if isinstance(operation, Maximum):
        return None
    if isinstance(operation, Piecewise):

        def value(x):
            pieces = list(operation._pieces(x, x))
            return np.select([p[2] for p in pieces], [p[0] * x + p[1] for p in pieces])

        return value
    same = [f for (name, *_), f in KINDS.items() if name == operation.kind]
    if operation.kind in ("elu", "selu", "celu"):
        left, right = operation.regions
        return np.vectorize(lambda x: float((left if x < 0 else right).function(_arb(x))))
    return same[0]


def _arb(x):
    from flint import arb

    return arb(float(x))


def _chords(operation, low, high):
    function = _function(operation)
    if function is None:
        top = high.max(axis=-1)
        first = np.zeros(low.shape)
        np.put_along_axis(first, high.argmax(axis=-1)[..., None], 1, axis=-1)
        return first, np.zeros(top.shape), np.zeros(low.shape), top
    x = low + (high - low) * np.linspace(0, 1, 101).reshape(-1, *(1,) * low.ndim)
    values = np.stack([function(row) for row in x])
    slope = (values[-1] - values[0]) / np.where(high > low, high - low, 1)
    rest = values - slope * x
    loose = 1e-3 * (high - low) + 1e-9
    return slope, rest.min(0) - loose, slope, rest.max(0) + loose


def test_every_operator_and_activation_in_one_network(tmp_path):
    model = models.digits()
    centre = np.random.default_rng(1).uniform(size=64)
    files = Files(tmp_path, model, _ball(model, centre, 1e-4))
    case = properties.load(files.paths[1]).cases[0]
    program = graph.read(model.SerializeToString(), Arithmetic())
    facts = Facts(Arithmetic(), program, case.input_lower64, case.input_upper64)
    boxes, lines = [], []
    for node in program.nodes:
        if isinstance(node.operation, Activation):
            k = node.arguments[0]
            low, high = facts.low[k] - 1e-9, facts.high[k] + 1e-9
            boxes.append((low, high))
            relu = node.operation.kind == "relu"
            lines.append(None if relu else _chords(node.operation, low, high))
            facts.sizes.append(None)
            facts.append(*node.operation.image(low, high))
        else:
            facts.append(*facts.derive())
    count = len(properties.load(files.paths[1]).cases)
    leaf = certificates.Leaf(np.ones(1), tuple(boxes), (None,) * len(boxes), tuple(lines))
    one = certificates.CaseProof((None,), (leaf,))
    data = model.SerializeToString()
    certificates.write(
        files.paths[2], certificates.Proof(data, files.text.encode(), (one,) * count)
    )
    report = check(*files.paths)
    assert report.accepted, report.reasons
    assert len(boxes) == 3 + len(models.ACTIVATIONS) + 4
    # The activations are in the order of the library's own reader.
    shapes = [tuple(low.shape) for low, _ in boxes]
    from stagecert.networks.relaxation import split

    parts = split(networks.load(files.paths[0]))
    for layer, shape in zip(parts.layers, shapes, strict=True):
        assert layer.shape in (shape, shape[:-1])


def test_splits(proven, tmp_path):
    network, groups = groups_of(networks.load(proven.paths[0]), properties.load(proven.paths[1]))
    low, high = groups[0].inputs.lower64, groups[0].inputs.upper64
    tree = Tree(group=[0] * 5, children={0: 1, 2: 3}, axis={0: 2, 2: 0},
                cut={0: float(low[2] + 0.05), 2: float(high[0])})  # fmt: skip
    for c in range(len(groups[0].numbers)):
        row = int(np.flatnonzero(groups[0].members[c])[0])
        tree.closed += [(node, c, row, 0.0) for node in (1, 3, 4)]
    found = types.SimpleNamespace(network=network, groups=groups, whole={}, tree=tree)
    proof = certificates.proof_of(*proven.paths[:2], found)
    certificates.write(tmp_path / "c", proof)
    report = check(*proven.paths[:2], tmp_path / "c")
    assert report.accepted, report.reasons
    assert [len(case) for case in report.bounds] == [3, 3]
    header, arrays = models.read(tmp_path / "c")
    case = header["cases"][0]
    assert case["splits"][0] == [2, float(low[2] + 0.05)]
    for splits in (
        case["splits"][:-1],
        [*case["splits"], None],
        [None],
        [[7, 0.0], *case["splits"][1:]],
        [[2, 5.0], *case["splits"][1:]],
        [[2, float("nan")], *case["splits"][1:]],
        [[1, 0], *case["splits"][1:]],
        [],
    ):
        new = copy.deepcopy(header)
        new["cases"][0]["splits"] = splits
        assert not proven.changed(tmp_path, new, arrays).accepted
    # The leaves of the left and of the right half are not interchangeable.
    new = copy.deepcopy(header)
    new["cases"][0]["leaves"].reverse()
    assert not proven.changed(tmp_path, new, arrays).accepted


def _leaf(header):
    return header["cases"][0]["leaves"][0]


def test_malformed_certificates_are_rejected(proven, tmp_path):
    header, arrays = models.read(proven.paths[2])
    assert proven.changed(tmp_path, header, arrays).accepted

    def rejected(change, **more):
        new, data = copy.deepcopy(header), dict(arrays)
        change(new, data)
        return not proven.changed(tmp_path, new, data, **more).accepted

    name = _leaf(header)["boxes"][0][0]
    assert rejected(lambda h, a: h.update(model_sha256="0" * 64))
    assert rejected(lambda h, a: h.update(property_sha256=""))
    assert rejected(lambda h, a: h.update(more=1))
    assert rejected(lambda h, a: h.pop("stagecert"))
    assert rejected(lambda h, a: h["cases"].pop())
    assert rejected(lambda h, a: h["cases"].append(h["cases"][0]))
    assert rejected(lambda h, a: a.pop(name))
    assert rejected(lambda h, a: a.update(extra=np.zeros(1)))
    assert rejected(lambda h, a: a.update({name: a[name].astype(np.float32)}))
    assert rejected(lambda h, a: a.update({name: a[name].reshape(-1)}))
    assert rejected(lambda h, a: a.update({name: a[name] * np.nan}))
    assert rejected(lambda h, a: a.update({name: a[name] - np.inf}))
    assert rejected(lambda h, a: _leaf(h)["boxes"].pop())
    assert rejected(lambda h, a: _leaf(h)["lines"].pop())
    assert rejected(lambda h, a: _leaf(h).update(justify=["ibp"] * 2))
    assert rejected(lambda h, a: _leaf(h).update(justify=[["default"], "ibp"]))
    assert rejected(lambda h, a: _leaf(h)["boxes"][0].reverse())
    assert rejected(lambda h, a: _leaf(h).update(lines="default"))
    for values in ([-1.0], [0.0], [np.nan], [1.0, 1.0]):
        multipliers = _leaf(header)["multipliers"]
        assert rejected(lambda h, a, m=multipliers, v=values: a.update({m: np.array(v)}))
    for change in ({"version": 2}, {"version": True}, {"format": "other"}):
        with pytest.raises(ProblemError):
            proven.changed(tmp_path, header | change, arrays)


def test_boxes_and_lines_that_are_a_little_wrong_are_rejected(proven, tmp_path):
    header, arrays = models.read(proven.paths[2])
    # Boxes that exclude attained values: true ranges of the first layer are its intervals.
    for sign, side in ((1, 0), (-1, 1)):
        for entry in range(8):
            name = _leaf(header)["boxes"][0][side]
            array = arrays[name].copy()
            array[0, entry] += sign * 1e-7
            assert not proven.changed(tmp_path, header, arrays | {name: array}).accepted
    # Explicit lines equal to the defaults, moved inwards. A line that is wrong but not used by
    # the bound must be rejected too.
    low, high = (arrays[name] for name in _leaf(header)["boxes"][0])
    unstable = np.argwhere((low < 0) & (high > 0))
    assert len(unstable)
    slope = high / (high - low)
    lines = {
        "ls": np.where(high <= 0, 0.0, np.where(low >= 0, 1.0, 0.5)),
        "lo": np.zeros(low.shape),
        "hs": np.where(high <= 0, 0.0, np.where(low >= 0, 1.0, slope)),
        "ho": np.where((low < 0) & (high > 0), -slope * low + 1e-14, 0),
    }
    new = copy.deepcopy(header)
    for case in new["cases"]:
        case["leaves"][0]["lines"][0] = list(lines)
    old = {n for case in header["cases"] for line in case["leaves"][0]["lines"]
           if line != "default" for n in line}  # fmt: skip
    used = json.dumps(new)
    kept = {k: v for k, v in arrays.items() if k not in old or f'"{k}"' in used}
    assert "below" not in str(proven.changed(tmp_path, new, kept | lines).reasons)
    at = tuple(unstable[0])
    for name, change, word in (
        ("lo", 1e-7, "below"), ("ho", -1e-7, "above"), ("ls", 0.5 + 1e-7, "below"),
        ("ls", -0.5 - 1e-7, "below"), ("hs", -1e-7, "above"), ("hs", 1e-7, "above"),
    ):  # fmt: skip
        array = lines[name].copy()
        array[at] += change
        report = proven.changed(tmp_path, new, kept | lines | {name: array})
        assert not report.accepted
        assert word in report.reasons[0]


def _holds(model, text) -> bool:
    """Whether samples of the box contain no counterexample."""
    property = properties.load(text)
    for case in property.cases:
        low, high = case.input_lower64, case.input_upper64
        random = np.random.default_rng(0)
        x = random.uniform(low, high, size=(300, len(low)))
        x[:150] = np.where(random.integers(0, 2, size=(150, len(low))), low, high)
        y = models.run(model, x)
        for point, output in zip(x, y, strict=True):
            # Runtimes round to single precision: only clear counterexamples count.
            if all(
                sum(float(c) * output[k] for k, c in row.outputs) < float(row.bound) - 1e-4
                for row in case.outputs
            ) and case.inputs.contains([Fraction(float(v)) for v in point]):
                return False
    return True


def test_random_changes_are_rejected_or_harmless(proven, tmp_path):
    random = np.random.default_rng(0)
    header, arrays = models.read(proven.paths[2])
    data = proven.paths[2].read_bytes()
    accepted = {"bytes": 0, "arrays": 0, "model": 0, "property": 0}
    for _ in range(150):  # bytes of the file
        broken = bytearray(data)
        for place in random.integers(0, len(data), random.integers(1, 4)):
            broken[place] = random.integers(0, 256)
        path = tmp_path / "broken"
        path.write_bytes(bytes(broken[: random.choice([len(data), random.integers(len(data))])]))
        with contextlib.suppress(ProblemError):
            accepted["bytes"] += check(*proven.paths[:2], path).accepted
    before = check(*proven.paths).bounds
    for _ in range(150):  # numbers of the certificate
        name = str(random.choice(list(arrays)))
        array = arrays[name].copy()
        place = tuple(random.integers(0, n) for n in array.shape)
        array[place] += random.choice([-1, 1]) * 10.0 ** random.uniform(-8, 1)
        report = proven.changed(tmp_path, header, arrays | {name: array})
        accepted["arrays"] += report.accepted
    for _ in range(60):  # weights of the model
        model = onnx.ModelProto()
        model.CopyFrom(proven.model)
        tensor = model.graph.initializer[random.integers(len(model.graph.initializer))]
        array = onnx.numpy_helper.to_array(tensor).copy()
        place = tuple(random.integers(0, n) for n in array.shape)
        array[place] += np.float32(random.choice([-1, 1]) * 10.0 ** random.uniform(-7, 1))
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        report = proven.changed(tmp_path, header, arrays, model=model)
        accepted["model"] += report.accepted
        assert not report.accepted or _holds(model, proven.text)
    lines = proven.text.splitlines()
    for _ in range(60):  # the property
        changed = list(lines)
        place = int(random.integers(8, len(lines)))
        words = changed[place].split()
        word = int(random.integers(len(words)))
        words[word] = str(
            random.choice(["0.25", "X_1", "Y_2", "Y_0", "(and", "-1.5))", ">=", "<="])
        )
        changed[place] = " ".join(words)
        text = "\n".join(changed)
        try:
            report = proven.changed(tmp_path, header, arrays, text=text)
        except ProblemError:
            continue
        accepted["property"] += report.accepted
        assert not report.accepted or _holds(proven.model, text)
    assert len(before) == 2
    # Wider boxes and lower lines are still a proof, so some changes are harmless; most are not.
    assert accepted["bytes"] < 40
    assert accepted["arrays"] < 110
    assert accepted["model"] < 60


def test_bounds_are_never_above_the_exact_value(tmp_path):
    random = np.random.default_rng(0)
    for seed in range(20):
        model = models.mlp((3, 5, 4, 2), seed=seed)
        point = random.normal(size=3).astype(np.float32).astype(float)
        value = _exact_difference(model, point)
        sign = "<=" if value > 0 else ">="
        text = models.vnnlib([0] * 3, [0] * 3, 2, f"(assert ({sign} Y_0 Y_1))")
        for k in range(3):
            for comparison in (">=", "<="):
                text = text.replace(
                    f"({comparison} X_{k} 0.000000000000)", f"({comparison} X_{k} {point[k]:.60f})"
                )
        data = model.SerializeToString()
        program = graph.read(data, Arithmetic())
        facts = Facts(Arithmetic(), program, point, point)
        boxes = []
        for node in program.nodes:
            if isinstance(node.operation, Activation):
                k = node.arguments[0]
                boxes.append((facts.low[k] - 1e-12, facts.high[k] + 1e-12))
                facts.sizes.append(None)
                facts.append(*node.operation.image(*boxes[-1]))
            else:
                facts.append(*facts.derive())
        leaf = certificates.Leaf(np.ones(1), tuple(boxes), (None, None), (None, None))
        case = certificates.CaseProof((None,), (leaf,))
        files = Files(tmp_path, model, text)
        certificates.write(files.paths[2], certificates.Proof(data, text.encode(), (case,)))
        for exact in (False, True):
            report = check(*files.paths, exact=exact)
            assert report.accepted, report.reasons
            found = Fraction(report.bounds[0][0])
            assert found <= abs(value) * (1 + Fraction(1, 2**50))
            assert found >= abs(value) - Fraction(1, 10**9)


def _exact_difference(model, point) -> Fraction:
    weights = [onnx.numpy_helper.to_array(t) for t in model.graph.initializer]
    pairs = [
        [[Fraction(float(v)) for v in np.ravel(w)] for w in weights[k : k + 2]] for k in (0, 2, 4)
    ]
    x = [Fraction(float(v)) for v in point]
    for number, (matrix, bias) in enumerate(
        (w, b) if len(w) > len(b) else (b, w) for b, w in pairs
    ):
        count = len(bias)
        x = [
            sum(x[i] * matrix[i * count + j] for i in range(len(x))) + bias[j] for j in range(count)
        ]
        x = [max(v, Fraction(0)) for v in x] if number < 2 else x
    return x[0] - x[1]


def test_input_terms_combinations_and_strict_rows(tmp_path):
    # Y = X for X in [0, 1]: Y - X <= -0.1 has no point; Y < 0 is refuted by a bound of zero.
    make = models.Maker()
    model = make.model([("x", [1, 2])], [(make.node("Relu", "x"), [1, 2])])
    box = (np.zeros((1, 2)), np.ones((1, 2)))

    def accepted(formula, multipliers):
        text = models.vnnlib([0, 0], [1, 1], 2, formula)
        files = Files(tmp_path, model, text)
        leaf = certificates.Leaf(np.array(multipliers), (box,), (None,), (None,))
        proof = certificates.Proof(
            model.SerializeToString(), text.encode(),
            (certificates.CaseProof((None,), (leaf,)),),
        )  # fmt: skip
        certificates.write(files.paths[2], proof)
        both = [check(*files.paths, exact=exact).accepted for exact in (False, True)]
        return tuple(both)

    assert accepted("(assert (<= (- Y_0 X_0) -0.1))", [1.0]) == (True, True)
    # A bound of exactly zero is seen in exact mode only.
    assert accepted("(assert (< Y_0 0.0))", [1.0]) == (False, True)
    assert accepted("(assert (<= Y_0 0.0))", [1.0]) == (False, False)
    both = "(assert (and (<= Y_0 (- Y_1 0.5)) (<= Y_1 (- Y_0 0.5))))"
    assert accepted(both, [1.0, 1.0]) == (True, True)
    assert accepted(both, [1.0, 0.0]) == (False, False)


def test_nothing_of_the_search_is_imported(proven):
    script = f"""
        import importlib.machinery, sys, types
        import numpy  # before the door closes
        package = types.ModuleType("stagecert")  # without the library's own __init__
        package.__path__ = [{str(next(iter(__import__("stagecert").__path__)))!r}]
        sys.modules["stagecert"] = package
        from stagecert.rigor import check
        print(check(*{[str(path) for path in proven.paths]!r}).accepted)
        print(sorted(m for m in sys.modules if m.startswith("stagecert.")))
        bad = ("jax", "jaxlib", "equinox", "stagecert.networks", "stagecert.solvers",
               "stagecert.verify", "stagecert.certificate", "scipy")
        print([m for m in sys.modules if m in bad])
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert out[0] == "True"
    assert out[2] == "[]"
    allowed = ("stagecert.rigor", "stagecert.properties", "stagecert.errors")
    assert all(m.startswith(allowed) for m in eval(out[1]))


def test_command(proven, tmp_path):
    runner = CliRunner()
    paths = [str(path) for path in proven.paths]
    done = runner.invoke(app, ["check", *paths])
    assert done.exit_code == 0
    assert "accepted" in done.stdout
    other = tmp_path / "other.vnnlib"
    other.write_text(proven.text + "; another\n")
    done = runner.invoke(app, ["check", paths[0], str(other), paths[2]])
    assert done.exit_code == 1
    assert "another property" in done.stdout
    done = runner.invoke(app, ["check", paths[0], paths[1], str(tmp_path / "none"), "--json"])
    assert done.exit_code == 2
    broken = tmp_path / "broken"
    with zipfile.ZipFile(broken, "w") as file:
        file.writestr("header.json", io.BytesIO(b"{").read())
    assert runner.invoke(app, ["check", *paths[:2], str(broken)]).exit_code == 2
