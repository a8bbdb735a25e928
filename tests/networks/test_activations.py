"""Activations: values against ONNX Runtime, hulls and ranges against extended precision."""

import functools
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stagecert import pieces
from stagecert.errors import ProblemError
from stagecert.networks import activations
from stagecert.networks.activations import find, kinked
from stagecert.networks.activations.registering import register, register_relaxation

# Long doubles have eleven more bits than float64 on the machines that matter; where they do not,
# they are float64, and the comparisons allow for it.
Long = np.longdouble
SPARE = 4 * float(np.finfo(Long).eps)
PI = Long("3.14159265358979323846264338327950288")


# -- the functions in extended precision ----------------------------------------------------------


def erfc(z):
    a = np.abs(z)
    small = np.minimum(a, Long(1.6))
    term, total = small, small
    for n in range(1, 60):
        term = term * 2 * small * small / (2 * n + 1)
        total = total + term
    near = 1 - 2 / np.sqrt(PI) * np.exp(-small * small) * total
    large = np.maximum(a, Long(1.6))
    fraction = large
    for k in range(200, 0, -1):
        fraction = large + Long(k) / 2 / fraction
    far = np.exp(-large * large) / np.sqrt(PI) / fraction
    result = np.where(a < 1.6, near, far)
    return np.where(z < 0, 2 - result, result)


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x > 0, 1, e) / (1 + e)


def gelu_tanh(x):
    near = np.clip(x, -300, 300)
    y = 2 * np.sqrt(2 / PI) * (near + Long("0.044715") * near**3)
    return np.maximum(x, -300) * sigmoid(y)


def mish(x):
    e = np.exp(-np.abs(x))
    top = np.where(x < 0, e * (2 + e), 1 + 2 * e)
    return x * top / (top + np.where(x < 0, 2, 2 * e * e))


def exponential(size, unit, right):
    return functools.partial(_exponential, size, unit, right)


def _exponential(size, unit, right, x):
    left = Long(size) * np.expm1(np.minimum(x, 0) / Long(unit))
    return np.where(x > 0, Long(right) * x, left)


def ramp(slope, offset, least, most):
    return lambda x: np.minimum(np.maximum(Long(slope) * x + Long(offset), least), most)


def leaky(alpha):
    return lambda x: np.where(x < 0, Long(alpha) * x, x)


ALPHA, GAMMA = 1.67326319217681884765625, 1.05070102214813232421875
INF = np.inf

# kind, settings, truth. Settings are numbers that float32 holds exactly.
CASES = [
    ("relu", {}, lambda x: np.maximum(x, 0)),
    ("abs", {}, np.abs),
    ("leaky_relu", {"alpha": 0.125}, leaky(0.125)),
    ("leaky_relu", {"alpha": -0.5}, leaky(-0.5)),
    ("leaky_relu", {"alpha": 2.5}, leaky(2.5)),
    ("clip", {"low": 0.0, "high": 6.0}, ramp(1, 0, 0, 6)),
    ("clip", {"low": -INF, "high": 1.0}, ramp(1, 0, -INF, 1)),
    ("clip", {"low": -1.0, "high": INF}, ramp(1, 0, -1, INF)),
    ("clip", {"low": 3.0, "high": 1.0}, ramp(1, 0, 3, 1)),
    ("hard_sigmoid", {}, ramp(0.2, 0.5, 0, 1)),
    ("hard_sigmoid", {"alpha": -1.0, "beta": 0.25}, ramp(-1, 0.25, 0, 1)),
    ("hard_sigmoid", {"alpha": 0.0, "beta": 0.25}, ramp(0, 0.25, 0, 1)),
    ("hard_swish", {}, lambda x: x * np.clip(x + 3, 0, 6) / 6),
    ("elu", {}, exponential(1, 1, 1)),
    ("elu", {"alpha": 0.5}, exponential(0.5, 1, 1)),
    ("elu", {"alpha": 2.0}, exponential(2, 1, 1)),
    ("elu", {"alpha": -1.0}, exponential(-1, 1, 1)),
    ("selu", {}, exponential(ALPHA * GAMMA, 1, GAMMA)),
    ("selu", {"alpha": 0.5, "gamma": -2.0}, exponential(-1, 1, -2)),
    ("celu", {"alpha": 0.5}, exponential(0.5, 0.5, 1)),
    ("softplus", {}, lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))),
    ("exp", {}, np.exp),
    ("square", {}, np.square),
    ("sigmoid", {}, sigmoid),
    ("tanh", {}, np.tanh),
    ("softsign", {}, lambda x: x / (1 + np.abs(x))),
    ("gelu", {}, lambda x: x * erfc(-x / np.sqrt(Long(2))) / 2),
    ("gelu_tanh", {}, gelu_tanh),
    ("silu", {}, lambda x: x * sigmoid(x)),
    ("mish", {}, mish),
]
NAMES = [f"{kind}{''.join(f'-{v:g}' for v in settings.values())}" for kind, settings, _ in CASES]
SOME = dict(zip(NAMES, CASES, strict=True))
ALL = pytest.mark.parametrize(("kind", "settings", "truth"), CASES, ids=NAMES)
BOTH = pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["f64", "f32"])
LINEAR = ("relu", "abs", "leaky_relu", "clip", "hard_sigmoid")


