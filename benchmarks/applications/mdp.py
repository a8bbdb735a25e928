"""Robust Markov decision processes beside a double oracle and the solvers of HiGHS.

All get the same process and the same set of rewards. Each run is a process of its own, with a limit
on its seconds of CPU, and the least time of several counts (the machine may have other work).
Building the linear programme is not counted; our checks of the input are.
"""

import multiprocessing
import resource
import time

import numpy as np
import scipy.sparse as sp

from benchmarks.applications import records
from stagecert.applications.mdp import MDP, Budget, Mixture, Resource, from_gymnasium, solve

PACKAGES = ("numpy", "scipy", "highspy", "jax", "numba", "gymnasium")
TOLERANCE = 1e-4
# States, actions, horizon, scenarios; and the seconds of CPU that peers may take.
SIZES = {"small": (50, 5, 10, 10), "medium": (300, 8, 30, 20), "large": (1000, 10, 50, 30)}
LIMIT = 150
REPEATS = 3


# -- instances ------------------------------------------------------------------------------------


def random_instance(name: str, kind: str, seed: int = 0):
    """Ten random successors for each state and action; rewards between 0 and 1."""
    states, actions, horizon, scenarios = SIZES[name]
    rng = np.random.default_rng(seed)
    successor = rng.integers(0, states, size=(actions * states, 10))
    chance = rng.exponential(size=successor.shape)
    chance /= chance.sum(axis=1, keepdims=True)
    row = np.repeat(np.arange(len(successor)), successor.shape[1])
    whole = sp.csr_array(
        (chance.ravel(), (row, successor.ravel())), shape=(actions * states, states)
    )
    matrices = [whole[a * states : (a + 1) * states] for a in range(actions)]
    nominal = rng.uniform(size=(actions, states))
    tables = 0.5 * nominal + 0.5 * rng.uniform(size=(scenarios, actions, states))
    if kind == "mixture":
        return matrices, horizon, Mixture(np.swapaxes(tables, 1, 2))
    budget = 0.02 * actions * states * horizon
    return matrices, horizon, Budget(nominal.T, 0.5, budget, over_time=True)


# -- peers ----------------------------------------------------------------------------------------


def uses_of(name: str):
    """Three resources with random uses between 0 and 1, of which 0.35 a step may be used."""
    states, actions, horizon, _ = SIZES[name]
    rng = np.random.default_rng(1)
    return [Resource(use, 0.35 * horizon) for use in rng.uniform(size=(3, states, actions))]


def linear_programme(matrices, horizon, rewards, initial=None, resources=()):
    """Minimise c x subject to low <= A x <= high and bounds.

    Variables are values of all steps, then weights, then prices of resources.
    """
    states, actions = matrices[0].shape[0], len(matrices)
    moves = sp.vstack(matrices, format="csr")
    here = sp.vstack([sp.identity(states)] * actions, format="csr")
    now = sp.kron(sp.identity(horizon), here)
    later = sp.kron(
        sp.diags_array([np.ones(horizon - 1)], offsets=[1], shape=2 * (horizon,)), moves
    )
    rows = horizon * actions * states
    if isinstance(rewards, Mixture):
        tables = np.swapaxes(np.asarray(rewards.scenarios), 1, 2).reshape(
            len(rewards.scenarios), -1
        )
        influence = sp.csr_array(np.tile(tables.T, (horizon, 1)))
        low, total = np.zeros(rows), (1.0, 1.0)
    else:
        deviation = np.broadcast_to(rewards.deviation, (horizon, states, actions))
        influence = -sp.diags_array(np.swapaxes(deviation, 1, 2).ravel())
        low, total = np.tile(np.asarray(rewards.nominal).T.ravel(), horizon), (0, rewards.budget)
    weights = influence.shape[1]
    matrix = sp.vstack(
        [sp.hstack([now - later, -influence]),
         sp.hstack([sp.csr_array((1, horizon * states)), sp.csr_array(np.ones((1, weights)))])],
        format="csc",
    )  # fmt: skip
    cost = np.zeros(matrix.shape[1])
    cost[:states] = np.eye(states)[0] if initial is None else initial
    free = np.full(horizon * states, np.inf)
    if resources:
        uses = np.stack([np.asarray(r.use).T.ravel() for r in resources])
        paid = sp.vstack([sp.csr_array(np.tile(uses.T, (horizon, 1))),
                          sp.csr_array((1, len(uses)))])  # fmt: skip
        matrix = sp.hstack([matrix, paid], format="csc")
        cost = np.append(cost, [r.budget for r in resources])
    prices = np.zeros(len(resources))
    return dict(
        cost=cost, matrix=matrix,
        low=np.append(low, total[0]), high=np.append(np.full(rows, np.inf), total[1]),
        lower=np.concatenate([-free, np.zeros(weights), prices]),
        upper=np.concatenate([free, np.ones(weights), prices + np.inf]),
    )  # fmt: skip


