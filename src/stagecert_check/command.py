"""`stagecert-check`: whether a certificate proves that a property of a model holds."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from stagecert_check import __version__
from stagecert_check.errors import ProblemError

ACCEPTED, REJECTED, UNREADABLE = 0, 1, 2


def main(arguments: list[str] | None = None) -> int:
    """The command itself. The status is 0 if accepted, 1 if rejected, 2 if a file is unreadable."""
    parser = argparse.ArgumentParser(
        prog="stagecert-check",
        description="Checks that a certificate proves a property of a model, independently of what"
        " made it.",
        epilog="The exit status is 0 if every step of it holds, 1 if it is rejected, and 2 if a"
        " file cannot be read.",
    )
    parser.add_argument("model", type=Path, help="an ONNX file, .onnx or .onnx.gz")
    parser.add_argument("property", type=Path, help="a VNN-LIB file, plain or gzipped")
    parser.add_argument("certificate", type=Path, help="the certificate")
    parser.add_argument(
        "--exact", action="store_true", help="compute in rational numbers; for small networks"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    given = parser.parse_args(arguments)
    return run(
        given.model, given.property, given.certificate, exact=given.exact, as_json=given.json
    )


def run(
    model: Path, property: Path, certificate: Path, *, exact: bool = False, as_json: bool = False
) -> int:
    """Checks, prints what was found, and returns the exit status."""
    try:
        # Not at the top: `--help` needs neither onnx nor flint.
        from stagecert_check.checker import check

        report = check(model, property, certificate, exact=exact, progress=_progress())
    except (ProblemError, ImportError) as error:
        print(error, file=sys.stderr)
        return UNREADABLE
    if as_json:
        bounds = [[x if math.isfinite(x) else None for x in case] for case in report.bounds]
        print(json.dumps(asdict(report) | {"bounds": bounds}))
    elif report.accepted:
        leaves = [bound for case in report.bounds for bound in case]
        least = f", the smallest bound is {min(leaves):.6g}" if leaves else ""
        cases = "1 case" if len(report.bounds) == 1 else f"{len(report.bounds)} cases"
        parts = "1 leaf" if len(leaves) == 1 else f"{len(leaves)} leaves"
        print(f"accepted: {cases} refuted on {parts}{least}")
    else:
        for reason in report.reasons:
            print("rejected: " + "".join(c if c.isprintable() else "?" for c in reason))
    return ACCEPTED if report.accepted else REJECTED


def _progress() -> Callable[[int, int], None] | None:
    """A function that shows how far the check is on a terminal, or None where there is none."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None

    def show(finished: int, total: int) -> None:
        # The last line is wiped, so that the answer stands alone.
        line = f"{finished} of {total} leaves" if finished < total else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)

    return show
