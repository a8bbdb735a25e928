"""What the checker makes of a model's numbers, functions and files, against exact values."""

import gzip
import time
from fractions import Fraction
from typing import Any

import numpy as np
import onnx
import pytest
import rigor_models as models
from flint import arb, fmpq
from onnx import TensorProto, numpy_helper
from onnx import helper as h

from stagecert.errors import ProblemError
from stagecert.verify import certificates
from stagecert_check import check, constants, external, graph
from stagecert_check.bounds import Facts
from stagecert_check.functions import Refused
from stagecert_check.numbers import EPS, Arithmetic


def _single(x) -> Fraction:
    """What single precision stores."""
    return Fraction(float(np.float32(x)))


def _interval(model, point, exact, files=None):
    """The interval of the first output at one point, in rationals."""
    program = graph.read(model.SerializeToString(), Arithmetic(exact), files)
    at = np.asarray(point, float)[None]
    facts = Facts(Arithmetic(exact), program, at, at).derive()
    return [
        [_fraction(x) for x in np.ravel(side[program.outputs[0]])]
        for side in (facts.low, facts.high)
    ]


def _fraction(x) -> Fraction:
    return Fraction(int(x.p), int(x.q)) if isinstance(x, fmpq) else Fraction(float(x))


def _ball(x: Fraction) -> arb:
    return arb(fmpq(x.numerator, x.denominator))


def _encloses(build, shape, points, truth, slack=1e-12):
    """Whether intervals at points contain truth(x), a Fraction or ball, and nothing far from it."""
    make = models.Maker()
    model = make.model([("x", shape)], [(build(make, "x"), None)])
    for point in points:
        for exact in (False, True):
            low: Any
            high: Any
            (low,), (high,) = _interval(model, [point], exact)
            wanted = truth(Fraction(float(point)))
            if isinstance(wanted, arb):
                low, high = _ball(low), _ball(high)
            assert low <= wanted
            assert wanted <= high
            assert high - low <= slack * (1 + abs(wanted))


# -- constants -------------------------------------------------------------------------------------

POINTS = np.array([-2.75, -0.4, 0.3, 1.9], np.float32)


def test_sums_of_constants_are_not_those_of_single_precision():
    # Once 16777216 + 1 was 16777216.
    def build(m, x):
        total = m.node("Add", m.constant(2.0**24), m.constant(1.0))
        return m.node("Sub", m.node("Add", x, total), m.constant(2.0**24))

    _encloses(build, (1,), POINTS, lambda x: x + 1, 1e-7)


def test_constants_of_a_sum_are_added_up_first():
    def build(m, x):
        return m.node("Sum", x, *(m.constant(c) for c in (1e30, 0.1, -1e30)))

    _encloses(build, (1,), POINTS, lambda x: x + _single(0.1))


def test_factors_that_nearly_cancel_are_charged():
    # Once a factor and its rounded reciprocal were left out together: 400 of them are not one.
    third = _single(1 / 3)

    def build(m, x):
        for _ in range(400):
            x = m.node("Mul", m.node("Mul", x, m.constant(3.0)), m.constant(1 / 3))
        return x

    assert abs((3 * third) ** 400 - 1) > Fraction(1, 10**5)
    _encloses(build, (1,), POINTS, lambda x: x * (3 * third) ** 400, 1e-9)


def test_normalisation_with_a_huge_mean():
    def build(m, x):
        numbers = ([3.0], [0.5], [1e6], [0.1])
        return m.node("BatchNormalization", x, *(m.constant(n) for n in numbers))

    spread = _ball(_single(0.1) + _single(1e-5)).sqrt()
    _encloses(build, (1, 1), POINTS, lambda x: _ball(3 * (x - 10**6)) / spread + arb(0.5), 1e-9)


def test_inexact_constants_as_factors_summands_and_weights():
    third = Fraction(1, 3)

    def constant(m):
        return m.node("Div", m.constant(1.0), m.constant(3.0))

    _encloses(lambda m, x: m.node("Mul", x, constant(m)), (1,), POINTS, lambda x: x * third)
    _encloses(lambda m, x: m.node("Add", constant(m), x), (1,), POINTS, lambda x: x + third)
    _encloses(lambda m, x: m.node("Sub", constant(m), x), (1,), POINTS, lambda x: third - x)

    def matmul(m, x):
        weights = m.node("Div", m.constant([[1.0]]), m.constant(3.0))
        return m.node("Gemm", x, weights, constant(m), beta=0.7)

    _encloses(matmul, (1, 1), POINTS, lambda x: x * third + _single(0.7) * third)


