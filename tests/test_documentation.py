"""The reference has every public name; the gallery every example; pictures are there and small."""

import ast
import importlib
import re
import runpy
from pathlib import Path
from types import ModuleType

import pytest

import stagecert as sc

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# What is public, by `__all__`: the package, and what it lists as packages.
PUBLIC = [
    "stagecert",
    *(f"stagecert.{name}" for name in sc.PACKAGES if name != "applications"),
    *(f"stagecert.applications.{name}" for name in sc.applications.__all__),
]


def resolved(path: str):
    """What mkdocstrings shows under a path: a module if there is one, else what is in it."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if not path.startswith(error.name or "."):
            raise
    parent, _, name = path.rpartition(".")
    return getattr(resolved(parent), name)


def documented() -> list[tuple[str, object]]:
    """Paths and objects of all entries of the reference."""
    found = []
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    for entry in re.finditer(r"^::: ([\w.]+)\n((?:    .*\n)*)", text, re.MULTILINE):
        thing = resolved(entry[1])
        members = re.search(r"members: \[([\w, ]+)\]", entry[2])
        if members:
            found += [(f"{entry[1]}.{k}", getattr(thing, k)) for k in members[1].split(", ")]
        else:
            found.append((entry[1], thing))
    return found


@pytest.mark.parametrize("package", PUBLIC)
def test_reference_has_all_public_names(package):
    module = importlib.import_module(package)
    shown = {id(thing) for _, thing in documented()}
    names = [name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)]
    assert names
    missing = [name for name in names if id(getattr(module, name)) not in shown]
    assert not missing, f"docs/reference.md lacks these names of {package}: {missing}"


def test_reference_shows_no_modules_and_nothing_twice():
    entries = documented()
    assert len(entries) > 100
    for path, thing in entries:
        assert not isinstance(thing, ModuleType), f"{path} is a module: name what is in it"
        assert getattr(thing, "__doc__", None), f"{path} has no docstring"
    shown = [id(thing) for _, thing in entries]
    assert len(shown) == len(set(shown))


def test_gallery_has_every_example():
    text = (DOCS / "gallery.md").read_text(encoding="utf-8")
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert set(re.findall(r"^    --8<-- \"examples/(\w+)\.py\"$", text, re.MULTILINE)) == examples
    assert set(re.findall(r"\]\(images/(\w+)\.png\)", text)) == examples


def test_files_that_pages_include_are_there():
    # A formatter once turned the marker into `--8 < --"..."`, which pages then showed as text.
    for page in DOCS.rglob("*.md"):
        for line in page.read_text().splitlines():
            if line.strip().startswith("--8"):
                found = re.fullmatch(r'\s*--8<-- "([^"]+)"', line)
                assert found is not None, f"{page.name}: {line}"
                assert (ROOT / found[1]).is_file(), f"{page.name}: {line}"


def test_pictures_are_there_used_and_small():
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    used = set(re.findall(r"\]\((?:docs/)?images/([\w.]+)\)", text))
    there = {path.name: path.stat().st_size for path in (DOCS / "images").iterdir()}
    assert used == set(there)
    assert sum(there.values()) < 2**20


def test_pages_are_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"^ +- .*: ([\w-]+\.md)$", text, re.MULTILINE))
    assert listed == {path.name for path in DOCS.glob("*.md")}


# -- the page about the code -----------------------------------------------------------------------


def architecture() -> str:
    return (DOCS / "architecture.md").read_text(encoding="utf-8")


def source(name: str) -> Path:
    package = "." if name.startswith("stagecert_check/") else "stagecert"
    return ROOT / "src" / package / name


def assert_defined(rows: list[tuple[str, str]]) -> None:
    """Every file of a row exists, and its files define what is to be read in them."""
    for files, names in rows:
        paths = [source(name) for name in re.findall(r"`([\w/]+\.py)`", files)]
        defined = set()
        for path in paths:
            assert path.is_file(), f"there is no {path.relative_to(ROOT)}"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    defined.add(node.name)
        for name in re.findall(r"`(\w+)`", names):
            assert name in defined, f"{files} has no {name}"


def test_walks_lead_through_what_is_there():
    rows = re.findall(r"^\| (`[^|]+\.py`) \| (`[^|]+`) \|", architecture(), re.MULTILINE)
    assert len(rows) > 40
    assert_defined(rows)


def test_places_that_compute_bounds_are_there():
    """The table of all bounds: files, functions, how they are rounded, and tests."""
    text = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    table = text.split("| bound | file | function |")[1].split("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) > 12
    assert_defined([(files, names) for _, files, names, _, _ in rows])
    for bound, *_, rounding, tests in rows:
        assert re.match("proven|estimated|as above", rounding), f"{bound}: {rounding}"
        named = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        assert named, f"{bound}: no test is named"
        assert all((ROOT / name).is_file() for name in named), f"{bound}: {named}"


def test_every_module_has_its_row():
    table = architecture().split("## Four walks")[0]
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|[^|]*\|([^|]*)\|", table, re.M))))
    sources = ROOT / "src" / "stagecert"
    modules = {path.stem for path in sources.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in sources.glob("*/__init__.py")}
    assert listed == modules | packages | {"stagecert_check"}


def test_the_lines_of_the_checker_are_counted():
    script = runpy.run_path(str(ROOT / "scripts" / "count_checker.py"))
    page = (DOCS / "certificates.md").read_text(encoding="utf-8")
    assert script["written"](page) == page, "run scripts/count_checker.py"
