"""What computes the items of a sweep: this process, or processes beside it."""

import os
import pickle
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing.connection import wait
from typing import Protocol

from stagecert.errors import ProblemError
from stagecert.machine import cores
from stagecert.sweeps.store import Row
from stagecert.sweeps.tasks import Task, Tasks, Work, attempt
from stagecert.sweeps.worker import Limits, Setup, Worker, settings

# Processes that may end one after the other before one is ready.
FALSE_STARTS = 3

Results = Generator[list[Row], None, None]


class Engine(Protocol):
    """Computes tasks until there are none."""

    def results(self, tasks: Tasks, work: Work, limits: Limits) -> Results:
        """Rows as they come; now and then none, so that whoever asks can do something else."""
        ...


@dataclass(frozen=True)
class InProcess:
    """Computes batches one after the other in this process."""

    def results(self, tasks: Tasks, work: Work, limits: Limits) -> Results:
        """See `Engine`."""
        if limits != Limits():
            raise ProblemError("Limits of time and memory need workers or Ray.")
        compute = None
        while (task := tasks.take()) is not None:
            compute = compute or work.prepare()
            yield tasks.settle(task, attempt(compute, task.items))


@dataclass(frozen=True)
class Processes:
    """Computes batches in processes on this machine.

    Attributes:
        workers: how many. None is one for each GPU or, if there are none, one for each core. If
            there are GPUs, each process gets one; those that get the same one share its memory.
    """

    workers: int | None = None

    def __post_init__(self):
        check_workers(self.workers)

    def results(self, tasks: Tasks, work: Work, limits: Limits) -> Results:
        """See `Engine`."""
        payload = pickle.dumps(work)
        slots = [
            _Slot(Setup(payload, settings(), environment), limits)
            for environment in environments(self.workers, visible_gpus())
        ]
        false_starts = 0
        try:
            while True:
                for slot in slots:
                    if slot.task is None and (task := tasks.take()) is not None:
                        slot.begin(task)
                busy = [slot.worker for slot in slots if slot.task is not None]
                if not busy:
                    return
                wait([worker.connection for worker in busy if worker is not None], limits.tick)
                rows: list[Row] = []
                for slot in slots:
                    if slot.task is None or (outcome := slot.worker.poll()) is None:  # type: ignore
                        continue
                    if outcome.kind == "ready":
                        false_starts = 0
                        continue
                    task = slot.end()
                    if outcome.kind == "stillborn":
                        tasks.give_back(task)
                        false_starts += 1
                    elif outcome.kind != "unprepared":
                        rows += tasks.settle(task, outcome)
                    if outcome.kind == "unprepared" or false_starts >= FALSE_STARTS:
                        raise ProblemError(f"Workers cannot be started: {outcome.why}.")
                yield rows
        finally:
            for slot in slots:
                slot.close()


class _Slot:
    """The place of a worker, which is started when there is something for it to do."""

    def __init__(self, setup: Setup, limits: Limits):
        self._setup, self._limits = setup, limits
        self.worker: Worker | None = None
        self.task: Task | None = None

    def begin(self, task: Task) -> None:
        if self.worker is not None and not self.worker.alive:
            self.close()
        if self.worker is None:
            self.worker = Worker(self._setup, self._limits)
        self.task = task
        self.worker.give(task.items)

    def end(self) -> Task:
        assert self.task is not None
        task, self.task = self.task, None
        return task

    def close(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker = None


def check_workers(workers: int | None) -> None:
    """Says if a number of workers is none."""
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ProblemError(f"workers must be at least 1, not {workers!r}.")


def environments(workers: int | None, gpus: list[str]) -> list[dict[str, str | None]]:
    """The variables that give each worker its GPU and its share of that one's memory."""
    if not gpus:
        return [{} for _ in range(workers or cores())]
    count = workers or len(gpus)
    share = gpu_share(-(-count // len(gpus)))
    return [{"CUDA_VISIBLE_DEVICES": gpus[k % len(gpus)], **share} for k in range(count)]


def gpu_share(processes: int) -> dict[str, str | None]:
    """How JAX is told that several processes use one GPU."""
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    if processes == 1 or name in os.environ:
        return {}
    return {name: f"{0.9 / processes:.3f}"}


def visible_gpus() -> list[str]:
    """The GPUs that JAX would use, found without JAX, which would take their memory."""
    plugins = (entry.name for entry in entry_points(group="jax_plugins"))
    platforms = os.environ.get("JAX_PLATFORMS", "cuda")
    if not any("cuda" in name for name in plugins) or not {"cuda", "gpu"} & {*platforms.split(",")}:
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return listed.stdout.split() if listed.returncode == 0 else []
