"""Networks from JAX functions against the functions themselves: every primitive, every activation,
layers of Equinox, refusals."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from stagecert import networks
from stagecert.errors import ProblemError
from stagecert.networks import operations as op
from stagecert.networks.importers.jax.functions import from_jax, supported

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def users_setting():
    """Functions are users', who may leave promotion to JAX."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def numbers(*shape, seed=0, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def agree(function, *shapes, dtype: Any = np.float32, size=2.0):
    """Checks a network against its function at random points; returns the network."""
    with jax.enable_x64(dtype == np.float64):
        points = tuple(size * numbers(5, *s, seed=k, dtype=dtype) for k, s in enumerate(shapes))
        structs = tuple(jax.ShapeDtypeStruct(s, dtype) for s in shapes)
        net = from_jax(function, structs[0] if len(shapes) == 1 else structs)

        def flat(*point):
            return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(function(*point))])

        wanted = np.asarray(jax.jit(jax.vmap(flat))(*points))
        found = np.asarray(net(points))
        assert found.shape == wanted.shape
        tolerance = 1e-5 if dtype == np.float32 else 1e-12
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
    assert net.hidden_axis == (False,) * len(shapes)
    assert net.input_shape == (shapes[0] if len(shapes) == 1 else shapes)
    return net


def kinds(net):
    """Activations, maxima and products of a network."""
    return [
        node.operation.kind if isinstance(node.operation, op.Activation) else node.operation.label
        for node in net.nodes
        if isinstance(node.operation, (op.Activation, op.Joint))
    ]


def settings(net):
    (node,) = (n for n in net.nodes if isinstance(n.operation, op.Activation))
    return dict(node.operation.settings)


# -- affine functions ------------------------------------------------------------------------------

W = numbers(4, 3)
T = numbers(2, 3, 4, seed=1)
MASK = np.array([[True, False, True], [False, False, True]])