def exact(truth, x):
    with np.errstate(all="ignore"):
        return truth(x.astype(Long))


# -- intervals and samples ------------------------------------------------------------------------

SPECIAL = [0, -3, 3, -1.5, -np.sqrt(2), np.sqrt(2), 2.399357280515468, 1e-30, -1e-30, 1, 6, -2.5]


ENTRIES = 448  # every call has as many, so that each kind is compiled once


def intervals(kind, dtype, n=ENTRIES, seed=0):
    """Ordinary, tiny, empty, huge and one-sided intervals, and some that end at special points."""
    random = np.random.default_rng(seed)
    middle = random.normal(size=n) * random.choice([0.1, 1, 5, 30], n)
    width = np.abs(random.normal(size=n)) * random.choice([1e-12, 1e-6, 1e-3, 0.1, 1, 5, 30], n)
    low, high = middle - width / 2, middle + width / 2
    size = 10 ** random.uniform(0, 30, n)
    special = random.choice(SPECIAL, n)
    for k, (new_low, new_high) in enumerate(
        [
            (low, low),
            (-size, high),
            (low, size),
            (-size, size[::-1]),
            (-1e30, 1e30),
            (0, high),
            (low, 0),
            (special, high),
            (low, special),
            (low, np.nextafter(low.astype(dtype), dtype(INF))),
        ]
    ):
        chosen = np.arange(n) % 14 == k
        low, high = np.where(chosen, new_low, low), np.where(chosen, new_high, high)
    low, high = np.minimum(low, high), np.maximum(low, high)
    # Values that overflow have their own test.
    if kind == "exp":
        low, high = np.minimum(low, 80), np.minimum(high, 80)
    if kind == "square":
        low, high = np.clip(low, -1e15, 1e15), np.clip(high, -1e15, 1e15)
    return low.astype(dtype), high.astype(dtype)


def samples(low, high):
    """Points of each interval: evenly, near the ends, and where activations bend."""
    dtype = low.dtype
    share = np.concatenate([np.linspace(0, 1, 33), np.logspace(-12, -2, 6)])
    share = np.unique(np.concatenate([share, 1 - share]))[:, None]
    even = low.astype(Long) + (high.astype(Long) - low) * share
    steps = np.logspace(-3, 2, 12)[:, None]
    near = np.broadcast_to(np.linspace(-6, 6, 49)[:, None], (49, low.size))
    x = np.concatenate([even, low + steps, high - steps, near, low[None], high[None]])
    return np.clip(x.astype(dtype), low, high)


@functools.cache
def compiled(kind, settings):
    """(low, high) -> wedge, image."""
    activation = find(kind)

    @jax.jit
    def run(low, high):
        wedge = activation.wedge(low, high, **dict(settings))
        return wedge, activation.image(low, high, **dict(settings))

    return run


