"""Bounds of imported models against the truth in exact arithmetic, for the numbers that are stored.

Each model once had false bounds, or was read as another one: constants were rounded, dropped or
taken for their neighbours. Truths are rational where the model is piecewise linear, and balls
elsewhere; boxes are single points, where bounds must enclose the value, and nearly be it.
"""

import itertools
import time
from fractions import Fraction

import jax
import numpy as np
import pytest
from flint import arb, ctx, fmpq
from onnx import TensorProto, helper
from test_onnx import Graph, ints, number, refusal

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.networks import operations as op
from stagecert.networks.activations.smooth import TANH_CUBES
from stagecert.networks.importers.onnx.model import describe, load

METHODS = ("ibp", "backward")


def ball(x) -> arb:
    x = Fraction(x) if not isinstance(x, Fraction) else x
    return arb(fmpq(x.numerator, x.denominator))


def single(x) -> Fraction:
    """The float32 that a model stores for x."""
    return Fraction(float(np.float32(x)))


POINTS = (-3.0, -1.25, -0.5, 0.0, 0.75, 2.0, 5.5)


def encloses(network, truth, points=POINTS, slack=1e-9, methods=METHODS):
    """Bounds at points enclose truth(point), a rational or a ball, and little else."""
    xs = np.array(points, np.float64)[:, None]
    for method in methods:
        found = networks.bound(network, xs, xs, [[1.0], [-1.0]], method=method).bound
        with ctx.workprec(300):
            for x, (low, high) in zip(points, found * [1, -1], strict=True):
                value = truth(Fraction(x))
                value = value if isinstance(value, arb) else ball(value)
                assert arb(low) <= value <= arb(high), (method, x, low, high, str(value))
                assert high - low <= slack * (1 + abs(float(value))), (method, x, low, high)


def graph(build, opset=17, dtype=TensorProto.FLOAT, shape=("batch", 1)) -> networks.Network:
    """The network of a model with one output, that of the last node."""
    g = Graph(opset, dtype, x=list(shape))
    build(g)
    return load(g.model([g.made[-1]]))


def double(x):
    return np.array(x, np.float64)


# -- constants that were dropped, rounded or cancelled ---------------------------------------------


@pytest.mark.parametrize("beta", [5.0, 1.0, -0.3])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_gemm_with_any_c_keeps_its_bias(beta, shape):
    """A scalar C times beta was no array any more, and was ignored: y = x + 5 was below 3."""
    c = np.full(shape, 1.1, np.float32)
    network = graph(lambda g: g("Gemm", "x", np.ones((1, 1), np.float32), c, beta=beta))
    encloses(network, lambda x: x + single(beta) * single(1.1))


def test_gemm_of_doubles():
    """alpha * B and beta * C were rounded without charge."""
    b, c = double([[1 / 3]]), double([0.1])
    network = graph(lambda g: g("Gemm", "x", b, c, alpha=0.7, beta=1e-3), dtype=TensorProto.DOUBLE)

    def truth(x):
        return single(0.7) * x * Fraction(1 / 3) + single(1e-3) * Fraction(0.1)

    encloses(network, truth, slack=1e-13)


def test_constants_are_not_added_up_in_their_type():
    """2^24 + 1 was 2^24."""
    network = graph(lambda g: g("Add", "x", g("Add", number(2**24), number(1))))
    encloses(network, lambda x: x + 2**24 + 1)


def test_sums_of_constants_do_not_swallow_small_ones():
    """1e30 + 1 - 1e30 was 0."""
    network = graph(lambda g: g("Sum", "x", number(1e30), number(1), number(-1e30)))
    encloses(network, lambda x: x + 1, slack=1e18)
    network = graph(lambda g: g("Sum", "x", number(2**20), number(2**-20)))
    assert [node.operation.label for node in network.nodes] == ["shift"]


