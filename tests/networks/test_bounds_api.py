"""What users of `bound` meet: messages, shapes, stopping, chunks, progress, compilations."""

import os
import subprocess
import sys
import textwrap
from typing import Any

import models
import numpy as np
import pytest

from stagecert import Status, networks
from stagecert.compiling import compiled
from stagecert.errors import ProblemError
from stagecert.networks import Intermediate
from stagecert.networks import operations as op
from stagecert.networks.graph import Builder
from stagecert.powers import few_counts

RANDOM = np.random.default_rng(0)
SIZES = (3, 6, 5, 2)


def network(seed=0, batch_axis=False):
    return models.dense(
        models.random_layers(np.random.default_rng(seed), SIZES), batch_axis=batch_axis
    )


NET = network()
LOW, HIGH = -np.ones((4, 3)), np.ones((4, 3))


def two_inputs():
    build = Builder()
    x, y = build.input("left", (2,), False), build.input("right", (2, 1), False)
    h = build.add(op.Sum((1, -1)), x, y)
    return build.network([build.add(op.Activation("relu"), h)])


# -- messages -------------------------------------------------------------------------------------


def nan_at(array, *place):
    array = array.copy()
    array[place] = np.nan
    return array


WRONG = {
    "a vector": (
        dict(lower=LOW[0]),
        r"lower must have shape \(batch, 3\), but has shape \(3,\)\. For one box give x\[None\]",
    ),
    "a number": (dict(lower=0.0), r"must have shape \(batch, 3\), but has shape \(\)"),
    "too wide": (dict(upper=np.ones((4, 5))), r"upper must have shape \(batch, 3\).*\(4, 5\)"),
    "words": (dict(lower="none"), "lower is no array of numbers"),
    "nothing": (dict(lower=None), "Give lower and upper, or a ball"),
    "a nan": (dict(lower=nan_at(LOW, 2, 1)), r"lower is not finite at \[2, 1\]"),
    "infinite": (dict(upper=np.full((4, 3), np.inf)), r"upper is not finite at \[0, 0\]"),
    "an empty box": (dict(lower=HIGH + 1), r"A box is empty: lower 2 > upper 1 at \[0, 0\]"),
    "no boxes": (dict(lower=LOW[:0], upper=HIGH[:0]), "the batch is empty"),
    "two batches": (dict(upper=HIGH[:2]), "lower has 4 boxes, upper has 2"),
    "short rows": (dict(objectives=np.ones((1, 3))), r"\(4, targets, 2\) or \(targets, 2\)"),
    "one row": (dict(objectives=np.ones(2)), r"they have shape \(2,\)"),
    "other boxes": (dict(objectives=np.ones((3, 1, 2))), r"they have shape \(3, 1, 2\)"),
    "no rows": (dict(objectives=np.ones((0, 2))), "objectives has no rows"),
    "a nan in rows": (dict(objectives=np.array([[1, np.nan]])), r"not finite at \[0, 0, 1\]"),
    "method": (dict(method="magic"), "Unknown method 'magic'; known are ibp, backward, nonconvex"),
    "no memory": (dict(memory=-1), "memory must be a positive number of GiB, not -1"),
    "precision": (dict(precision="half"), "one of 'float32', 'float64', 'tf32', not 'half'"),
    "intermediate": (dict(intermediate="guess"), "Unknown intermediate bounds 'guess'"),
    "intermediate's type": (dict(intermediate=3), "an Intermediate or intervals, not 3"),
    "no steps": (dict(intermediate=Intermediate("optimised", steps=0)), "at least 1, not 0"),
    "threshold's shape": (dict(threshold=np.zeros(3)), r"or have shape \(4, 2\), not \(3,\)"),
    "threshold is nan": (dict(threshold=np.nan), "threshold has a NaN"),
    "few intervals": (dict(intermediate=((LOW, HIGH),)), "there are 2 activations, but 1"),
    "intervals' shape": (dict(intermediate=((LOW, HIGH),) * 2), r"must have shape \(4, 6\)"),
    "a bad ball": (dict(ball=3.0), r"ball must be \(centre, radius\)"),
    "no radius": (dict(ball=(LOW, 0.0)), "radius must be positive"),
    "a nan radius": (dict(ball=(LOW, np.nan)), "radius must be positive"),
    "two radii": (dict(ball=(LOW, np.ones(2))), "4 centres but 2 radii"),
    "centre outside": (dict(ball=(LOW - 1, 1.0)), "centre must lie in its box"),
    "half a box": (dict(upper=None, ball=(LOW, 1.0)), "both lower and upper with a ball"),
    "too few balls": (dict(ball=(LOW[:1], 1.0)), "4 boxes but 1 balls"),
    "atol": (dict(atol=-1.0), "atol must be a finite number"),
    "rtol": (dict(rtol=np.nan), "rtol must be a finite number"),
    "iterations": (dict(max_iterations=-1), "max_iterations must be a whole number"),
    "time": (dict(time_limit=0.0), "time_limit must be a positive number"),
}


