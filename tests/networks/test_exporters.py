"""What PyTorch's exporters write for activations: importer, hulls and checker read the same."""

from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import exporters
import jax
import numpy as np
import onnx
import onnxruntime
import pytest
from exporters import SIZE, SPELLINGS, Graph, model_of

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.networks.activations import find
from stagecert.verify import verify
from stagecert_check import checker, graph
from stagecert_check.functions import Refused, activation_of
from stagecert_check.numbers import Arithmetic

DOCS = Path(__file__).parents[2] / "docs"


def read(model: onnx.ModelProto):
    """The model as the checker reads it."""
    assert checker  # which registers the operators
    return graph.read(model.SerializeToString(), Arithmetic())


def kinds_of(network) -> list[str]:
    return [n.operation.kind for n in network.nodes if hasattr(n.operation, "kind")]


def points(random) -> np.ndarray:
    """Points around all knots, and on some of them."""
    special = [-0.5, 0.5, 0.0, exporters.T, 20.0, 0.7, np.nextafter(np.float32(20), 21)]
    drawn = random.normal(size=(30, SIZE)) * random.choice([0.1, 1, 20], (30, 1))
    found = np.concatenate([np.resize(special, (2, SIZE)), drawn])
    return found.astype(np.float32)


@pytest.mark.parametrize("key", SPELLINGS, ids=" ".join)
def test_importer_and_checker_read_what_it_is(key):
    _, _, kinds, function = SPELLINGS[key]
    model = model_of(key)
    onnx.checker.check_model(model)
    network, program = networks.load(model), read(model)
    assert kinds_of(network) == kinds
    assert [cast(Any, program.nodes[k].operation).kind for k in program.activations] == kinds
    x = points(np.random.default_rng(0))
    x = np.maximum(x, -10) if key[0] == "LogSigmoid()" else x  # ORT takes the log of zero
    with jax.enable_x64(True):
        found = np.asarray(network(x.astype(np.float64))).reshape(x.shape)
    np.testing.assert_allclose(found, function(x.astype(float)), rtol=1e-6, atol=1e-7)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for one, wanted in zip(x, found, strict=True):
        (got,) = map(np.asarray, session.run(None, {"x": one[None]}))
        loose = 1e-3 if key[0] == "LogSigmoid()" else 2e-6  # ORT's sigmoid has few digits
        np.testing.assert_allclose(got[0], wanted, rtol=2e-5, atol=loose)


def test_the_documentation_has_the_table():
    assert exporters.table() in (DOCS / "activations.md").read_text()


# -- hulls -----------------------------------------------------------------------------------------

BROKEN = {
    "hardshrink": {"knot0": -0.5, "knot1": 0.5, "slope0": 1.0, "slope1": 0.0, "slope2": 1.0,
                   "offset0": 0.0, "offset1": 0.0, "offset2": 0.0},
    "threshold": {"knot0": 0.1, "slope0": 0.0, "slope1": 1.0, "offset0": 20.0, "offset1": 0.0},
    "zigzag": {"knot0": -1.0, "knot1": 0.3, "knot2": 2.0, "slope0": -2.0, "slope1": 3.0,
               "slope2": 0.0, "slope3": 0.5, "offset0": 1.0, "offset1": -0.5, "offset2": 4.0,
               "offset3": -3.0},
}  # fmt: skip
ACTIVATIONS = [("broken_line", numbers) for numbers in BROKEN.values()]
ACTIVATIONS += [("reverting_softplus", {"threshold": t}) for t in (20.0, 2.0, 0.0)]


def exact(kind: str, settings: dict, x: float) -> list:
    """The values at x in exact or very precise arithmetic; both sides' at a knot."""
    if kind == "broken_line":
        count = (len(settings) - 2) // 3
        knots = [Fraction(settings[f"knot{k}"]) for k in range(count)]
        sides = {sum(t < x for t in knots), sum(t <= x for t in knots)}
        return [Fraction(settings[f"slope{k}"]) * Fraction(x) + Fraction(settings[f"offset{k}"])
                for k in sides]  # fmt: skip
    from flint import arb

    soft = arb(x).exp().log1p() if x < 50 else arb(x) + (-arb(x)).exp().log1p()
    return [*([soft] if x <= settings["threshold"] else []),
            *([arb(x)] if x >= settings["threshold"] else [])]  # fmt: skip


def intervals(random, settings) -> tuple[np.ndarray, np.ndarray]:
    knots = [v for name, v in settings.items() if name.startswith(("knot", "threshold"))]
    centre = random.choice(knots, 400) + random.normal(size=400) * random.choice([0, 0.1, 3], 400)
    widths = abs(random.normal(size=(2, 400))) * random.choice([0, 1e-7, 0.3, 4], (2, 400))
    ends = [centre - widths[0], centre + widths[1]]
    ends[0][:20], ends[1][20:40] = knots[0], knots[-1]
    return np.minimum(*ends), np.maximum(*ends)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("kind", "settings"), ACTIVATIONS)
def test_hulls_enclose_every_value(kind, settings, dtype):
    random = np.random.default_rng(1)
    activation = find(kind)

    @jax.jit
    def sides(low, high, shares):
        wedge = activation.wedge(low, high, **settings)
        # Sides are functions of real numbers: evaluating them must not round.
        double = jax.tree.map(lambda a: a.astype(np.float64), wedge)
        x = jax.numpy.clip((low + shares * (high - low)).astype(dtype), low, high)
        wide = x.astype(np.float64)
        ends = jax.vmap(double.lower)(wide), jax.vmap(double.upper)(wide)
        return x, *ends, *activation.image(low, high, **settings)

    with jax.enable_x64(True):
        low, high = (jax.numpy.asarray(end, dtype) for end in intervals(random, settings))
        shares = np.array([0, 1, 0.5, *random.random(5)])[:, None]
        x, under, over, least, most = map(np.asarray, sides(low, high, shares))
    slack = 1e-13 * (1 + abs(x.astype(float)))  # of the sides' values, which are float64 here
    for at in np.ndindex(*x.shape):
        for value in exact(kind, settings, float(x[at])):
            assert under[at] - slack[at] <= value <= over[at] + slack[at]
            assert float(least[at[1]]) <= value <= float(most[at[1]])


