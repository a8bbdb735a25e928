"""The compiled steps of a search, without running them; knows stagecert's inside."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import stagecert as sc
from stagecert.lanes import CHUNK, Stopping, advance_lanes, start_lanes
from stagecert.problem import as_arrays
from stagecert.reformulation import full_point
from stagecert.solving import named_solver


def solver_object(name: str):
    """The (last) solver that a name stands for."""
    return named_solver(name)[-1]


def _arguments(batch: sc.Batch | sc.Problem, solver):
    """Arguments of the right shapes for start_lanes and for advance_lanes."""
    single = isinstance(batch, sc.Problem)
    size = 1 if single else batch.size
    problem = as_arrays(batch if single else batch.problem)
    lane = problem if single else batch.lane(0)
    points = jax.tree.map(
        lambda x: jnp.zeros((size, *x.shape), x.dtype), full_point(lane, None, jnp.float64)
    )
    ones = jnp.ones(size)
    stopping = Stopping(ones, ones, ones, ones, jnp.ones(size, jnp.int32))
    start = (None if single else batch.axes, problem, solver, stopping, points)
    shapes = eqx.filter_eval_shape(start_lanes, *start)
    lanes = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return start, (*start[:-1], lanes, jnp.asarray(CHUNK))


def jaxprs(batch, solver) -> list:
    """The jaxprs of a search's start and of its iterations."""
    start, advance = _arguments(batch, solver)
    return [
        eqx.filter_make_jaxpr(start_lanes)(*start)[0],
        eqx.filter_make_jaxpr(advance_lanes)(*advance)[0],
    ]


def compiled_advance(batch, solver):
    """XLA's executable of a search's iterations."""
    _, advance = _arguments(batch, solver)
    return advance_lanes.lower(*advance).compile().compiled


def sizes(problem: sc.Problem) -> tuple[int, int]:
    """(number of inputs, number of block entries)."""
    inputs = sum(int(np.size(x)) for x in jax.tree.leaves(problem.inputs.centre()))
    return inputs, sum(int(np.prod(s.shape)) for s in problem.block_shapes())