@pytest.mark.parametrize("what", WRONG)
def test_messages(what):
    changed, message = WRONG[what]
    arguments = dict(lower=LOW, upper=HIGH, intermediate="ibp") | changed
    with pytest.raises(ProblemError, match=message):
        networks.bound(NET, **arguments)


def test_other_things_than_networks_and_points_of_another_size():
    with pytest.raises(ProblemError, match=r"not function: from networks\.load"):
        networks.bound(lambda x: x, LOW, HIGH)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match=r"shape \(batch, 3\), but has shape \(4,\)"):
        NET(np.zeros(4))
    assert repr(NET) == "Network(input (3,), 2 outputs, 8 nodes, 71 parameters)"


def test_messages_of_several_inputs():
    net = two_inputs()
    pair = (np.zeros((1, 2)), np.zeros((1, 2, 1)))
    with pytest.raises(ProblemError, match="the network has 2 inputs; give a tuple"):
        networks.bound(net, pair[0], pair[0])
    with pytest.raises(ProblemError, match=r"upper \(input 1, 'right'\) must have shape"):
        networks.bound(net, pair, (pair[0], pair[0]))
    with pytest.raises(ProblemError, match=r"Batches differ.*\(input 1, 'right'\)"):
        networks.bound(net, (pair[0], np.zeros((2, 2, 1))), (pair[0], np.zeros((2, 2, 1))))
    with pytest.raises(ProblemError, match="A ball needs a network with one input"):
        networks.bound(net, ball=(pair[0], 1.0))


def test_intervals_that_are_empty_are_refused():
    given = networks.bound(NET, LOW, HIGH, method="ibp", intermediate="ibp").intermediate
    with pytest.raises(ProblemError, match="an interval of 'layer 2' is empty or NaN"):
        networks.bound(NET, LOW, HIGH, intermediate=(given[0], given[1][::-1]))


# -- results --------------------------------------------------------------------------------------


def test_shapes_and_fields():
    result = networks.bound(NET, LOW, HIGH, rtol=1e-3)
    assert result.bound.shape == result.value.shape == result.status.shape == (4, 2)
    assert result.inputs.shape == (4, 2, 3)
    assert result.passes.shape == (4, 2)
    assert [low.shape for low, _ in result.intermediate] == [(4, 6), (4, 5)]
    assert np.all(result.gap <= 1e-6 + 1e-3 * np.abs(result.bound))
    assert np.all(result.status == Status.GAP_REACHED)
    outputs = np.asarray(NET(result.inputs.reshape(8, 3))).reshape(4, 2, 2)
    np.testing.assert_allclose(result.attained, outputs[:, [0, 1], [0, 1]], rtol=1e-6)
    assert np.all(result.attained >= result.bound)
    assert "4 boxes x 2 objectives" in repr(result)
    for array in (result.bound, result.value, result.inputs, *result.intermediate[0]):
        assert isinstance(array, np.ndarray)
        assert array.dtype == np.float64


def test_objectives_may_differ_from_box_to_box():
    rows = RANDOM.normal(size=(4, 2, 2))
    whole = networks.bound(NET, LOW, HIGH, rows, method="backward")
    for b in range(4):
        one = networks.bound(NET, LOW[b : b + 1], HIGH[b : b + 1], rows[b], method="backward")
        np.testing.assert_allclose(whole.bound[b], one.bound[0], rtol=1e-12)


def test_methods_are_in_order():
    low, high = LOW * RANDOM.random(LOW.shape), HIGH * RANDOM.random(LOW.shape)
    by_intervals = networks.bound(NET, low, high, method="ibp", intermediate="ibp")
    back = networks.bound(NET, low, high, method="backward")
    searched = networks.bound(NET, low, high, rtol=1e-4)
    assert np.all(searched.bound >= by_intervals.bound)
    assert np.all(searched.bound >= back.bound - 1e-9)
    assert np.all(searched.value <= back.value + 1e-6)


def test_margins():
    rows = networks.margins([0, 2], 3)
    assert rows.tolist() == [[[1, -1, 0], [1, 0, -1]], [[-1, 0, 1], [0, -1, 1]]]
    for labels, classes in (([3], 3), ([-1], 3), ([0], 1), ([0.5], 3), ([[0]], 3)):
        with pytest.raises(ProblemError, match="margins"):
            networks.margins(labels, classes)