def by_highs(programme, solver: str) -> dict:
    """One of HiGHS's solvers: simplex, ipm (interior point) or hipdlp (first order)."""
    import highspy

    highs = highspy.Highs()
    options = {"output_flag": False, "threads": 1, "solver": solver}
    if solver == "hipdlp":
        for name in ("pdlp_optimality", "primal_feasibility", "dual_feasibility"):
            options[f"{name}_tolerance"] = TOLERANCE
    for option, value in options.items():
        if highs.setOptionValue(option, value) != highspy.HighsStatus.kOk:
            raise RuntimeError(f"HiGHS knows no {option} = {value}")
    model = highspy.HighsLp()
    matrix = programme["matrix"]
    model.num_row_, model.num_col_ = matrix.shape
    model.col_cost_ = programme["cost"]
    model.col_lower_, model.col_upper_ = programme["lower"], programme["upper"]
    model.row_lower_, model.row_upper_ = programme["low"], programme["high"]
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_, model.a_matrix_.index_ = matrix.indptr, matrix.indices
    model.a_matrix_.value_ = matrix.data
    highs.passModel(model)
    begin = time.process_time()
    highs.run()
    cpu = time.process_time() - begin
    x = np.array(highs.getSolution().col_value)
    status = highs.modelStatusToString(highs.getModelStatus())
    if len(x) != len(programme["cost"]):
        return dict(cpu=cpu, status=status)
    made = matrix @ x
    off = [programme["low"] - made, made - programme["high"],
           programme["lower"] - x, x - programme["upper"]]  # fmt: skip
    violation = max(float(np.max(part)) for part in off)
    return dict(
        cpu=cpu, status=status, value=float(programme["cost"] @ x), violation=max(violation, 0.0)
    )


def double_oracle(matrices, horizon, rewards) -> dict:
    """Best answers in turn: policies to mixtures, mixtures (by a linear programme) to policies."""
    from scipy.optimize import linprog

    begin = time.process_time()
    states, actions = matrices[0].shape[0], len(matrices)
    moves = sp.vstack(matrices, format="csr")
    back = moves.T.tocsr()
    tables = np.swapaxes(np.asarray(rewards.scenarios), 1, 2)
    flat = tables.reshape(len(tables), -1)
    weights, earned = np.full(len(tables), 1 / len(tables)), []
    value = np.inf
    while True:
        reward = np.tensordot(weights, tables, axes=1)
        later, policy = np.zeros(states), np.empty((horizon, states), int)
        for t in range(horizon - 1, -1, -1):
            each = (moves @ later).reshape(actions, states) + reward
            policy[t] = each.argmax(axis=0)
            later = each.max(axis=0)
        value = min(value, float(later[0]))
        mass, visits = np.eye(states)[0], np.zeros((actions, states))
        for t in range(horizon):
            step = np.zeros((actions, states))
            step[policy[t], np.arange(states)] = mass
            visits += step
            mass = back @ step.ravel()
        earned.append(flat @ visits.ravel())
        found = linprog(
            np.append(np.zeros(len(tables)), 1.0),
            A_ub=np.column_stack([earned, -np.ones(len(earned))]), b_ub=np.zeros(len(earned)),
            A_eq=[np.append(np.ones(len(tables)), 0.0)], b_eq=[1.0],
            bounds=[(0, None)] * len(tables) + [(None, None)],
        )  # fmt: skip
        weights = np.maximum(found.x[:-1], 0)
        weights /= weights.sum()
        if value - found.fun <= TOLERANCE * abs(found.fun):
            cpu = time.process_time() - begin
            return dict(cpu=cpu, value=value, bound=float(found.fun), iterations=len(earned))


