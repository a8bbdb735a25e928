"""Counts the lines that a sceptic has to read, and writes the table into docs/certificates.md.

The order is that of the list above the table: each of its numbers is a row.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "certificates.md"
CHECKER = ROOT / "src" / "stagecert_check"
MARKS = "<!-- lines -->\n", "<!-- end of lines -->\n"


def steps(page: str) -> list[list[str]]:
    """The files of each step of the reading order."""
    listed = page.split("## Reading the checker")[1].split(MARKS[0])[0]
    items = re.split(r"^\d+\. ", listed, flags=re.MULTILINE)[1:]
    return [re.findall(r"`(\w+\.py)`", item) for item in items]


def lines(path: Path) -> int:
    """How many lines a file has."""
    return len(path.read_text(encoding="utf-8").splitlines())


def table(page: str) -> str:
    """The table: every file of the package is in it."""
    order = steps(page)
    rows = [(", ".join(names), sum(lines(CHECKER / name) for name in names)) for names in order]
    listed = {name for names in order for name in names}
    rest = sorted(path for path in CHECKER.glob("*.py") if path.name not in listed)
    rows.append((", ".join(path.name for path in rest), sum(map(lines, rest))))
    reader = sorted((CHECKER / "properties").glob("*.py"))
    rows.append(("properties/, the reader of VNN-LIB files", sum(map(lines, reader))))
    made = ["| files | lines |", "|---|---|"]
    made += [f"| {name} | {count:,} |" for name, count in rows]
    made += [f"| all | {sum(count for _, count in rows):,} |"]
    return "\n".join(made) + "\n"


def written(page: str) -> str:
    """The page with its table made anew."""
    before, rest = page.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    return f"{before}{MARKS[0]}{table(page)}{MARKS[1]}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
