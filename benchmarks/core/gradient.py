"""What a gradient costs, in units of a forward pass; and how large its largest array is."""

import re
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import stagecert as sc
from benchmarks.core import lowering, records
from benchmarks.core.instances import LARGE
from stagecert.certificate import evaluate
from stagecert.problem import as_arrays
from stagecert.reformulation import forward_pass, full_point, psi_0_and_gradient

ROUNDS = 40
SECONDS_A_ROUND = 0.01
TARGET = 4.0


def forward_value(problem, point):
    """One forward pass."""
    return forward_pass(problem, point).value


def _gradient(problem, point):
    done, gradient = psi_0_and_gradient(problem, point)
    return done.value, gradient


def _gradient_and_bound(problem, point):
    evaluation = evaluate(problem, point)
    return evaluation.value, evaluation.gradient(), evaluation.bound


FUNCTIONS = {"forward": forward_value, "gradient": _gradient, "with_bound": _gradient_and_bound}


def interleaved_times(calls: dict) -> dict[str, list[float]]:
    """Seconds a call, ROUNDS times each, taking turns so that a busy spell hits all alike."""
    repeats = {}
    for name, call in calls.items():
        jax.block_until_ready(call())
        begin = time.perf_counter()
        jax.block_until_ready(call())
        repeats[name] = max(1, int(SECONDS_A_ROUND / (time.perf_counter() - begin)))
    times: dict = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            for _ in range(repeats[name]):
                jax.block_until_ready(call())
            times[name].append((time.perf_counter() - begin) / repeats[name])
    return times


def _inner(equation):
    """The jaxprs inside an equation."""
    for parameter in equation.params.values():
        for inner in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def _entries(variable) -> int:
    return int(np.prod(getattr(variable.aval, "shape", ())))


# Primitives that move numbers or only look at them.
_FREE = {
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "copy",
    "dynamic_slice",
    "gather",
    "iota",
    "pad",
    "reshape",
    "rev",
    "slice",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
}


def operations(jaxpr) -> int:
    """Floating-point operations of a jaxpr: two for each product in a matrix, one an entry else."""
    total = 0
    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, list(_inner(equation))
        if inner and not name.startswith("scatter"):
            times = equation.params["length"] if name == "scan" else 1
            total += times * sum(operations(body) for body in inner)
        elif name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += (
                2 * _entries(equation.outvars[0]) * int(np.prod([shape[k] for k in contracted]))
            )
        elif name.startswith("scatter"):
            total += _entries(equation.invars[2])
        elif name not in _FREE:
            reads = equation.invars if name.startswith(("reduce", "arg")) else equation.outvars
            total += sum(_entries(variable) for variable in reads)
    return total


class Compiled:
    """FUNCTIONS of one problem at its default starting point."""

    def __init__(self, problem: sc.Problem):
        self.problem = as_arrays(problem)
        point = full_point(self.problem, None, jnp.float64)
        self.arrays, static = eqx.partition((self.problem, point), eqx.is_array)
        self.traceable = {
            name: lambda arrays, f=function: f(*eqx.combine(arrays, static))
            for name, function in FUNCTIONS.items()
        }

    def compiled(self, name: str):
        return jax.jit(self.traceable[name]).lower(self.arrays).compile()

    def traced(self, name: str):
        return jax.make_jaxpr(self.traceable[name])(self.arrays).jaxpr


def times_of(problem: sc.Problem, names: tuple) -> dict[str, list[float]]:
    """Seconds of some of FUNCTIONS."""
    held = Compiled(problem)
    calls = {name: held.compiled(name) for name in names}
    return interleaved_times({n: (lambda c=c: c(held.arrays)) for n, c in calls.items()})


def cost(label: str, make) -> dict:
    """Ratios to a forward pass, in time and in floating-point operations."""
    problem = make()
    held = Compiled(problem)
    times = times_of(problem, tuple(FUNCTIONS))
    flops = {name: held.compiled(name).cost_analysis()["flops"] for name in FUNCTIONS}
    traced = {name: operations(held.traced(name)) for name in FUNCTIONS}
    # XLA counts the body of a loop once, however often it runs: no count then.
    loops = any(isinstance(stage, sc.ScanStage) for stage in problem.stages)
    n_inputs, n_blocks = lowering.sizes(problem)
    record = {"instance": label, "inputs": n_inputs, "blocks": n_blocks}
    record["forward_microseconds"] = round(1e6 * min(times["forward"]), 1)
    for name in ("gradient", "with_bound"):
        rounds = np.divide(times[name], times["forward"])
        record[name] = {
            "time_of_minima": round(min(times[name]) / min(times["forward"]), 2),
            "median_of_rounds": round(float(np.median(rounds)), 2),
            "operations_traced": round(traced[name] / traced["forward"], 2),
            "operations_xla": None if loops else round(flops[name] / flops["forward"], 2),
        }
    record["ok"] = all(ratio is None or ratio <= TARGET for ratio in record["gradient"].values())
    return record


def run_cost() -> None:
    """The cost of a gradient on the large instances."""
    out = []
    for label, make in LARGE.items():
        out.append(cost(label, make))
        print(f"  {label}: {out[-1]['gradient']}", flush=True)
        if not out[-1]["ok"]:
            print(f"      SUSPICIOUS: a gradient costs more than {TARGET} forward passes")
    records.save("gradient", out)


# -- the largest array ----------------------------------------------------------------------------


def largest_in_jaxpr(jaxpr) -> int:
    """Entries of the largest array that any equation of a jaxpr makes, inner jaxprs included."""
    largest = 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            largest = max(largest, _entries(variable))
        for inner in _inner(equation):
            largest = max(largest, largest_in_jaxpr(inner))
    return largest


def largest_in_program(text: str) -> int:
    """Entries of the largest array named in a compiled program's text, arguments included."""
    shapes = re.findall(r"\b(?:f64|f32|s64|s32|u32|u64|s8|u8|pred)\[([\d,]*)\]", text)
    return max(int(np.prod([int(x) for x in shape.split(",") if x])) for shape in set(shapes))


def run_jacobian(solvers: tuple) -> None:
    """Looks for anything as large as a Jacobian in the steps of every solver."""
    out = []
    for label, make in LARGE.items():
        problem = as_arrays(make())
        n_inputs, n_blocks = lowering.sizes(problem)
        data = max(
            int(np.size(leaf)) for leaf in jax.tree.leaves(eqx.filter(problem, eqx.is_array))
        )
        dense = n_blocks * min(n_inputs, n_blocks)
        for name in solvers:
            solver = lowering.solver_object(name)
            traced = max(largest_in_jaxpr(j.jaxpr) for j in lowering.jaxprs(problem, solver))
            program = None
            if name in ("greedy", "polish"):  # what the default runs is compiled too
                program = largest_in_program(lowering.compiled_advance(problem, solver).as_text())
            record = {
                "instance": label,
                "solver": name,
                "inputs": n_inputs,
                "blocks": n_blocks,
                "data": data,
                "jacobian": dense,
                "largest_traced": traced,
                "largest_compiled": program,
                "ok": max(traced, program or 0) < dense,
            }
            out.append(record)
            print(
                f"  {label}, {name}: {traced} traced, {program} compiled, Jacobian {dense}",
                flush=True,
            )
            if not record["ok"]:
                print("      SUSPICIOUS: an array as large as a dense Jacobian")
    records.save("jacobian", out)