def test_factors_that_nearly_cancel():
    """x * 3 * (1/3) was x, however often."""

    def build(g):
        y = "x"
        for _ in range(100):
            y = g("Mul", g("Mul", y, double(3)), double(1 / 3))

    network = graph(build, dtype=TensorProto.DOUBLE)
    # Without factors, intervals are charged less than what the hundred roundings come to.
    truth = (3 * Fraction(1 / 3)) ** 100
    encloses(network, lambda x: x * truth, methods=("ibp",))
    assert len(network.nodes) == 200


def test_factors_that_cancel():
    def build(g):
        y = "x"
        for _ in range(20):
            y = g("Mul", g("Div", y, number(3)), number(3))

    assert graph(build).nodes == ()


def test_long_chains_of_factors_are_read_fast():
    def build(g):
        y = "x"
        for _ in range(3000):
            y = g("Mul", y, number(1.1))

    start = time.perf_counter()
    graph(build)
    assert time.perf_counter() - start < 30


def test_batch_normalization_with_a_large_mean():
    """bias - mean * factor was rounded without charge."""
    one = np.ones(1, np.float32)
    mean, variance = np.float32(1e20), np.float32(0.3)

    def truth(x):
        spread = ball(Fraction(float(variance)) + single(1e-5)).sqrt()
        return (ball(x) - ball(Fraction(float(mean)))) / spread + 1

    numbers = one, one, mean * one, variance * one
    network = graph(lambda g: g("BatchNormalization", "x", *numbers))
    encloses(network, truth)
    below = networks.bound(network, [[0.0]], [[0.0]], [[1.0]], method="backward").bound.item()
    assert below < -1.8e20


@pytest.mark.parametrize("n", [1, 3, 4, 7])
def test_means(n):
    """1/n is no float64: means were those of another number."""

    def build(g):
        y = g("Expand", g("Mul", "x", double(1e15)), ints(1, n))
        g("ReduceMean", y, axes=[1])

    network = graph(build, dtype=TensorProto.DOUBLE)
    encloses(network, lambda x: x * 10**15, points=(0.75, 5.5), slack=1e-13)
    loose = [n.operation.loose for n in network.nodes if isinstance(n.operation, op.Scale)]
    assert loose == ([0] if n == 1 else [0, 0] if n == 4 else [0, 4])


def test_division_by_a_constant():
    y = double([[7.0, 3.0, 0.1, 4.0]])
    g = Graph(17, TensorProto.DOUBLE, x=["batch", 4])
    g("ReduceSum", g("Div", "x", y), ints(1))
    network = load(g.model())
    xs = double([[[1e8, -1e8, 3e6, 5.0]]])[0]
    truth = sum(Fraction(a) / Fraction(b) for a, b in zip(xs[0], y[0], strict=True))
    for method in METHODS:
        low, high = networks.bound(network, xs, xs, [[1.0], [-1.0]], method=method).bound[0]
        assert Fraction(low) <= truth <= -Fraction(high)


def test_padding_of_a_double_model():
    """The value was rounded to float32."""
    network = graph(
        lambda g: g("ReduceSum", g("Pad", "x", ints(0, 1, 0, 0), double(0.1)), ints(1)),
        dtype=TensorProto.DOUBLE,
    )
    encloses(network, lambda x: x + Fraction(0.1), slack=1e-13)


def test_clip_beyond_single_precision():
    """Bounds beyond 3.4e38 meant none."""
    network = graph(
        lambda g: g("Mul", g("Clip", g("Mul", "x", double(1e40)), double(-1e39), double(1e39)),
                    double(1e-39)),
        dtype=TensorProto.DOUBLE,
    )  # fmt: skip

    def truth(x):
        scaled = x * Fraction(1e40)
        return max(min(scaled, Fraction(1e39)), -Fraction(1e39)) * Fraction(1e-39)

    encloses(network, truth)
    assert graph(lambda g: g("Clip", "x"), opset=9).nodes == ()
    most = float(np.finfo(np.float32).max)
    network = graph(lambda g: g("Clip", g("Mul", "x", number(2e38)), max=most), opset=9)
    encloses(network, lambda x: min(x * single(2e38), Fraction(most)))


