"""Sweeps on a Ray cluster.

Each worker is an actor that looks after a process of its own, as `Processes` does on one machine.
So crashes, timeouts and limits of memory are dealt with on the node where they happen. What is left
for Ray is what it is made for: getting the work to the nodes, and noticing that one is gone.
"""

import logging
import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from stagecert.errors import ProblemError
from stagecert.machine import cores
from stagecert.sweeps.engines import Results, check_workers, gpu_share
from stagecert.sweeps.store import Row
from stagecert.sweeps.tasks import Item, Outcome, Task, Tasks, Work
from stagecert.sweeps.worker import Limits, Setup, Worker, settings

# Seconds for which no worker at all need be there, such as while a cluster is growing.
PATIENCE = 600.0
# Seconds for connecting to a cluster's head node.
CONNECTION = 10.0
# Batches that take less than so many seconds are sent ahead, to hide the way to the node.
SHORT = 1.0
# How often in a row a process may end before it is ready, and actors in all, for each worker.
FALSE_STARTS = 3
THREADS = "OMP_NUM_THREADS"
# Bytes of the object store of a cluster that is started here, apart from the work itself.
OBJECTS = 200 * 2**20


@dataclass(frozen=True)
class Ray:
    """Computes batches on a Ray cluster: the one that this process uses already, if there is one.

    Attributes:
        address: of the cluster ("auto" finds the one that this machine belongs to). None joins that
            one, or the one in $RAY_ADDRESS, or starts one on this machine; "local" always does.
        workers: how many. None is one for each GPU of the cluster or, if there are none, one for
            each of its CPUs, as they are now. More than fit wait until the cluster grows.
    """

    address: str | None = None
    workers: int | None = None

    def __post_init__(self):
        check_workers(self.workers)

    def results(self, tasks: Tasks, work: Work, limits: Limits) -> Results:
        """See `Engine`."""
        try:
            import ray
        except ImportError as error:
            raise ProblemError('Ray is not installed: pip install "stagecert[ray]"') from error
        if not tasks.left:
            return
        payload = np.frombuffer(ray.cloudpickle.dumps(work), np.uint8)  # type: ignore
        with _connection(ray, self, payload.nbytes):
            crew = _Crew(ray, self.workers, payload, limits)
            try:
                yield from crew.results(tasks, limits.tick)
            finally:
                crew.dismiss()


class _Supervisor:
    """An actor: looks after one process on its node."""

    def __init__(self, payload, settings: dict, environment: dict, limits: Limits):
        # An array is read in place from the node's object store, and copied to the process only.
        self._setup, self._limits = Setup(memoryview(payload), settings, environment), limits
        self._worker: Worker | None = None

    def start(self) -> Outcome:
        """Starts the process, again if need be: "ready", or why not."""
        for _ in range(FALSE_STARTS):
            self._worker = Worker(self._setup, self._limits)
            outcome = self._worker.wait()
            if outcome.kind != "stillborn":
                break
        return outcome

    def compute(self, items: Sequence[Item]) -> Outcome:
        """What becomes of the items."""
        if self._worker is None or not self._worker.alive:
            started = self.start()
            if started.kind != "ready":
                return started
        assert self._worker is not None
        self._worker.give(items)
        return self._worker.wait()


class _Member:
    """An actor as the driver sees it, with the tasks that were sent to it, in that order."""

    def __init__(self, actor: Any):
        self.actor = actor
        self.starting = actor.start.remote()
        self.ready = False
        self.sent: deque[tuple[Any, Task]] = deque()
        self.ahead = 1
        self._since = 0.0

    def send(self, task: Task) -> None:
        if not self.sent:
            self._since = time.monotonic()
        self.sent.append((self.actor.compute.remote(task.items), task))

    def received(self) -> None:
        """Takes note of how long a batch takes."""
        now = time.monotonic()
        self.ahead = 2 if now - self._since < SHORT else 1
        self._since = now