def evaluate(wedge, x):
    return [
        jax.vmap(lambda x, side=side: jax.jvp(side, (x,), (jnp.ones_like(x),)))(x)
        for side in (wedge.lower, wedge.upper)
    ]


def build(kind, settings, low, high):
    """The wedge and the image; the ends may be any vectors that are not too long."""
    n = low.size
    low, high = (jnp.asarray(np.pad(x, (0, ENTRIES - n), mode="edge")) for x in (low, high))
    wedge, image = compiled(kind, tuple(settings.items()))(low, high)
    return jax.tree.map(lambda leaf: leaf[:n], (wedge, image))


def run(kind, settings, low, high, x, evaluate=evaluate):
    """Wedge, values of both sides at the points, their slopes, image."""
    wedge, image = build(kind, settings, low, high)
    (lower, left), (upper, right) = jax.tree.map(np.asarray, evaluate(wedge, jnp.asarray(x)))
    return wedge, lower, upper, left, right, jax.tree.map(np.asarray, image)


def sizes(kind, settings, value):
    """What roundings are relative to: the largest value, and the terms it was computed from."""
    size = np.max(np.abs(value), axis=0)
    return size + (abs(settings.get("beta", 0.5)) if kind == "hard_sigmoid" else 0)


def check_sound(kind, settings, truth, low, high, evaluate=evaluate):
    x = samples(low, high)
    dtype, info = low.dtype, np.finfo(low.dtype)
    wedge, lower, upper, left, right, (least, most) = run(kind, settings, low, high, x, evaluate)
    assert all(leaf.dtype in (dtype, bool) for leaf in jax.tree.leaves(wedge))
    value = exact(truth, x)
    # Lines with given slopes are exact as lines, but their values are rounded like the function's.
    straight = kind in (*LINEAR, "elu", "selu", "celu", "hard_swish")
    slack = (info.eps if straight else 0) * (
        np.abs(value) + (abs(settings.get("beta", 0.5)) if kind == "hard_sigmoid" else 0)
    )
    # Compiled code takes numbers below the smallest normal one for zero; `lines_at` charges that.
    slack = slack + SPARE * np.abs(value) + info.tiny
    assert np.all(lower <= value + slack)
    assert np.all(upper >= value - slack)
    for part in (lower, upper, left, right):
        assert np.all(np.isfinite(part))
    # `intervals` widens by as much, too.
    assert np.all(least <= value + SPARE * np.abs(value) + info.tiny)
    assert np.all(most >= value - SPARE * np.abs(value) - info.tiny)
    return x, value, lower, upper, left, right, least, most


# -- values ---------------------------------------------------------------------------------------


@ALL
@BOTH
def test_values_in_extended_precision(kind, settings, truth, dtype):
    x = np.random.default_rng(1).normal(size=4000) * 10
    x = np.concatenate([x, x * 1e-3, x * 1e-12, SPECIAL]).astype(dtype)
    value = exact(truth, x)
    computed = np.asarray(find(kind)(jnp.asarray(x), **settings))
    assert computed.dtype == dtype
    scale = np.abs(value) + np.finfo(dtype).tiny
    if kind in ("gelu", "gelu_tanh"):  # the tails have the rounding of their exponents
        scale = scale * (1 + np.minimum(x, 0) ** 2 + (kind == "gelu_tanh") * np.abs(x) ** 3 / 10)
    if kind == "hard_sigmoid":
        scale = scale + 1
    normal = np.abs(value) > 10 * np.finfo(dtype).tiny
    error = (np.abs(computed - value) / scale)[normal | (value == 0)]
    assert np.max(error) < 6 * np.finfo(dtype).eps


