"""Other processes that take part in a search.

Threads do not help a search: its arrays fit into a processor's caches, and what is done between
operations on them holds Python's lock. A process of its own is asked for something that takes long
enough to make up for the journey of what it needs.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from threadpoolctl import threadpool_limits

# Seconds that a search takes before others join: most are over by then.
ALONE = 0.5
PATIENT = 0.05  # seconds between two looks at what is expected
MOST = 8  # processes that join without being asked for


class Lost(Exception):
    """A process is gone."""


class Member:
    """A process that is asked for one thing after the other."""

    def __init__(self):
        """Starts it."""
        command = [sys.executable, "-c", "from stagecert.verify.team import serve; serve()"]
        one_core = dict.fromkeys(
            ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"
        )
        home = os.pathsep.join(path for path in sys.path if path)
        environment = os.environ | one_core | {"PYTHONPATH": home, "JAX_PLATFORMS": "cpu"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._thread = ThreadPoolExecutor(1)
        self.planted: object = None  # the tree that the process knows

    def ask(self, function: Callable, *arguments) -> Future:
        """What a function of some module returns there, later."""
        return self._thread.submit(self._asked, function, arguments)

    def _asked(self, function: Callable, arguments: tuple) -> Any:
        there, back = self._process.stdin, self._process.stdout
        assert there is not None
        assert back is not None
        try:
            pickle.dump((function, arguments), there, protocol=5)
            there.flush()
            well, answer = pickle.load(back)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise Lost("A process that took part in the search is gone.") from error
        if not well:
            raise answer
        return answer

    def close(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._thread.shutdown(cancel_futures=True)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # nobody reads what was still to be written
                pipe.close()
        self._process.wait()


class Team:
    """This process and some others, which are started when there is enough to do.

    Attributes:
        size: how many there are to be.
        members: the others, as far as they have been started.
    """

    def __init__(self, size: int = 1):
        self.size = size
        self.members: list[Member] = []
        self._begin = time.monotonic()

    def gather(self) -> None:
        """Starts the other processes, if the search has taken long enough for that."""
        if len(self.members) < self.size - 1 and time.monotonic() - self._begin > ALONE:
            self.members += [Member() for _ in range(self.size - 1 - len(self.members))]

    def deal(
        self, function: Callable, parts: Callable[[int, int], tuple], stop: Callable[[], bool]
    ) -> list[Any] | None:
        """What a function returns for all parts of something, of which every process has one.

        Args:
            function: of some module.
            parts: the arguments of part k of n.
            stop: whether time is up; then there is nothing.
        """
        self.gather()
        members = list(self.members)
        count = len(members) + 1
        asked = [one.ask(function, *parts(k, count)) for k, one in enumerate(members, 1)]
        found = [function(*parts(0, count))]
        for k, (member, answer) in enumerate(zip(members, asked, strict=True), 1):
            while not answer.done():
                if stop():
                    return None
                wait([answer], PATIENT)
            try:
                found.append(answer.result())
            except Lost:
                self.drop(member)
                found.append(function(*parts(k, count)))
        return found

    def drop(self, member: Member) -> None:
        """Goes on without a process."""
        self.size -= 1
        self.members.remove(member)
        member.close()

    def __enter__(self) -> "Team":
        self._begin = time.monotonic()
        return self

    def __exit__(self, *_) -> None:
        """Ends all other processes."""
        for member in self.members:
            member.close()
        self.members, self.size = [], 1


def one_thread() -> contextlib.AbstractContextManager:
    """Has NumPy's products use one thread meanwhile, unless OPENBLAS_NUM_THREADS says how many.

    Those of a search are many and small: threads that wait for each other make them slower.
    """
    if "OPENBLAS_NUM_THREADS" in os.environ:
        return contextlib.nullcontext()
    return threadpool_limits(1, "blas")


def serve() -> None:
    """What such a process does: it answers until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Only answers go where they are expected.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = True, function(*arguments)
        except Exception as error:
            answer = False, error
        try:
            pickle.dump(answer, answers, protocol=5)
            answers.flush()
        except BrokenPipeError:
            return
