"""The end of a command: by a signal, at a deadline or when all is done, also if nobody reads."""

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


class Ending:
    """What ends the process, once, whichever thread comes first."""

    def __init__(self):
        # Whoever has the right may still fail: another claim by the same thread does not wait.
        self._once = threading.RLock()
        # Tells a process that waits for this one; see `stagecert.cli.guard`.
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
        self.awake, wake = socket.socketpair()
        wake.setblocking(False)
        self.wake = wake
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

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