def test_an_allowance_for_a_summand_is_charged():
    # What float64 makes of 1 / 3 is below it: bounds that do not know would be false.
    def build(m, x):
        return m.node("Add", x, m.node("Div", m.constant(1.0), m.constant(3.0)))

    make = models.Maker()
    model = make.model([("x", (1,))], [(build(make, "x"), None)])
    (low,), (high,) = _interval(model, [0.0], exact=True)
    assert low < Fraction(1, 3) < high


@pytest.mark.parametrize(
    "build",
    [
        lambda m: m.node("Sub", m.node("Mul", m.node("Div", m.constant(1.0), m.constant(3.0)),
                                       m.constant(3.0)), m.constant(1.0)),  # nothing is known
        lambda m: m.node("Div", m.constant(1.0), m.node("Sub", m.constant(0.5), m.constant(0.5))),
        lambda m: m.node("Sqrt", m.constant(-1.0)),
        lambda m: m.node("Log", m.constant(0.0)),
        lambda m: m.node("Exp", m.constant(1e6)),
        lambda m: m.node("Cast", m.node("Cast", m.constant(0.1), to=10), to=1),
        lambda m: m.node("Cast", m.node("Mul", m.constant(2**30), m.constant(2)), to=1),
        lambda m: m.node("Cast", m.node("Div", m.constant(-1), m.constant(2)), to=1),
        lambda m: m.node("Floor", m.node("Div", m.constant(1.0), m.constant(3.0))),
        lambda m: m.node("Add", m.constant(np.inf), m.constant(1.0)),
    ],
)  # fmt: skip
def test_constants_that_are_not_known_are_refused(build):
    make = models.Maker()
    model = make.model([("x", (1,))], [(make.node("Add", "x", build(make)), None)])
    with pytest.raises(Refused):
        graph.read(model.SerializeToString(), Arithmetic())


def test_repeated_squares_of_constants_cost_nothing():
    make = models.Maker()
    c = make.constant(0.9)
    for _ in range(200):
        c = make.node("Mul", c, c)
    model = make.model([("x", (1,))], [(make.node("Add", "x", c), None)])
    begin = time.monotonic()
    with pytest.raises(Refused, match="not known precisely"):
        graph.read(model.SerializeToString(), Arithmetic())
    assert time.monotonic() - begin < 5


def test_numbers_near_constants_against_rationals():
    random = np.random.default_rng(0)
    a, b, c = (random.normal(size=200) * 10.0 ** random.integers(-20, 20, 200) for _ in range(3))
    found = (constants.balls(a) + constants.balls(b)) * constants.balls(c) / constants.balls(a)
    numbers, loose = constants.near(constants.settled(found))
    assert 0 < loose <= 2
    for x, y, z, number in zip(a, b, c, numbers, strict=True):
        x, y, z = (Fraction(float(v)) for v in (x, y, z))
        off = abs((x + y) * z / x - Fraction(float(number)))
        assert off <= loose * Fraction(EPS) * abs(Fraction(float(number)))
    # What is exact is a number.
    whole = constants.settled(constants.balls(np.array([0.5, 3.0])) * arb(0.25))
    assert whole.dtype == np.float64
    assert whole.tolist() == [0.125, 0.75]


# -- activations that are spelt out ----------------------------------------------------------------


def _erf(x):
    return _ball(x).erf()


def _sigmoid(x):
    return 1 / (1 + (-_ball(x)).exp())


def _hard(x, alpha, beta=Fraction(1, 2)):
    return max(min(alpha * x + beta, Fraction(1)), Fraction(0))


def test_gelu_with_the_numbers_that_are_stored():
    # Once anything within 1e-6 of 1 / sqrt(2) was taken for it.
    for number in (0.7071073, np.sqrt(0.5), 0.6, -0.5):

        def build(m, x, number=number):
            inner = m.node("Erf", m.node("Mul", x, m.constant(number)))
            gate = m.node("Mul", x, m.node("Add", inner, m.constant(1.0)))
            return m.node("Mul", gate, m.constant(1e6))

        c = _single(number)
        _encloses(build, (1,), POINTS, lambda x, c=c: _ball(x * 10**6) * (1 + _erf(c * x)))


