"""Planes above neurons: never above the truth, whatever they are, and what certificates say."""

from dataclasses import replace

import numpy as np
import pytest
import rigor_exact
import rigor_models as models
import rigor_trees
from flint import fmpq

from stagecert.networks.bounding.envelope import Envelope
from stagecert.networks.bounding.envelope_search import search
from stagecert.verify import splitting, verify
from stagecert.verify.certificates import Above, Arrays, Leaf
from stagecert.verify.models import OpenModel
from stagecert.verify.planes import bounds_by_planes
from stagecert.verify.queries import groups_of
from stagecert_check import check, properties
from stagecert_check.bounds import Facts
from stagecert_check.functions import Refused
from stagecert_check.numbers import Arithmetic
from stagecert_check.planes import slopes_of, sources_of
from stagecert_check.tree import Path, Task

NOWHERE = Path(*(np.zeros(0, kind) for kind in (np.int64, float, np.int64, float)))


def _random_leaf(random, checker) -> Leaf:
    """Planes with whatever slopes and shares above some neurons of every activation."""
    planes = []
    for index in checker.activations:
        size = checker.given.sizes[index]
        entries = np.flatnonzero(random.uniform(size=size) < 0.7).astype("<i4")
        sources = sources_of(checker.program, index)
        reads = sum(int(np.prod(checker.program.nodes[k].shape)) for k in sources)
        kept = random.choice([0.0, 1.0, 0.5], size=(len(entries), reads))
        kept = kept + random.choice([0, 0, 0.3]) * random.normal(size=kept.shape)
        shares = random.choice([0.0, 1.0, 0.3], size=len(entries))
        planes.append(Above(entries, shares.astype("<f4"), kept.astype("<f8")))
    none = (None,) * len(planes)
    return Leaf(np.ones(1), none, none, tuple(planes))


def _bound(checker, leaf: Leaf, multipliers):
    case, arrays = checker.wanted.cases[0], Arrays()
    low, high = (np.array(x, float) for x in (case.inputs.lower64, case.inputs.upper64))
    task = Task(0, 0, low, high, multipliers, arrays.leaf(leaf))
    with np.errstate(all="ignore"):
        ((_, (bound,)),) = checker.bounds(arrays, [task])
    return task, bound


@pytest.mark.parametrize("activation", ["Relu", "LeakyRelu"])
def test_bounds_with_any_planes_are_never_above_the_exact_minimum(activation):
    used = 0
    for seed in range(12):
        random = np.random.default_rng(seed)
        model = models.mlp((2, 5, 4, 3), activation, seed=seed)
        centre, radius = random.normal(size=2), random.choice([0.1, 0.5, 2])
        text = models.vnnlib(centre - radius, centre + radius, 3,
                             "(assert (>= Y_0 Y_1))(assert (<= Y_2 0.3))")  # fmt: skip
        checker, exact = (rigor_trees.checker_of(model, text, x) for x in (False, True))
        (case,) = checker.wanted.cases
        none = (None,) * len(checker.activations)
        for _ in range(3):
            leaf, multipliers = _random_leaf(random, checker), tuple(random.uniform(size=2))
            task, bound = _bound(checker, leaf, multipliers)
            _, other = _bound(exact, leaf, multipliers)
            other = float(int(other.p) / int(other.q))
            assert bound <= other + 1e-12 * (1 + abs(other))
            assert bound >= other - 1e-9 * (1 + abs(other))
            if activation == "Relu":
                box = [[fmpq(v.numerator, v.denominator) for v in side]
                       for side in (case.inputs.lower, case.inputs.upper)]  # fmt: skip
                pieces = list(rigor_exact.traced(rigor_exact.layers_of(model), *box))
                least = rigor_trees.exact_minimum(pieces, case, replace(task, path=NOWHERE))
                assert least is not None
                assert rigor_exact.exact(bound) <= least
            plain = _bound(checker, Leaf(np.ones(1), none, none), multipliers)[1]
            used += bound != plain
    assert used > 20


def _floats(numbers) -> np.ndarray:
    return np.array([[int(x.p) / int(x.q) for x in row] for row in numbers])


@pytest.mark.parametrize(
    "networks", [range(10), pytest.param(range(10, 100), marks=pytest.mark.slow)]
)
def test_what_the_search_proves_is_never_above_the_exact_minimum(networks):
    """200 rows on each network; minima are at corners of its linear pieces, known exactly."""
    tight = used = 0
    for seed in networks:
        random = np.random.default_rng(seed)
        model = models.mlp((2, 4, 4, 3), seed=seed)
        centre, radius = np.round(random.normal(size=2), 3), random.choice([0.25, 0.5, 1.0])
        low, high = centre - radius, centre + radius
        box = [[rigor_exact.exact(v) for v in side] for side in (low, high)]
        values = []
        for polygon, outputs, _ in rigor_exact.traced(rigor_exact.layers_of(model), *box):
            if polygon:
                planes = _floats(outputs)
                values.append(_floats(polygon) @ planes[:, :2].T + planes[:, 2])
        rows = random.normal(size=(200, 3))
        least = (np.concatenate(values) @ rows.T).min(axis=0)
        text = models.vnnlib(low, high, 3, "(assert (<= Y_0 0))")
        program = rigor_trees.checker_of(model, text).program
        with np.errstate(all="ignore"):
            facts = Facts(Arithmetic(), program, low[None], high[None]).derive()
            relaxation = Envelope(program, facts)
            start = relaxation.start(rows, relaxation.default_slopes(200))
            found = search(relaxation, rows, start, (15, 5), np.full(200, np.inf), (0, 0))
            bound = relaxation.certified(rows, found.state)
        assert np.all(bound <= least + 1e-12 * (1 + np.abs(least)))
        tight += np.sum(bound > least - 1e-6)
        used += sum(np.sum(x > 0) for (name, _), x in found.state.arrays.items() if name == "mix")
    assert tight > 50 * len(networks)
    assert used > 100 * len(networks)


