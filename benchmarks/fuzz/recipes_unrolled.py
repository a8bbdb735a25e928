"""How Einsum, LSTM, GRU, RNN, linear interpolation and ScatterND get into a random graph."""

import math
from typing import Any

from benchmarks.fuzz.graphs import Skip, Writer


def _einsum(w: Writer) -> None:
    x = w.pick(least=1)
    shape = list(w.shape(x))
    if w.version("Einsum") < 12 or len(shape) > 4:
        raise Skip("no such Einsum")
    letters = "abcd"[: len(shape)]
    order = "".join(w.draw.sample(letters, len(letters)))
    if w.draw.random() < 0.3:  # the sum over some axes
        w.emit("Einsum", [x], equation=f"{letters}->{order[w.draw.randint(0, 1) :]}")
    elif w.draw.random() < 0.5:  # two variables, or the square of one
        kept = order[: w.draw.randint(0, len(order))]
        w.emit("Einsum", [x, x], equation=f"{letters},{letters}->{kept}")
    else:
        weights = w.floats((shape[-1], w.draw.randint(1, 3)))
        dots = w.draw.random() < 0.3
        left = f"...{letters[-1]}" if dots else letters
        right = "...z" if dots else letters[:-1] + "z"
        pair = [(left, x), (f"{letters[-1]}z", weights)]
        w.draw.shuffle(pair)
        equation = ",".join(term for term, _ in pair) + f"->{right}"
        w.emit("Einsum", [name for _, name in pair], equation=equation)


def _sequence(w: Writer) -> str:
    """A value with three axes; most have one step only, so others are made sequences of several."""
    x = w.pick(least=1)
    size = math.prod(w.shape(x))
    lengths = [n for n in (2, 3) if size % n == 0 and size // n <= 4]
    if not lengths or w.draw.random() < 0.3:
        return w.pick(3)
    length = w.draw.choice(lengths)
    return w.one("Reshape", x, w.ints([length, 1, size // length]))


def _recurrent(operator: str, gates: int):
    def recipe(w: Writer) -> None:
        w.version(operator)
        x = _sequence(w)
        length, batch, width = w.shape(x)
        if length > 3 or batch > 2 or width > 4 or not w.palette.tame:
            raise Skip("too large to unroll")
        size, way = w.draw.randint(1, 2), w.draw.choice(("forward", "reverse", "bidirectional"))
        ways = 2 if way == "bidirectional" else 1
        settings: dict[str, Any] = {"hidden_size": size, "direction": way}
        items = [x, w.floats((ways, gates * size, width)), w.floats((ways, gates * size, size))]
        if w.draw.random() < 0.7:
            items.append(w.floats((ways, 2 * gates * size)))
            if w.draw.random() < 0.4:
                items += ["", w.floats((ways, batch, size))]
        if operator == "GRU":
            settings["linear_before_reset"] = w.draw.choice((None, 0, 1))
        w.emit(operator, items, 1, **settings)

    return recipe


def _interpolated(w: Writer) -> None:
    x = w.pick(2, 4)
    shape = w.shape(x)
    if w.opset < 13:
        raise Skip("older ways to resize")
    sizes = [n if k < len(shape) - 2 else w.draw.randint(1, 4) for k, n in enumerate(shape)]
    way = w.draw.choice((None, "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"))
    w.emit("Resize", [x, "", "", w.ints(sizes)], mode="linear", coordinate_transformation_mode=way)


def _scattered(w: Writer) -> None:
    x = w.pick(least=1)
    shape = w.shape(x)
    w.version("ScatterND")
    rows = w.draw.sample(range(shape[0]), w.draw.randint(1, shape[0]))
    updates = w.floats((len(rows), *shape[1:]))
    items = [x, w.ints([[r] for r in rows]), updates]
    if len(rows) == shape[0] and w.draw.random() < 0.5:  # variables into constants
        items = [updates, items[1], x]
    w.emit("ScatterND", items)


RECIPES = {
    "Einsum": _einsum, "interpolation": _interpolated, "ScatterND": _scattered,
    **{name: _recurrent(name, n) for name, n in (("LSTM", 4), ("GRU", 3), ("RNN", 1))},
}  # fmt: skip