def test_concat_with_constants_of_another_type():
    network = graph(
        lambda g: g("ReduceSum", g("Concat", "x", double([[0.1]]), axis=1), axes=[1]),
        opset=11,
        dtype=TensorProto.DOUBLE,
    )
    encloses(network, lambda x: x + Fraction(0.1), slack=1e-13)


# -- numbers below the normal range ----------------------------------------------------------------


def test_weights_below_the_normal_range():
    """Single ones are kept; double ones, which processors take for zero, are refused."""
    small = float(np.float32(1e-42))
    network = graph(lambda g: g("Mul", g("Mul", "x", number(small)), number(1e38)))
    encloses(network, lambda x: x * Fraction(small) * single(1e38), slack=1e-16)
    g = Graph(17, TensorProto.DOUBLE, x=["batch", 1])
    g("Mul", "x", double(1e-310))
    assert "smallest normal number" in refusal(g)
    g = Graph(17, TensorProto.DOUBLE, x=["batch", 1])
    g("Gemm", "x", double([[1e-300]]), double([1e-300]), alpha=1e-30, beta=1e-30)
    assert "next to zero" in refusal(g)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_below_the_normal_range(method):
    """They were taken for zero, and 1e300 times nothing is nothing."""
    network = graph(lambda g: g("Mul", "x", double(1e300)), dtype=TensorProto.DOUBLE)
    small = 1.5e-308
    for low, high in ((small, small), (-small, -small), (-small, small), (-1.0, -small)):
        found = networks.bound(network, [[low]], [[high]], [[1.0], [-1.0]], method=method).bound[0]
        assert Fraction(found[0]) <= Fraction(1e300) * Fraction(low)
        assert -Fraction(found[1]) >= Fraction(1e300) * Fraction(high)
    with pytest.raises(ProblemError, match="take for zero"):
        networks.bound(network, [[0.0]], [[1.0]], [[1e-310]], method=method)


# -- activations that are spelt out ----------------------------------------------------------------


def _sigmoid(x):
    return 1 / (1 + (-x).exp())


def gelu_by_erf(c):
    def build(g):
        erf = g("Erf", g("Mul", "x", number(c)))
        g("Mul", g("Mul", "x", g("Add", erf, number(1))), number(0.5))

    return build, lambda x: ball(x) * (1 + (ball(x) * ball(single(c))).erf()) / 2


def gelu_by_division(c):
    def build(g):
        erf = g("Erf", g("Div", g("Add", "x", number(0.3)), number(c)))
        g("Mul", g("Mul", g("Add", "x", number(0.3)), number(0.5)), g("Add", erf, number(1)))

    def truth(x):
        y = ball(x + single(0.3))
        return y * (1 + (y / ball(single(c))).erf()) / 2

    return build, truth


def silu(a):
    def build(g):
        g("Mul", "x", g("Sigmoid", g("Mul", "x", number(a))))

    return build, lambda x: ball(x) * _sigmoid(ball(x) * ball(single(a)))


def hard_swish(alpha):
    def build(g):
        g("Mul", "x", g("HardSigmoid", "x", alpha=alpha, beta=0.5))

    return build, lambda x: x * min(max(single(alpha) * x + Fraction(1, 2), 0), 1)


def clipped(factor):
    def build(g):
        six = g("Clip", g("Add", "x", number(3)), number(0), number(6))
        g("Mul", six, g("Mul", "x", number(factor)))

    return build, lambda x: x * min(max(x + 3, 0), 6) * single(factor)


def mish(factor):
    def build(g):
        g("Mul", g("Tanh", g("Softplus", "x")), g("Mul", "x", number(factor)))

    return build, lambda x: ball(x) * ball(x).exp().log1p().tanh() * ball(single(factor))