class _Crew:
    """All actors of a sweep."""

    def __init__(self, ray: Any, workers: int | None, payload: np.ndarray, limits: Limits):
        self._ray = ray
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        self.size = workers or gpus or max(int(resources.get("CPU", 1)), 1)
        # Ray gives its workers one thread if nothing is said, and threads may change last digits.
        environment: dict[str, str | None] = {THREADS: os.environ.get(THREADS)}
        options: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if gpus:
            each = -(-self.size // gpus)
            options["num_gpus"] = 1 / each
            environment |= gpu_share(each)
        # Once to the object store, and from there to each node once.
        reference = ray.put(payload)
        kind = ray.remote(**options)(_Supervisor)
        self._hire = lambda: _Member(kind.remote(reference, settings(), environment, limits))
        self._members = [self._hire() for _ in range(self.size)]
        self._any_ready, self._false_starts = False, 0

    def results(self, tasks: Tasks, tick: float) -> Results:
        """See `Engine`."""
        idle_since = time.monotonic()
        while True:
            self._send(tasks)
            references = [
                reference
                for member in self._members
                for reference in (
                    [sent for sent, _ in member.sent] if member.ready else [member.starting]
                )
            ]
            if not tasks.under_way and not tasks.left:
                return
            if tasks.under_way:
                idle_since = time.monotonic()
            elif time.monotonic() > idle_since + PATIENCE:
                raise ProblemError(f"No Ray worker was there within {PATIENCE:g} s.")
            self._ray.wait(references, num_returns=1, timeout=tick)
            done, _ = self._ray.wait(references, num_returns=len(references), timeout=0)
            yield self._receive(tasks, set(done))

    def dismiss(self) -> None:
        """Ends all actors, and with them their processes."""
        for member in self._members:
            self._ray.kill(member.actor)

    def _send(self, tasks: Tasks) -> None:
        """One batch to each member that has none, then another to those with short ones."""
        for depth in (1, 2):
            for member in self._members:
                if member.ready and len(member.sent) < min(depth, member.ahead):
                    task = tasks.take()
                    if task is None:
                        return
                    member.send(task)

    def _receive(self, tasks: Tasks, done: set) -> list[Row]:
        rows: list[Row] = []
        for k, member in enumerate(self._members):
            if not member.ready:
                if member.starting in done:
                    self._started(k, member)
                continue
            while member.sent and member.sent[0][0] in done:
                reference, task = member.sent.popleft()
                outcome = self._outcome(reference)
                if outcome.kind in ("lost", "unprepared", "stillborn"):
                    if outcome.kind == "lost":
                        rows += tasks.settle(task, Outcome("died", why=outcome.why))
                    else:
                        tasks.give_back(task)
                    # It had not begun with what came after.
                    for _, later in reversed(member.sent):
                        tasks.give_back(later)
                    self._replace(k, member, outcome)
                    break
                rows += tasks.settle(task, outcome)
                member.received()
        return rows

    def _started(self, k: int, member: _Member) -> None:
        outcome = self._outcome(member.starting)
        if outcome.kind == "ready":
            member.ready = self._any_ready = True
        elif outcome.kind == "unprepared" and not self._any_ready:
            raise ProblemError(f"Workers cannot be started: {outcome.why}.")
        else:
            self._replace(k, member, outcome)

    def _replace(self, k: int, member: _Member, outcome: Outcome) -> None:
        """Another actor, perhaps elsewhere, for one that is of no use any more."""
        self._ray.kill(member.actor)
        if not member.ready:
            # One bad node must not end the sweep; all of them together must.
            self._false_starts += 1
            if self._false_starts > FALSE_STARTS * self.size:
                raise ProblemError(f"Workers cannot be started: {outcome.why}.")
        self._members[k] = self._hire()

    def _outcome(self, reference: Any) -> Outcome:
        """What an actor returned; "lost" if that or the actor is lost."""
        lost = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except (lost.RayActorError, lost.ObjectLostError, lost.OutOfMemoryError):
            return Outcome("lost", why="its Ray worker was lost")


@contextmanager
def _connection(ray: Any, engine: Ray, size: int) -> Iterator[None]:
    """Joins or starts a cluster; leaves or ends it afterwards."""
    if ray.is_initialized():
        yield  # The caller's, who knows when to end it.
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = engine.address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_address(address)
    alone = {
        "address": "local",
        "num_cpus": max(engine.workers or 0, cores()),
        "include_dashboard": False,
        "object_store_memory": OBJECTS + 2 * size,
    }
    try:
        _start(ray, alone if address == "local" else {"address": address})
    except ConnectionError as error:
        if address != "auto" or engine.address == "auto":
            raise ProblemError(f"There is no Ray cluster at {address}: {error}") from None
        _start(ray, alone)
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Says at once what Ray would say after minutes."""
    if "://" in address:
        raise ProblemError(
            f"{address}: give HOST:PORT of the head node, on a machine that belongs to the cluster."
        )
    host, colon, port = address.rpartition(":")
    if not colon:
        if address not in ("auto", "local"):
            raise ProblemError(f"A Ray cluster's address is HOST:PORT, not {address!r}.")
        return
    try:
        socket.create_connection((host, int(port)), CONNECTION).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ProblemError(f"There is no Ray cluster at {address}: {error}.") from None


def _start(ray: Any, arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        # Ray starts its processes with a function between fork and exec, which JAX warns of. That
        # function does no more than system calls.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)
