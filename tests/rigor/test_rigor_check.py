"""Whole certificates: real ones are accepted, malformed ones are rejected."""

import copy
import hashlib
import io
import subprocess
import sys
import textwrap
import types
import zipfile
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import pytest
import rigor_exact
import rigor_models as models
from typer.testing import CliRunner

from stagecert import ProblemError, networks
from stagecert.cli import app
from stagecert.verify import certificates
from stagecert.verify.proving import Refutation
from stagecert.verify.queries import groups_of
from stagecert.verify.splitting import Tree
from stagecert_check import check, graph, properties
from stagecert_check.bounds import Facts
from stagecert_check.checker import Checker, Task
from stagecert_check.numbers import Arithmetic


class Files:
    """A model, a property and a certificate on disk."""

    def __init__(self, folder, model: onnx.ModelProto, text: str):
        self.model, self.text = model, text
        self.paths = [folder / name for name in ("m.onnx", "p.vnnlib", "c.cert")]
        self.paths[0].write_bytes(model.SerializeToString())
        self.paths[1].write_text(text)

    def prove(self, found=None):
        """Writes a certificate and gives its parts."""
        self.paths[2].write_bytes(
            certificates.packed(models.proof_of(self.paths[0], self.paths[1], found))
        )
        return models.read(self.paths[2])

    def changed(self, folder, header, arrays):
        """Checks a changed certificate."""
        models.write(folder / "changed.cert", header, arrays)
        return check(self.paths[0], self.paths[1], folder / "changed.cert")


def proof(model: onnx.ModelProto, text: str, *cases) -> certificates.Proof:
    model_digest, text_digest = (
        hashlib.sha256(data).hexdigest() for data in (model.SerializeToString(), text.encode())
    )
    return certificates.Proof(model_digest, text_digest, cases)


def _ball(model, centre, radius):
    label = int(models.run(model, [centre])[0].argmax())
    return models.vnnlib(centre - radius, centre + radius, 3, models.robust(label, 3))


@pytest.fixture(scope="module")
def proven(tmp_path_factory) -> Files:
    """A real proof."""
    model = models.mlp(seed=3)
    text = _ball(model, np.array([0.3, -0.2, 0.5, 0.1]), 0.1)
    files = Files(tmp_path_factory.mktemp("proven"), model, text)
    files.prove()
    return files


@pytest.fixture(scope="module")
def searched(tmp_path_factory) -> Files:
    """A proof that needs slopes: neither the checker's own nor halves of the box suffice."""
    model = models.mlp((30, 16, 12, 3), seed=5)
    centre = np.random.default_rng(3).uniform(size=30)
    files = Files(tmp_path_factory.mktemp("searched"), model, _ball(model, centre, 0.15))
    files.prove()
    return files


def test_a_real_proof_is_accepted(proven):
    report = check(*proven.paths)
    assert report.accepted, report.reasons
    exact = check(*proven.paths, exact=True)
    assert exact.accepted
    for one, other in zip(report.bounds, exact.bounds, strict=True):
        assert 0 < one[0] <= other[0] < one[0] + 1e-12


def test_slopes_that_were_searched_for(searched, tmp_path):
    header, arrays = models.read(searched.paths[2])
    report = check(*searched.paths)
    assert report.accepted, report.reasons
    with_slopes = [case for case in header["cases"] if case["leaves"]]
    assert with_slopes
    assert any(case["leaves"][0]["boxes"] != [None, None] for case in with_slopes)
    assert check(*searched.paths, exact=True).accepted
    # Without the slopes there is no proof; with those of another case there may be, or not.
    for case in with_slopes:
        new = copy.deepcopy(header)
        new["cases"][header["cases"].index(case)]["leaves"] = []
        used = str(new["cases"])
        kept = {name: array for name, array in arrays.items() if f"'{name}'" in used}
        report = searched.changed(tmp_path, new, kept)
        assert "refutes nothing" in report.reasons[0]


