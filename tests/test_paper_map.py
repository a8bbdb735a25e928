"""Every row of docs/paper-map.md names code that exists, by its dotted path."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "paper-map.md"
DOTTED = re.compile(r"`(stagecert(?:\.\w+)+)`")


def rows_of(page: str) -> list[list[str]]:
    """The cells of every row of the tables on a page, without their heads."""
    rows, in_body = [], False
    for line in page.splitlines():
        if not line.lstrip().startswith("|"):
            in_body = False
        elif re.fullmatch(r"[\s|:-]+", line):
            in_body = True
        elif in_body:
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return rows


def paths_of(row: list[str]) -> list[str]:
    return DOTTED.findall(" | ".join(row))


def resolve(path: str):
    """The object a dotted path names: a module, or what attributes (or fields) lead to from one."""
    names = path.split(".")
    for count in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:count]))
        except ModuleNotFoundError:
            continue
        for name in names[count:]:
            # A field without a default is no attribute of its class.
            fields = getattr(found, "__dataclass_fields__", {})
            found = fields[name] if name in fields else getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


ROWS = rows_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else []


def test_the_table_is_there():
    assert PAGE.exists()
    assert len(ROWS) >= 12
    named = {path for row in ROWS for path in paths_of(row)}
    # The names that a reader of the paper looks for.
    for name in (
        "forward",
        "psi_0",
        "duality_gap",
        "step_progress",
        "degenerate",
        "escape_exact_local_min",
        "fix_degeneracy",
        "Simple",
        "Safe",
    ):
        assert any(path.endswith(f".{name}") for path in named), name


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_row_names_code_that_exists(row):
    paths = paths_of(row)
    assert paths, f"no dotted path in {row}"
    for path in paths:
        resolve(path)


def test_what_counts_as_a_row():
    page = """
    Words with a | bar.

    | notion | code |
    |:---|---:|
    | a | `stagecert.problem.Problem` |
    | b | nothing |
    """
    assert [paths_of(row) for row in rows_of(page)] == [["stagecert.problem.Problem"], []]


def test_what_can_be_resolved():
    assert resolve("stagecert.problem").__name__ == "stagecert.problem"
    assert resolve("stagecert.certificate.Certificate.derive").__name__ == "derive"
    assert resolve("stagecert.certificate.Certificate.multipliers").name == "multipliers"
    for wrong in ("stagecert.nowhere.Problem", "stagecert.problem.Problme"):
        with pytest.raises(AttributeError):
            resolve(wrong)
