"""`stagecert demo --core`: a few stagewise problems, each with value, bound, gap and status."""

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import stagecert as sc


@dataclass(frozen=True)
class Demo:
    """A problem of the demonstration, and how accurately it is solved."""

    name: str
    make: Callable[[], sc.Problem]
    start: sc.Point | None = None
    atol: float = 1e-6
    rtol: float = 1e-6


def _lens() -> sc.Problem:
    return sc.Problem(
        sc.Box(-1.0, 1.0),
        (sc.Stage(lower=lambda s, z: s**2 - 1, upper=lambda s, z: 1 - s**2),),
        lambda s, z: z[0],
    )


def _chain(length: int = 100_000) -> sc.Problem:
    steps = sc.ScanStage(
        lower=lambda _, previous: -jnp.ones_like(previous),
        upper=lambda _, previous: previous,
        length=length - 1,
        initial=lambda s, z: s,
    )
    return sc.Problem(sc.Box(0.0, 1.0), (steps,), lambda s, z: -z[0][-1])


def _control(horizon: int = 200, states: int = 8, controls: int = 3) -> sc.Problem:
    """Tracking with box-bounded controls; the state may gain up to 0.05 (1 - |u|^2) a step."""
    draw = np.random.default_rng(1)
    a = draw.normal(size=(states, states))
    a *= 0.9 / np.abs(a).sum(1, keepdims=True)
    b = draw.normal(size=(states, controls)) / states
    goal = np.sin(np.arange(1, horizon + 1)[:, None] / 15 + draw.uniform(0, 6, states))
    steps = sc.ScanStage(
        lower=lambda u, x: a @ x + b @ u,
        upper=lambda u, x: a @ x + b @ u + 0.05 * (1 - jnp.mean(u**2)),
        length=horizon,
        initial=np.zeros(states),
        feed=lambda u, z: u,
    )
    objective = sc.Objective(
        lambda u, z: 0.5 * jnp.sum((z[0] - goal) ** 2) + 0.05 * jnp.sum(u**2),
        curvature_inputs=0.1,
        curvature_blocks=(1.0,),
    )
    box = sc.Box(-np.ones((horizon, controls)), np.ones((horizon, controls)))
    return sc.Problem(box, (steps,), objective)


def _network(width: int = 50, radius: float = 0.1) -> sc.Problem:
    """The triangle relaxation of a random relu network, bounded by intervals."""
    draw = np.random.default_rng(2)
    sizes = (16, width, width, width, 1)
    layers = [
        (draw.normal(size=(m, n)) * np.sqrt(2 / n), 0.1 * draw.normal(size=m))
        for n, m in itertools.pairwise(sizes)
    ]
    centre = draw.normal(size=sizes[0])
    low, high = centre - radius, centre + radius
    stages = []
    for w, b in layers[:-1]:
        middle, half = w @ (low + high) / 2 + b, np.abs(w) @ (high - low) / 2
        low, high = middle - half, middle + half
        slope = np.where(low >= 0, 1.0, np.where(high <= 0, 0.0, high / (high - low)))
        offset = np.where((low < 0) & (high > 0), -slope * low, 0.0)
        stages.append(
            sc.Stage(
                lower=lambda p, s, z: sc.relu(p["w"] @ (z[-1] if z else s) + p["b"]),
                upper=lambda p, s, z: (
                    p["slope"] * (p["w"] @ (z[-1] if z else s) + p["b"]) + p["offset"]
                ),
                params={"w": w, "b": b, "slope": slope, "offset": offset},
            )
        )
        low, high = np.maximum(low, 0), np.maximum(high, 0)
    w, b = layers[-1]
    objective = sc.Objective(lambda p, s, z: (p[0] @ z[-1] + p[1])[0], params=(w, b))
    return sc.Problem(sc.Box(centre - radius, centre + radius), tuple(stages), objective)


def _isotonic(side: int = 6) -> sc.Problem:
    """Least squares on a grid where every row and column must not fall; levels are diagonals."""
    draw = np.random.default_rng(3)
    rows, columns = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    target = (rows + columns) / side + 0.5 * draw.normal(size=(side, side))
    stages = []
    for level in range(1, 2 * side - 1):
        first = max(0, level - side + 1)
        # Which entries of the diagonal before lie above and left of each entry of this one.
        cells = [(i, level - i) for i in range(first, min(level, side - 1) + 1)]
        before = max(0, level - side)
        above = np.array([[i - 1 - before, i - before] for i, _ in cells])
        size = level if level <= side - 1 else 2 * side - level
        stages.append(
            sc.Stage(
                lower=lambda k, s, z: sc.max((z[-1] if z else jnp.atleast_1d(s))[k]),
                upper=lambda k, s, z: jnp.full(len(k), 3.0),
                params=np.clip(above, 0, size - 1),
            )
        )
    diagonals = [np.diag(target[:, ::-1], side - 1 - level)[:] for level in range(2 * side - 1)]

    def loss(p, s, z):
        fit = (jnp.atleast_1d(s), *z)
        return sum(jnp.sum((x - y) ** 2) for x, y in zip(fit, p, strict=True))

    objective = sc.Objective(
        loss,
        params=tuple(diagonals),
        curvature_inputs=2.0,
        curvature_blocks=(2.0,) * len(stages),
    )
    return sc.Problem(sc.Box(-3.0, 3.0), tuple(stages), objective)


DEMOS = (
    Demo("lens, spurious start", _lens, sc.Point(1.0, 0.8)),
    Demo("chain, 100,000 stages", _chain, atol=1e-9, rtol=0.0),
    Demo("control in a wedge", _control),
    Demo("relu net, 3 x 50", _network, rtol=1e-5),
    Demo("isotonic, 6 x 6 grid", _isotonic, rtol=1e-5),
)


def core_demo(as_json: bool) -> None:
    """Solves a few problems and prints, for each, a certified answer."""
    jax.config.update("jax_enable_x64", True)
    console = Console()
    table = Table(title="stagecert: every answer with a certificate", box=box.SIMPLE_HEAD)
    for heading in ("problem", "value", "bound", "gap", "passes", "seconds", "status"):
        table.add_column(heading, justify="left" if heading in ("problem", "status") else "right")
    rows = []
    with console.status("solving") as line:
        for number, item in enumerate(DEMOS, 1):
            line.update(f"solving {number} of {len(DEMOS)}: {item.name}")
            begin = time.perf_counter()
            solution = sc.solve(item.make(), item.atol, item.rtol, start=item.start)
            seconds = time.perf_counter() - begin
            rows.append(
                {
                    "problem": item.name,
                    "value": solution.value,
                    "bound": solution.bound,
                    "gap": solution.gap,
                    "passes": solution.stats.passes,
                    "seconds": round(seconds, 2),
                    "status": solution.status.name,
                }
            )
            table.add_row(
                item.name,
                f"{solution.value:.8g}",
                f"{solution.bound:.8g}",
                f"{solution.gap:.1e}",
                str(solution.stats.passes),
                f"{seconds:.1f}",
                solution.status.name.lower().replace("_", " "),
            )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console.print(table)
    console.print(
        "The optimum of each problem lies between its lower bound and its value. A pass is one "
        "evaluation of all stages, forwards or backwards; seconds include compilation."
    )