def ours(matrices, horizon, rewards, resources=()) -> dict:
    """From the matrices on, checks included."""
    begin = time.process_time()
    found = solve(MDP(matrices, horizon), rewards, resources=resources, rtol=TOLERANCE, atol=0)
    return dict(
        cpu=time.process_time() - begin, value=found.value, bound=found.bound,
        relative_gap=found.gap / abs(found.bound), iterations=found.iterations,
        status=found.status.name, engine=found.engine,
    )  # fmt: skip


def _child(pipe, method, arguments, limit):
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    pipe.send(method(*arguments))


def limited(method, arguments, limit: int = LIMIT) -> dict:
    """What the method returns from a process of its own, or that it took too long."""
    # Not forked: JAX has threads of its own.
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, method, arguments, limit))
    process.start()
    send.close()
    try:
        answer = receive.recv()
    except EOFError:
        answer = None
    process.join()
    if answer is None:
        took_too_long = process.exitcode in (-9, -24)
        return dict(cpu=None, status=f"> {limit} s" if took_too_long else "failed")
    return answer


PROGRAMMES = ("simplex", "ipm", "hipdlp")


def run_sets(kind: str, methods, sizes=tuple(SIZES)) -> list[dict]:
    """Every method on every size."""
    found = []
    for name in sizes:
        matrices, horizon, rewards = random_instance(
            name, "budget" if kind == "budget" else "mixture"
        )
        resources = uses_of(name) if kind == "resources" else ()
        if resources:  # with one reward, which is known
            rewards = Mixture(rewards.scenarios[:1])
        programme = linear_programme(matrices, horizon, rewards, resources=resources)
        given = (matrices, horizon, rewards, resources)
        for method in methods:
            call = {"ours": (ours, given), "double oracle": (double_oracle, given[:3])}.get(
                method, (by_highs, (programme, method))
            )
            limit = 10 * LIMIT if method == "ours" else LIMIT
            runs = [limited(*call, limit)]
            while len(runs) < REPEATS and runs[0]["cpu"] is not None and runs[0]["cpu"] < 5:
                runs.append(limited(*call, limit))
            best = min(runs, key=lambda run: run["cpu"] or 0)
            rows = programme["matrix"].shape[0] - 1
            found.append(dict(kind=kind, name=name, rows=rows, method=method) | best)
            found[-1]["cpu_all"] = [run["cpu"] for run in runs]
            print(f"  {found[-1]}", flush=True)
    return found


def run_seeds() -> list[dict]:
    """Ours alone on other instances of the same kinds: nothing is tuned to one of them."""
    found = []
    for kind in ("mixture", "budget"):
        for name in ("small", "medium"):
            for seed in range(1, 6):
                answer = ours(*random_instance(name, kind, seed))
                found.append(dict(kind=kind, name=name, seed=seed) | answer)
                print(f"  {found[-1]}", flush=True)
    return found


def run_environments() -> list[dict]:
    """Gymnasium's tables: our default tolerance beside HiGHS's simplex method."""
    import gymnasium

    found = []
    for name, horizon in (
        ("FrozenLake-v1", 20), ("FrozenLake8x8-v1", 100), ("CliffWalking-v1", 20), ("Taxi-v4", 15),
    ):  # fmt: skip
        process, nominal = from_gymnasium(gymnasium.make(name), horizon)
        rng = np.random.default_rng(0)
        sets = {
            "mixture": Mixture(nominal + rng.normal(0, 0.3, (6, *nominal.shape))),
            "budget": Budget(nominal, 0.5, 8.5, over_time=True),
        }
        for kind, rewards in sets.items():
            count = process.states
            matrices = [process.matrix(0)[a * count : (a + 1) * count]
                        for a in range(process.actions)]  # fmt: skip
            peer = limited(
                by_highs,
                (linear_programme(matrices, horizon, rewards, process.initial), "simplex"),
            )
            begin = time.process_time()
            ours = solve(process, rewards)
            found.append(
                dict(
                    name=name, horizon=horizon, kind=kind, value=ours.value, bound=ours.bound,
                    gap=ours.gap, engine=ours.engine, status=ours.status.name,
                    cpu=time.process_time() - begin, highs=peer.get("value"),
                    highs_cpu=peer["cpu"], highs_status=peer["status"],
                )
            )  # fmt: skip
            print(f"  {found[-1]}", flush=True)
    return found