def test_only_functions_that_do_not_fall_have_planes():
    text = models.vnnlib([0, 0], [1, 1], 3, "(assert (<= Y_0 0))")
    for activation, attributes in (("Tanh", {}), ("LeakyRelu", {"alpha": -0.5}), ("Abs", {})):
        checker = rigor_trees.checker_of(models.mlp((2, 5, 4, 3), activation, **attributes), text)
        operation = checker.program.nodes[checker.activations[0]].operation
        assert slopes_of(operation) == ()
        with pytest.raises(Refused, match="an activation that has none"):
            _bound(checker, _random_leaf(np.random.default_rng(0), checker), (1.0,))


def _convolved():
    make = models.Maker(1)
    x = make.node("Conv", "x", make.weights(3, 1, 2, 2, size=4), make.constant(np.zeros(3)))
    x = make.node("Flatten", make.node("Relu", x))
    x = make.node("Gemm", x, make.weights(12, 8, size=12), make.constant(np.full(8, 0.1)))
    x = make.node("Gemm", make.node("Relu", x), make.weights(8, 2, size=8))
    return make.model([("x", [1, 1, 3, 3])], [(x, [1, 2])])


NETWORKS = {
    "relu": lambda: models.mlp((2, 8, 8, 2), seed=3),
    "leaky": lambda: models.mlp((2, 8, 8, 2), "LeakyRelu", seed=3, alpha=0.125),
    "convolved": _convolved,
}


@pytest.fixture(
    scope="module",
    params=["relu", *(pytest.param(x, marks=pytest.mark.slow) for x in ("leaky", "convolved"))],
)
def proven(request, tmp_path_factory):
    """A property that planes prove and triangles do not, with its certificate."""
    patch = pytest.MonkeyPatch()
    patch.setattr(splitting, "LARGEST_DIMENSION", 0)  # few inputs would be split
    folder = tmp_path_factory.mktemp("planes")
    model = NETWORKS[request.param]()
    inputs = 9 if request.param == "convolved" else 2

    def text_of(limit: float) -> str:
        low = -np.ones(inputs)
        return models.vnnlib(low, -low, 2, f"(assert (<= Y_0 {limit:.9f}))")

    opened = OpenModel(model)
    _, groups = groups_of(opened.network, properties.load(text_of(0.0)))
    group = replace(groups[0], limits=np.full(1, np.inf))
    bound = bounds_by_planes(opened.program, group, np.arange(1), 1.0)[0].bound
    limit = bound / abs(group.matrix[0]).max() - 1e-3
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "property.vnnlib").write_text(text_of(limit))
    verdict = verify(folder / "model.onnx", folder / "property.vnnlib", relaxation="envelope")
    patch.undo()
    assert verdict.answer == "unsat"
    assert verdict.cases[0].how == "envelope"
    (folder / "c").write_bytes(verdict.certificate)
    return folder, model, text_of, limit


def test_a_certificate_with_planes_is_accepted(proven):
    folder, *_ = proven
    header, arrays = models.read(folder / "c")
    assert header["version"] == 3
    assert any(header["cases"][0]["leaves"][0]["planes"])
    paths = folder / "model.onnx", folder / "property.vnnlib", folder / "c"
    assert check(*paths).accepted
    assert check(*paths, exact=True).accepted
    # Planes are what proves it.
    header["cases"][0]["leaves"][0]["planes"] = []
    used = json_names(header)
    models.write(folder / "without", header, {k: v for k, v in arrays.items() if k in used})
    assert not check(*paths[:2], folder / "without").accepted


def json_names(tree) -> set:
    """All strings in a tree of JSON."""
    if isinstance(tree, dict):
        return set().union(*map(json_names, tree.values()))
    if isinstance(tree, list):
        return set().union(set(), *map(json_names, tree))
    return {tree} if isinstance(tree, str) else set()


def test_mutated_planes_are_rejected_or_harmless(proven):
    folder, model, text_of, limit = proven
    header, arrays = models.read(folder / "c")
    random = np.random.default_rng(0)
    planes = [x for x in header["cases"][0]["leaves"][0]["planes"] if x]
    # A false property: no planes whatever may prove it.
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    points = random.uniform(-1, 1, size=(300, *shape)).astype(np.float32)
    least = min(models.run(model, x)[0, 0] for x in points)
    false = text_of(max(float(least) + 1e-3, limit + 1e-3))
    (folder / "false.vnnlib").write_text(false)
    refused = 0
    for k in range(60):
        changed = {name: x.copy() for name, x in arrays.items()}
        above = planes[k % len(planes)]
        name = above[("kept", "shares", "entries")[k % 3]]
        x = changed[name].reshape(-1)
        some = random.integers(len(x), size=3)
        x[some] = random.choice([-2, -0.5, 0, 0.5, 1, 2, 100], size=3).astype(x.dtype)
        for text, file in ((None, "property.vnnlib"), (false, "false.vnnlib")):
            models.write(folder / "m", header, changed, None, text and text.encode())
            report = check(folder / "model.onnx", folder / file, folder / "m")
            assert text is None or not report.accepted
            refused += not report.accepted and text is None
    assert refused > 10