@ALL
def test_values_far_away(kind, settings, truth):
    dtype = np.float32
    x = np.array([-INF, -1e30, -1e5, 1e5, 1e30, INF], dtype)
    with np.errstate(over="ignore"):
        value = exact(truth, np.clip(x.astype(float), -1e300, 1e300)).astype(dtype)
    computed = np.asarray(find(kind)(jnp.asarray(x), **settings))
    finite = np.isfinite(value) & (np.isfinite(x) | (np.abs(value) < 10))
    assert np.all(np.isfinite(computed[finite]))
    assert np.allclose(computed[finite], value[finite], rtol=1e-5, atol=1e-30)
    assert not np.any(np.isnan(computed[~finite]))
    slope = jax.vmap(jax.grad(lambda x: find(kind)(x, **settings)))(jnp.asarray(x[1:-1]))
    assert not np.any(np.isnan(slope))


ONNX = {
    "relu": ("Relu", {}),
    "leaky_relu": ("LeakyRelu", {"alpha": 0.1}),
    "elu": ("Elu", {"alpha": 1.5}),
    "selu": ("Selu", {}),
    "celu": ("Celu", {"alpha": 2.0}),
    "softplus": ("Softplus", {}),
    "sigmoid": ("Sigmoid", {}),
    "tanh": ("Tanh", {}),
    "hard_sigmoid": ("HardSigmoid", {"alpha": 0.3, "beta": 0.4}),
    "hard_swish": ("HardSwish", {}),
    "gelu": ("Gelu", {}),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
    "mish": ("Mish", {}),
    "softsign": ("Softsign", {}),
    "abs": ("Abs", {}),
    "exp": ("Exp", {}),
}


@pytest.mark.parametrize("kind", ONNX)
def test_values_in_onnxruntime(kind):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    operator, attributes = ONNX[kind]
    make = onnx.helper
    vector = [make.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [None]) for n in "xy"]
    node = make.make_node(operator, ["x"], ["y"], **attributes)
    graph = make.make_graph([node], "one", vector[:1], vector[1:])
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 20)], ir_version=9)
    session = runtime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    x = np.linspace(-12, 12, 2001).astype(np.float32)
    (expected,) = session.run(None, {"x": x})
    settings = {} if kind == "gelu_tanh" else attributes
    computed = np.asarray(find(kind)(jnp.asarray(x), **settings))
    # ONNX Runtime subtracts in the tails, where the error is relative to the input.
    assert np.allclose(computed, expected, rtol=1e-6, atol=1e-6)


# -- hulls ----------------------------------------------------------------------------------------


# Float32 once for each way in which hulls are made.
SINGLE = ["relu", "clip-0-6", "hard_sigmoid", "hard_swish", "elu-2", "exp", "tanh", "gelu", "silu"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, np.float64) for name in NAMES] + [(name, np.float32) for name in SINGLE],
)
def test_hulls_are_sound_convex_and_finite(name, dtype):
    kind, settings, truth = SOME[name]
    low, high = intervals(kind, dtype)
    x, value, lower, upper, left, right, least, most = check_sound(kind, settings, truth, low, high)
    eps = np.finfo(dtype).eps
    size = sizes(kind, settings, value) + 1e5 * np.finfo(dtype).tiny / eps
    # Slopes are monotone, up to what they come to over the interval.
    order = np.argsort(x, axis=0, kind="stable")
    width = high.astype(Long) - low
    for slope, sign in ((left, 1), (right, -1)):
        sorted_slopes = sign * np.take_along_axis(slope, order, axis=0)
        back = np.maximum.accumulate(sorted_slopes, axis=0) - sorted_slopes
        allowed = 64 * eps * (np.max(np.abs(slope), axis=0) + size / np.maximum(width, 1e-300))
        assert np.all(back <= allowed)
    if kind in ("gelu", "gelu_tanh"):  # the tails have the rounding of their exponents
        size = size * (1 + np.clip(-low, 0, 40) ** 3)
    # The wedge closes at the ends (but for room for rounded constants), and the range is reached.
    room = 1e-8 if kind == "gelu_tanh" else 1e-20
    for k in (-2, -1):
        assert np.all(value[k] - lower[k] <= 1000 * eps * size + room)
        assert np.all(upper[k] - value[k] <= 1000 * eps * size + room)
    dense = exact(truth, (low + width * np.linspace(0, 1, 61)[:, None]).astype(dtype))
    dense = np.concatenate([dense, value])
    moderate = width < 30
    reached = 0.02 * (np.max(dense, axis=0) - np.min(dense, axis=0)) + 64 * eps * size + room
    assert np.all((np.min(dense, axis=0) - least <= reached)[moderate])
    assert np.all((most - np.max(dense, axis=0) <= reached)[moderate])