def test_a_smooth_network_with_a_maximum_is_accepted(tmp_path):
    make = models.Maker(5)
    x = make.node("Conv", "x", make.weights(3, 1, 3, 3), make.weights(3, size=9))
    x = make.node("MaxPool", make.node("Tanh", x), kernel_shape=[2, 2], strides=[2, 2])
    x = make.node("MatMul", make.node("Flatten", x), make.weights(12, 3, size=12))
    model = make.model([("x", [1, 1, 6, 6])], [(x, [1, 3])])
    centre = np.random.default_rng(0).uniform(size=36)
    files = Files(tmp_path, model, _ball(model, centre, 0.001))
    files.prove()
    report = check(*files.paths)
    assert report.accepted, report.reasons
    assert check(*files.paths, exact=True).accepted


def test_every_operator_and_activation_in_one_network(tmp_path):
    model = models.digits()
    centre = np.random.default_rng(1).uniform(size=64)
    files = Files(tmp_path, model, _ball(model, centre, 1e-4))
    files.prove()
    report = check(*files.paths)
    assert report.accepted, report.reasons
    # The activations are in the order of the library's own reader.
    from stagecert.networks.bounding.relaxation import split

    program = graph.read(model.SerializeToString(), Arithmetic())
    parts = split(networks.load(files.paths[0]))
    assert len(parts.layers) == 3 + len(models.ACTIVATIONS) + 4
    for layer, index in zip(parts.layers, program.activations, strict=True):
        assert layer.shape == program.nodes[index].shape


def _tree(files, cuts):
    """What verification finds when it cuts a box twice."""
    network, groups = groups_of(networks.load(files.paths[0]), properties.load(files.paths[1]))
    low, high = groups[0].inputs.lower64, groups[0].inputs.upper64
    tree = Tree(group=[0] * 5, children={0: 1, 2: 3}, axis=dict(cuts),
                cut={0: float(0.5 * (low + high)[cuts[0]]), 2: float(high[cuts[2]])})  # fmt: skip
    for c in range(len(groups[0].numbers)):
        row = int(groups[0].places[c].min())
        tree.closed += [(node, c, row, 0.0) for node in (1, 3, 4)]
    return Refutation(network, groups, tree=tree)


def test_splits(proven, tmp_path):
    files = Files(tmp_path, proven.model, proven.text)
    header, arrays = files.prove(_tree(files, {0: 2, 2: 0}))
    report = check(*files.paths)
    assert report.accepted, report.reasons
    assert [len(case) for case in report.bounds] == [3, 3]
    case = header["cases"][0]
    axes, cuts = arrays[case["axes"]], arrays[case["cuts"]]
    assert axes.tolist() == [2, -1, 0, -1, -1]
    for name, array in (
        ("axes", axes[:-1]),
        ("axes", np.array([*axes, -1], "<i4")),
        ("axes", np.array([-1, *axes], "<i4")),
        ("axes", np.array([7, *axes[1:]], "<i4")),
        ("axes", np.array([-2, *axes[1:]], "<i4")),
        ("axes", axes[:0]),
        ("axes", np.array([-1, 2, 0, -1, -1], "<i4")),  # a leaf, and then more
        ("axes", np.zeros(10**6, "<i4")),  # splits without leaves would fill the memory
        ("axes", axes.astype("<i8")),
        ("cuts", cuts + 5),
        ("cuts", cuts * np.nan),
        ("cuts", cuts[:-1]),
        ("multipliers", np.ones((2, 1))),
        ("multipliers", np.ones((3, 2))),
    ):
        assert not files.changed(tmp_path, header, arrays | {case[name]: array}).accepted


def test_boxes_are_split_further_where_the_checker_needs_it(tmp_path):
    model = models.mlp((2, 6, 5, 3), seed=1)
    text = _ball(model, np.array([0.4, -0.1]), 0.6)
    assert rigor_exact.holds(model, properties.load(text))
    files = Files(tmp_path, model, text)
    header, arrays = files.prove()
    report = check(*files.paths)
    assert report.accepted, report.reasons
    assert any(len(arrays[case["axes"]]) > 1 for case in header["cases"])


