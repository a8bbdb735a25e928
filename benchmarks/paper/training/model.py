"""A network's values, its intervals, and its ONNX file."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax
from onnx import TensorProto, helper, numpy_helper

from benchmarks.paper.training.architectures import Layer, shapes
from stagecert.files import write_whole

ACTIVATIONS = {"relu": (jax.nn.relu, "Relu"), "softplus": (jax.nn.softplus, "Softplus")}
OPSET, IR_VERSION = 17, 8


def initialise(layers: tuple[Layer, ...], input_shape, key) -> list:
    """He's normal weights and zero biases: [(weight, bias), ...] in float32."""
    parameters = []
    keys = jax.random.split(key, len(layers))
    for layer, shape, layer_key in zip(layers, shapes(layers, input_shape), keys, strict=False):
        of_weight = layer.weight_shape(shape)
        scale = np.float32(np.sqrt(2 / np.prod(of_weight[1:])))
        weight = scale * jax.random.normal(layer_key, of_weight, jnp.float32)
        parameters.append((weight, jnp.zeros(layer.units, jnp.float32)))
    return parameters


def _affine(layer: Layer, weight, bias, x):
    if not layer.kernel:
        return x.reshape(len(x), -1) @ weight.T + bias
    x = lax.conv_general_dilated(x, weight, (layer.stride,) * 2, "VALID")
    return x + bias[:, None, None]


def logits(layers, activation: str, parameters, x):
    """The network's outputs for a batch of inputs in [0, 1]."""
    function, _ = ACTIVATIONS[activation]
    for place, (layer, (weight, bias)) in enumerate(zip(layers, parameters, strict=True)):
        x = _affine(layer, weight, bias, function(x) if place else x)
    return x


def worst_margins(layers, activation: str, parameters, lower, upper, labels):
    """Interval bounds: at most how far every class's logit is above the label's, (batch, classes).

    The last layer is bounded together with the difference of logits, as in the literature on
    training with intervals; bounding logits by themselves and subtracting would be looser.
    """
    function, _ = ACTIVATIONS[activation]
    for place, (layer, (weight, bias)) in enumerate(zip(layers[:-1], parameters, strict=False)):
        if place:
            lower, upper = function(lower), function(upper)
        middle = _affine(layer, weight, bias, (lower + upper) / 2)
        radius = _affine(layer, jnp.abs(weight), jnp.zeros_like(bias), (upper - lower) / 2)
        lower, upper = middle - radius, middle + radius
    if len(layers) > 1:
        lower, upper = function(lower), function(upper)
    weight, bias = parameters[-1]
    middle, radius = ((a.reshape(len(a), -1) / 2) for a in (lower + upper, upper - lower))
    rows = weight[None] - weight[labels][:, None]  # (batch, classes, units)
    return (
        jnp.einsum("bn,bkn->bk", middle, rows)
        + jnp.einsum("bn,bkn->bk", radius, jnp.abs(rows))
        + bias[None]
        - bias[labels][:, None]
    )


def save_onnx(path: Path, layers, activation: str, parameters, input_shape) -> None:
    """Writes the network with input `batch x channels x height x width` in [0, 1]."""
    nodes, arrays, now = [], [], "input"

    def then(kind: str, name: str, *more: str, **attributes) -> None:
        nonlocal now
        nodes.append(helper.make_node(kind, [now, *more], [name], name=name, **attributes))
        now = name

    flat = False
    for place, (layer, values) in enumerate(zip(layers, parameters, strict=True)):
        names = [f"weight{place}", f"bias{place}"]
        arrays += [
            numpy_helper.from_array(np.asarray(value, np.float32), name)
            for value, name in zip(values, names, strict=True)
        ]
        if place:
            then(ACTIVATIONS[activation][1], f"active{place}")
        if layer.kernel:
            sides, strides = [layer.kernel] * 2, [layer.stride] * 2
            then("Conv", f"affine{place}", *names, kernel_shape=sides, strides=strides)
        else:
            if not flat:
                then("Flatten", "flat", axis=1)
            flat = True
            then("Gemm", f"affine{place}", *names, transB=1)
    nodes[-1].output[0] = "logits"
    graph = helper.make_graph(
        nodes,
        path.stem,
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", *input_shape])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", layers[-1].units])],
        arrays,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = IR_VERSION
    onnx.checker.check_model(model)
    write_whole(path, model.SerializeToString())