def test_hidden_batch_axes_do_not_show():
    plain = networks.bound(network(), LOW, HIGH, method="backward")
    hidden = networks.bound(network(batch_axis=True), LOW, HIGH, method="backward")
    assert hidden.inputs.shape == (4, 2, 3)
    np.testing.assert_allclose(hidden.bound, plain.bound, rtol=1e-12)
    np.testing.assert_allclose(hidden.attained, plain.attained, rtol=1e-12)


def test_several_inputs():
    net = two_inputs()
    low = (np.zeros((2, 2)), np.zeros((2, 2, 1)))
    high = (np.ones((2, 2)), np.ones((2, 2, 1)))
    rows = -np.eye(4)
    for method in ("ibp", "backward", "nonconvex"):
        result = networks.bound(net, low, high, rows, method=method)
        np.testing.assert_allclose(result.bound, -1, atol=1e-6)
        assert [x.shape for x in result.inputs] == [(2, 4, 2), (2, 4, 2, 1)]
        assert result.attained.shape == (2, 4)


# -- stopping -------------------------------------------------------------------------------------


def test_thresholds_stop_the_search():
    exact = networks.bound(NET, LOW, HIGH, rtol=1e-5)
    easy, hopeless = exact.bound - 1, exact.value + 1
    proven = networks.bound(NET, LOW, HIGH, rtol=0.0, atol=0.0, threshold=easy)
    assert np.all(proven.status == Status.TARGET_PROVEN)
    assert np.all(proven.bound > easy)
    met = networks.bound(NET, LOW, HIGH, rtol=0.0, atol=0.0, threshold=hopeless)
    assert np.all(met.status == Status.TARGET_MET)
    assert np.all(met.value <= hopeless)
    assert proven.passes.sum() + met.passes.sum() < exact.passes.sum()
    mixed = np.where(np.arange(4)[:, None] % 2, easy, hopeless)
    both = networks.bound(NET, LOW, HIGH, rtol=0.0, atol=0.0, threshold=mixed)
    assert np.all(both.status[1::2] == Status.TARGET_PROVEN)
    assert np.all(both.status[::2] == Status.TARGET_MET)
    for method in ("ibp", "backward"):
        far = networks.bound(NET, LOW, HIGH, method=method, threshold=-1e6)
        assert np.all(far.status == Status.TARGET_PROVEN)
        far = networks.bound(NET, LOW, HIGH, method=method, threshold=1e6)
        assert np.all(far.status == Status.TARGET_MET)
        assert np.all(networks.bound(NET, LOW, HIGH, method=method).status == Status.STALLED)


def test_limits_leave_valid_bounds():
    exact = networks.bound(NET, LOW, HIGH, rtol=1e-5)
    limits: list[dict[str, Any]] = [dict(max_iterations=1), dict(time_limit=1e-9)]
    for limit in limits:
        result = networks.bound(NET, LOW, HIGH, rtol=0.0, atol=0.0, **limit)
        assert np.all(np.isfinite(result.bound))
        assert np.all(result.bound <= exact.value)
        assert np.all(result.value >= exact.bound)
        expected = Status.ITERATION_LIMIT if "max_iterations" in limit else Status.TIME_LIMIT
        assert expected in set(result.status.ravel())


@pytest.mark.slow
def test_double_precision_closes_smaller_gaps():
    result = networks.bound(NET, LOW, HIGH, rtol=1e-8, atol=1e-10, precision="float64")
    assert np.all(result.gap <= 1e-10 + 1e-8 * np.abs(result.bound))


# -- how work is cut ------------------------------------------------------------------------------


def test_chunks_change_nothing():
    low = LOW * RANDOM.random(LOW.shape)
    rows = RANDOM.normal(size=(4, 2, 2))
    options: dict[str, Any] = dict(intermediate="backward", rtol=1e-4)
    whole = networks.bound(NET, low, HIGH, rows, **options)
    parts = networks.bound(NET, low, HIGH, rows, memory=1e-7, **options)
    tolerance: dict[str, Any] = dict(rtol=1e-6, atol=1e-9)
    for (l, u), (l2, u2) in zip(whole.intermediate, parts.intermediate, strict=True):
        np.testing.assert_allclose(l2, l, **tolerance)
        np.testing.assert_allclose(u2, u, **tolerance)
    np.testing.assert_allclose(parts.bound, whole.bound, rtol=2e-4, atol=1e-6)
    assert parts.inputs.shape == whole.inputs.shape
    assert parts.status.shape == whole.status.shape
    back = [networks.bound(NET, low, HIGH, rows, method="backward", memory=m) for m in (2.0, 1e-7)]
    np.testing.assert_allclose(back[0].bound, back[1].bound, rtol=1e-12)


