"""`stagecert demo`: verifies a few properties of a digits network, and checks the certificates."""

import json
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from stagecert.errors import ProblemError

if TYPE_CHECKING:
    import numpy as np

MODEL = "digits.onnx"
SHADES = " ░▒▓█"


@dataclass
class Line:
    """What the demonstration says of one property.

    Attributes:
        property: what it claims.
        file: where it is.
        answer: of `verify`.
        how: the most expensive method that was needed.
        bound: a certified lower bound on the smallest margin, over all cases and inputs.
        met: the smallest margin that the search met.
        gap: met - bound; None where a tree proves that the margin is positive, and no more.
        seconds: for verifying, compilation included.
        certificate: "accepted" or "rejected" by the independent checker, or None.
        checked: the smallest bound that the checker derived.
        counterexample: pixels and outputs, if there is one.
    """

    property: str
    file: str
    answer: str
    how: str | None
    bound: float | None
    met: float | None
    gap: float | None
    seconds: float
    certificate: str | None = None
    checked: float | None = None
    counterexample: dict[str, list[float]] | None = None


def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="Keep model, images, properties and certificates in this folder."),
    ] = None,
    core: Annotated[
        bool, typer.Option("--core", help="Solve a few stagewise problems instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Verifies properties of a small network, with bounds, gaps and checked certificates.

    The exit status is 0 unless a certificate is rejected.
    """
    if core:
        from stagecert.cli.core_demo import core_demo

        core_demo(as_json)
        return
    console = Console()
    try:
        with tempfile.TemporaryDirectory() as rest:
            folder = Path(rest) if out is None else out
            _unpack(folder)
            lines = _verify_all(folder, console)
    except (ProblemError, OSError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        _print(console, lines, out)
    raise typer.Exit(1 if any(line.certificate == "rejected" for line in lines) else 0)


def _unpack(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ProblemError(f"{folder} cannot be used as a folder: {error.strerror}.") from None
    for part in (resources.files("stagecert") / "digits").iterdir():
        if part.name.endswith((".onnx", ".npz", ".vnnlib")):
            with part.open("rb") as source, open(folder / part.name, "wb") as target:
                shutil.copyfileobj(source, target)


def _verify_all(folder: Path, console: Console) -> list[Line]:
    from stagecert.cli.verify import set_up_jax

    set_up_jax()
    lines = []
    files = sorted(folder.glob("?-*.vnnlib"))
    with console.status("") as status:
        for number, file in enumerate(files, 1):

            def show(text: str, number=number, file=file) -> None:
                status.update(f"{number} of {len(files)}, {file.stem}: {text}")

            show("starting")
            lines.append(_verify(folder / MODEL, file, show))
    return lines


def _verify(model: Path, file: Path, show) -> Line:
    import numpy as np

    from stagecert.files import write_whole
    from stagecert.verify import verify

    begin = time.perf_counter()
    verdict = verify(model, file, progress=show)
    seconds = time.perf_counter() - begin
    order = ("ibp", "backward", "nonconvex", "optimised", "splitting", "tree")
    hows = [case.how for case in verdict.cases if case.how is not None]
    bound = min(case.proven for case in verdict.cases)
    met = min(case.nearest for case in verdict.cases)
    line = Line(
        file.read_text().splitlines()[0].removeprefix("; "),
        file.name,
        verdict.answer,
        max(hows, key=order.index) if hows and verdict.answer == "unsat" else None,
        bound if np.isfinite(bound) else None,
        met,
        verdict.gap,
        round(seconds, 2),
    )
    if verdict.counterexample is not None:
        found = verdict.counterexample
        line.counterexample = {"inputs": found.inputs.tolist(), "outputs": found.outputs.tolist()}
    if verdict.certified is not None:
        write_whole(file.with_suffix(".cert"), verdict.certified.certificate)
        line.certificate = "accepted"
        line.checked = min(leaf for case in verdict.certified.report.bounds for leaf in case)
    elif verdict.rejected:
        line.certificate = "rejected"
    return line


def _print(console: Console, lines: list[Line], out: Path | None) -> None:
    console.print("A network that reads digits, and what must hold for it:", highlight=False)
    for number, line in enumerate(lines, 1):
        console.print(f"  {number}. {line.property}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("", justify="right")
    for heading in ("answer", "by", "bound", "met", "gap", "certificate", "seconds"):
        left = heading in ("answer", "by", "certificate")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    colours = {"unsat": "green", "sat": "red"}
    for number, line in enumerate(lines, 1):
        table.add_row(
            str(number),
            f"[{colours.get(line.answer, 'yellow')}]{line.answer}[/]",
            line.how or "",
            # Leaves of a tree prove that there is no violation, and not how far away one is.
            "> 0" if line.how == "tree" and line.bound == 0 else _short(line.bound),
            *(_short(value) for value in (line.met, line.gap)),
            line.certificate or "",
            f"{line.seconds:.1f}",
        )
    console.print(table)
    console.print(
        "unsat: proven, no input violates the property. sat: the input below does, ONNX Runtime "
        "says so. unknown: neither was found.\n"
        "bound: proven over the whole box, no input has a smaller margin; above zero, the property "
        "holds. by: tree is proven on the parts of a tree of splits of neurons. met: the "
        "smallest margin that the search met. gap: how far they are apart; the search ends as "
        "soon as a property is decided.\n"
        "Certificates were checked by stagecert_check, a package of its own: it reads model and "
        "property itself and uses nothing of the search, so only it has to be trusted. Seconds "
        "include compilation, which later runs save.",
        highlight=False,
    )
    for line in lines:
        if line.counterexample is not None:
            _print_images(console, line)
    if out is not None:
        console.print(
            f"\n{out} has the model, images, properties and certificates. To go on:\n"
            f"  stagecert check {out}/{MODEL} {out}/{lines[0].file} "
            f"{out}/{Path(lines[0].file).stem}.cert\n"
            f"  stagecert robust {out}/{MODEL} --data {out}/digits.npz --eps 8/255 "
            f"--out {out}/robust",
            highlight=False,
            soft_wrap=True,
        )


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _print_images(console: Console, line: Line) -> None:
    """The test image next to the counterexample, and what ONNX Runtime makes of the latter."""
    import numpy as np

    assert line.counterexample is not None
    with np.load((resources.files("stagecert") / "digits" / "digits.npz").open("rb")) as file:  # type: ignore
        images = file["images"].reshape(-1, 64)
        labels: Any = file["labels"]
    point = np.array(line.counterexample["inputs"])
    nearest = int(np.argmin(np.abs(images - point).max(axis=1)))
    seen = int(np.argmax(line.counterexample["outputs"]))
    console.print(f"\nA test image, a {labels[nearest]}, and an input near it that is a {seen}:")
    for one, other in zip(_drawn(images[nearest]), _drawn(point), strict=True):
        console.print(f"    {one}    {other}", highlight=False)


def _drawn(pixels: "np.ndarray") -> list[str]:
    most = len(SHADES) - 1
    levels = (pixels * most).round().clip(0, most).astype(int)
    return ["".join(SHADES[v] * 2 for v in row) for row in levels.reshape(8, 8)]