def test_silu_with_the_numbers_that_are_stored():
    for number in (1.0000008, 1.702, -0.3):

        def build(m, x, number=number):
            return m.node("Mul", m.node("Sigmoid", m.node("Mul", x, m.constant(number))), x)

        c = _single(number)
        _encloses(build, (1,), POINTS, lambda x, c=c: _ball(x) * _sigmoid(c * x))


def test_hard_swish_with_the_numbers_that_are_stored():
    for number in (0.16666682, 1 / 6, 0.2):

        def build(m, x, number=number):
            gate = m.node("Mul", x, m.node("HardSigmoid", x, alpha=number, beta=0.5))
            return m.node("Mul", gate, m.constant(1e6))

        c = _single(number)
        _encloses(build, (1,), [*POINTS, 3.5, -3.5], lambda x, c=c: 10**6 * x * _hard(x, c))

    def clipped(m, x):
        gate = m.node("Clip", m.node("Add", x, m.constant(3.0)), m.constant(0.0), m.constant(6.0))
        return m.node("Mul", x, m.node("Mul", gate, m.constant(1 / 6)))

    six = _single(1 / 6)
    _encloses(clipped, (1,), [*POINTS, 3.5], lambda x: x * max(min(x + 3, 6), 0) * six)


def test_gelu_by_tanh_with_the_numbers_that_are_stored():
    a, c = _single(np.sqrt(2 / np.pi)), _single(0.044715)

    def build(m, x):
        cube = m.node("Mul", m.node("Pow", x, m.constant(3.0)), m.constant(0.044715))
        inner = m.node("Mul", m.node("Add", x, cube), m.constant(np.sqrt(2 / np.pi)))
        gate = m.node("Add", m.node("Tanh", inner), m.constant(1.0))
        return m.node("Mul", m.node("Mul", x, gate), m.constant(0.5))

    def truth(x):
        return _ball(x / 2) * (1 + _ball(a * (x + c * x**3)).tanh())

    _encloses(build, (1,), POINTS, truth)


def test_lines_around_activations_that_are_spelt_out():
    def build(m, x):  # silu of 0.3 x + 0.1, times -7
        y = m.node("Add", m.node("Mul", x, m.constant(0.3)), m.constant(0.1))
        return m.node("Mul", m.node("Sigmoid", y), m.node("Mul", y, m.constant(-7.0)))

    def truth(x):
        y = _single(0.3) * x + _single(0.1)
        return -7 * _ball(y) * _sigmoid(y)

    _encloses(build, (1,), POINTS, truth)


def test_an_activation_that_is_spelt_out_is_one():
    make = models.Maker()
    inner = make.node("Div", "x", make.constant(np.sqrt(2)))
    gate = make.node("Add", make.node("Erf", inner), make.constant(1.0))
    y = make.node("Mul", make.node("Mul", "x", gate), make.constant(0.5))
    program = graph.read(make.model([("x", (1, 4))], [(y, None)]).SerializeToString(), Arithmetic())
    assert models.kinds_of(program) == ["gelu"]
    # Its argument is k x with k near 1, on which the slopes of certificates depend.
    (k,) = program.activations
    (argument,) = program.nodes[k].arguments
    scale: Any = program.nodes[argument].operation
    assert abs(float(scale.weights) - 1) < 1e-7
    assert scale.loose


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda m, x: m.node("MatMul", x, x), "multiplies shapes"),
        (lambda m, x: m.node("Gemm", x, x), "multiplies shapes"),
        (lambda m, x: m.node("Pow", m.constant(-2.0), x), "needs a base that is positive"),
        (lambda m, x: m.node("Pow", x, m.constant(1.5)), "has the exponent 1.5"),
        (lambda m, x: m.node("Pow", x, m.constant([1.0, 2.0, 1.0, 2.0])), "needs one exponent"),
        (lambda m, x: m.node("Resize", x, "", m.constant([1.0, 1.5])), "whole factors"),
        (lambda m, x: m.node("Resize", x, "", m.constant([1.0, 2.0]), mode="cubic"), "nearest"),
        (lambda m, x: m.node("Reshape", x, m.node("Cast", x, to=7)), "Cast"),
        (lambda m, x: m.node("Conv", x, m.weights(1, 1, 3)), "has weights of shape"),
        (lambda m, x: m.node("MaxPool", x, kernel_shape=[2]), "has a window"),
        (lambda m, x: m.node("Concat", x, m.constant([1]), axis=0), "floating-point"),
        (lambda m, x: m.node("Gather", x, m.constant(0.5)), "impossible indices"),
        (lambda m, x: m.node("Split", x, outputs=2, num_outputs=0), "has 0 outputs"),
        (lambda m, x: m.node("Unknown", x), "is not supported"),
        (lambda m, x: m.node("Clip", x, m.constant([0.0, 1.0])), "one number"),
    ],
)
def test_reasons_are_given_in_words(build, text):
    make = models.Maker()
    made = build(make, "x")
    made = made if isinstance(made, str) else made[0]
    with pytest.raises(Refused, match=text) as caught:
        graph.read(make.model([("x", (1, 4))], [(made, None)]).SerializeToString(), Arithmetic())
    assert "NoneType" not in str(caught.value)


