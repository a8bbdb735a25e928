"""Which part of the library may import which: the table below, checked against the sources.

Sources are parsed, not imported, so imports inside functions count too.
"""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

from benchmarks.core import records

SOURCES = Path(__file__).parent.parent / "src"
NAME = re.compile(r"`(\w+)`")

# A part, its modules (names below `stagecert`, or those of the checker; a package has all that is
# in it but for what has a row of its own), the parts that it may import besides itself, and the
# packages from elsewhere that it may import.
LAYERS = [
    # What a sceptic has to trust: a package of its own, nothing of the search, no JAX.
    ("checker",    "stagecert_check",
                   "bad_input reader",
                   "flint numpy onnx"),
    ("reader",     "stagecert_check.properties",
                   "bad_input",
                   "numpy"),
    ("bad_input",  "stagecert_check.errors",
                   "",
                   ""),
    ("basics",     "errors files tree codes powers machine charts html compiling",
                   "bad_input",
                   "jax matplotlib numpy"),
    # In order: a module imports only modules that come before it.
    ("core",       "jaxprs evidence sets inside pieces sides problem enclosure reformulation "
                   "ordering repairing formula certificate degeneracy solvers solution validate "
                   "check curvature batch assumptions programme lanes searching guiding "
                   "solving plotting",
                   "basics",
                   "equinox flint jax jaxtyping matplotlib numpy rich scipy"),
    ("activations", "networks.activations",
                   "basics core",
                   "equinox jax numpy"),
    ("networks",   "networks.graph networks.operations networks.regions",
                   "activations basics core",
                   "equinox jax numpy"),
    ("importers",  "networks.importers",
                   "activations basics core networks",
                   "flint jax numpy onnx onnxscript torch"),
    ("bounding",   "networks.bounding",
                   "activations basics checker core networks",
                   "equinox jax jaxtyping numpy rich"),
    ("interop",    "interop",
                   "activations basics bounding core networks",
                   "cvxpy equinox jax numpy scipy"),
    ("answers",    "applications.answer",
                   "core",
                   ""),
    ("control",    "applications.control",
                   "answers basics core",
                   "equinox jax numpy scipy"),
    ("isotonic",   "applications.isotonic",
                   "answers basics core",
                   "jax maxflow numba numpy scipy sklearn"),
    ("mdp",        "applications.mdp",
                   "answers basics core",
                   "jax numpy scipy"),
    ("old_names",  "properties rigor",  # of the checker, in version 0.1
                   "checker reader",
                   ""),
    # What decides.
    ("sweeps",     "sweeps",
                   "basics",
                   "jax numpy pyarrow ray"),
    ("verify",     "verify",
                   "basics bounding core networks reader checker sweeps",
                   "cupy equinox jax numpy onnx onnxruntime scipy threadpoolctl"),
    ("robust",     "robust",
                   "basics bounding networks reader checker sweeps verify",
                   "numpy"),
    ("cli",        "cli __main__",
                   "basics core importers checker reader sweeps verify robust",
                   "jax numpy onnx rich typer"),
]  # fmt: skip

PARTS = {part: modules.split() for part, modules, _, _ in LAYERS}
MAY = {part: may.split() for part, _, may, _ in LAYERS}
ELSEWHERE = {part: packages.split() for part, _, _, packages in LAYERS}