def test_ready_intervals_are_used_as_they_are():
    first = networks.bound(NET, LOW, HIGH, method="backward", intermediate="backward")
    again = networks.bound(NET, LOW, HIGH, method="backward", intermediate=first.intermediate)
    np.testing.assert_array_equal(again.bound, first.bound)
    cut = networks.bound(
        NET, LOW, HIGH, method="backward", intermediate=first.intermediate, memory=1e-7
    )
    np.testing.assert_allclose(cut.bound, first.bound, rtol=1e-12)
    wide = tuple((low - 1, high + 1) for low, high in first.intermediate)
    looser = networks.bound(NET, LOW, HIGH, method="backward", intermediate=wide)
    assert np.all(looser.bound < first.bound)
    endless = tuple((np.full_like(low, -np.inf), high) for low, high in first.intermediate)
    for method in ("ibp", "backward", "nonconvex"):
        nothing = networks.bound(NET, LOW, HIGH, method=method, intermediate=endless)
        assert not np.any(np.isnan(nothing.bound))


def test_the_method_of_intervals_is_intervals_throughout():
    """Not passes back for every neuron, which take minutes on large networks."""
    plain, told = (
        networks.bound(NET, LOW, HIGH, method="ibp", intermediate=how) for how in (None, "ibp")
    )
    np.testing.assert_array_equal(plain.bound, told.bound)
    # The network is evaluated once a box, and its value there serves for all objectives.
    assert plain.inputs.shape == (*plain.bound.shape, *NET.input_shapes[0])
    np.testing.assert_array_equal(plain.value, plain.attained)
    finer = networks.bound(NET, LOW, HIGH, method="ibp", intermediate="backward")
    assert np.any(finer.bound > plain.bound)


def test_progress(capsys):
    seen = []
    networks.bound(NET, LOW, HIGH, progress=lambda *what: seen.append(what))
    assert {what for what, _, _ in seen} == {"layer 2", "searching"}
    assert all(0 <= finished <= total for _, finished, total in seen)
    assert seen[-1] == ("searching", 8, 8)
    networks.bound(NET, LOW, HIGH, progress=True)
    assert "layer 2" in capsys.readouterr().err


def test_new_numbers_do_not_compile():
    def everything(seed, intermediate):
        random = np.random.default_rng(seed)
        net = network(seed)
        low = random.normal(size=(4, 3))
        rows = random.normal(size=(4, 2, 2))
        for method in ("ibp", "backward", "nonconvex"):
            result = networks.bound(
                net, low, low + 1, rows, method, intermediate, rtol=0.0, atol=0.0, max_iterations=3
            )
            assert np.all(result.attained >= result.bound)

    # With "backward", unstable neurons are worked off in portions of one size; some networks have
    # none in a layer.
    everything(0, "ibp")
    for seed in range(12):
        everything(seed, "backward")
    before, _ = compiled()
    for seed in range(12, 18):
        everything(seed, "ibp")
        everything(seed, "backward")
    assert compiled()[0] == before


def test_numbers_of_boxes_are_few_to_the_compiler():
    random = np.random.default_rng(5)
    low = random.normal(size=(8, 3))

    def some(count, **options):
        return networks.bound(NET, low[:count], low[:count] + 0.5, **options)

    for options in ({"method": "ibp"}, {"method": "backward", "intermediate": "ibp"}):
        eight = some(8, **options)
        before, _ = compiled()
        seven = some(7, **options)
        assert compiled()[0] == before
        for name in ("bound", "value", "status", "passes", "objectives", "inputs"):
            np.testing.assert_array_equal(getattr(seven, name), getattr(eight, name)[:7])
        for (low_7, high_7), (low_8, high_8) in zip(
            seven.intermediate, eight.intermediate, strict=True
        ):
            np.testing.assert_array_equal(low_7, low_8[:7])
            np.testing.assert_array_equal(high_7, high_8[:7])
    few = {few_counts(count) for count in range(1, 1025)}
    assert len(few) < 60
    assert all(count <= few_counts(count) <= 1.5 * count for count in range(1, 1025))


def test_without_double_precision_switched_on():
    """The same bounds in a process whose JAX has single precision as its default."""
    code = """
        import jax, models, numpy as np
        from stagecert import networks
        assert not jax.config.jax_enable_x64
        layers = models.random_layers(np.random.default_rng(0), (3, 6, 5, 2))
        result = networks.bound(models.dense(layers), -np.ones((4, 3)), np.ones((4, 3)), rtol=1e-4)
        assert not jax.config.jax_enable_x64
        assert result.bound.dtype == result.attained.dtype == np.float64
        assert jax.numpy.ones(1).dtype == np.float32
        print(*(repr(float(x)) for x in result.bound.ravel()))
    """
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__), "JAX_ENABLE_X64": "0"},
    )
    here = networks.bound(NET, LOW, HIGH, rtol=1e-4)
    bounds = np.array([float(x) for x in found.stdout.split()]).reshape(4, 2)
    np.testing.assert_allclose(bounds, here.bound, rtol=3e-4, atol=1e-6)