# -- types and opsets ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16"])
def test_numbers_are_those_that_are_stored(kind):
    element = TensorProto.DataType.Value(kind)
    weights = h.make_tensor("w", element, [2, 1], [0.1, -0.7])
    stored = [Fraction(float(v)) for v in numpy_helper.to_array(weights).astype(np.float64).flat]
    node = h.make_node("MatMul", ["x", "w"], ["y"])
    info = [h.make_tensor_value_info(n, element, s) for n, s in (("x", [1, 2]), ("y", [1, 1]))]
    made = h.make_graph([node], "g", info[:1], info[1:], [weights])
    model = h.make_model(made, opset_imports=[h.make_opsetid("", 21)])
    (low,), (high,) = _interval(model, [1.0, 0.5], exact=True)
    assert low == high == stored[0] + stored[1] / 2
    assert (kind == "DOUBLE") == (stored[0] == Fraction(0.1))


def test_bounds_of_clips_beyond_single_precision_are_bounds():
    # Once they were left out: 1e39 is a number of double precision.
    nodes = [h.make_node("Clip", ["x", "", "c"], ["y"])]
    c = numpy_helper.from_array(np.array(1e39), "c")
    info = [h.make_tensor_value_info(n, TensorProto.DOUBLE, [1]) for n in "xy"]
    model = h.make_model(h.make_graph(nodes, "g", info[:1], info[1:], [c]))
    model.opset_import[0].version = 20
    program = graph.read(model.SerializeToString(), Arithmetic())
    assert models.kinds_of(program) == ["clip"]


def test_all_opsets_from_7_on():
    for opset in range(5, 31):
        make = models.Maker(opset=opset)
        y = make.node("Relu", make.node("Gemm", "x", make.weights(2, 2), make.weights(2)))
        data = make.model([("x", (1, 2))], [(y, None)]).SerializeToString()
        if opset in range(7, 29):
            assert len(graph.read(data, Arithmetic()).activations) == 1
        else:
            with pytest.raises(Refused, match="opset"):
                graph.read(data, Arithmetic())


def test_inputs_without_a_shape_are_refused():
    model = models.mlp()
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(Refused, match="no shape"):
        graph.read(model.SerializeToString(), Arithmetic())


# -- local functions -------------------------------------------------------------------------------


def _function(name, inputs, outputs, nodes, attributes=(), defaults=(), opset=20):
    return h.make_function(
        "local", name, inputs, outputs, nodes,
        [h.make_opsetid("", opset), h.make_opsetid("local", 1)],
        attributes=list(attributes), attribute_protos=list(defaults),
    )  # fmt: skip


def _with_functions(nodes, functions, output="y"):
    info = [h.make_tensor_value_info(n, TensorProto.FLOAT, [1, 3]) for n in ("x", output)]
    opsets = [h.make_opsetid("", 20), h.make_opsetid("local", 1)]
    made = h.make_graph(nodes, "g", info[:1], info[1:])
    return h.make_model(made, opset_imports=opsets, functions=functions, ir_version=10)


def _reference(op, to, **more):
    node = h.make_node(op, **more)
    for attribute, name in to.items():
        item = node.attribute.add()
        item.name, item.ref_attr_name, item.type = attribute, name, onnx.AttributeProto.FLOAT
    return node