def run_loops() -> list[dict]:
    """A soft backup and its visits: NumPy with SciPy's products (ours), Numba's loops, JAX."""
    found = []
    for name in SIZES:
        matrices, horizon, rewards = random_instance(name, "budget")
        process = MDP(matrices, horizon)
        reward = np.ascontiguousarray(process.over_time(np.asarray(rewards.nominal).T))
        log_policy = np.full(process.shape, -np.log(process.actions))
        ways = {
            "NumPy and SciPy": _numpy_pass(process, reward, log_policy),
            "Numba": _numba_pass(process, reward, log_policy),
            "JAX": _jax_pass(process, reward, log_policy),
        }
        visits = {way: run() for way, run in ways.items()}
        for way, run in ways.items():
            apart = float(np.max(np.abs(visits[way] - visits["NumPy and SciPy"])))
            assert apart < 1e-9, f"{way} is {apart} off"
            seconds = []
            for _ in range(7):
                begin = time.process_time()
                run()
                seconds.append(time.process_time() - begin)
            found.append(dict(name=name, how=way, cpu=min(seconds)))
            print(f"  {found[-1]}", flush=True)
    return found


def _numpy_pass(process, reward, log_policy):
    new, policy = np.empty(process.shape), np.empty(process.shape)

    def run():
        process.soft_backup(reward, log_policy, 2.0, -60.0, new, policy)
        return process.occupancy(policy)[0]

    return run


def _numba_pass(process, reward, log_policy):
    import numba

    @numba.njit
    def both(start, index, chance, reward, log_policy, step, initial):
        horizon, actions, states = reward.shape
        policy = np.empty(reward.shape)
        later, now = np.zeros(states), np.empty(states)
        for t in range(horizon - 1, -1, -1):
            for s in range(states):
                top = -np.inf
                for a in range(actions):
                    row = a * states + s
                    value = reward[t, a, s]
                    for e in range(start[row], start[row + 1]):
                        value += chance[e] * later[index[e]]
                    z = step * value + log_policy[t, a, s]
                    policy[t, a, s] = z
                    top = max(top, z)
                total = 0.0
                for a in range(actions):
                    p = np.exp(policy[t, a, s] - top)
                    policy[t, a, s] = p
                    total += p
                for a in range(actions):
                    policy[t, a, s] /= total
                now[s] = (top + np.log(total)) / step
            later, now = now, later
        visits = np.empty(reward.shape)
        mass = initial.copy()
        for t in range(horizon):
            following = np.zeros(states)
            for a in range(actions):
                for s in range(states):
                    d = policy[t, a, s] * mass[s]
                    visits[t, a, s] = d
                    row = a * states + s
                    for e in range(start[row], start[row + 1]):
                        following[index[e]] += chance[e] * d
            mass = following
        return visits

    m = process.matrix(0)
    return lambda: both(m.indptr, m.indices, m.data, reward, log_policy, 2.0, process.initial)


def _jax_pass(process, reward, log_policy):
    import jax
    import jax.numpy as jnp

    m = process.matrix(0).tocoo()
    shape = process.shape[1:]
    with jax.enable_x64(True):
        row, column, chance = jnp.asarray(m.row), jnp.asarray(m.col), jnp.asarray(m.data)

        @jax.jit
        def both(reward, log_policy, initial):
            def back(later, step):
                moved = jax.ops.segment_sum(
                    chance * later[column], row, m.shape[0], indices_are_sorted=True
                )
                z = 2.0 * (moved.reshape(shape) + step[0]) + step[1]
                total = jax.nn.logsumexp(z, axis=0)
                return total / 2.0, jnp.exp(z - total)

            def forth(mass, policy):
                d = policy * mass
                return jax.ops.segment_sum(chance * d.ravel()[row], column, shape[1]), d

            _, policy = jax.lax.scan(back, jnp.zeros(shape[1]), (reward, log_policy), reverse=True)
            return jax.lax.scan(forth, initial, policy)[1]

        given = [jnp.asarray(x) for x in (reward, log_policy, process.initial)]

    def run():
        with jax.enable_x64(True):
            return np.asarray(both(*given).block_until_ready())

    return run


