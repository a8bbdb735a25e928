"""A process that computes batches, and its parent's view of it.

Everything that can go wrong in a computation, from an exception to a crash of the whole process,
ends as an `Outcome` here. Engines only decide what to do about it.

Processes are spawned, not forked: a fork of a process in which JAX runs is likely to hang.
"""

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import jax

from stagecert.compiling import CACHE, announce
from stagecert.errors import ProblemError
from stagecert.sweeps.tasks import Item, Outcome, attempt, said

# Settings of JAX that influence rows, or how long they take.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    CACHE,
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Limits:
    """What an item may take: seconds, and GiB of its process."""

    timeout: float | None = None
    memory: float | None = None

    def __post_init__(self):
        if self.memory is not None and not Path("/proc/self/statm").exists():
            raise ProblemError("A limit on the memory of workers needs Linux.")

    @property
    def tick(self) -> float:
        """Seconds between two looks at a process."""
        # The memory is looked at, not limited by the system: JAX reserves far more address space
        # than it uses, and more with every GPU, so that no limit on that says anything.
        return 0.2 if self.memory is None else 0.02


@dataclass(frozen=True)
class Setup:
    """What a new process is to be like.

    Attributes:
        payload: the work, pickled.
        settings: of JAX.
        environment: variables that it gets, or is to be without (None).
    """

    payload: Any
    settings: Mapping[str, Any]
    environment: Mapping[str, str | None]


def settings() -> dict[str, Any]:
    """This process's settings of JAX, which workers get too."""
    return {name: getattr(jax.config, name) for name in SETTINGS}


class Worker:
    """A process that computes one batch at a time."""

    def __init__(self, setup: Setup, limits: Limits):
        self._setup, self._limits = setup, limits
        self._ready, self._items = False, None
        self._deadline = float("inf")
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=_serve, args=(theirs, dict(setup.settings)), daemon=True
        )
        with _environment(setup.environment), _no_interrupts():
            self.process.start()
        theirs.close()

    def give(self, items: Sequence[Item]) -> None:
        """Lets it compute items, as soon as it is ready. It must not have any."""
        if not self._ready:
            self._items = items
            return
        if self._limits.timeout is not None:
            self._deadline = time.monotonic() + self._limits.timeout * len(items)
        self._send(items)

    def poll(self) -> Outcome | None:
        """What became of it or its items, if anything did by now."""
        try:
            message = self.connection.recv() if self.connection.poll() else None
        except (EOFError, OSError):
            return self._ended()
        if message == "up":
            self._send(self._setup.payload)
        elif message is not None and message.kind == "ready":
            self._ready = True
            if self._items is not None:
                self.give(self._items)
            return message
        elif message is not None:
            self._deadline = float("inf")
            return message
        elif time.monotonic() > self._deadline:
            self.kill()
            return Outcome("late", why=f"took more than {self._limits.timeout:g} s")
        elif self._limits.memory is not None and self._gigabytes() > self._limits.memory:
            self.kill()
            return self._dead(f"took more than {self._limits.memory:g} GiB of memory")
        return None

    def wait(self) -> Outcome:
        """What became of it or its items."""
        while (outcome := self.poll()) is None:
            wait([self.connection], self._limits.tick)
        return outcome

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.is_alive()

    def kill(self) -> None:
        """Ends the process. It keeps nothing that could be lost."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _send(self, what: Any) -> None:
        try:
            if what is self._setup.payload:
                self.connection.send_bytes(what)
            else:
                self.connection.send(what)
        except OSError:
            pass  # It has ended, as the next `poll` will find.

    def _ended(self) -> Outcome:
        # Its end of the pipe is closed, so it has ended or is about to.
        self.process.join(5)
        self.kill()
        code = self.process.exitcode or 0
        if code >= 0:
            return self._dead(f"its process ended with status {code}")
        names = {number.value: number.name for number in signal.Signals}
        return self._dead(f"its process was killed by {names.get(-code, f'signal {-code}')}")

    def _dead(self, why: str) -> Outcome:
        return Outcome("died" if self._ready else "stillborn", why=why)

    def _gigabytes(self) -> float:
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0.0  # It has just ended.
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Changes variables while a process is started, so that it has them before it imports."""
    before = {name: os.environ.get(name) for name in changes}
    try:
        _set(changes)
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal; workers inherit that they never see it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in the process -----------------------------------------------------------------------------


def _serve(connection: Connection, settings: Mapping[str, Any]) -> None:
    _end_with_parent()
    announce(lambda _: None)  # there may be many, and one terminal
    for name, value in settings.items():
        if name != CACHE or value is None or _writable(value):
            jax.config.update(name, value)
    try:
        connection.send("up")
        payload = connection.recv_bytes()
        try:
            compute = pickle.loads(payload).prepare()
        except Exception as error:
            connection.send(Outcome("unprepared", why=said(error)))
            return
        del payload
        connection.send(Outcome("ready"))
        while True:
            outcome = attempt(compute, connection.recv())
            try:
                connection.send(outcome)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                connection.send(Outcome("raised", why=said(error)))
    except (EOFError, OSError):
        return  # The parent is gone.


def _writable(folder: str) -> bool:
    """Whether compiled programs can be kept there; another machine may not have such a place."""
    if "://" in folder:
        return True
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _end_with_parent() -> None:
    """However the parent ends, this process ends too, also in the middle of a computation."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        # Works even while compiled code keeps Python's lock.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
