"""How comparisons and `Where` get into a random graph: as parts of activations."""

from benchmarks.fuzz.graphs import Skip, Writer


def _limit(w: Writer) -> float:
    return w.draw.choice((0.25, 0.5, 1.0, 2.0, 20.0))


def _where(w: Writer) -> None:
    x = w.pick()
    tests = ("Greater", "Less", "GreaterOrEqual", "LessOrEqual")
    test = w.draw.choice(tests if w.opset >= 12 else tests[:2])
    condition = w.one(test, x, w.scalar_of(w.draw.choice((-1, 1)) * _limit(w)))
    if w.draw.random() < 0.5:
        other = w.one(w.draw.choice(("Greater", "Less")), x, w.scalar_of(_limit(w)))
        condition = w.one(w.draw.choice(("And", "Or", "Xor")), condition, other)
    if w.draw.random() < 0.3:
        condition = w.one("Not", condition)
    one = w.draw.choice((x, w.one("Mul", x, w.scalar_of(0.5)), w.scalar_of(_limit(w))))
    w.emit("Where", w.draw.choice(([condition, x, one], [condition, one, x])))


def _softplus(w: Writer) -> None:
    x = w.pick()
    scaled = w.one("Mul", x, w.scalar_of(2.0)) if w.draw.random() < 0.5 else x
    soft = w.one("Softplus", scaled)
    soft = w.one("Div", soft, w.scalar_of(2.0)) if scaled != x else soft
    w.emit("Where", [w.one("Greater", scaled, w.scalar_of(_limit(w))), x, soft])


def _shrink(w: Writer) -> None:
    w.emit("Shrink", [w.pick()], lambd=_limit(w), bias=w.draw.choice((None, 0.0, 0.5)))


def _softshrink(w: Writer) -> None:
    x, limit = w.pick(), w.scalar_of(_limit(w))
    if w.opset < 9:
        raise Skip("no Sign")
    far = w.one("Greater", w.one("Abs", x), limit)
    moved = w.one("Sub", x, w.one("Mul", w.one("Sign", x), limit))
    w.emit("Where", [far, moved, w.scalar_of(0.0)])


def _thresholded(w: Writer) -> None:
    w.emit("ThresholdedRelu", [w.pick()], alpha=_limit(w))


RECIPES = {
    "Where": _where, "softplus of PyTorch": _softplus, "softshrink of PyTorch": _softshrink,
    "Shrink": _shrink, "ThresholdedRelu": _thresholded,
}  # fmt: skip