def grid_hull(x, y):
    """The lower convex hull of points in order, at those points."""
    xs, ys = x.tolist(), y.tolist()
    keep: list[int] = []
    for k in range(len(xs)):
        while len(keep) > 1 and xs[k] > xs[keep[-1]]:
            i, j = keep[-2:]
            if (ys[j] - ys[i]) * (xs[k] - xs[i]) < (ys[k] - ys[i]) * (xs[j] - xs[i]):
                break
            keep.pop()
        if not keep or xs[k] > xs[keep[-1]]:
            keep.append(k)
    return np.interp(x, x[keep], y[keep])


def check_tight(kind, settings, truth, low, high, tolerance=1e-6):
    kinks = np.clip(np.array([-3, -2.5, -1, -0.75, 0, 0.25, 1, 2.5, 3, 6])[:, None], low, high)
    x = np.sort(np.concatenate([np.linspace(low, high, 4001), kinks]), axis=0)
    _, lower, upper, *_ = run(kind, settings, low, high, x)
    value = exact(truth, x).astype(float)
    worst = 0.0
    for k in range(low.size):
        width = high[k] - low[k]
        worst = max(worst, np.max(grid_hull(x[:, k], value[:, k]) - lower[:, k]) / width)
        worst = max(worst, np.max(upper[:, k] + grid_hull(x[:, k], -value[:, k])) / width)
    assert worst < tolerance
    return worst


@ALL
def test_hulls_are_tight(kind, settings, truth):
    low = np.array([-5.0, -3.5, -1.0, -0.3, 0.5, -4.5, 1.0, -6.0, -2.0, -0.01, -4.0, 2.5])
    high = np.array([5.0, 2.0, 4.0, 0.4, 2.0, -0.4, 7.0, -2.0, 0.0, 0.02, 0.5, 4.0])
    check_tight(kind, settings, truth, low, high)


@ALL
def test_infinite_bounds_prove_nothing(kind, settings, truth):
    low = np.array([-INF, -1.0, -INF, np.nan, -1.7e308, -1.0])
    high = np.array([1.0, INF, INF, 1.0, 1.7e308, 1.0])
    x = np.array([[-2.0], [0.5]]) * np.ones(6)
    wedge, lower, upper, left, right, _ = run(kind, settings, low, high, x)
    value = exact(truth, x)
    slack = 1e-12
    assert not np.any(np.isnan(lower))
    assert not np.any(np.isnan(upper))
    inside = x >= np.where(np.isnan(low), 0, low)
    assert np.all((lower <= value + slack)[inside])
    assert np.all((upper >= value - slack)[inside])
    assert np.all(np.isfinite(left))
    assert np.all(np.isfinite(right))
    assert all(np.all(np.isfinite(w)) for w in jax.tree.leaves(wedge.slopes()))


