"""The numbers of random graphs: mostly ordinary ones, and those that trap programs."""

import math
import random

import numpy as np

_TINY = (1e-45, -1e-45, 1.1754944e-38, -1e-40, 3e-39, 1e-30, -1e-20, 1e-12)
_HUGE = (16777216.0, -16777216.0, 33554433.0, 1e10, 1e15, -1e15, 1e20, -1e20, 1e30, -1e30, 3e38,
         -3.4028235e38)  # fmt: skip
_NEAR = (1 + 2**-23, 1 - 2**-24, 1 / 3, 3.0, 1 / 6, 6.0, 0.1, 0.7, math.sqrt(2), math.sqrt(0.5),
         math.sqrt(2 / math.pi), 0.044715, -0.0, 0.0, 1.0000008, 0.16666682, 0.7071073)  # fmt: skip
_TINY64 = (5e-324, -5e-324, 2.2e-308, 1e-300, -1e-310, 1e-100)
_HUGE64 = (9007199254740993.0, 1e100, -1e300, 1e300, 4e38, -3.5e38)
_NEAR64 = (1 + 2**-52, 1 - 2**-53)


class Palette:
    """Random numbers for one graph, which is tame or has a taste of its own."""

    def __init__(self, draw: random.Random, dtype):
        self.draw, self.dtype = draw, dtype
        double = dtype == np.float64
        self.lists = [
            _TINY + _TINY64 * double,
            _HUGE + _HUGE64 * double,
            _NEAR + _NEAR64 * double,
        ]
        self.tame = draw.random() < 0.45
        self.weights = draw.choice(((1, 1, 1), (4, 1, 1), (1, 4, 1), (0, 0, 1), (1, 1, 6)))
        self.scale = 1.0
        if not self.tame:
            scales = [1e-40, 1e-6, 1.0, 1.0, 1.0, 100.0, 1e6] + [1e-310, 1e-200] * double
            self.scale = draw.choice(scales)

    def input(self) -> float:
        """An entry of an input; any float64 number is one."""
        return self.scale * self.draw.choice(
            (self.draw.uniform(-2, 2), self.draw.uniform(-2, 2), self.draw.randint(-3, 3), 0.0)
        )

    def ordinary(self) -> float:
        """A number of moderate size."""
        draw = self.draw
        return draw.choice(
            (draw.gauss(0, 1), round(draw.uniform(-2, 2), 2), draw.randint(-3, 3), 1.0, -1.0, 0.5,
             draw.uniform(-1, 1), 0.0)
        )  # fmt: skip

    def special(self) -> float:
        """One of the numbers that trap."""
        return self.draw.choice(self.draw.choices(self.lists, self.weights)[0])

    def entry(self) -> float:
        """One number."""
        if self.tame or self.draw.random() < 0.6:
            return self.ordinary()
        return self.special()

    def positive(self) -> float:
        """A positive number."""
        return abs(self.entry()) or 1.0

    def array(self, shape) -> np.ndarray:
        """A tensor: ordinary numbers, the same number, or some that trap among them."""
        size, draw = math.prod(shape), self.draw
        wild = not self.tame and draw.random() < 0.5
        if draw.random() < 0.15:
            entries = [self.entry() if wild else self.ordinary()] * size
        else:
            entries = [
                self.special() if wild and draw.random() < 0.5 else self.ordinary()
                for _ in range(size)
            ]
            if wild and size > 1 and draw.random() < 0.4:  # two that cancel
                big = draw.choice(self.lists[1])
                one, two = draw.sample(range(size), 2)
                entries[one], entries[two] = big, -big
        with np.errstate(over="ignore"):
            array = np.asarray(entries, np.float64).astype(self.dtype)
        array = np.where(np.isfinite(array), array, np.asarray(1, self.dtype))
        return array.reshape(tuple(shape))
