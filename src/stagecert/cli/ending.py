"""The end of a command: by a signal, at a deadline or when all is done, also if nobody reads.

A time limit holds whatever it interrupts: the work is done in a process of its own; see `guard`.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

# Exit statuses that commands have in common.
BAD_INPUT, FAILED = 2, 3


def say(text: object, to_stdout: bool = False) -> None:
    """Prints a line, on standard error unless told otherwise; what nobody reads is dropped."""
    stream = sys.stdout if to_stdout else sys.stderr
    if stream is None:  # closed when Python started
        return
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError):
        # The reader is gone, the disk is full or the stream is closed. There is work left to do,
        # such as writing a result file, and later lines must not fail again.
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError):
            return


def end(code: int) -> NoReturn:
    """Ends the process: compilations run in threads that cannot be stopped in any other way."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _woken_by(*signals: int) -> tuple[socket.socket, socket.socket]:
    """A socket to wait at, on which signals arrive as bytes; and its other end, to be kept."""
    awake, wake = socket.socketpair()
    wake.setblocking(False)
    for number in signals:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    return awake, wake


class Ending:
    """What ends the process, once, whichever thread comes first."""

    def __init__(self):
        # Whoever has the right may still fail: another claim by the same thread does not wait.
        self._once = threading.RLock()
        # Tells a process that waits for this one; see `guard`.
        self.tell: Callable[[bytes], None] = lambda what: None

    def claim(self) -> None:
        """Takes the right to end the process; a thread that comes later waits for that end."""
        if not self._once.acquire(blocking=False):
            threading.Event().wait()

    def timed_out(self) -> None:
        """Ends the process when time is up; not called where there is no limit."""
        raise NotImplementedError

    def interrupted(self) -> None:
        """Ends the process when the user wants no more."""
        raise NotImplementedError

    def lost(self, answer: str, reason: str, code: int | None = None) -> NoReturn:
        """Ends the process that waited for another one, which gave no answer."""
        raise NotImplementedError


class Watcher(threading.Thread):
    """Ends the work at its deadline or on a signal, also while a compilation is under way.

    Python runs signal handlers between two steps of its main thread, which can be a minute away
    when JAX compiles. So signals wake up this thread.

    Args:
        deadline: a time of the monotonic clock, or None.
        ending: told of the one or the other.
    """

    def __init__(self, deadline: float | None, ending: Ending):
        super().__init__(daemon=True)
        self.deadline, self.ending = deadline, ending
        self.awake, self.wake = _woken_by(signal.SIGINT, signal.SIGTERM)

    def run(self) -> None:
        """Waits."""
        try:
            while True:
                wait = None if self.deadline is None else self.deadline - time.monotonic()
                if wait is not None and wait <= 0:
                    self.ending.timed_out()
                ready, _, _ = select.select([self.awake], [], [], wait)
                if ready and set(self.awake.recv(16)) & {signal.SIGINT, signal.SIGTERM}:
                    self.ending.interrupted()
        except Exception as error:
            # Without this thread nothing but SIGKILL would end the process.
            say(f"{type(error).__name__}: {error}")
            end(FAILED)


# -- a process of its own --------------------------------------------------------------------------


# Seconds after the deadline that the child has to end by itself, and more of them after a signal.
GRACE, AFTER_SIGNAL = 1.0, 4.0
# What the child tells its parent: that the deadline no longer holds, and that it gives the answer.
UNLIMITED, ANSWERING = b"u", b"a"


def guard(deadline: float | None, ending: Ending) -> None:
    """Goes on in a child process; the parent waits for it, and ends as it does.

    A thread that waits for the deadline cannot run while a compiler holds Python's lock, which has
    kept a command for 20 seconds beyond its limit. Another process can. So the parent only waits,
    and the child does the work with its own watcher thread, which ends it in all ordinary cases.
    The fork comes before JAX has started any of its threads.

    Does nothing but on Linux: elsewhere, system libraries do not survive a fork.

    Args:
        deadline: a time of the monotonic clock, or None.
        ending: `ending.lost` is called in the parent if there is no answer from the child.
    """
    if not sys.platform.startswith("linux"):
        return
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    news, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(news)
        ending.tell = lambda what: _write(tell, what)
        return
    os.close(tell)
    _Parent(child, news, deadline, ending).wait()


def _write(to: int, what: bytes) -> None:
    try:
        os.write(to, what)
    except OSError:  # there is no parent any more
        return


class _Parent:
    """Waits for the child."""

    def __init__(self, child: int, news: int, deadline: float | None, ending: Ending):
        self.child, self.news, self.deadline, self.ending = child, news, deadline, ending
        self.answering = False
        self.passed_on: set[int] = set()
        self.awake, self.wake = _woken_by(signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)

    def wait(self) -> None:
        """Ends this process when the child has ended."""
        while True:
            # The child may have ended before there was a handler.
            done, status = os.waitpid(self.child, os.WNOHANG)
            if done:
                self._finish(status)
            left = None
            if self.deadline is not None and not self.answering:
                left = self.deadline + GRACE - time.monotonic()
                if left <= 0:
                    self._kill()
            watched = [self.awake, self.news] if self.news >= 0 else [self.awake]
            ready, _, _ = select.select(watched, [], [], left)
            if self.news in ready:
                self._hear()
            if self.awake in ready:
                for number in {*self.awake.recv(64)} & {signal.SIGINT, signal.SIGTERM}:
                    self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """A signal is the child's business, but it may not be able to hear it."""
        os.kill(self.child, number)
        self.passed_on.add(number)
        soon = time.monotonic() + AFTER_SIGNAL
        self.deadline = soon if self.deadline is None else min(soon, self.deadline)

    def _hear(self) -> None:
        said = os.read(self.news, 64)
        if not said:
            self.news = -1
        if UNLIMITED in said:
            self.deadline = None
        if ANSWERING in said:
            self.answering = True

    def _kill(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        if self.passed_on:
            self.ending.lost("unknown", "Interrupted; the work had to be killed.")
        self.ending.lost("timeout", "Time is up; the work had to be killed.")

    def _finish(self, status: int) -> None:
        if os.WIFEXITED(status):
            end(os.WEXITSTATUS(status))
        if self.news >= 0 and select.select([self.news], [], [], 0)[0]:
            self._hear()
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in list(signal.Signals) else str(number)
        if self.answering:
            end(FAILED)
        if number in self.passed_on:
            self.ending.lost("unknown", "Interrupted.")
        why = " It was out of memory, perhaps." if number == signal.SIGKILL else ""
        self.ending.lost("unknown", f"The work ended with the signal {name}.{why}", FAILED)