@pytest.mark.parametrize("kind", ["exp", "square"])
def test_overflow(kind):
    low, high = np.array([-1e30, 0, 100], np.float32), np.array([10, 1e30, 1e25], np.float32)
    x = np.stack([np.maximum(low, -5), np.minimum(high, 120)])
    _, lower, upper, left, right, image = run(kind, {}, low, high, x)
    assert np.all(np.isfinite(left))
    assert np.all(np.isfinite(right))
    assert not np.any(np.isnan([lower, upper]))
    value = exact(np.exp if kind == "exp" else np.square, x)
    assert np.all(lower <= value)
    assert np.all(upper >= value)
    assert image[1][2] == INF


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("relu", [1.0, -3.0, 0.0], [2.0, -1.0, 0.0]),
        ("leaky_relu-0.125", [0.3, -3.7], [2.1, -1.3]),
        ("leaky_relu-2.5", [0.3, -3.7], [2.1, -1.3]),
        ("abs", [0.3, -3.7], [2.1, -1.3]),
        ("clip-0-6", [-3.0, 0.7, 6.2], [-1.1, 1.3, 9.0]),
        ("hard_sigmoid", [-9.0, -1.7, 3.0], [-3.0, 1.3, 5.0]),
        ("hard_swish", [-9.0, 3.1], [-3.0, 7.7]),
        ("elu-0.5", [0.3], [2.1]),
        ("elu-2", [0.3], [2.1]),
        ("selu", [0.3], [2.1]),
        ("celu-0.5", [0.3], [2.1]),
    ],
)
def test_stable_entries_are_exactly_linear(name, low, high):
    low, high = np.array(low), np.array(high)
    kind, settings, _ = SOME[name]
    _, lower, upper, *_ = run(kind, settings, low, high, samples(low, high))
    assert np.array_equal(lower, upper)


def test_prelu_is_handled_entry_by_entry():
    alpha = np.array([0.25, -1.0, 1.0, 3.0, 0.0])
    low, high = -2 * np.ones((3, 5)), np.array([[1.0], [4.0], [-1.0]]) * np.ones(5)
    activation = find("prelu")
    arguments = jnp.asarray(low), jnp.asarray(high), jnp.asarray(alpha)
    wedge = jax.jit(activation.wedge)(*arguments)
    least, most = activation.image(*arguments)
    x = low + (high - low) * np.linspace(0, 1, 101)[:, None, None]
    x = np.sort(np.concatenate([x, np.clip(0, low, high)[None]]), axis=0)
    value = np.where(x < 0, alpha * x, x)
    assert np.allclose(activation(jnp.asarray(x), jnp.asarray(alpha)), value)
    lower, upper = jax.vmap(wedge.lower)(x), jax.vmap(wedge.upper)(x)
    assert np.all(lower <= value + 1e-15)
    assert np.all(upper >= value - 1e-15)
    assert np.allclose(least, value.min(axis=0))
    assert np.allclose(most, value.max(axis=0))
    for index in np.ndindex(3, 5):
        column = (slice(None), *index)
        assert np.allclose(lower[column], grid_hull(x[column], value[column]), atol=1e-12)
        assert np.allclose(upper[column], -grid_hull(x[column], -value[column]), atol=1e-12)


numbers = st.floats(-1e30, 1e30, allow_subnormal=False) | st.floats(-8, 8, allow_subnormal=False)


@pytest.mark.parametrize(
    "name", ["relu", "tanh", "gelu", "silu", "elu-2", "hard_swish", "softplus"]
)
@hypothesis.settings(max_examples=15)
@hypothesis.given(ends=st.lists(st.tuples(numbers, numbers), min_size=8, max_size=8))
def test_any_interval(name, ends):
    low, high = np.sort(np.array(ends), axis=1).T
    kind, settings, truth = SOME[name]
    check_sound(kind, settings, truth, low, high, jax.jit(evaluate))  # compiled code rounds anew


# -- how wedges are used --------------------------------------------------------------------------


@ALL
def test_wedges_have_the_shape_of_the_neurons(kind, settings, truth):
    low = jax.ShapeDtypeStruct((3, 4), np.float64)
    wedge = functools.partial(find(kind).wedge, **settings)
    whole = jax.eval_shape(wedge, low, low)
    batched = jax.eval_shape(jax.vmap(wedge), low, low)
    assert jax.tree.structure(whole) == jax.tree.structure(batched)
    for one, two in zip(jax.tree.leaves(whole), jax.tree.leaves(batched), strict=True):
        assert one.shape == two.shape
        assert one.shape[:2] == (3, 4)