AFFINE = {
    "add": (lambda x: x + W[0], (3,)),
    "add wider": (lambda x: x + W, (3,)),
    "add zero": (lambda x: x + 0.0, (3,)),
    "sub": (lambda x: x - W[0], (3,)),
    "sub from": (lambda x: W[0] - x, (3,)),
    "sum of two": (lambda x: x + 2 * x[::-1], (3,)),
    "difference of two": (lambda x: x[:2] - x[1:], (3,)),
    "neg": (lambda x: -x, (3,)),
    "mul": (lambda x: W * x, (4, 3)),
    "mul wider": (lambda x: x * W, ()),
    "div": (lambda x: x / jnp.sqrt(jnp.abs(jnp.asarray(W, x.dtype))), (4, 3)),
    "mean": (lambda x: jnp.mean(x, axis=0), (4, 3)),
    "sum": (jnp.sum, (4, 3)),
    "sum of no axes": (lambda x: lax.reduce_sum(x, ()), (4, 3)),
    "matvec": (lambda x: W @ x, (3,)),
    "vecmat": (lambda x: x @ W, (4,)),
    "matmul": (lambda x: x @ W, (2, 5, 4)),
    "matmul left": (lambda x: W @ x, (2, 3, 5)),
    "dot": (lambda x: jnp.vdot(W[0], x), (3,)),
    "outer": (lambda x: jnp.outer(W[0], x), (2,)),
    "einsum": (lambda x: jnp.einsum("abc,cbd->adb", T, x), (4, 3, 2)),
    "einsum batched": (lambda x: jnp.einsum("abc,dab->bdc", T, x), (5, 2, 3)),
    "einsum batched left": (
        lambda x: jnp.einsum("abc,bca->ab", x, T.transpose(1, 2, 0)),
        (2, 3, 4),
    ),
    "tensordot": (lambda x: jnp.tensordot(x, T, axes=((2, 0), (1, 2))), (4, 2, 3)),
    "reshape": (lambda x: x.reshape(6, 2), (4, 3)),
    "transpose": (lambda x: x.transpose(2, 0, 1), (2, 3, 4)),
    "broadcast": (lambda x: jnp.broadcast_to(x, (2, 4, 3)), (3,)),
    "broadcast in dim": (lambda x: lax.broadcast_in_dim(x, (3, 2), (0,)), (3,)),
    "squeeze": (lambda x: jnp.squeeze(x, 1), (4, 1, 3)),
    "expand_dims": (lambda x: jnp.expand_dims(x, (0, 2)), (4,)),
    "slice": (lambda x: x[1:4:2, 1], (5, 3)),
    "flip": (lambda x: x[::-1, ::-1], (4, 3)),
    "gather": (lambda x: x[jnp.array([2, 0, 2])], (3, 2)),
    "gather pairs": (lambda x: x[jnp.array([2, 0]), jnp.array([1, 1])], (3, 2)),
    "take": (lambda x: jnp.take(x, 1, axis=1), (3, 2)),
    "take clipped": (lambda x: jnp.take(x, np.array([7, 0]), axis=0, mode="clip"), (3, 2)),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (2, 0), (2, 1)), (3, 2)),
    "dynamic_slice by index": (lambda x: x[jnp.asarray(1)], (3, 2)),
    "concatenate": (lambda x: jnp.concatenate([x, 2 * x[:1]]), (3, 2)),
    "concatenate constant": (lambda x: jnp.concatenate([W[:1, :2], x, W[1:, :2]]), (3, 2)),
    "stack": (lambda x: jnp.stack([x, -x], axis=1), (3, 2)),
    "stack constant": (lambda x: jnp.stack([x, W[0]]), (3,)),
    "pad": (lambda x: jnp.pad(x, ((1, 0), (0, 2))), (3, 2)),
    "pad by a constant": (lambda x: jnp.pad(x, 1, constant_values=3.5), (3, 2)),
    "pad edge": (lambda x: jnp.pad(x, 1, mode="edge"), (3, 2)),
    "pad inside": (lambda x: lax.pad(x, 0.0, ((1, 2, 2), (-1, 0, 1))), (3, 3)),
    "pad cutting": (lambda x: lax.pad(x, 0.0, ((-1, -1, 0),)), (4,)),
    "pad by a variable": (lambda x: lax.pad(W[0], x[0], ((1, 1, 0),)), (2,)),
    "roll": (lambda x: jnp.roll(x, 1), (4,)),
    "repeat": (lambda x: jnp.repeat(x, 2), (4,)),
    "tile": (lambda x: jnp.tile(x, (2, 1)), (4, 2)),
    "split": (lambda x: jnp.split(x, [1, 3])[1], (4, 2)),
    "diff": (jnp.diff, (5,)),
    "where": (lambda x: jnp.where(MASK, x, 2.0), (2, 3)),
    "where of two": (lambda x: jnp.where(MASK, x, x[::-1]), (2, 3)),
    "cumsum": (lambda x: jnp.cumsum(x, axis=1), (2, 4)),
    "cumsum reversed": (lambda x: lax.cumsum(x, axis=0, reverse=True), (3, 2)),
    "set": (lambda x: x.at[1].set(7.0), (3, 2)),
    "set variable": (lambda x: jnp.zeros((4, 2)).at[np.array([3, 0])].set(x), (2, 2)),
    "update slice": (lambda x: lax.dynamic_update_slice(x, x[:1] * 3, (1, 0)), (3, 2)),
    "cast": (lambda x: x.astype(jnp.float16).astype(x.dtype) * 0 + x, (3,)),
    "stop_gradient": (lambda x: lax.stop_gradient(x) + jnp.copy(x), (3,)),
    "power of one": (lambda x: lax.integer_pow(x, 1), (3,)),
    "window sum": (
        lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 3), (2, 1), ((1, 0), (0, 2))),
        (4, 3),
    ),
    "window sum spread": (
        lambda x: lax.reduce_window(
            x, 0.0, lax.add, (2,), (1,), ((0, 0),), base_dilation=(2,), window_dilation=(2,)
        ),
        (4,),
    ),
    "triangle": (lambda x: jnp.tril(x), (3, 3)),
    "empty": (lambda x: jnp.concatenate([x[:0], x]), (3,)),
    "constant condition": (lambda x: lax.cond(True, lambda x: 2 * x, lambda x: x, x), (3,)),
    "constant loop": (lambda x: x * lax.fori_loop(0, 3, lambda k, s: 2.0 * s, 1.0), (3,)),
    "constant scan": (
        lambda x: x * lax.scan(lambda s, w: (s + w / 3, s * w), jnp.zeros(3), W, reverse=True)[1],
        (4, 3),
    ),
    "remat": (jax.checkpoint(lambda x: W @ x), (3,)),
    "jit": (jax.jit(lambda x: jax.jit(lambda y: 2 * y)(x) + 1), (3,)),
    "vmap": (jax.vmap(lambda x: W @ x), (2, 3)),
    "derivative": (jax.grad(lambda x: jnp.sum((W @ x) ** 2)), (3,)),
}


