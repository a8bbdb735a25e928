"""Bounds by jax_verify's non-convex reformulation on interval bounds of the hidden layers."""

import importlib.metadata
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.networks.peers import common

COMMIT = "fe8ea3c8da81350ca92203a5089d37c2b93f8583"


def _names_of_2023():
    """Give JAX the names that jax_verify imports and later releases moved or dropped."""
    import jax.experimental.pjit
    import jax.extend.core
    import jax.interpreters.pxla
    from jax._src.pjit import jit_p

    core = jax.extend.core
    moved = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var"]
    homes = [
        (jax.core, {n: getattr(core, n) for n in [*moved, "new_jaxpr_eqn", "no_effects"]}),
        (jax, {"tree_map": jax.tree_util.tree_map}),
        (jax.experimental.pjit, {"pjit_p": jit_p}),
        # Gone, and in none of the graphs here: primitives that match nothing.
        (jax.interpreters.pxla, {"xla_pmap_p": core.Primitive("xla_pmap")}),
        (
            jax.custom_derivatives,
            {"custom_jvp_call_jaxpr_p": core.Primitive("custom_jvp_call_jaxpr")},
        ),
    ]
    for module, names in homes:
        for name, value in names.items():
            if name not in vars(module):
                setattr(module, name, value)


_names_of_2023()
import jax_verify  # noqa: E402
from jax_verify.src import bound_propagation as propagation  # noqa: E402
from jax_verify.src import optimizers as plain_optimizers  # noqa: E402
from jax_verify.src import synthetic_primitives as synthetic  # noqa: E402
from jax_verify.src.nonconvex import nonconvex, optimizers  # noqa: E402

# Plain operations: jax_verify finds them in a traced network and computes with `jax.nn`'s
# functions in their place. On recent JAX it does not find `jax.nn`'s own, which have custom
# derivatives.
ACTIVATIONS = {
    "relu": (lambda x: jnp.maximum(x, 0.0), synthetic.relu_p),
    "softplus": (
        lambda x: jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x))),
        synthetic.softplus_p,
    ),
}


def _use_double_precision():
    """Lets jax_verify compute in float64; its module for the reformulation asks for float32."""
    jax.config.update("jax_enable_x64", True)
    names = {name: getattr(jnp, name) for name in dir(jnp)}
    nonconvex.jnp = types.SimpleNamespace(**names | {"float32": jnp.float64})


def _simplifier(network, dtype):
    """jax_verify's default simplifier without what these networks do not need.

    The rest of its list (softmax, clipping, elementwise extrema) does not run on recent JAX.
    """
    function, primitive = ACTIVATIONS[network.activation]
    specs = [synthetic.SyntheticPrimitiveSpec(function, None, primitive, ([], dtype))]
    return synthetic.simplifier_composition(
        lambda graph, _: synthetic.detect(specs, graph),
        synthetic.hoist_constant_computations,
        synthetic.group_linear_sequence,
        synthetic.group_posbilinear,
    )


def forward(network, parameters, x):
    """(logits, what enters the activations) of a batch."""
    (activation, _), before = ACTIVATIONS[network.activation], []
    for layer, (weight, bias) in zip(network.layers, parameters, strict=True):
        x = activation(x) if before else x
        if layer.stride:
            x = lax.conv_general_dilated(x, weight, (layer.stride,) * 2, "VALID")
            x = x + bias[:, None, None]
        else:
            x = x.reshape(x.shape[0], -1) @ weight.T + bias
        before.append(x)
    return x, before[:-1]


