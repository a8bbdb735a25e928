"""The options that say what computes: `--workers` and `--ray`."""

from typing import Annotated

import typer

from stagecert.errors import ProblemError

# What a bare `--ray` stands for: any cluster, or one that is started.
ANY = "any"

Workers = Annotated[
    str | None,
    typer.Option(metavar="N|auto", help="Processes that compute; auto: one a GPU, or one a core."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="[ADDRESS]",
        help="Compute on the Ray cluster there, on this machine's, or on one that is started.",
    ),
]
WorkerMemory = Annotated[
    float | None, typer.Option(help="GiB of a worker process at which it is ended.")
]


def engine_of(workers: str | None, ray: str | None):
    """The engine that the options ask for; settles, too, that this process keeps off GPUs."""
    import jax

    from stagecert.sweeps import InProcess, Processes, Ray

    if workers is None and ray is None:
        return InProcess()
    count = None
    if workers not in (None, "auto"):
        if not workers.isdecimal() or int(workers) < 1:
            raise ProblemError(f"--workers must be auto or at least 1, not {workers}.")
        count = int(workers)
    # This process only hands out work; on a GPU it would take memory from its workers.
    jax.config.update("jax_platforms", "cpu")
    return Processes(count) if ray is None else Ray(None if ray == ANY else ray, count)


def with_address(arguments: list[str]) -> list[str]:
    """Gives a bare `--ray` its value: options have one in the parser that is used here.

    What follows is an address only if it looks like one, as paths do not: it has a colon, or is
    Ray's own `auto` or `local`.
    """
    result = list(arguments)
    for k, argument in enumerate(arguments):
        following = arguments[k + 1] if k + 1 < len(arguments) else ""
        if argument == "--ray" and ":" not in following and following not in ("auto", "local"):
            result[k] = f"--ray={ANY}"
    return result