@pytest.mark.parametrize("name", AFFINE)
def test_affine(name):
    function, shape = AFFINE[name]
    assert kinds(agree(function, shape)) == []


@pytest.mark.parametrize("name", ["div", "matvec", "einsum batched", "cumsum", "where"])
def test_affine_in_float64(name):
    function, shape = AFFINE[name]
    with jax.enable_x64(True):
        agree(function, shape, dtype=np.float64)


CONV = {
    "plain": {},
    "same": dict(padding="SAME", window_strides=(2, 2)),
    "dilated": dict(padding=((2, 1), (0, 2)), rhs_dilation=(2, 1)),
    "transposed": dict(padding=((1, 1), (2, 1)), lhs_dilation=(2, 3)),
    "cutting": dict(padding=((-1, 0), (1, -2))),
    "cutting transposed": dict(padding=((-1, 0), (1, -2)), lhs_dilation=(2, 2)),
    "wide": dict(padding=((4, 0), (5, 3)), window_strides=(2, 1)),
    "channels last": dict(dimension_numbers=("NHWC", "HWIO", "NHWC")),
    "mixed": dict(dimension_numbers=("CNHW", "IOHW", "HWNC"), window_strides=(1, 2)),
    "grouped": dict(feature_group_count=2),
}


@pytest.mark.parametrize("name", CONV)
def test_convolutions(name):
    options = {"window_strides": (1, 1), "padding": "VALID", **CONV[name]}
    x_shape, w_shape = (1, 4, 7, 8), (6, 4 // options.get("feature_group_count", 1), 3, 2)
    lhs, rhs, _ = options.get("dimension_numbers", ("NCHW", "OIHW", "NCHW"))
    weights = numbers(*w_shape).transpose(["OIHW".index(c) for c in rhs])
    shape = tuple(x_shape["NCHW".index(c)] for c in lhs)
    net = agree(lambda x: lax.conv_general_dilated(x, weights, **options), shape)
    for node in net.nodes:
        if isinstance(node.operation, op.Conv):
            assert min(min(pad) for pad in node.operation.padding) >= 0


def test_convolution_without_space_in_float64():
    weights = numbers(6, 4, 3, dtype=np.float64)
    agree(lambda x: lax.conv_general_dilated(x, weights, (2,), "SAME"), (1, 4, 9), dtype=np.float64)


# -- activations -----------------------------------------------------------------------------------

SLOPES = np.array([0.1, -0.2, 0.3], np.float32)

ACTIVATIONS = {
    "relu": ("relu", jax.nn.relu),
    "maximum": ("relu", lambda x: jnp.maximum(0, x)),
    "where": ("relu", lambda x: jnp.where(x > 0, x, 0)),
    "masked": ("relu", lambda x: x * (x > 0)),
    "relu6": ("clip", jax.nn.relu6),
    "clip": ("clip", lambda x: jnp.clip(x, -1, 0.5)),
    "clip below": ("clip", lambda x: jnp.clip(x, -1)),
    "clip above": ("clip", lambda x: jnp.minimum(x, 0.25)),
    "clamp": ("clip", lambda x: lax.clamp(-0.5, x, 1.5)),
    "hard_tanh": ("clip", jax.nn.hard_tanh),
    "bounds": ("relu", lambda x: jnp.maximum(x, SLOPES)),
    "bounds above": ("relu", lambda x: jnp.minimum(x, SLOPES)),
    "leaky_relu": ("leaky_relu", jax.nn.leaky_relu),
    "leaky_relu 0.3": ("leaky_relu", lambda x: jax.nn.leaky_relu(x, 0.3)),
    "leaky maximum": ("leaky_relu", lambda x: jnp.maximum(0.2 * x, x)),
    "prelu": ("prelu", lambda x: jnp.where(x >= 0, x, SLOPES * x)),
    "elu": ("elu", jax.nn.elu),
    "elu 0.4": ("elu", lambda x: jax.nn.elu(x, 0.4)),
    "elu by hand": ("elu", lambda x: jnp.where(x > 0, x, jnp.exp(x) - 1)),
    "selu": ("selu", jax.nn.selu),
    "celu": ("celu", jax.nn.celu),
    "celu 0.6": ("celu", lambda x: jax.nn.celu(x, 0.6)),
    "softplus": ("softplus", jax.nn.softplus),
    "softplus by hand": ("softplus", lambda x: jnp.log(1 + jnp.exp(x))),
    "log_sigmoid": ("softplus", jax.nn.log_sigmoid),
    "sigmoid": ("sigmoid", jax.nn.sigmoid),
    "sigmoid by hand": ("sigmoid", lambda x: 1 / (1 + jnp.exp(-x))),
    "tanh": ("tanh", jnp.tanh),
    "hard_sigmoid": ("clip", jax.nn.hard_sigmoid),
    "hard_swish": ("hard_swish", jax.nn.hard_swish),
    "gelu": ("gelu", lambda x: jax.nn.gelu(x, approximate=False)),
    "gelu by hand": ("gelu", lambda x: 0.5 * x * (1 + lax.erf(x / np.sqrt(2).astype(x.dtype)))),
    "gelu tanh": ("gelu_tanh", jax.nn.gelu),
    "silu": ("silu", jax.nn.silu),
    "silu by hand": ("silu", lambda x: jax.nn.sigmoid(x) * x),
    "mish": ("mish", jax.nn.mish),
    "soft_sign": ("softsign", jax.nn.soft_sign),
    "abs": ("abs", jnp.abs),
    "exp": ("exp", jnp.exp),
    "square": ("square", jnp.square),
    "power": ("square", lambda x: x**2),
    "power 2.0": ("square", lambda x: x**2.0),
    "product": ("square", lambda x: x * x),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name, dtype):
    kind, function = ACTIVATIONS[name]
    # Behind a layer, so that the argument is no input.
    weights = numbers(4, 3).astype(dtype)
    net = agree(lambda x: function(x @ weights * 2), (4,), dtype=dtype)
    assert kinds(net) == [kind]


def test_settings_are_read():
    assert settings(agree(lambda x: jax.nn.leaky_relu(x, 0.25), (3,))) == {"alpha": 0.25}
    assert settings(agree(lambda x: jax.nn.celu(x, 0.5), (3,))) == {"alpha": 0.5}
    assert settings(agree(lambda x: jnp.clip(x, -2, 0.5), (3,))) == {"low": -2, "high": 0.5}


def test_a_name_does_not_make_an_activation():
    @jax.jit
    def silu(x):
        return x * jax.nn.sigmoid(2 * x)

    assert "silu" not in kinds(from_jax(silu, np.zeros(3)))

    def gelu(x):  # the usual one has another number
        return 0.5 * x * (1.1 + lax.erf(x / 1.5))

    assert "gelu" not in kinds(from_jax(gelu, np.zeros(3)))


def test_leaky_maxima_that_are_steep():
    assert kinds(agree(lambda x: jnp.maximum(x, 2 * x), (3,))) == ["max"]


def test_registered_functions():
    networks.register("test_from_jax_sine", lambda x: x + 0.5 * jnp.tanh(3 * x), inflections=(0.0,))
    weights = numbers(4, 3)

    @jax.jit
    def function(x):
        return x + 0.5 * jnp.tanh(3 * x)

    assert kinds(agree(lambda x: function(x @ weights), (4,))) == ["test_from_jax_sine"]
    assert kinds(agree(lambda x: x + 0.6 * jnp.tanh(3 * x), (4,))) == ["tanh"]


@pytest.mark.parametrize(
    "written",
    [
        lambda x: jnp.sqrt(1 + x * x),
        lambda x: jnp.sqrt(1 + x**2),
        lambda x: (jnp.square(x) + 1.0) ** 0.5,
        lambda x: jnp.sqrt(x * x + 0.5 + 0.5),
    ],
)
def test_registered_functions_are_found_however_they_are_written(written):
    networks.register("test_from_jax_hyperbola", lambda x: jnp.sqrt(1 + x**2), replace=True)
    weights = numbers(4, 3)
    network = agree(lambda x: written(x @ weights + jnp.arange(3.0)), (4,))
    assert kinds(network) == ["test_from_jax_hyperbola"]


def test_formulas_of_other_functions_are_others():
    networks.register("test_from_jax_hyperbola", lambda x: jnp.sqrt(1 + x**2), replace=True)
    for other in (
        lambda x: jnp.sqrt(1 + 1.5 * x**2),
        lambda x: jnp.sqrt(2 + x**2),
        lambda x: jnp.sqrt(1 + jnp.sqrt(x) ** 4),  # no x**2 where x is negative
        lambda x: jnp.sqrt(1 + x**2 + 0 * jnp.log(x)),  # not a number below zero
        lambda x: jnp.sqrt(1 + x**2 + jnp.log(x) - jnp.log(x)),
        lambda x: jnp.sqrt(1 + x[0] * x),
    ):
        try:
            network = networks.from_jax(other, np.ones(3, np.float32))
        except ProblemError:
            continue
        # Read as something else, if at all.
        assert "test_from_jax_hyperbola" not in kinds(network)


def test_maxima():
    assert kinds(agree(lambda x, y: jnp.maximum(x, y), (3,), (2, 3))) == ["max"]
    assert kinds(agree(lambda x, y: jnp.minimum(x, y), (2, 3), (2, 1))) == ["max"]
    assert kinds(agree(lambda x: jnp.max(x, axis=(0, 2)), (2, 3, 4))) == ["max"]
    assert kinds(agree(jnp.min, (2, 3))) == ["max"]
    assert kinds(agree(lambda x: jnp.max(x, axis=1), (2, 1))) == []


@pytest.mark.parametrize("extreme", [lax.max, lax.min])
def test_window_maxima(extreme):
    start = -np.inf if extreme is lax.max else np.inf

    def function(x):
        padding, dilation = ((0, 0), (1, 1), (0, 2)), (1, 2, 1)
        return lax.reduce_window(
            x, start, extreme, (1, 2, 3), (1, 2, 1), padding, window_dilation=dilation
        )

    assert kinds(agree(function, (2, 6, 5))) == ["max"]


# -- whole networks --------------------------------------------------------------------------------


@pytest.fixture
def _float32():
    """Layers made in a test have float32 weights."""
    with jax.enable_x64(False):
        yield


@pytest.mark.usefixtures("_float32")
def test_mlp():
    net = agree(eqx.nn.MLP(4, 3, 8, 2, jax.nn.gelu, key=KEY), (4,))
    assert kinds(net) == ["gelu_tanh", "gelu_tanh"]


class Net(eqx.Module):
    first: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    state: eqx.nn.State
    second: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    slopes: eqx.nn.PReLU
    last: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.first = eqx.nn.Conv2d(2, 4, 3, padding=1, key=keys[0])
        self.norm, self.state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="ema")
        self.second = eqx.nn.Conv2d(4, 4, 3, padding=1, groups=2, key=keys[1])
        self.up = eqx.nn.ConvTranspose2d(4, 2, 2, stride=2, key=keys[2])
        self.slopes = eqx.nn.PReLU(0.1)
        self.last = eqx.nn.Linear(32, 3, key=keys[3])

    def __call__(self, x):
        x, _ = self.norm(self.first(x), self.state)
        x = x + jax.nn.relu(self.second(self.slopes(x)))
        x = eqx.nn.MaxPool2d(2, 2)(x)
        x = eqx.nn.AvgPool2d(2, 1, padding=1)(x)
        x = eqx.nn.AdaptiveAvgPool2d(2)(self.up(x)[:, :4, :4])
        return self.last(jnp.tile(x.ravel(), 4))