def test_batches_agree_with_single_wedges():
    activation = find("tanh")
    low = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4)))
    batched = jax.jit(jax.vmap(activation.wedge))(low, low + 1)
    single = jax.jit(activation.wedge)(low, low + 1)
    values = jax.vmap(lambda wedge, x: wedge.lower(x))(batched, low + 0.5)
    assert np.allclose(values, single.lower(low + 0.5), rtol=1e-13)


@ALL
def test_first_weights_fit_the_pieces(kind, settings, truth):
    low, high = np.array([-1.0, 0.5, -4.0, -1.0]), np.array([2.0, 1.0, -3.0, 0.5])
    wedge, _ = build(kind, settings, low, high)
    middle = jnp.asarray(low + high) / 2
    exactly = pieces.exactly_sloped(jnp.zeros(()))
    for side, first in zip((wedge.lower, wedge.upper), wedge.slopes(), strict=True):
        value, records = pieces.evaluate(side, (middle,), exactly)
        assert np.allclose(value, side(middle))
        assert jax.tree.structure(records) == jax.tree.structure(first)
        for record, weights in zip(jax.tree.leaves(records), jax.tree.leaves(first), strict=True):
            assert record.shape == weights.shape
            assert np.all((weights >= 0) & (weights <= 1))
    if kind in LINEAR:
        assert wedge.straight
    else:
        assert not wedge.straight


def test_unknown_kind():
    with pytest.raises(ProblemError, match="Unknown activation 'swoosh'"):
        find("swoosh")


def test_celu_needs_a_positive_alpha():
    with pytest.raises(ProblemError, match="alpha > 0"):
        find("celu")(jnp.ones(2), alpha=-1.0)


# -- registration ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _unregister():
    before = dict(activations.REGISTERED)
    yield
    activations.REGISTERED.clear()
    activations.REGISTERED.update(before)


REGISTERED = {
    "bell": ((-1.0, 1.0), lambda x, np: np.exp(-x * x / 2)),
    "wells": ((-(3**-0.5), 3**-0.5), lambda x, np: x**4 / 4 - x**2 / 2 + x / 16),
    "roof": ((0.0,), lambda x, np: np.where(x > 0, -x, np.expm1(np.minimum(x, 0)))),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTERED)
def test_registered_functions_get_exact_hulls(name):
    inflections, formula = REGISTERED[name]
    register("mine", lambda x: formula(x, jnp), inflections=inflections)
    truth = functools.partial(formula, np=np)
    compiled.cache_clear()
    low, high = intervals("square", np.float64, 300)
    low, high = np.clip(low, -50, 50), np.clip(high, -50, 50)
    _, value, *_, least, most = check_sound("mine", {}, lambda x: truth(x), low, high)
    size = np.max(np.abs(value), axis=0) + 1e-3
    assert np.all(np.min(value, axis=0) - least <= 0.02 * size)
    assert np.all(most - np.max(value, axis=0) <= 0.02 * size)
    ends = np.array([-3.0, -1.2, -0.5, 0.2, 0.7, -2.5, -0.9]), np.array([2.5, 1.5, 2, 3, 1.1, 0, 4])
    check_tight("mine", {}, lambda x: truth(x), *ends, tolerance=2e-6)
    compiled.cache_clear()


def test_bad_registrations_are_refused():
    with pytest.raises(ProblemError, match="already registered"):
        register("relu", jnp.sin)
    with pytest.raises(ProblemError, match="at most two"):
        register("mine", jnp.sin, inflections=(-3.14, 0, 3.14))
    with pytest.raises(ProblemError, match="in order"):
        register("mine", jnp.tanh, inflections=(1, 0))
    with pytest.raises(ProblemError, match="both rises and falls"):
        register("mine", jnp.tanh)
    with pytest.raises(ProblemError, match="must change between convex and concave"):
        register("mine", jnp.exp, inflections=(0,))
    with pytest.raises(ProblemError, match="does not match the function"):
        register("mine", jnp.arctan, lambda x: 1 / (1 + jnp.abs(x)), inflections=(0,))
    with pytest.raises(ProblemError, match="entry by entry"):
        register("mine", jnp.sum)
    with pytest.raises(ProblemError, match="finite"):
        register("mine", jnp.log)
    register("mine", jnp.exp)
    register("mine", jnp.tanh, inflections=(0,), replace=True)
    assert float(find("mine")(jnp.array(0.0))) == 0