def test_malformed_certificates_are_rejected(searched, tmp_path):
    header, arrays = models.read(searched.paths[2])
    assert searched.changed(tmp_path, header, arrays).accepted
    which = next(k for k, case in enumerate(header["cases"]) if case["leaves"])

    def rejected(change):
        new, data = copy.deepcopy(header), dict(arrays)
        change(new, data, new["cases"][which])
        return not searched.changed(tmp_path, new, data).accepted

    leaf = header["cases"][which]["leaves"][0]
    name = next(pair[0] for pair in leaf["slopes"] if pair)
    box = next(rows for rows in leaf["boxes"] if rows)
    assert rejected(lambda h, a, c: h.update(model_sha256="0" * 64))
    assert rejected(lambda h, a, c: h.update(property_sha256=""))
    assert rejected(lambda h, a, c: h.update(more=1))
    assert rejected(lambda h, a, c: h.pop("stagecert"))
    assert rejected(lambda h, a, c: h["cases"].pop())
    assert rejected(lambda h, a, c: h["cases"].append(h["cases"][0]))
    assert rejected(lambda h, a, c: c["leaves"].append(c["leaves"][0]))
    assert rejected(lambda h, a, c: c["leaves"][0].update(number=1))
    assert rejected(lambda h, a, c: c["leaves"][0].update(number=True))
    assert rejected(lambda h, a, c: c["leaves"][0]["slopes"].pop())
    assert rejected(lambda h, a, c: c["leaves"][0]["slopes"].append(None))
    assert rejected(lambda h, a, c: c["leaves"][0]["boxes"].reverse())
    assert rejected(lambda h, a, c: c["leaves"][0].update(slopes="default"))
    assert rejected(lambda h, a, c: c.update(axes=None))
    assert rejected(lambda h, a, c: a.pop(name))
    assert rejected(lambda h, a, c: a.update(extra=np.zeros(1)))
    assert rejected(lambda h, a, c: a.update({name: a[name].astype(np.int32)}))
    assert rejected(lambda h, a, c: a.update({name: a[name].reshape(-1)}))
    assert rejected(lambda h, a, c: a.update({name: a[name] * np.nan}))
    assert rejected(lambda h, a, c: a.update({name: a[name] - np.inf}))
    assert rejected(lambda h, a, c: a.update({name: a[name].astype(float) + 1e31}))
    assert rejected(lambda h, a, c: a.update({box["entries"]: a[box["entries"]] + 10**6}))
    assert rejected(lambda h, a, c: a.update({box["entries"]: a[box["entries"]] - 10**6}))
    assert rejected(lambda h, a, c: a.update({box["sides"]: 2 * a[box["sides"]]}))

    # Proofs by cases are for trees that split neurons: what would be ignored is refused.
    one = {"zero": np.zeros(1, "<i4"), "one": np.ones(1, "<i4"), "leaf": np.full(1, -1, "<i4")}
    one |= {"cut": np.zeros(1), "none": np.zeros(0)}

    def newer(h, a, c, cases=False):
        h["version"] = 4
        for leaf in (leaf for case in h["cases"] for leaf in case["leaves"]):
            leaf["planes"] = []
        if cases:
            boxes = c["leaves"][0]["boxes"]
            rows = next(k for k, rows in enumerate(boxes) if rows)
            lemma = {"entries": "zero", "sides": "one", "axes": "leaf", "cuts": "cut",
                     "forces": "none", "slopes": [None] * rows}  # fmt: skip
            boxes[rows]["cases"] = lemma
            a.update(one)

    assert not rejected(newer)
    assert rejected(lambda h, a, c: newer(h, a, c, True))
    multipliers = header["cases"][which]["multipliers"]
    for values in ([[-1.0]], [[0.0]], [[np.nan]], [[1.0, 1.0]], [1.0]):
        assert rejected(lambda h, a, c, v=values: a.update({multipliers: np.array(v)}))
    for change in ({"version": 5}, {"version": True}, {"format": "other"}):
        with pytest.raises(ProblemError):
            searched.changed(tmp_path, header | change, arrays)