@pytest.mark.usefixtures("_float32")
def test_cnn():
    net = agree(eqx.nn.inference_mode(Net(KEY)), (2, 8, 8))
    assert kinds(net) == ["leaky_relu", "relu", "max"]


@pytest.mark.usefixtures("_float32")
def test_sequential_and_dropout():
    model = eqx.nn.Sequential(
        [
            eqx.nn.Linear(4, 8, key=KEY),
            eqx.nn.Lambda(jax.nn.silu),
            eqx.nn.Dropout(0.5, inference=True),
            eqx.nn.Linear(8, 2, key=KEY),
        ]
    )
    agree(model, (4,))


def test_several_inputs_and_outputs():
    def function(x, y):
        return {"b": jax.nn.relu(x @ W.T), "a": (y + 1, jnp.float32(3) * jnp.ones(2))}

    net = agree(function, (3,), (2, 2))
    assert net.output_shapes == ((2, 2), (2,), (4,))


def test_short_floats():
    weights = jnp.asarray(W, jnp.bfloat16)
    net = from_jax(lambda x: jnp.maximum(weights @ x, 0), jnp.zeros(3, jnp.bfloat16))
    x = numbers(1, 3)
    wanted = np.maximum(x @ np.asarray(weights, np.float32).T, 0)
    np.testing.assert_allclose(net(x), wanted, rtol=1e-6)


