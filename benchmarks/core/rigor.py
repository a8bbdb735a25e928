"""Rigorous bounds: none above an exact optimum, what they lose, and what they cost."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.core import records
from benchmarks.core.exact import FAMILIES
from benchmarks.core.instances import zoo
from stagecert.certificate import certify, evaluate
from stagecert.problem import as_arrays
from stagecert.reformulation import full_point

COUNT = 2_500  # of each family
REPEATS = 5


def compare(family: str, count: int, seed: int, plain: bool = True) -> dict:
    """Bounds of `count` random problems against their exact optima.

    `loss` is the mean of (plain bound - rigorous bound) / max(|optimum|, 1).
    """
    rng = np.random.default_rng(seed)
    above = above_plain = 0
    losses = []
    for _ in range(count):
        instance = FAMILIES[family](rng)
        bound = instance.certificate.derive(instance.problem, rigorous=True)
        above += instance.above(bound)
        if plain:
            ordinary = instance.certificate.derive(instance.problem)
            above_plain += instance.above(ordinary)
            losses.append((ordinary - bound) / max(abs(instance.optimum), 1))
    found = {"family": family, "count": count, "above": int(above)}
    if plain:
        found |= {"plain_above": int(above_plain), "loss": float(np.mean(losses)),
                  "largest_loss": float(np.max(losses))}  # fmt: skip
    return found


def _least_seconds(function) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return min(times)


@eqx.filter_jit
def certificate_at_centre(problem):
    """The certificate of the point where searches begin, with its plain bound."""
    dtype = jnp.result_type(*jax.tree.leaves(problem.inputs.centre()))
    evaluation = evaluate(problem, full_point(problem, None, dtype))
    return certify(problem, evaluation.proposal())[0]


def cost(name: str, problem) -> dict:
    """CPU milliseconds of the plain and of the rigorous bound, at the centre of the problem."""
    certificate = jax.tree.map(np.asarray, certificate_at_centre(as_arrays(problem)))
    begin = time.process_time()
    bound = certificate.derive(problem, rigorous=True)
    first = time.process_time() - begin
    ordinary = certificate.derive(problem)
    plain = _least_seconds(lambda: certificate.derive(problem))
    rigorous = _least_seconds(lambda: certificate.derive(problem, rigorous=True))
    return {
        "problem": name,
        "variables": sum(x.size for x in jax.tree.leaves((certificate.inputs, certificate.blocks))),
        "plain_ms": 1e3 * plain,
        "rigorous_ms": 1e3 * rigorous,
        "first_ms": 1e3 * first,
        "ratio": rigorous / plain,
        "lower_by": (ordinary - bound) / max(abs(ordinary), 1),
    }


def _larger():
    """Problems of the sizes that applications have."""
    from benchmarks.core.instances import relu_network, scan_band

    return {
        "relu network, 64-128-128": relu_network(64, (128, 128), eps=0.3),
        "relu network, 784-1024-1024": relu_network(784, (1024, 1024), eps=0.3),
        "scan, 200 steps": scan_band(200, 4, 2),
        "scan, 10,000 steps": scan_band(10_000, 4, 2),
    }


def run() -> None:
    """All families, then the zoo and larger problems."""
    found = []
    for family in FAMILIES:
        found.append(compare(family, COUNT, seed=0))
        print(f"  {found[-1]}", flush=True)
    for name, problem in {**{n: c.make() for n, c in zoo().items()}, **_larger()}.items():
        found.append(cost(name, problem))
        print(f"  {found[-1]}", flush=True)
    records.save("rigor", found)
