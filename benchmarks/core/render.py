"""Makes the tables of docs/benchmarks.md from the result files."""

import re

import numpy as np

from benchmarks.core import passes, records

PAGE = records.ROOT / "docs" / "benchmarks.md"
PRIMAL = tuple(name for name in passes.SOLVERS if name != "slope_ascent")
NAMES = ("1 %", "1e-3", "1e-5")


def table(header, rows, right_from: int = 1) -> str:
    """A Markdown table; columns from `right_from` on are aligned to the right."""
    rule = ["---" if k < right_from else "---:" for k in range(len(header))]
    lines = [header, rule, *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def made(part: str) -> str:
    """The line that says where a table comes from."""
    held = records.load(part)["made"]
    versions = held["versions"]
    return (
        f"*`benchmarks/results/core/{part}.json`, made by `{held['command']}` on {held['date']}: "
        f"{held['cpu']} (load {held['load']} at the end), Python {held['python']}, "
        f"JAX {versions['jax']}, Equinox {versions['equinox']}, code `{held['code']}`.*"
    )


# -- passes ---------------------------------------------------------------------------------------


def _solves() -> dict:
    """Records by (case, solver)."""
    return {(r["case"], r["solver"]): r for r in records.load("passes")["records"]}


def _reached(record, level: int):
    return None if record is None or "error" in record else record["to_gap"][level]


def _cases(solves) -> list[str]:
    return list(dict.fromkeys(case for case, _ in solves))


def _shown(numbers) -> str:
    return " / ".join("-" if x is None else str(x) for x in numbers)


def passes_table() -> str:
    """Passes to the three levels, for every case and solver that searches the primal."""
    solves = _solves()
    rows = []
    for case in _cases(solves):
        found = {name: [_reached(solves.get((case, name)), k) for k in range(3)] for name in PRIMAL}
        ends = [f[-1] for f in found.values() if f[-1] is not None]
        cells = []
        for name in PRIMAL:
            shown = _shown(found[name])
            best = ends and found[name][-1] == min(ends)
            cells.append(f"**{shown}**" if best else shown)
        rows.append([f"`{case}`", *cells])
    return table(["case", *(f"`{name}`" for name in PRIMAL)], rows)


def _geometric(numbers) -> float:
    return float(np.exp(np.mean(np.log(np.asarray(numbers, float)))))


def summary_table() -> str:
    """How many cases each solver brought to each level, and how its searches ended."""
    solves = _solves()
    cases = _cases(solves)
    stops = ("GAP_REACHED", "STALLED", "ITERATION_LIMIT", "TIME_LIMIT")
    header = ["solver", *(f"reached {n}" for n in NAMES)]
    header += [stop.lower().replace("_", " ") for stop in stops] + ["other end"]
    rows = []
    for name in PRIMAL:
        held = [solves[case, name] for case in cases if (case, name) in solves]
        counts = [sum(_reached(r, k) is not None for r in held) for k in range(3)]
        ends = [r.get("status", "error") for r in held]
        known = [ends.count(stop) for stop in stops]
        rows.append([f"`{name}`", *(f"{c} of {len(held)}" for c in counts), *known])
        rows[-1].append(len(held) - sum(known))
    return table(header, rows)


def means_table() -> str:
    """Geometric means of passes: on the cases of all solvers, and against the default."""
    solves = _solves()
    cases = _cases(solves)
    at = {
        name: [{c: _reached(solves.get((c, name)), k) for c in cases} for k in range(3)]
        for name in PRIMAL
    }
    common = [[c for c in cases if all(at[n][k][c] for n in PRIMAL)] for k in range(3)]
    header = ["solver"]
    header += [f"mean to {n} ({len(c)} cases)" for n, c in zip(NAMES, common, strict=True)]
    header += [f"times `auto`, to {n}" for n in NAMES]
    rows = []
    for name in PRIMAL:
        row = [f"`{name}`"]
        row += [
            f"{_geometric([at[name][k][c] for c in common[k]]):.1f}" if common[k] else "-"
            for k in range(3)
        ]
        for k in range(3):
            both = [c for c in cases if at[name][k][c] and at["auto"][k][c]]
            if both:
                ratio = _geometric([at[name][k][c] / at["auto"][k][c] for c in both])
                row.append(f"{ratio:.2f} ({len(both)} cases)")
            else:
                row.append("-")
        rows.append(row)
    return table(header, rows)


def beaten_table() -> str:
    """Where the default is not the best at 1e-5."""
    solves = _solves()
    cases, rows, ratios = _cases(solves), [], [1.0]
    for case in cases:
        own = _reached(solves.get((case, "auto")), 2)
        others = {n: _reached(solves.get((case, n)), 2) for n in PRIMAL if n != "auto"}
        others = {n: p for n, p in others.items() if p is not None and (own is None or p < own)}
        if others:
            best = min(others, key=others.__getitem__)
            names = ", ".join(f"`{n}`" for n in others if others[n] == others[best])
            ratio = "-" if own is None else f"{own / others[best]:.2f}"
            ratios.append(float("inf") if own is None else own / others[best])
            rows.append([f"`{case}`", "-" if own is None else own, names, others[best], ratio])
    best = (
        "To 1e-5, `auto` needs the fewest passes (alone or with others) on "
        f"{len(cases) - len(rows)} of {len(cases)} cases; where it does not, at most "
        f"{max(ratios):.1f} times the fewest."
    )
    return f"{best}\n\n{table(['case', '`auto`', 'best', 'its passes', 'ratio'], rows)}"


def slope_table() -> str:
    """Passes until the bound alone is near the optimum, where there are nonsmooth pieces."""
    solves = _solves()
    rivals = ("slope_ascent", "auto", "polish")
    rows = []
    for case in _cases(solves):
        own = solves.get((case, "slope_ascent"))
        if own is None or "error" in own or not own["pieces"]:
            continue
        far = (own["optimum"] - own["bound"]) / abs(own["optimum"])
        cells = [
            _shown(solves[case, n]["bound_to_optimum"]) if (case, n) in solves else "-"
            for n in rivals
        ]
        rows.append([f"`{case}`", *cells, f"{max(far, 0):.1e}", own["passes"]])
    header = ["case", *(f"`{n}`" for n in rivals), "`slope_ascent`: last distance", "passes in all"]
    return table(header, rows)


def checks() -> str:
    """What the runs say about soundness."""
    held = records.load("passes")
    solved = [r for r in held["records"] if "error" not in r]
    whole = [r for r in solved if r["value"] is not None and r["bound"] is not None]
    below = max((r["optimum"] - r["value"]) / (1 + abs(r["optimum"])) for r in whole)
    above = max((r["bound"] - r["optimum"]) / (1 + abs(r["optimum"])) for r in whole)
    lines = [
        f"{len(held['records'])} solves. Relative to 1 + |optimum|, the lowest value lies "
        f"{max(below, 0):.1e} below the known optimum and the highest bound {max(above, 0):.1e} "
        f"above it (the optima are trusted to {passes.TRUTH:.0e})."
    ]
    found = [(r, text) for r in held["records"] for text in passes.suspicions(r)]
    if found:
        lines += ["", "Suspicious:", ""]
        lines += [f"- `{r['case']}`, `{r['solver']}`: {text}" for r, text in found]
    else:
        lines.append("Nothing not finite, no error, no status that contradicts its numbers.")
    for name in passes.SOLVERS:
        count = len({r["code"] for r in held["records"] if r["solver"] == name})
        if count > 1:
            lines += ["", f"**The rows of `{name}` were made by {count} versions of its code.**"]
    return "\n".join(lines)


# -- the other parts ------------------------------------------------------------------------------


def chain_table() -> str:
    """The chain: the default, and PDHG."""
    rows, peer = [], None
    for r in records.load("chain")["records"]:
        if r["method"] == "PDHG":
            peer = r
        else:
            gap = f"{r['gap']:.1e}"
            rows.append([r["theta"], r["iterations"], r["passes"], gap, r["status"], r["seconds"]])
    n = next(r["n"] for r in records.load("chain")["records"] if r["method"] == "auto")
    header = ["theta at the start", "iterations", "passes", "certified gap", "status", "seconds"]
    near = "not within a million" if peer["near"] is None else f"after {peer['near']:,}"
    return (
        f"The default, n = {n:,}:\n\n{table(header, rows)}\n\n"
        f"PDHG, n = {peer['n']}, from zero: x_1 leaves 0 in iteration {peer['first_move']}; all "
        f"entries are first within 1 % of the optimum {near} iterations."
    )


def gradient_table() -> str:
    """Costs of a gradient."""
    rows = []
    for r in records.load("gradient")["records"]:
        cells = []
        for name in ("gradient", "with_bound"):
            held = r[name]
            cells += [held["time_of_minima"], held["median_of_rounds"], held["operations_traced"]]
            cells.append("-" if held["operations_xla"] is None else held["operations_xla"])
        rows.append([r["instance"], f"{r['forward_microseconds']:,.0f} µs", *cells])
    header = ["instance", "forward"]
    for name in ("gradient", "and bound"):
        header += [f"{name}: least time", "median time", "operations traced", "by XLA"]
    return table(header, rows)


def jacobian_table() -> str:
    """Largest arrays."""
    by_instance: dict = {}
    for r in records.load("jacobian")["records"]:
        by_instance.setdefault(r["instance"], []).append(r)
    rows = []
    for label, held in by_instance.items():
        worst = max(held, key=lambda r: r["largest_traced"])
        compiled = max(r["largest_compiled"] or 0 for r in held)
        rows.append(
            [
                label,
                f"{worst['inputs'] + worst['blocks']:,}",
                f"{worst['data']:,}",
                f"{worst['largest_traced']:,} (`{worst['solver']}`)",
                f"{compiled:,}",
                f"{worst['jacobian']:,}",
                "yes" if all(r["ok"] for r in held) else "**NO**",
            ]
        )
    header = ["instance", "variables", "largest datum", "largest traced", "largest compiled"]
    return table([*header, "dense Jacobian", "all below"], rows)


def overhead_table() -> str:
    """What a pass costs in a search, in units of a forward pass alone."""
    ratios: dict = {}
    for r in records.load("overhead")["records"]:
        name = f"`{r['solver']}`" + ("" if r["blas"] == "default" else f", {r['blas']}")
        ratios.setdefault(r["instance"], {})[name] = r["ratio"]
    names = list(next(iter(ratios.values())))
    rows = [[label, *(held[n] for n in names)] for label, held in ratios.items()]
    return table(["instance", *names], rows)


def memory_table() -> str:
    """Bytes against batches."""
    held = records.load("memory")["records"]
    rows = [
        [a[0]["batch"], *(f"{x['total'] / 1024:,.0f}" for x in a)]
        for a in zip(*(r["amounts"] for r in held), strict=True)
    ]
    lines = [table(["batch", *(f"`{r['solver']}`, KiB" for r in held)], rows, 0), ""]
    for r in held:
        lines.append(
            f"- `{r['solver']}`: {r['constant'] / 1024:,.0f} KiB + {r['slope'] / 1024:,.1f} KiB a "
            f"problem; the largest deviation from that line is {100 * r['deviation']:.1f} %."
        )
    return "\n".join(lines)


def compile_table() -> str:
    """First solves, and recompilations."""
    held = records.load("compile")["records"]
    scans = [
        [
            f"{r['length']:,}",
            r["first_solve_seconds"],
            r["second_solve_seconds"],
            r["xla_seconds"],
            r["compilations"],
        ]
        for r in held
        if "length" in r
    ]
    header = ["steps", "first solve, s", "second solve, s", "of the first in XLA, s", "programs"]
    again = [[r["instance"], *r["compilations"]] for r in held if "instance" in r]
    return (
        table(header, scans)
        + "\n\nPrograms compiled for a first, second and third instance of the same shape:\n\n"
        + table(["instance", "first", "second", "third"], again)
    )


def peers_table() -> str:
    """Times beside other solvers."""
    rows = [
        [
            r["instance"],
            r["seconds"],
            r["first_seconds"],
            "-" if r["relative_gap"] is None else f"{r['relative_gap']:.0e}",
            r["passes"],
            r["peer"],
            r["peer_seconds"],
            f"{r['seconds'] / r['peer_seconds']:.2f}",
        ]
        for r in records.load("peers")["records"]
    ]
    header = [
        "instance",
        "`auto`, s",
        "first call, s",
        "certified gap",
        "passes",
        "peer",
        "peer, s",
    ]
    return table([*header, "ratio"], rows)


def inventory_table() -> str:
    """Schedules on small inventories."""
    held = records.load("inventory")["records"]
    schedules = []
    for r in (r for r in held if "schedule" in r):
        found = [[np.inf if x is None else x for x in lane] for lane in r["to_gap"]]
        closed = int(np.isfinite(found).all(axis=1).sum())
        middle, most = (
            _shown(None if np.isinf(x) else int(x) for x in f(found, axis=0))
            for f in (np.median, np.max)
        )
        schedules.append([r["schedule"], middle, most, f"{closed} of {len(found)}"])
    header = ["`Polish(...)`", "median passes", "most passes", "closed to 1e-5"]
    return table(header, schedules)


def horizon_table() -> str:
    """Long inventories beside Clarabel."""
    rows = [
        [r["instance"], f"{r['seconds']:.2f}", f"{r['cpu_seconds']:.2f}", r["passes"],
         "-" if r["relative_gap"] is None else f"{r['relative_gap']:.1e}", r["status"],
         r["peer_seconds"]]
        for r in records.load("horizon")["records"]
    ]  # fmt: skip
    columns = ["instance", "`auto`, s", "of CPU", "passes", "certified gap", "status"]
    return table([*columns, "Clarabel, s"], rows)


def rigor_table() -> str:
    """Bounds against exact optima, and what they cost."""
    held = records.load("rigor")["records"]
    families = [
        [r["family"], f"{r['count']:,}", r["above"], r["plain_above"], f"{r['loss']:.1e}",
         f"{r['largest_loss']:.1e}"]
        for r in held if "family" in r
    ]  # fmt: skip
    costs = [
        [r["problem"], f"{r['variables']:,}", f"{r['plain_ms']:.2f}", f"{r['rigorous_ms']:.1f}",
         f"{r['ratio']:.1f}", f"{r['first_ms']:.0f}", f"{r['lower_by']:.1e}"]
        for r in held if "problem" in r
    ]  # fmt: skip
    header = ["family", "problems", "above", "plain above", "mean loss", "largest loss"]
    columns = ["problem", "variables", "plain, ms", "rigorous, ms", "ratio", "first, ms", "loss"]
    return table(header, families) + "\n\n" + table(columns, costs)


SECTIONS = {
    "passes": ("passes", passes_table),
    "summary": ("passes", summary_table),
    "means": ("passes", means_table),
    "beaten": ("passes", beaten_table),
    "slopes": ("passes", slope_table),
    "checks": ("passes", checks),
    "chain": ("chain", chain_table),
    "gradient": ("gradient", gradient_table),
    "jacobian": ("jacobian", jacobian_table),
    "overhead": ("overhead", overhead_table),
    "memory": ("memory", memory_table),
    "compile": ("compile", compile_table),
    "peers": ("peers", peers_table),
    "inventory": ("inventory", inventory_table),
    "horizon": ("horizon", horizon_table),
    "rigor": ("rigor", rigor_table),
}


def write() -> None:
    """Replaces what stands between the markers of docs/benchmarks.md."""
    text = PAGE.read_text()
    for name, (part, make) in SECTIONS.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise SystemExit(f"{PAGE.name} needs the markers '{begin}' and '{end}', once each.")
        if records.load(part) is None:
            body = f"*Not measured yet: `python -m benchmarks.core --only {part}`.*"
        else:
            # The first section of a part says where its numbers come from.
            body = f"{make()}\n\n{made(part)}" if name == part else make()
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        text = re.sub(pattern, lambda _, b=body: f"{begin}\n\n{b}\n\n{end}", text, flags=re.DOTALL)  # noqa: B023
    PAGE.write_text(text)
    print(f"tables: {PAGE.relative_to(records.ROOT)}")