def test_custom_derivatives():
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (double(x), None), lambda _, g: (g,))
    agree(lambda x: jax.nn.relu(double(x)), (3,))


def hold(function, net, low, high, methods):
    """Checks bounds on all outputs against samples."""
    share = np.random.default_rng(1).uniform(size=(1000, *low.shape)).astype(np.float32)
    values = np.asarray(jax.jit(jax.vmap(function))(low + share * (high - low)))
    for method in methods:
        found = networks.bound(net, low[None], high[None], method=method).bound[0]
        assert np.all(found <= values.reshape(1000, -1).min(0) + 1e-5)
    assert np.all(found > values.reshape(1000, -1).min(0) - 1)  # and they are worth having


def test_bounds_hold():
    weights, low = numbers(4, 3), numbers(3, seed=2)

    def function(x):
        y = jax.nn.relu(weights @ x)
        return jnp.stack([jnp.max(y), -jnp.cumsum(y)[2]])

    net = from_jax(function, np.zeros(3, np.float32))
    hold(function, net, low, low + np.float32(0.3), ["ibp", "backward"])


def test_bounds_by_search_hold():
    weights, low = numbers(1, 1, 2, 2), numbers(4, 4)

    def function(x):
        y = lax.conv_general_dilated(x[None, None], weights, (1, 1), ((-1, 2), (0, 0)))[0, 0]
        y = jax.nn.relu(y[np.array([1, 0, 1])].at[0].set(0.5))
        return jnp.where(np.eye(3, dtype=bool), y, 1.0)[:1] @ weights[0, 0, 0, [0, 1, 0]]

    net = from_jax(function, np.zeros((4, 4), np.float32))
    hold(function, net, low, low + np.float32(0.5), ["nonconvex"])