def gelu_by_tanh(outer, cube, power):
    def build(g):
        cubed = g("Pow", "x", number(3)) if power else g("Mul", "x", g("Mul", "x", "x"))
        inner = g("Add", "x", g("Mul", cubed, number(cube)))
        tanh = g("Tanh", g("Mul", inner, number(outer)))
        g("Mul", g("Mul", "x", number(0.5)), g("Add", tanh, number(1)))

    def truth(x):
        inner = ball(single(outer)) * (ball(x) + ball(single(cube)) * ball(x) ** 3)
        return ball(x) * (1 + inner.tanh()) / 2

    return build, truth


TANH = np.sqrt(2 / np.pi)
SPELT = {
    "gelu 1 / sqrt 2": (*gelu_by_erf(np.sqrt(0.5)), "gelu"),
    "gelu 0.7071073": (*gelu_by_erf(0.7071073), "gelu"),
    "gelu 1.5": (*gelu_by_erf(1.5), "gelu"),
    "gelu / sqrt 2": (*gelu_by_division(np.sqrt(2)), "gelu"),
    "silu 1.0000008": (*silu(1.0000008), "silu"),
    "silu -2": (*silu(-2.0), "silu"),
    "hard swish 1/6": (*hard_swish(1 / 6), "hard_swish"),
    "hard swish 0.16666682": (*hard_swish(0.16666682), "hard_swish"),
    "hard swish -0.2": (*hard_swish(-0.2), "hard_swish"),
    "clip 1/6": (*clipped(1 / 6), "hard_swish"),
    "mish": (*mish(1.0), "mish"),
    "mish 0.9999999": (*mish(0.9999999), "mish"),
    "gelu tanh": (*gelu_by_tanh(TANH, 0.044715, True), "gelu_tanh"),
    "gelu tanh by products": (*gelu_by_tanh(TANH, 0.044715, False), "gelu_tanh"),
}


@pytest.mark.parametrize("name", SPELT)
def test_activations_that_are_nearly_known(name):
    """They were taken for the known ones, which are others by up to 1e-6."""
    build, truth, kind = SPELT[name]
    g = Graph(17, x=["batch", 1])
    build(g)
    # Large factors: differences of roundings become visible.
    g("Mul", g.made[-1], number(1e6))
    network = load(g.model())
    assert kind in [getattr(node.operation, "kind", "") for node in network.nodes]
    slack = 5e-2 if kind == "gelu_tanh" else 1e-6
    encloses(network, lambda x: truth(x) * (ball(single(1e6))
                                            if isinstance(truth(x), arb) else single(1e6)),
             slack=slack)  # fmt: skip


@pytest.mark.parametrize(("outer", "cube"), [(TANH, 0.0447151), (0.797, 0.044715), (TANH, 0.0)])
def test_polynomials_that_are_not_those_of_gelu(outer, cube):
    build, _ = gelu_by_tanh(outer, cube, True)
    g = Graph(17, x=["batch", 1])
    build(g)
    found = [getattr(n.operation, "kind", n.operation.label) for n in load(g.model()).nodes]
    assert "product" in found
    assert "gelu_tanh" not in found