def solver(network, simplifier, gap, together):
    """A compiled function to the relaxation's (values, bounds) of one image's rows.

    Rows given to jax_verify's line search together need, each of them, the decrease due to all of
    them; it then falls to its least step. So every row is a problem of its own, and `vmap` makes
    the batch; `together` is for the behaviour as shipped.
    """

    def solve_rows(parameters, lower, upper, rows, steps):
        box = jax_verify.IntervalBound(lower[None], upper[None])
        bound = jax_verify.nonconvex_ibp_bound_propagation(
            lambda x: forward(network, parameters, x)[0], box, graph_simplifier=simplifier
        )
        # `OptimizingConcretizer` would maximise every row besides; here only the lower bounds.
        objectives = {bound.index: rows[:, None]}
        start = {
            index: jnp.full((len(rows), *shape), 0.5) for index, shape in bound.variables.items()
        }
        if gap:
            search = optimizers.LinesearchFistaOptimizer(steps, termination_dual_gap=gap)
            found = search.optimize_fun(bound)(objectives, start)
        else:
            search = plain_optimizers.LinesearchFistaOptimizer(steps)
            found = search.optimize_fn(
                lambda variables: bound.primal_fn(variables, objectives)[0],
                lambda variables: jax.tree.map(lambda a: jnp.clip(a, 0.0, 1.0), variables),
            )(start)
        return bound.dual(found, objectives)

    @jax.jit
    def solve(parameters, lower, upper, rows, steps):
        if together:
            return solve_rows(parameters, lower, upper, rows, steps)
        each = jax.vmap(lambda row: solve_rows(parameters, lower, upper, row[None], steps))
        return jax.tree.map(lambda a: a[:, 0], each(rows))

    return solve


def hidden_intervals(network, simplifier, parameters, problems):
    """jax_verify's own interval bounds of what enters the activations."""
    dtype = parameters[0][0].dtype
    box = jax_verify.IntervalBound(
        jnp.asarray(problems.lower, dtype), jnp.asarray(problems.upper, dtype)
    )
    found, _ = propagation.bound_propagation(
        propagation.ForwardPropagationAlgorithm(jax_verify.ibp_transform),
        lambda x: forward(network, parameters, x)[1],
        box,
        graph_simplifier=simplifier,
    )
    return [(bound.lower, bound.upper) for bound in found]


def main():
    parser = common.parser(__doc__, steps="0,5,20,50,100")
    parser.add_argument(
        "--gap",
        type=float,
        default=0.0,
        help="stop at this gap, checked at every step; 0: do all the steps, without checks",
    )
    parser.add_argument(
        "--together", action="store_true", help="an image's rows in one line search, as shipped"
    )
    parser.add_argument("--precision", choices=("float32", "float64"), default="float32")
    arguments = parser.parse_args()
    network, problems, steps = common.read(arguments)
    if arguments.precision == "float64":
        _use_double_precision()
    dtype = jnp.dtype(arguments.precision)
    simplifier = _simplifier(network, dtype)
    parameters = [
        (jnp.asarray(a.weight, dtype), jnp.asarray(a.bias, dtype)) for a in network.layers
    ]
    theirs = hidden_intervals(network, simplifier, parameters, problems)
    difference = common.check_intervals(network, problems, theirs)

    solve = solver(network, simplifier, arguments.gap, arguments.together)
    inputs = [
        tuple(jnp.asarray(a[i], dtype) for a in (problems.lower, problems.upper, problems.rows))
        for i in range(len(problems.rows))
    ]
    compiling, _, _ = common.timed(
        lambda: jax.block_until_ready(solve(parameters, *inputs[0], jnp.asarray(1)))
    )
    settings = []
    for k in steps:
        cpu, wall, found = common.timed(
            lambda k=k: jax.block_until_ready(
                [solve(parameters, *one, jnp.asarray(k)) for one in inputs]
            )
        )
        values, bounds = (np.stack(part) for part in zip(*found, strict=True))
        values = values.astype(np.float64).tolist()
        settings.append(common.setting(k, cpu, wall, bounds, values=values))
    common.write(
        arguments,
        network,
        peer="jax_verify",
        version=importlib.metadata.version("jax_verify"),
        commit=COMMIT,
        jax=jax.__version__,
        gap=arguments.gap,
        together=arguments.together,
        precision=arguments.precision,
        interval_difference=difference,
        compile_process_seconds=compiling,
        settings=settings,
    )


if __name__ == "__main__":
    main()
