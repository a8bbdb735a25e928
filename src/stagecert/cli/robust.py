"""`stagecert robust`: how robust a classifier is on a data set, image by image."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from stagecert.cli.ending import Watcher, say
from stagecert.cli.running import RayAddress, Running, WorkerMemory, Workers, command, engine_of

REPORT = "report.html"


def robust(
    model: Annotated[Path, typer.Argument(help="An ONNX classifier, .onnx or .onnx.gz.")],
    data: Annotated[Path, typer.Option(help="An .npz file with images and labels.")],
    eps: Annotated[
        str, typer.Option(help="How far each pixel may move: 8/255, 0.03; several with commas.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the results; made, or gone on with.")],
    clip: Annotated[
        str, typer.Option(help="The range of pixels, which cuts the boxes: LOW,HIGH or none.")
    ] = "0,1",
    mean: Annotated[
        str, typer.Option(help="The model gets (pixel - mean) / std: a number or one a channel.")
    ] = "0",
    std: Annotated[str, typer.Option(help="See --mean.")] = "1",
    images: Annotated[str | None, typer.Option(help="The name of the images in the file.")] = None,
    labels: Annotated[str | None, typer.Option(help="The name of the labels in the file.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take the first images only.")] = None,
    method: Annotated[
        str,
        typer.Option(
            help="The last method to try: ibp, backward, nonconvex or optimised; or complete."
        ),
    ] = "nonconvex",
    time_limit: Annotated[
        float, typer.Option(help="Seconds an image, for --method complete.")
    ] = 10.0,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Certify without having proofs checked.")
    ] = False,
    restarts: Annotated[
        int, typer.Option(help="Starting points of the attack, for each other class.")
    ] = 4,
    seed: Annotated[int, typer.Option(help="For the starting points of the attack.")] = 0,
    batch: Annotated[
        int | None, typer.Option(help="Images computed together; by default what fits.")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(help="GiB that arrays may take; by default 1, and half of a GPU's."),
    ] = None,
    worker_memory: WorkerMemory = None,
    workers: Workers = None,
    ray: RayAddress = None,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Compute images again that had errors.")
    ] = False,
    format: Annotated[str, typer.Option(help="Of the table: csv or parquet.")] = "csv",
    report: Annotated[bool, typer.Option(help=f"Write {REPORT}.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Clean, attacked and certified accuracy on a data set, with a table of all images.

    The folder gets results.csv (or .parquet), summary.json, times.csv, counterexamples.npz and
    report.html. With several radii each has a folder of its own, and report.html shows accuracy
    against the radius. A run that was interrupted or killed goes on where it was if the same
    command is given again.

    The exit status is 0 when all images are done, 2 for bad input, 3 for an error of the program,
    and 130 if the run was interrupted.
    """
    running = Running("images", "status", ("certified", "attacked"), quiet)
    Watcher(None, running).start()
    with running.failures("--batch or --memory"):
        from stagecert.compiling import announce, keep_programs
        from stagecert.robust import Robustness
        from stagecert.robust.data import load
        from stagecert.robust.report import folder_of, report_of_radii, report_of_robust
        from stagecert.sweeps import Store
        from stagecert.sweeps.tables import check_format

        keep_programs()
        announce(running.compiling)
        check_format(format)
        engine = engine_of(workers, ray)
        arrays = load(data, images, labels)
        radii = eps.split(",")

        def prepared(radius: str) -> Robustness:
            return Robustness(
                model,
                *arrays,
                radius,
                clip=None if clip == "none" else clip.split(","),
                mean=mean.split(","),
                std=std.split(","),
                method=method,
                time_limit=time_limit,
                check=not unchecked,
                restarts=restarts,
                seed=seed,
                limit=limit,
                batch=batch,
                memory=memory,
            )

        def computed(run: Robustness, folder: Path, last: bool):
            """Everything about one radius, in its folder."""

            def write(store: Store):
                found = run.export(store, format)
                if report:
                    report_of_robust(
                        store, run.keys, folder / REPORT,
                        command=command(), name=model.name, images=run.data,
                    )  # fmt: skip
                return found

            if run.warning:
                say(f"Warning: {run.warning}")
            summary, known = running.carry_out(
                run, folder, write, retry_errors=retry_errors, last=last, engine=engine,
                memory=worker_memory,
            )  # fmt: skip
            if not as_json and not quiet:
                files = f"The table is {folder / f'results.{format}'}"
                files += f", the report {folder / REPORT}." if report else "."
                _print(summary, known, files)
            return summary

        # Bad input is told before any work.
        runs = {radius: prepared(radius) for radius in radii}
        notice = next(iter(runs.values())).notice  # of the model, which all have
        if notice and not quiet:
            say(notice)
        if len(runs) == 1:
            found = [computed(runs[eps], out, last=True)]
        else:
            folders = {
                radius: out / folder_of(run.configuration["eps"]) for radius, run in runs.items()
            }
            out.mkdir(parents=True, exist_ok=True)
            found = [
                computed(run, folders[radius], last=radius == radii[-1])
                for radius, run in runs.items()
            ]
            if report:
                report_of_radii(out / REPORT, found, command=command(), name=model.name)
                if not as_json and not quiet:
                    print(f"The report of all radii is {out / REPORT}.")
        if as_json:
            told = [one.to_dict() | {"seconds": round(one.seconds, 3)} for one in found]
            print(json.dumps(told[0] if len(told) == 1 else told))
        raise typer.Exit(0)


def _print(report, known: int, files: str) -> None:
    from stagecert.robust.boxes import written

    console = Console()
    title = f"{report.done} images, eps {written(report.configuration['eps'])}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("accuracy")
    table.add_column("images", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    proven = ", ".join(f"{n} by {name}" for name, n in report.methods.items())
    for name, count, note in (
        ("clean", report.correct, "classified correctly"),
        ("attacked", report.correct - report.attacked,
         f"and no counterexample found ({report.attacked} have one)"),
        ("certified", report.certified,
         f"and proven{'' if report.configuration['checked'] else ', unchecked'}"
         + (f": {proven}" if proven else "")),
    ):  # fmt: skip
        table.add_row(name, str(count), f"{count / max(report.done, 1):.1%}", note)
    console.print(table)
    if report.unknown:
        console.print(
            f"{report.unknown} images are undecided: neither attacked nor certified.",
            highlight=False,
        )
    if report.errors:
        console.print(f"{report.errors} images have errors; see the column note.", highlight=False)
    new = report.done - known
    console.print(
        f"{new} images computed now, {known} before; {report.seconds:.1f} s in all. {files}",
        highlight=False,
        soft_wrap=True,
    )
