"""Functions take at most seven parameters: what belongs together gets a name."""

import ast
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "src"
MOST = 7

# What a user calls with options by name, each with a default: more there is no burden.
PUBLIC = {
    "stagecert.solving.solve",
    "stagecert.solving.solve_batch",
    "stagecert.networks.bounding.bounds.bound",
    "stagecert.verify.verify.verify",
    "stagecert.verify.verify.Verification.__init__",
    "stagecert.robust.robust.robust",
    "stagecert.robust.robust.Robustness.__init__",
    "stagecert.sweeps.sweep.run",
    "stagecert.applications.mdp.solving.solve",
    "stagecert.applications.isotonic.fitting.fit",
    "stagecert.applications.isotonic.estimator.IsotonicRegression.__init__",
    # Commands: every parameter is an option.
    "stagecert.cli.robust.robust",
    "stagecert.cli.sweep.sweep",
    "stagecert.cli.verify.verify",
}
# What is still to be done: none may be added.
LONG = {
    "stagecert.batch.BatchSolution.__init__",
    "stagecert.networks.bounding.opening._forward",
    "stagecert.networks.bounding.search.search",
    "stagecert.networks.bounding.envelope_bounds.improve",
    "stagecert.searching.search_lanes",
    "stagecert.solving._solve",
    "stagecert.verify.ascent._move",
}


def functions(tree: ast.AST, name: str):
    """All functions below a node, with their full names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from functions(node, f"{name}.{node.name}")
            if not isinstance(node, ast.ClassDef):
                yield f"{name}.{node.name}", node.args
        else:
            yield from functions(node, name)


def parameters(given: ast.arguments) -> int:
    """How many there are, apart from `self`."""
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [a.arg for a in (given.vararg, given.kwarg) if a is not None]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def test_few_parameters():
    long = set()
    for path in SOURCES.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        found = functions(ast.parse(path.read_text()), module)
        long |= {name for name, given in found if parameters(given) > MOST}
    assert sorted(long - PUBLIC - LONG) == [], "too many parameters"
    # What has become shorter leaves the lists.
    assert sorted((PUBLIC | LONG) - long) == []


def untyped(given: ast.arguments) -> list[str]:
    """Parameters that no type is said of, apart from `self`."""
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    every += [a for a in (given.vararg, given.kwarg) if a is not None]
    return [a.arg for a in every if a.annotation is None and a.arg not in ("self", "cls")]


def test_the_checker_says_the_types_of_its_parameters():
    for path in (SOURCES / "stagecert_check").rglob("*.py"):
        module = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
        for name, given in functions(ast.parse(path.read_text()), module):
            assert not untyped(given), f"{name}: {untyped(given)}"