def name_of(path: Path) -> str:
    """Of a module: stagecert.networks.bounding.bounds, say."""
    name = ".".join(path.relative_to(SOURCES).with_suffix("").parts)
    return name.removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted(SOURCES.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
# The package's own modules hand names on; whoever imports from those imports what they hand on.
HANDING_ON = {"stagecert", "stagecert.applications", "stagecert.networks"}


def below(name: str, modules) -> bool:
    """Whether a module is one of those, or in one of them."""
    inside = name.removeprefix("stagecert.")
    return any(inside == module or inside.startswith(module + ".") for module in modules)


def is_ours(module: str) -> bool:
    return module.split(".")[0] in ("stagecert", "stagecert_check") and module != "stagecert"


def part_of(name: str) -> str | None:
    """The part that a module is in; None for those that hand names on."""
    if name in HANDING_ON:
        return None
    found = {m: part for part, modules in PARTS.items() for m in modules if below(name, [m])}
    assert found, f"{name} is in no part of the table"
    return found[max(found, key=len)]


def handed_on(package: str) -> dict[str, str]:
    """Where the names of a package come from, by the imports that type checkers see."""
    return {
        alias.asname or alias.name: str(node.module)
        for node in ast.walk(TREES[package])
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("stagecert.")
        for alias in node.names
    }


HOMES = {package: handed_on(package) for package in HANDING_ON}


@functools.cache
def imports_of(name: str) -> set[str]:
    """The modules that a module imports, ours in full (stagecert.sets), others by package."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            assert node.module
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in HANDING_ON:  # what counts is what is taken from it
                    found |= taken_from(alias.asname or alias.name, whole, TREES[name])
                else:
                    found.add(resolved(node.module, alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in HANDING_ON:
                    found |= taken_from(alias.asname or alias.name, alias.name, TREES[name])
                else:
                    found.add(alias.name)
    return {
        module if module.startswith("stagecert") else module.split(".")[0]
        for module in found
        if module.split(".")[0] not in sys.stdlib_module_names
    }


def taken_from(called: str, module: str, tree) -> set[str]:
    return {
        resolved(module, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == called
    }


def resolved(module: str, name: str) -> str:
    if name in HOMES.get(module, {}):
        return HOMES[module][name]
    return f"{module}.{name}" if f"{module}.{name}" in FILES else module


@pytest.mark.parametrize("part", PARTS)
def test_part_imports_only_what_it_may(part):
    wrong = []
    for name in FILES:
        if part_of(name) != part:
            continue
        for module in imports_of(name):
            if module in HANDING_ON:  # what is defined there itself: __version__, say
                continue
            if not is_ours(module):
                if module not in ELSEWHERE[part]:
                    wrong.append(f"{name} imports {module}")
            elif part_of(module) not in {part, *MAY[part]}:
                wrong.append(f"{name} imports {module}, of the part {part_of(module)}")
    assert not wrong, "\n".join(wrong)


def test_table_has_nothing_to_spare():
    """Every permission is used: what is no longer needed is no longer allowed."""
    for part in PARTS:
        names = [name for name in FILES if part_of(name) == part]
        assert names, f"there is no module of the part {part}"
        used = set().union(*(imports_of(name) for name in names))
        for package in ELSEWHERE[part]:
            assert package in used, f"{part} does not import {package}"
        ours = {part_of(name) for name in used if is_ours(name)}
        for other in MAY[part]:
            assert other in ours, f"{part} does not import {other}"


def test_parts_form_no_circle():
    order, left = [], dict(MAY)
    while left:
        ready = [p for p, may in left.items() if not set(may) & set(left)]
        assert ready, f"these parts import each other: {sorted(left)}"
        order += ready
        left = {p: may for p, may in left.items() if p not in ready}
    assert order.index("checker") < order.index("verify") < order.index("cli")


def test_core_is_in_order():
    core = PARTS["core"]
    for name in FILES:
        if part_of(name) != "core":
            continue
        (mine,) = [k for k, module in enumerate(core) if below(name, [module])]
        for module in imports_of(name):
            for k, other in enumerate(core):
                if module.startswith("stagecert.") and below(module, [other]):
                    assert k <= mine, f"{name} imports {module}, which comes after it"


def test_no_two_modules_import_each_other():
    """Imports inside functions count too: they hide a circle, they do not remove it."""
    edges = {name: {m for m in imports_of(name) if m in FILES} - {name} for name in FILES}
    edges = {name: found for name, found in edges.items() if name not in HANDING_ON}
    while edges:
        ready = [name for name, found in edges.items() if not found & set(edges)]
        assert ready, f"there is a circle among {sorted(edges)}"
        edges = {name: found for name, found in edges.items() if name not in ready}


def test_what_the_search_uses_of_the_checker_is_said():
    """The page for sceptics has a table of it: trust goes one way only."""
    page = (SOURCES.parent / "docs" / "certificates.md").read_text(encoding="utf-8")
    table = page.split("| the search uses | for |")[1].split("\n\n")[0]
    said = {name for row in re.findall(r"^\|([^|]+)\|", table, re.M) for name in NAME.findall(row)}
    search = set().union(*(imports_of(name) for name in FILES if name.startswith("stagecert.")))
    used = {name.split(".")[1] for name in search if name.startswith("stagecert_check.")}
    assert said == used


def test_imports_are_found():
    """What the other tests rest on."""
    assert "jax" in imports_of("stagecert.compiling")
    assert "stagecert_check.checker" in imports_of("stagecert.rigor")
    assert "stagecert.problem" in imports_of("stagecert.cli.core_demo")  # sc.Problem
    assert "stagecert_check.checker" in imports_of("stagecert_check.command")  # inside a function


def test_results_of_benchmarks_know_what_a_search_imports():
    """New modules used to be forgotten: changes there never made results out of date."""

    def named(files) -> set[str]:
        return {"stagecert." + name.removesuffix(".py").replace("/", ".") for name in files}

    hashed = named(records._CODE)
    hashed |= named(f"solvers/{name}" for names in records._SOLVERS.values() for name in names)
    # Solvers are hashed where they are measured; `damped` is not.
    aside = named([*records._ASIDE, records._RIGOROUS, "solvers/damped"])
    seen, unread = set(), ["stagecert.solving"]
    while unread:
        name = unread.pop()
        if name not in seen and name in FILES:
            seen.add(name)
            unread += () if name in aside else imports_of(name)
    assert seen == hashed | aside | {"stagecert.solvers"}
    assert records.part_version("rigor") != records.part_version("peers")