def test_gelu_tanh_allows_for_its_constants():
    """|d/dc x sigmoid(s (x + c x^3))| = s x^4 sigmoid'(...) is below 0.6 for all x."""
    low = ball(Fraction(TANH_CUBES[0]))
    scale = (8 / arb.pi()).sqrt()

    def derivative(x: arb) -> arb:
        # At the least c the argument is least, and sigmoid' largest, for x > 0 (and even in x).
        e = (-scale * (x + low * x**3)).exp()
        return scale * x**4 * e / (1 + e) ** 2

    with ctx.workprec(100):
        for k in range(4000):  # [0, 8] in pieces
            assert derivative(arb((k + 0.5) / 500, 0.5 / 500)) < 0.6
        # Beyond, s x^4 exp(-s x) falls, and is small already.
        assert scale * 8**4 * (-scale * 8).exp() < 0.03
    x = jax.numpy.linspace(-6, 6, 2001)
    from stagecert.networks.activations import find

    wedge = find("gelu_tanh").wedge(x - 0.25, x + 0.25)
    image = find("gelu_tanh").image(x - 0.25, x + 0.25)
    for cube in TANH_CUBES:
        for at in (x - 0.25, x, x + 0.1):
            y = np.asarray(at)
            value = y / (1 + np.exp(-np.sqrt(8 / np.pi) * (y + cube * y**3)))
            assert np.all(wedge.lower(at) <= value)
            assert np.all(value <= wedge.upper(at))
            assert np.all((image[0] <= value) & (value <= image[1]))


# -- from_jax --------------------------------------------------------------------------------------


def test_from_jax_with_rounded_constants():
    def truth(x):
        return ball(x) * (1 + (ball(x) * ball(single(np.sqrt(0.5)))).erf()) / 2

    with jax.enable_x64(False):
        function = jax.nn.gelu
        network = networks.from_jax(
            lambda x: 2.0**20 * function(x, approximate=False), np.zeros(1, np.float32)
        )
    encloses(network, lambda x: truth(x) * 2**20, slack=1e-6)
    with jax.enable_x64(False):
        network = networks.from_jax(lambda x: 2.0**20 * function(x), np.zeros(1, np.float32))
    _, tanh = gelu_by_tanh(TANH, 0.044715, True)
    encloses(network, lambda x: tanh(x) * 2**20, slack=5e-2)


def test_from_jax_computes_constants_exactly():
    one = np.ones(1, np.float32)
    with jax.enable_x64(False):
        network = networks.from_jax(
            lambda x: x + (jax.numpy.asarray(2**24 * one) + one), np.zeros(1, np.float32)
        )
    encloses(network, lambda x: x + 2**24 + 1)

    def normalised(x):
        return (x - 0.25) * jax.lax.rsqrt(jax.numpy.asarray(0.3 * one) + 1e-5) / 3

    with jax.enable_x64(False):
        network = networks.from_jax(normalised, np.zeros(1, np.float32))

    def truth(x):
        return ball(x - Fraction(1, 4)) / ball(single(0.3) + single(1e-5)).sqrt() / 3

    encloses(network, truth, slack=1e-13)


# -- models that inspect called supported, or that took forever ------------------------------------


@pytest.mark.parametrize(
    ("x", "y"),
    [((4,), "right"), ((4,), "left"), ((3, 4), "right"), ((4, 3), "left"), ((2, 3, 4), "right"),
     ((2, 4, 3), "left"), ((4,), "matrix"), ((4,), "stack")],
)  # fmt: skip
def test_matmul_with_vectors(x, y):
    """`inspect` called it supported, and `bound` raised an IndexError."""
    w = {"matrix": (4, 2), "stack": (2, 4, 3)}.get(y, (4,))
    w = np.random.default_rng(0).integers(-5, 5, size=w).astype(np.float32)
    g = Graph(17, x=list(x))
    product = g("MatMul", w, "x") if y == "left" else g("MatMul", "x", w)
    g("Relu", product)
    network = load(g.model(), batched=False)
    point = np.random.default_rng(1).integers(-5, 5, size=x).astype(np.float64)
    truth = np.maximum(w @ point if y == "left" else point @ w, 0)
    assert network.output_shapes[0] == np.shape(truth)
    rows = np.concatenate([np.eye(truth.size), -np.eye(truth.size)])
    for method in METHODS:
        found = networks.bound(network, point[None], point[None], rows, method=method).bound[0]
        low, high = np.split(found, 2)
        np.testing.assert_allclose(low, truth.ravel(), atol=1e-12)
        np.testing.assert_allclose(-high, truth.ravel(), atol=1e-12)