def _chord(x, low, high):
    return high * low * -1 + (low + high) * x


def test_registered_relaxations():
    def tangent(x, low, high):
        return pieces.maximum(2 * low * x - low**2, 2 * high * x - high**2)

    def image(low, high):
        most = jnp.maximum(low**2, high**2)
        return jnp.zeros_like(most), most

    register_relaxation("squared", jnp.square, tangent, _chord, image)
    wedge = find("squared").wedge(jnp.array([-1.0, 0.5]), jnp.array([2.0, 0.5]))
    assert wedge.lower(jnp.array([0.0, 0.5])).tolist() == [-1, 0.25]
    assert wedge.upper(jnp.array([0.0, 0.5])).tolist() == [2, 0.25]
    below, above = wedge.slopes()
    assert above == ()
    assert len(below) == 1
    for faulty, message in [
        ((_chord, _chord, image), "lower is above"),
        ((tangent, tangent, image), "upper is below"),
        ((lambda x, low, high: x * x - 1e3 + 5 * jnp.sin(9 * x), _chord, image), "not convex"),
        ((tangent, _chord, lambda low, high: (low**2, high**2)), "image misses"),
        ((lambda x, low, high: x + jnp.inf, _chord, image), "not finite"),
        ((lambda x, low, high: jnp.sum(x), _chord, image), "entry by entry"),
        ((lambda x: x, _chord, image), "fails on arrays"),
    ]:
        with pytest.raises(ProblemError, match=message):
            register_relaxation("faulty", jnp.square, *faulty)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("compiled", [False, True])
def test_lines_of_relu_hold_exactly(dtype, compiled):
    """In rational arithmetic, from the smallest numbers to the largest."""
    random, info, count = np.random.default_rng(5), np.finfo(dtype), 4000
    edges = np.array(
        [0, info.smallest_subnormal, info.tiny, info.eps, 1, info.tiny / info.eps, info.max / 2,
         info.max], dtype,
    )  # fmt: skip
    edges = np.concatenate([edges, np.nextafter(edges, dtype(0)), -edges, edges[:-1] * dtype(1.5)])
    pairs = np.stack(np.meshgrid(edges, edges)).reshape(2, -1)
    exponents = random.uniform(np.log2(info.tiny), np.log2(info.max), (2, count))
    spread = np.exp2(exponents).astype(dtype) * np.array([[-1], [1]], dtype)
    close = -spread[0] * (1 + random.integers(-4, 5, count) * info.eps).astype(dtype)
    pairs = np.concatenate([pairs, spread, [spread[0], close]], axis=1)
    low, high = pairs[:, (pairs[0] <= pairs[1]) & np.isfinite(pairs).all(axis=0)]
    weight = random.uniform(-0.1, 1.1, low.size).astype(dtype)
    weight[::7] = np.nan

    def lines(low, high, weight):
        return kinked.ReluWedge(low, high).lines(((pieces.First(weight),), ()))

    with jax.enable_x64(True):
        lines = jax.jit(lines) if compiled else lines
        found = lines(*map(jnp.asarray, (low, high, weight)))
    found = tuple(map(np.asarray, found))
    assert all(x.dtype == dtype for x in found)
    assert not any(np.any(np.isnan(x)) for x in found)
    for a, b, *numbers in zip(low, high, *found, strict=True):
        if not np.isfinite(numbers[3]):
            assert float(b) / 2 - float(a) / 2 > 0.499 * float(info.max)  # too wide to have a width
            continue
        under, zero, slope, offset = (Fraction(float(x)) for x in numbers)
        for x in (Fraction(float(a)), Fraction(float(b))):  # relu is convex
            assert slope * x + offset >= max(x, 0)
            assert under * x + zero <= max(x, 0)
        assert 0 <= under <= 1