# -- products, waves, steps ------------------------------------------------------------------------


@pytest.mark.parametrize("function", [
    lambda x: x[0] * x[1] + jnp.sin(x[2]),
    lambda x: jnp.outer(x, jnp.cos(x)) @ x,
    lambda x: jnp.einsum("ij,ik->jk", jnp.outer(x, jnp.abs(x)), jnp.outer(x, x + 1)),
    lambda x: jax.nn.softmax(jnp.outer(x, x)) @ x,
    lambda x: x / (1.5 + x * x) + 2.0 / (1 + jnp.exp(x)),
    lambda x: jnp.log(jnp.sqrt(1 + jnp.abs(x))) + lax.rsqrt(2 + x * x),
    lambda x: jnp.floor(3 * x) + jnp.ceil(x) - jnp.round(5 * x) + jnp.sign(x),
    lambda x: x**3 - x**4 + (2 + jnp.abs(x)) ** -2.0 + lax.erf(x),
    lambda x: jnp.exp2(x) + jnp.expm1(2 * x) + jnp.prod(x),
    lambda x: jnp.prod(jnp.outer(x, 1 + x), axis=0),
    eqx.nn.LayerNorm(3),
])  # fmt: skip
def test_products_waves_and_steps(function):
    agree(function, (3,))