def test_local_functions_against_a_runtime():
    leaky = _function(
        "Leaky", ["a"], ["b"],
        [_reference("LeakyRelu", {"alpha": "slope"}, inputs=["a"], outputs=["t"]),
         h.make_node("Neg", ["t"], ["b"])],
        defaults=[h.make_attribute("slope", 0.25)],
    )  # fmt: skip
    # The same inner names as in the graph and in the other function; a call inside a call.
    twice = _function(
        "Twice", ["x", "b"], ["y", "t"],
        [h.make_node("Leaky", ["x"], ["u"], domain="local", slope=0.5),
         h.make_node("Leaky", ["u"], ["t"], domain="local"),
         h.make_node("Clip", ["t", "b"], ["y"])],
    )  # fmt: skip
    nodes = [
        h.make_node("Neg", ["x"], ["t"]),
        h.make_node("Twice", ["t"], ["u", "b"], domain="local"),
        h.make_node("Twice", ["u"], ["v", "w"], domain="local"),
        h.make_node("Sum", ["v", "b", "t"], ["y"]),
    ]
    model = _with_functions(nodes, [leaky, twice])
    onnx.checker.check_model(model)
    points = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    wanted = models.run(model, points)
    for point, values in zip(points, wanted, strict=True):
        low, high = _interval(model, point, exact=False)
        for l, u, value in zip(low, high, values, strict=True):
            assert abs(float(l) - value) < 1e-6
            assert abs(float(u) - value) < 1e-6


def _calls(name, count=2):
    """Nodes that call a function several times in a row."""
    names = ["a", *(f"t{k}" for k in range(count - 1)), "b"]
    return [h.make_node(name, [names[k]], [names[k + 1]], domain="local") for k in range(count)]


def test_functions_in_functions_are_counted_before_they_are_written_out():
    # 25 functions that call each other twice stand for 2**25 nodes.
    functions = [_function("F0", ["a"], ["b"], [h.make_node("Relu", ["a"], ["b"])])]
    functions += [_function(f"F{k}", ["a"], ["b"], _calls(f"F{k - 1}")) for k in range(1, 26)]
    model = _with_functions([h.make_node("F25", ["x"], ["y"], domain="local")], functions)
    begin = time.monotonic()
    with pytest.raises(Refused, match="more than 100000 nodes"):
        graph.read(model.SerializeToString(), Arithmetic())
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize(
    ("functions", "text"),
    [
        ([_function("F", ["a"], ["b"], _calls("F", 1))], "call themselves"),
        ([_function("F", ["a"], ["b"], _calls("G", 1)), _function("G", ["a"], ["b"], _calls("F"))],
         "call themselves"),
        ([_function("F", ["a"], ["b"], [h.make_node("Relu", ["x"], ["b"])])], "reads 'x'"),
        ([_function("F", ["a"], ["b"], [h.make_node("Relu", ["a"], ["a"])])], "makes 'a' twice"),
        ([_function("F", ["a"], ["b"], [h.make_node("Relu", ["a"], ["c"])])], "all of its outputs"),
        ([_function("F", ["a"], ["b"], [h.make_node("Relu", ["a"], ["b"])], opset=13)],
         "another opset"),
        ([_function("F", ["a"], ["b"], [h.make_node("Relu", ["a"], ["b"])])] * 2, "defined twice"),
        ([_function("F", [], ["b"], [h.make_node("Relu", ["a"], ["b"])])], "too many inputs"),
    ],
)  # fmt: skip
def test_odd_functions_are_refused(functions, text):
    model = _with_functions([h.make_node("F", ["x"], ["y"], domain="local")], functions)
    with pytest.raises(Refused, match=text):
        graph.read(model.SerializeToString(), Arithmetic())


def test_a_function_does_not_replace_a_standard_operator():
    relu = _function("Relu", ["a"], ["b"], [h.make_node("Neg", ["a"], ["b"])])
    relu.domain = ""
    model = _with_functions([h.make_node("Relu", ["x"], ["y"])], [relu])
    with pytest.raises(Refused, match="standard"):
        graph.read(model.SerializeToString(), Arithmetic())


# -- weights in other files ------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path):
    """A model whose weights are in a file beside it, and the same model in one piece."""
    model = models.mlp(sizes=(3, 40, 2))
    apart = onnx.ModelProto()
    apart.CopyFrom(model)
    path = tmp_path / "model.onnx"
    onnx.save_model(
        apart, path, save_as_external_data=True, location="model.onnx.data", size_threshold=0
    )
    return model, path