@pytest.mark.parametrize(("kind", "settings"), ACTIVATIONS)
def test_the_checker_bounds_every_value(kind, settings):
    random = np.random.default_rng(2)
    low, high = (end[:60, None] for end in intervals(random, settings))
    made = activation_of(kind, **settings)
    slope = random.normal(size=low.shape)
    least, most = made.image(low, high)
    under, over = (made.offset(low, high, slope, side) for side in (1, -1))
    for k in range(len(low)):
        inside = low[k, 0] + random.random(12) * (high[k, 0] - low[k, 0])
        knots = [v for name, v in settings.items() if name.startswith(("knot", "threshold"))]
        knots = [v for v in knots if low[k, 0] <= v <= high[k, 0]]
        for x in (low[k, 0], high[k, 0], *knots, *np.clip(inside, low[k, 0], high[k, 0])):
            for value in exact(kind, settings, float(x)):
                line = Fraction(float(slope[k, 0])) * Fraction(float(x))
                line = line if isinstance(value, Fraction) else type(value)(
                    float(slope[k, 0])) * type(value)(float(x))  # fmt: skip
                assert least[k, 0] <= value <= most[k, 0]
                assert under[k, 0] <= value - line <= over[k, 0]


def test_hulls_are_tight_where_lines_are():
    """The hull of hardshrink on [0, 2] is known: from (0, 0) to (0.5, 0) and (2, 2), and above."""
    with jax.enable_x64(True):
        low, high = jax.numpy.array([0.0, 0.6]), jax.numpy.array([2.0, 2.0])
        wedge = find("broken_line").wedge(low, high, **BROKEN["hardshrink"])
        at = jax.numpy.array([0.5, 1.0])
        np.testing.assert_allclose(wedge.lower(at), [0, 1], atol=1e-12)
        np.testing.assert_allclose(wedge.upper(at), [0.5, 1], atol=1e-12)


# -- from the file to the answer -------------------------------------------------------------------


def test_a_proof_that_needs_the_fall_of_softplus_is_accepted_and_no_more():
    """max over [19, 23] of softplus(x) - x by the default exporter is that at 19, and the least is
    zero, which softplus itself never reaches."""
    g = Graph()
    model = g.model(g("Sub", exporters.softplus(g, "x"), "x"), 20)
    box = "".join(
        f"(declare-const X_{k} Real)(assert (>= X_{k} 19))(assert (<= X_{k} 23))"
        f"(declare-const Y_{k} Real)"
        for k in range(SIZE)
    )
    most = float(np.log1p(np.exp(-19)))
    held = verify(model, f"{box}(assert (>= Y_0 {most * 1.01:.18f}))", 60)
    assert (held.answer, held.checked) == ("unsat", True)
    # With softplus in its place, the difference would be proven to be positive.
    open_ = verify(model, f"{box}(assert (<= Y_0 0.0))", 60)
    assert open_.answer == "sat"


@pytest.mark.parametrize(
    ("spelt", "reason"),
    [
        (lambda g: g("Where", g("Or", g("Greater", "x", 0.5), g("Less", "x", 0.5)), "x", 7.0),
         "single point"),
        (lambda g: g("Cast", g("Greater", "x", 0.5), to=7), "to integers or to truth values"),
        (lambda g: g("Where", g("Greater", g("Mul", "x", 3.0), 1.0), "x", 0.0), "does not hold"),
    ],
)  # fmt: skip
def test_what_is_no_activation_is_refused(spelt, reason):
    g = Graph()
    model = g.model(spelt(g), 20)
    with pytest.raises(ProblemError, match=reason):
        networks.load(model)
    with pytest.raises(Refused):
        read(model)


def test_a_value_between_two_lines_that_jump():
    """Shrink with lambd = 0: zero at zero, where neither line is."""
    g = Graph()
    network = networks.load(g.model(g("Shrink", "x", lambd=0.0, bias=0.5), 20))
    size = int(np.prod(network.input_shape))
    x = np.resize(np.array([-1.0, 0.0, 1.0], np.float32), size)
    found = np.asarray(network(x.reshape(1, *network.input_shape))).ravel()
    assert found.tolist() == (x - 0.5 * np.sign(x)).tolist()


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_operators_of_their_own(bias):
    for operator, attributes, function in (
        ("Shrink", {"lambd": 0.5, "bias": bias},
         lambda x: np.where(x > 0.5, x - bias, np.where(x < -0.5, x + bias, 0))),
        ("ThresholdedRelu", {"alpha": 0.75}, lambda x: np.where(x > 0.75, x, 0)),
    ):  # fmt: skip
        g = Graph()
        model = g.model(g(operator, "x", **attributes), 20)
        x = points(np.random.default_rng(3))
        np.testing.assert_allclose(
            np.asarray(networks.load(model)(x)).reshape(x.shape), function(x), rtol=1e-6
        )
        kinds = [getattr(node.operation, "kind", None) for node in read(model).nodes]
        assert [kind for kind in kinds if kind is not None] == ["broken_line"]