def test_inputs_that_are_left_out():
    """Sum(x, "", x) was 2 x here, and a crash elsewhere."""
    for operator in ("Sum", "Mean", "Max", "Min"):
        g = Graph(17, x=["batch", 3])
        g(operator, "x", None, "x")
        assert "lacks an input" in refusal(g)


def _nested(depth, calls=2):
    """Functions that each call the one before twice: 2^depth nodes."""
    functions = []
    opset = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    for k in range(depth):
        inner = ("Relu", "") if k == 0 else (f"f{k - 1}", "own")
        names = ["x", *(f"y{i}" for i in range(calls))]
        nodes = [
            helper.make_node(inner[0], [a], [b], domain=inner[1])
            for a, b in itertools.pairwise(names)
        ]
        functions.append(helper.make_function("own", f"f{k}", ["x"], [names[-1]], nodes, opset))
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])
    node = helper.make_node(f"f{depth - 1}", ["x"], ["y"], domain="own")
    model = helper.make_model(
        helper.make_graph([node], "g", [value], [result]), functions=functions, opset_imports=opset
    )
    model.ir_version = 10
    return model


def test_functions_within_functions():
    """1.5 kB of them hung for minutes, with 4 GB."""
    start = time.perf_counter()
    for source in (load, describe):
        with pytest.raises(ProblemError, match=r"stand for 33554432 nodes, more than 100000"):
            source(_nested(25))
        with pytest.raises(ProblemError, match="more than 100 deep"):
            source(_nested(200, calls=1))
        looped = _nested(2)
        looped.functions[0].node[0].CopyFrom(looped.functions[1].node[0])
        with pytest.raises(ProblemError, match="calls itself"):
            source(looped)
    assert time.perf_counter() - start < 5
    assert len(load(_nested(4)).nodes) == 16


def test_tensors_that_are_too_large():
    g = Graph(17, x=["batch", 4])
    g("Relu", g("Expand", "x", ints(2**26, 4)))
    assert f"makes a tensor of {2**28} entries, more than {2**27}" in refusal(g)


def test_casts_that_round():
    g = Graph(17, TensorProto.DOUBLE, x=["batch", 1])
    g("Add", "x", g("Cast", g("Cast", double(0.1), to=TensorProto.FLOAT), to=TensorProto.DOUBLE))
    g("Add", "x", g("CastLike", g("CastLike", double(0.1), number(1)), "x"))
    assert refusal(g).count("rounds constants") == 2
    network = graph(
        lambda g: g("Add", "x", g("Cast", double(0.375), to=TensorProto.FLOAT)), opset=19
    )
    encloses(network, lambda x: x + Fraction(3, 8))
    g = Graph(17, x=["batch", 4])
    g("Gather", "x", g("Cast", number(1.5), to=TensorProto.INT64), axis=1)
    assert "rounds constants" in refusal(g)
    # A third is no number of single precision, but a cast of what has that type does nothing:
    # PyTorch's older exporter writes one behind 1 / sqrt(d) of attention.
    third = lambda g: g("Div", number(1), number(3))  # noqa: E731
    network = graph(lambda g: g("Add", "x", g("Cast", third(g), to=TensorProto.FLOAT)), opset=19)
    encloses(network, lambda x: x + Fraction(1, 3))
    g = Graph(17, x=["batch", 1])
    g("Add", "x", g("Cast", third(g), to=TensorProto.FLOAT16))
    assert "rounds constants" in refusal(g)


def test_integers_are_divided_towards_zero_and_do_not_overflow():
    def build(g):
        third = g("Div", ints(-7)[0], ints(2)[0])
        g("Add", "x", g("Cast", third, to=TensorProto.FLOAT))

    encloses(graph(build), lambda x: x - 3)
    g = Graph(17, x=["batch", 4])
    g("Gather", "x", g("Mul", ints(2**40), ints(2**40)), axis=1)
    assert "too large for int64" in refusal(g)


