"""Which layers a network has, written as in "conv16x4/2 conv32x4/1 fc100".

`convCxK/S` is a convolution with C channels, K x K kernels and stride S, without padding; `fcN` is
a matrix to N units. An activation follows each of them, and at the end a matrix to the classes.
"""

import math
import re
from dataclasses import dataclass

PAPER = {
    "tiny": "fc100",
    "small": "conv16x4/2 conv32x4/1 fc100",
    "medium": "conv32x3/1 conv32x4/2 conv64x3/1 conv64x4/2 fc512 fc512",
}


@dataclass(frozen=True)
class Layer:
    """An affine layer: to `units` channels by a convolution, or to `units` numbers (kernel 0)."""

    units: int
    kernel: int = 0
    stride: int = 1

    def shape_after(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The output's shape for an input's shape, without the batch."""
        if not self.kernel:
            return (self.units,)
        if len(shape) != 3 or min(shape[1:]) < self.kernel:
            raise ValueError(
                f"a convolution with {self.kernel} x {self.kernel} kernels cannot follow {shape}"
            )
        return (self.units, *((side - self.kernel) // self.stride + 1 for side in shape[1:]))

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The weight's shape for an input's shape: outputs first, as in ONNX."""
        if self.kernel:
            return (self.units, shape[0], self.kernel, self.kernel)
        return (self.units, math.prod(shape))


def parse(text: str, classes: int) -> tuple[Layer, ...]:
    """The layers that a text, or the name of one of the paper's networks, stands for.

    >>> parse("conv16x4/2 fc100", 10)[0]
    Layer(units=16, kernel=4, stride=2)
    """
    layers = []
    for word in PAPER.get(text, text).split():
        conv = re.fullmatch(r"conv(\d+)x(\d+)/(\d+)", word)
        dense = re.fullmatch(r"fc(\d+)", word)
        if conv:
            layers.append(Layer(*map(int, conv.groups())))
        elif dense:
            layers.append(Layer(int(dense[1])))
        else:
            raise ValueError(
                f"architecture: '{word}' is neither convCxK/S nor fcN (nor is '{text}' one of "
                f"{', '.join(PAPER)})"
            )
        if min(layers[-1].units, layers[-1].stride) < 1 or (conv and layers[-1].kernel < 1):
            raise ValueError(f"architecture: '{word}' has a zero in it")
    return (*layers, Layer(classes))


def shapes(layers: tuple[Layer, ...], input_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shape of every layer's input, and of the output."""
    found = [tuple(input_shape)]
    for layer in layers:
        found.append(layer.shape_after(found[-1]))
    return found


def hidden_units(layers: tuple[Layer, ...], input_shape: tuple[int, ...]) -> int:
    """How many activations there are.

    >>> [hidden_units(parse(name, 10), (3, 32, 32)) for name in PAPER]
    [100, 8308, 46912]
    """
    return sum(math.prod(shape) for shape in shapes(layers, input_shape)[1:-1])