def test_whatever_slopes_are_given_bounds_are_true(searched, tmp_path):
    header, arrays = models.read(searched.paths[2])
    random = np.random.default_rng(0)
    samples = []
    for case in properties.load(searched.paths[1]).cases:
        x = random.uniform(case.input_lower64, case.input_upper64, size=(200, 30))
        y = models.run(searched.model, x)
        ((row, _),) = [(row, None) for row in case.outputs]
        samples.append(min(sum(float(c) * o[k] for k, c in row.outputs) for o in y))
    for _ in range(40):
        changed = {
            name: (array + random.choice([0.1, 1, 10]) * random.normal(size=array.shape)).astype(
                array.dtype) if array.dtype.kind == "f" and array.ndim == 2 and array.size > 1
            else array
            for name, array in arrays.items()
        }  # fmt: skip
        report = searched.changed(tmp_path, header, changed)
        for bounds, sample in zip(report.bounds, samples, strict=True):
            assert not bounds[0] > sample + 1e-5


def test_bounds_are_never_above_the_exact_value(tmp_path):
    random = np.random.default_rng(0)
    for seed in range(20):
        model = models.mlp((2, 5, 4, 2), seed=seed)
        point = random.normal(size=2).astype(np.float32).astype(float)
        first, second = rigor_exact.value(rigor_exact.layers_of(model), point)
        value = first - second
        value = Fraction(int(value.p), int(value.q))
        sign = "<=" if value > 0 else ">="
        text = models.vnnlib([0] * 2, [0] * 2, 2, f"(assert ({sign} Y_0 Y_1))")
        for k in range(2):
            for comparison in (">=", "<="):
                text = text.replace(
                    f"({comparison} X_{k} 0.000000000000)", f"({comparison} X_{k} {point[k]:.60f})"
                )
        files = Files(tmp_path, model, text)
        leaf = certificates.Leaf(np.ones(1))
        case = certificates.CaseProof((None,), (leaf,))
        files.paths[2].write_bytes(certificates.packed(proof(model, text, case)))
        for exact in (False, True):
            report = check(*files.paths, exact=exact)
            assert report.accepted, report.reasons
            found = Fraction(report.bounds[0][0])
            assert found <= abs(value) * (1 + Fraction(1, 2**50))
            assert found >= abs(value) - Fraction(1, 10**9)


def test_intervals_and_bounds_of_boxes_together_are_those_of_each(proven):
    program = graph.read(proven.paths[0].read_bytes(), Arithmetic())
    low = np.random.default_rng(0).normal(size=(7, 4))
    high = low + np.random.default_rng(1).uniform(size=(7, 4))
    together = Facts(Arithmetic(), program, low, high).derive()
    for k in range(7):
        alone = Facts(Arithmetic(), program, low[k : k + 1], high[k : k + 1]).derive()
        for one, other in zip(alone.low + alone.high, together.low + together.high, strict=True):
            assert np.allclose(one[0], other[k], rtol=1e-12, atol=1e-12)


def test_input_terms_combinations_and_strict_rows(tmp_path):
    # Y = X for X in [0, 1]: Y - X <= -0.1 has no point; Y < 0 is refuted by a bound of zero.
    make = models.Maker()
    model = make.model([("x", [1, 2])], [(make.node("Relu", "x"), [1, 2])])

    def accepted(formula, multipliers):
        text = models.vnnlib([0, 0], [1, 1], 2, formula)
        files = Files(tmp_path, model, text)
        leaf = certificates.Leaf(np.array(multipliers))
        case = certificates.CaseProof((None,), (leaf,))
        files.paths[2].write_bytes(certificates.packed(proof(model, text, case)))
        both = [check(*files.paths, exact=exact).accepted for exact in (False, True)]
        return tuple(both)

    assert accepted("(assert (<= (- Y_0 X_0) -0.1))", [1.0]) == (True, True)
    # A bound of exactly zero is seen in exact mode only.
    assert accepted("(assert (< Y_0 0.0))", [1.0]) == (False, True)
    assert accepted("(assert (<= Y_0 0.0))", [1.0]) == (False, False)
    both = "(assert (and (<= Y_0 (- Y_1 0.5)) (<= (- Y_1 (* 0.1 X_0)) (- Y_0 0.5))))"
    assert accepted(both, [1.0, 1.0]) == (True, True)
    assert accepted(both, [1.0, 0.0]) == (False, False)