# -- refusals --------------------------------------------------------------------------------------

REFUSED = {
    "division by zero": (lambda x: x / jnp.zeros(3), ["div", "zeros"]),
    "power": (lambda x: x**20, ["integer_pow", "whole exponents"]),
    "tangent": (jnp.tan, ["tan", "register"]),
    "convolution": (lambda x: jnp.convolve(x, x), ["conv_general_dilated"]),
    "argmax": (lambda x: jnp.argmax(x).astype(float), ["argmax", "not continuous"]),
    "rounding": (lambda x: x.astype(int).astype(float), ["convert_element_type", "continuous"]),
    "condition": (lambda x: jnp.where(x > 1, x, 0), ["gt", "select_n", "condition"]),
    "branches": (lambda x: lax.cond(x[0] > 0, jnp.abs, jnp.exp, x), ["gt", "cond"]),
    "index": (lambda x: jnp.arange(3.0)[x[0].astype(int)], ["convert_element_type"]),
    "scan": (lambda x: lax.scan(lambda c, w: (w * c, None), x, W)[0], ["scan", "Python loop"]),
    "while": (lambda x: lax.fori_loop(0, 3, lambda k, x: W[:3] @ x, x), ["loop"]),
    "sort": (jnp.sort, ["sort", "several variables"]),
    "out of bounds": (lambda x: jnp.take(x, 5), ["gather", "out of bounds"]),
    "infinite": (lambda x: x + np.inf, ["add", "infinite"]),
    "infinite slopes": (lambda x: jnp.where(x > 0, x, np.inf * x), ["mul", "infinite"]),
    "infinite bounds": (lambda x: jnp.maximum(x, np.array([0, 1, np.nan])), ["max", "NaN"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, texts = REFUSED[name]
    with pytest.raises(ProblemError) as error:
        from_jax(function, np.zeros(3))
    for text in [*texts, "Supported primitives", "dot_general"]:
        assert text in str(error.value)


def _forward(x):
    y = jnp.arctan(x)  # marked
    return jnp.sort(jnp.arcsinh(W @ y))


def test_all_refusals_come_at_once_with_their_places():
    with pytest.raises(ProblemError) as error:
        from_jax(_forward, np.zeros(3))
    text = str(error.value)
    line = _forward.__code__.co_firstlineno + 1
    assert "3 equations" in text
    assert f"test_from_jax.py:{line}" in text
    for name in ("atan (", "asinh (", "sort ("):
        assert f"\n  {name}" in text


def test_what_no_output_needs_is_not_refused():
    agree(lambda x: (jnp.sin(x), 2 * x)[1], (3,))


def test_bad_examples():
    for example, text in [
        ((), "empty tuple"),
        (np.zeros(3, int), "floating-point"),
        (np.zeros((0, 2)), "empty"),
        ({"x": np.zeros(3)}, "must be an array"),
    ]:
        with pytest.raises(ProblemError, match=text):
            from_jax(lambda x: x, example)
    with pytest.raises(ProblemError, match=r"cannot trace[\s\S]*jnp\.where"):
        from_jax(lambda x: x if x[0] > 0 else -x, np.zeros(3))
    with pytest.raises(ProblemError, match=r"cannot trace[\s\S]*jnp\.exp for np\.exp"):
        from_jax(np.exp, np.zeros(3))
    with pytest.raises(ProblemError, match="cannot trace"):
        from_jax(lambda x: W @ x, np.zeros(4))
    with pytest.raises(ProblemError, match="no outputs"):
        from_jax(lambda x: (), np.zeros(4))
    with pytest.raises(ProblemError, match="does not depend"):
        from_jax(lambda x: jnp.arange(3), np.zeros(4))


def test_supported_names_primitives():
    assert {"dot_general", "max", "cond", "reduce_window_max", "copy"} <= set(supported())
