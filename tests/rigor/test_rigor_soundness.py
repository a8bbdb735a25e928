"""No bound is above the truth: a sample of what `rigor_soundness.py` does at length."""

import numpy as np
import pytest
import rigor_exact
import rigor_soundness


def test_pieces_are_the_network():
    random = np.random.default_rng(0)
    for _ in range(20):
        sizes = rigor_soundness.SIZES[random.integers(4)]
        layers = rigor_exact.layers_of(rigor_soundness.random_model(random, sizes))
        low, high = np.array([-1.0, -2.0]), np.array([1.5, 0.5])
        ends = [[rigor_exact.exact(v) for v in side] for side in (low, high)]
        made = list(rigor_exact.pieces(layers, *ends))
        area = 0
        for polygon, outputs in made:
            area += sum(
                x * v - u * y
                for (x, y), (u, v) in zip(polygon, polygon[1:] + polygon[:1], strict=True)
            )
            # At every corner, and so everywhere on the piece, the affine functions are the network.
            for x, y in polygon:
                wanted = rigor_exact.value(layers, (x, y))
                assert wanted == [a * x + b * y + c for a, b, c in outputs]
        assert area == 2 * (ends[1][0] - ends[0][0]) * (ends[1][1] - ends[0][1])


@pytest.mark.parametrize(
    ("problems", "architectures"),
    [(640, {"sizes": ((2, 5, 4),), "kinds": ("Tanh",)}),
     pytest.param(10_000, {}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_no_bound_is_above_the_truth(problems, architectures):
    tally = rigor_soundness.run(problems, problems, **architectures)
    assert tally.problems["relu"] >= problems / 2
    assert tally.problems["smooth"] > 0
    assert not any(tally.above.values()), tally.above
    assert not any(tally.unknown.values())
    # Not by being far below: where a box is a point, intervals are all but exact.
    assert min(tally.near.values()) > tally.problems["relu"] / 20