def test_constants_whose_rounding_matters_are_refused():
    g = Graph(17, x=["batch", 1])
    third = g("Div", number(1), number(3))
    g("Conv", g("Unsqueeze", "x", ints(2)), g("Reshape", third, ints(1, 1, 1)))
    g("Clip", "x", third)
    g("PRelu", "x", third)
    g("Max", "x", third)
    g("Mul", "x", g("Sub", third, g("Mul", third, number(0.9999999))))
    message = refusal(g)
    assert message.count("rounded result of a calculation") == 4
    assert "cancels nearly all their digits" in message


FOLDED = {
    "Sqrt": ((2.0,), lambda a: ball(a).sqrt()),
    "Exp": ((-1.5,), lambda a: ball(a).exp()),
    "Erf": ((0.3,), lambda a: ball(a).erf()),
    "Tanh": ((0.7,), lambda a: ball(a).tanh()),
    "Sigmoid": ((2.5,), lambda a: _sigmoid(ball(a))),
    "Softplus": ((0.1,), lambda a: ball(a).exp().log1p()),
    "Log": ((0.1,), lambda a: ball(a).log()),
    "Sin": ((3.0,), lambda a: ball(a).sin()),
    "Cos": ((3.0,), lambda a: ball(a).cos()),
    "Reciprocal": ((7.0,), lambda a: 1 / a),
    "Neg": ((0.1,), lambda a: -a),
    "Abs": ((-0.1,), abs),
    "Div": ((1.0, 7.0), lambda a, b: a / b),
    "Mul": ((0.1, 0.7), lambda a, b: a * b),
    "Sub": ((0.1, 1e-9), lambda a, b: a - b),
    "Mean": ((0.1, 0.7, 1e5), lambda *a: sum(a) / 3),
    "Pow": ((1.1, 5.0), lambda a, b: a**5),
    "Max": ((0.1, 0.7), max),
    "Min": ((0.1, 0.7), min),
}


def test_constants_are_enclosed():
    g = Graph(17, x=["batch", 1])
    columns = []
    for operator, (numbers, _) in FOLDED.items():
        made = g(operator, *map(number, numbers))
        columns.append(g("Mul", g("Add", "x", made), made))
    g("Concat", *columns, axis=1)
    network = load(g.model())
    x = np.array([[0.75]])
    rows = np.concatenate([np.eye(len(FOLDED)), -np.eye(len(FOLDED))])
    for method in METHODS:
        low, high = np.split(networks.bound(network, x, x, rows, method=method).bound[0], 2)
        for k, (operator, (numbers, function)) in enumerate(FOLDED.items()):
            value = function(*map(single, numbers))
            value = value if isinstance(value, arb) else ball(value)
            value = (arb(0.75) + value) * value
            assert arb(low[k]) <= value <= arb(-high[k]), operator
            assert -high[k] - low[k] <= 1e-11 * (1 + abs(low[k])), operator


def test_sums_over_constants_are_enclosed():
    numbers = np.array([[1e8, 1.1, -1e8], [0.1, 0.2, 0.3]], np.float32)
    exact = [[Fraction(float(n)) for n in row] for row in numbers]

    def build_matmul(g):
        g("Mul", "x", g("ReduceMean", g("MatMul", numbers, numbers.T.copy()), axes=[0, 1]))

    products = [[sum(a * b for a, b in zip(r, s, strict=True)) for s in exact] for r in exact]
    encloses(graph(build_matmul), lambda x: x * sum(map(sum, products)) / 4, slack=1e-12)
    totals = [sum(row) for row in exact]

    def build_totals(g):
        total = g("ReduceSum", numbers, ints(1), keepdims=0)
        g("ReduceSum", g("Mul", g("Concat", "x", "x", axis=1), total), ints(1))

    encloses(graph(build_totals), lambda x: x * sum(totals), slack=1e-12)
