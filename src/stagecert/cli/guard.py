"""A time limit that holds whatever it interrupts: the work is done in a process of its own.

A thread that waits for the deadline cannot run while a compiler holds Python's lock, which has kept
a command for 20 seconds beyond its limit. Another process can. So the command forks: the parent
only waits, and the child does the work with its own watcher thread, which ends it in all ordinary
cases. The fork comes before JAX has started any of its threads.
"""

import os
import select
import signal
import socket
import sys
import time

from stagecert.cli.ending import FAILED, Ending, end

# Seconds after the deadline that the child has to end by itself, and more of them after a signal.
GRACE, AFTER_SIGNAL = 1.0, 4.0
# What the child tells its parent: that the deadline no longer holds, and that it gives the answer.
UNLIMITED, ANSWERING = b"u", b"a"


def guard(deadline: float | None, ending: Ending) -> None:
    """Goes on in a child process; the parent waits for it, and ends as it does.

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
        self.awake, wake = socket.socketpair()
        wake.setblocking(False)
        self.wake = wake
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

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