def test_rows_that_refute_a_case_together(tmp_path):
    make = models.Maker()
    model = make.model([("x", [1, 2])], [(make.node("Relu", "x"), [1, 2])])
    formula = "(assert (and (<= Y_0 (- Y_1 0.5)) (<= (* 3.0 Y_1) (- (* 2.9 Y_0) 0.25))))"
    files = Files(tmp_path, model, models.vnnlib([0, 0], [1, 1], 2, formula))
    network, groups = groups_of(networks.load(files.paths[0]), properties.load(files.paths[1]))
    tree: Any = types.SimpleNamespace(
        group=[0], children={}, axis={}, cut={}, closed=[(0, 0, 0, 0.0)],
        mixed={(0, 0): np.array([0.75, 0.25])}, grafts={},
    )  # fmt: skip
    found = Refutation(network, groups, tree=tree)
    header, arrays = files.prove(found)
    (case,) = header["cases"]
    assert np.all(arrays[case["multipliers"]] > 0)
    assert check(*files.paths).accepted
    # Without weights they are found, after those of single rows fail.
    header, arrays = files.prove(Refutation(network, groups))
    assert check(*files.paths).accepted


def test_nothing_of_the_search_is_imported(proven):
    script = f"""
        import sys
        from stagecert_check.command import main
        assert main({[str(path) for path in proven.paths]!r}) == 0
        ours = {{"stagecert", "jax", "jaxlib", "equinox", "scipy", "onnxruntime"}}
        print(sorted(ours & {{name.split(".")[0] for name in sys.modules}}))
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert out[0].startswith("accepted")
    assert out[1] == "[]"


def test_reading_a_property_needs_neither_onnx_nor_flint():
    script = """
        import sys
        from stagecert_check import properties
        from stagecert_check.errors import ProblemError
        print([name for name in ("onnx", "flint", "stagecert") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_command_of_the_checker(proven, tmp_path):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "stagecert_check", *map(str, arguments)],
            capture_output=True,
            text=True,
        )

    done = run(*proven.paths, "--exact")
    assert done.returncode == 0
    assert done.stdout.startswith("accepted")
    other = tmp_path / "other.vnnlib"
    other.write_text(proven.text + "; another\n")
    done = run(proven.paths[0], other, proven.paths[2])
    assert done.returncode == 1
    assert "another property" in done.stdout
    assert run(*proven.paths[:2], tmp_path / "none").returncode == 2


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


def _verify(files):
    """Runs the command; it ends its process itself."""
    command = "from stagecert.cli import main; main()"
    arguments = [str(path) for path in files.paths[:2]]
    return subprocess.run(
        [sys.executable, "-c", command, "verify", *arguments, "--certificate",
         str(files.paths[2]), "--quiet"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_verification_writes_a_certificate(proven, tmp_path):
    files = Files(tmp_path, proven.model, proven.text)
    done = _verify(files)
    assert done.stdout.split() == ["unsat"]
    assert done.returncode == 0
    assert check(*files.paths).accepted


def test_padding_is_followed_in_rationals(tmp_path):
    """The zeros that Pad adds were integers, for which the exact mode had no rounding."""
    make = models.Maker()
    padded = make.node("Pad", "x", make.constant([0, 0, 0, 1]))
    most = make.node("ReduceMax", padded, make.constant([1]), keepdims=0)
    model = make.model([("x", [1, 2])], [(most, [1])])
    files = Files(tmp_path, model, models.vnnlib([-1, -1], [1, 1], 1, "(assert (>= Y_0 1.5))"))
    files.prove()
    for exact in (False, True):
        assert check(*files.paths, exact=exact).accepted


def test_inputs_whose_values_are_numbers_of_nodes():
    """A value of zero in one input once hid the first node, which is another input."""
    make = models.Maker()
    model = make.model([("a", [1, 1]), ("b", [1, 1])], [(make.node("Add", "a", "b"), [1, 1])])
    wanted = properties.load(models.vnnlib([-2, 0], [-1, 0], 1, "(assert (<= Y_0 -1.5))"))
    judge = Checker(graph.read(model.SerializeToString(), Arithmetic()), wanted)
    task = Task(0, 0, np.array([-2.0, 0.0]), np.array([-1.0, 0.0]), (1.0,))
    (bound,) = [
        bound for _, bounds in judge.bounds(certificates.Arrays(), [task]) for bound in bounds
    ]
    assert -0.5 - 1e-12 < bound <= -0.5