def test_weights_in_another_file_are_read(split):
    model, path = split
    found = external.model_contents(path)
    assert list(found.files) == ["model.onnx.data"]
    # The files one after the other, but not only that: no bytes can move from one to the other.
    weights = path.with_name("model.onnx.data").read_bytes()
    both = b"%s\0model.onnx.data\0%d\0%s" % (path.read_bytes(), len(weights), weights)
    assert found.digest == external.Model(both).digest
    moved = external.Model(found.data + weights[:1], {"model.onnx.data": weights[1:]})
    assert found.digest != moved.digest
    assert found.digest != external.Model(found.data).digest
    apart = graph.read(found.data, Arithmetic(), found.files)
    whole = graph.read(model.SerializeToString(), Arithmetic())
    at = np.array([[0.1, -0.7, 0.4]])
    for one, other in zip(
        *(Facts(Arithmetic(), program, at, at + 1).derive().low for program in (apart, whole)),
        strict=True,
    ):
        assert np.array_equal(one, other)
    with pytest.raises(Refused, match="is missing"):
        graph.read(found.data, Arithmetic())


def test_a_certificate_is_bound_to_the_weights(split, tmp_path):
    model, path = split
    whole, text, proof = (tmp_path / name for name in ("whole.onnx", "p.vnnlib", "p.cert"))
    whole.write_bytes(model.SerializeToString())
    text.write_text(models.vnnlib([0, 0, 0], [0.1, 0.1, 0.1], 2, "(assert (>= Y_0 100.0))"))
    proof.write_bytes(certificates.packed(models.proof_of(whole, text)))
    header, arrays = models.read(proof)
    # Models in one piece keep their plain digest.
    assert header["model_sha256"] == external.model_contents(whole).digest
    assert not check(path, text, proof).accepted
    models.write(proof, header | {"model_sha256": external.model_contents(path).digest}, arrays)
    assert check(path, text, proof).accepted
    weights = path.with_name("model.onnx.data")
    changed = bytearray(weights.read_bytes())
    changed[5] ^= 1
    weights.write_bytes(bytes(changed))
    assert check(path, text, proof).reasons == ("the certificate is for another model",)
    weights.unlink()
    with pytest.raises(ProblemError, match="is missing"):
        check(path, text, proof)


def _changed(path, **entries):
    """Changes where the first tensor is."""
    model = onnx.load_model(path, load_external_data=False)
    tensor = model.graph.initializer[0]
    found = {e.key: e.value for e in tensor.external_data} | entries
    del tensor.external_data[:]
    for key, value in found.items():
        if value is not None:
            tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("location", ["../secret", "/etc/passwd", "sub/../../secret", "link", "",
                                      "sub/link/secret", "a\\b", "."])  # fmt: skip
def test_files_outside_of_the_folder_are_not_read(tmp_path, location):
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret").write_bytes(bytes(10_000))
    for name in ("model.onnx", "model.onnx.data"):
        (inner / name).write_bytes((tmp_path / name).read_bytes())
    (inner / "link").symlink_to(tmp_path / "secret")
    (inner / "sub").mkdir()
    (inner / "sub" / "link").symlink_to(tmp_path)
    _changed(inner / "model.onnx", location=location)
    with pytest.raises(ProblemError, match=r"own folder|is missing"):
        external.model_contents(inner / "model.onnx")


@pytest.mark.parametrize(
    "entries",
    [
        {"offset": "1000000"}, {"offset": "-4"}, {"length": "4"}, {"length": "x"},
        {"length": "99999999999999999999999"}, {"offset": "\u0661"}, {"other": "1"},
    ],
)  # fmt: skip
def test_places_that_do_not_fit_are_refused(split, entries):
    _, path = split
    _changed(path, **entries)
    found = external.model_contents(path)
    with pytest.raises(Refused, match="stored in another file"):
        graph.read(found.data, Arithmetic(), found.files)


def test_offset_and_length_may_be_left_out(split):
    _, path = split
    _changed(path, offset=None, length=None)
    found = external.model_contents(path)
    assert graph.read(found.data, Arithmetic(), found.files).activations


def test_gzipped_models_keep_their_weights(split, tmp_path):
    model, path = split
    packed = tmp_path / "model.onnx.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ProblemError, match="gzipped"):
        external.model_contents(packed)
    packed.write_bytes(gzip.compress(model.SerializeToString()))
    assert external.model_contents(packed).data == model.SerializeToString()