PARTS = {
    "loops": run_loops,
    "environments": run_environments,
    "seeds": run_seeds,
    "mixture": lambda: run_sets("mixture", ("double oracle", "ours")),
    "budget": lambda: run_sets("budget", (*PROGRAMMES, "ours")),
    "resources": lambda: run_sets("resources", ("ipm", "ours"), ("small", "medium")),
    # Not at the largest size, so that the command does not take longer still.
    "programmes": lambda: run_sets("mixture", PROGRAMMES, ("small", "medium")),
}


# -- tables ---------------------------------------------------------------------------------------


def _of(part: str) -> list[dict]:
    held = records.load("mdp", part)
    return held["records"] if held else []


def _sets_table(kind: str, *parts: str) -> str:
    lines = []
    ours = {r["name"]: r for r in _of(kind) if r["method"] == "ours"}
    for r in (r for part in (parts or (kind,)) for r in _of(part)):
        mine = ours[r["name"]]
        seconds = f"{r['cpu']:.2f}" if r["cpu"] is not None else r["status"]
        proof = "-"
        if "bound" in r:
            proof = f"{(r['value'] - r['bound']) / abs(r['bound']):.1e}"
        off = "-"
        if "value" in r:
            # How far outside of what ours has proven.
            outside = max(mine["bound"] - r["value"], r["value"] - mine["value"], 0.0)
            off = f"{outside / abs(mine['bound']):.1e}"
        violation = f"{r['violation']:.1e}" if "violation" in r else "-"
        lines.append([f"{r['rows']:,} rows, {r['method']}", seconds, proof, violation, off])
    header = ["instance, method", "seconds", "relative gap", "violation", "outside of our bounds"]
    return records.table(header, lines)


def _seeds_table() -> str:
    lines = []
    rows = _of("seeds")
    for kind, name in dict.fromkeys((r["kind"], r["name"]) for r in rows):
        here = [r for r in rows if (r["kind"], r["name"]) == (kind, name)]
        solved = sum(r["status"] == "GAP_REACHED" for r in here)
        cpu = [r["cpu"] for r in here]
        steps = [r["iterations"] for r in here]
        lines.append(
            [f"{kind}, {name}", f"{solved} of {len(here)}", f"{min(cpu):.2f} to {max(cpu):.2f}",
             f"{min(steps)} to {max(steps)}"]
        )  # fmt: skip
    return records.table(["instances", "solved", "seconds", "steps"], lines)


def _environments_table() -> str:
    return records.table(
        ["environment, set", "value", "gap", "HiGHS", "difference", "seconds", "HiGHS, seconds",
         "engine"],
        [
            [f"{r['name']}, {r['horizon']} steps, {r['kind']}", f"{r['value']:.7f}",
             f"{r['gap']:.1e}", f"{r['highs']:.7f}", f"{abs(r['value'] - r['highs']):.1e}",
             f"{r['cpu']:.2f}", f"{r['highs_cpu']:.2f}", r["engine"]]
            for r in _of("environments")
        ],
    )  # fmt: skip


def _loops_table() -> str:
    return records.table(
        ["instance", "how", "milliseconds"],
        [[r["name"], r["how"], f"{1e3 * r['cpu']:.2f}"] for r in _of("loops")],
    )


TABLES = {
    "programmes": ("Linear programmes of mixtures", lambda: _sets_table("mixture", "programmes")),
    "mixture": ("Mixtures of scenarios, 1e-4", lambda: _sets_table("mixture")),
    "budget": ("Budgets, 1e-4", lambda: _sets_table("budget")),
    "resources": ("Budgets of three resources, 1e-4", lambda: _sets_table("resources")),
    "seeds": ("Other seeds, 1e-4", _seeds_table),
    "environments": ("Environments of Gymnasium, 1e-6", _environments_table),
    "loops": ("A soft backup and its visits", _loops_table),
}


def tables() -> str:
    """All tables of the application."""
    return records.render(
        "mdp", "Markov decision processes", "Seconds of CPU, least of several runs.", TABLES
    )
