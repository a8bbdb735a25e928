"""Compiled programs: kept on disk for the next process, and announced where they take long."""

import hashlib
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

CACHE = "jax_compilation_cache_dir"
# Seconds of compiling that are worth a word: of one program, in commands; of all programs of a
# call together, in Python.
LONG, PATIENCE = 1.0, 3.0
TEXT = "compiling for this network (kept for later runs)"
_BEGINS = "/jax/compilation_cache/compile_requests_use_cache"
_ENDS = "/jax/core/compile/backend_compile_duration"


class _Compiled:
    """How many programs this process has compiled or read from the cache, and how long it took."""

    programs, seconds = 0, 0.0

    @classmethod
    def note(cls, event: str, seconds: float, **_: str | int) -> None:
        if event == _ENDS:
            cls.programs += 1
            cls.seconds += seconds


jax.monitoring.register_event_duration_secs_listener(_Compiled.note)  # type: ignore


def compiled() -> tuple[int, float]:
    """How many programs this process has compiled so far, and the seconds spent on that.

    Programs that were kept on disk count too; they take little time.
    """
    return _Compiled.programs, _Compiled.seconds


def use_compilation_cache(folder: str | os.PathLike | None = None) -> Path:
    """Lets JAX keep compiled programs in a folder; returns it.

    Weights, boxes and objectives are arguments of compiled programs, so one compilation serves
    every network of the same architecture, in this process and, with this cache, in later ones.
    The commands and `stagecert.networks` use the default folder by themselves, unless JAX was told
    of another one before or cannot write there.

    Args:
        folder: where; by default `stagecert/compiled` in the user's cache folder ($XDG_CACHE_HOME
            or ~/.cache), in a folder of its own for each kind of processor.
    """
    folder = _default() if folder is None else Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update(CACHE, str(folder))
    # Many of our programs compile in less than a second, and there are many of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # If something was compiled before, JAX has decided to do without a cache.
    compilation_cache.reset_cache()
    return folder


def keep_programs() -> Path | None:
    """Uses the default folder unless JAX has another one; None where that cannot be written."""
    given = getattr(jax.config, CACHE)
    if given is not None:
        return Path(given)
    try:
        folder = _default()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            return None
        return use_compilation_cache(folder)
    except (OSError, RuntimeError):  # no home folder, or one that is closed: do without
        return None


def _default() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stagecert" / "compiled" / _processor()


def _processor() -> str:
    """A name for the kind of processor: programs compiled for one may not run on another."""
    try:
        told = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        told = [line for line in told if line.startswith(("model name", "flags", "Features"))]
    except OSError:
        told = [platform.processor()]
    return f"{platform.machine()}-{hashlib.sha256(repr(told).encode()).hexdigest()[:12]}"


def announce(tell: Callable[[str], None]) -> None:
    """Calls `tell` in a thread of its own whenever a program has been compiled for some time.

    For commands, which show more than a log: `announced` is silent from then on.
    """
    _WATCH.tell = tell
    _WATCH.listen()


@contextmanager
def announced() -> Iterator[None]:
    """Logs one line if the programs of a call compile for some seconds."""
    outer, _WATCH.here.call = _WATCH.call, _Call()
    _WATCH.listen()
    try:
        yield
    finally:
        _WATCH.here.call = outer


class _Call:
    """A call that may compile: how long until a word is due."""

    def __init__(self):
        self.left, self.told = PATIENCE, False

    def tell(self) -> None:
        if not self.told:
            self.told = True
            logging.getLogger("stagecert").warning("stagecert is %s", TEXT)


class _Watch:
    """Listens to JAX's compiler, in whichever thread it runs."""

    def __init__(self):
        self.tell: Callable[[str], None] | None = None
        self.here = threading.local()  # `call`: what is under way in a thread
        self._waiting: dict[int, threading.Timer] = {}
        self._listens = False

    @property
    def call(self) -> _Call | None:
        return getattr(self.here, "call", None)

    def listen(self) -> None:
        """JAX keeps listeners for good: it gets these once, when they are needed."""
        if not self._listens:
            self._listens = True
            jax.monitoring.register_event_listener(self.begins)
            jax.monitoring.register_event_duration_secs_listener(self.ends)

    def begins(self, event: str, **_) -> None:
        if event != _BEGINS:
            return
        if self.tell is not None:
            timer = threading.Timer(LONG, self.tell, [TEXT])
        elif self.call is not None and not self.call.told:
            timer = threading.Timer(max(self.call.left, 0.0), self.call.tell)
        else:
            return
        timer.daemon = True
        self._waiting[threading.get_ident()] = timer
        timer.start()

    def ends(self, event: str, duration_secs: float, **_) -> None:
        if event != _ENDS:
            return
        if (timer := self._waiting.pop(threading.get_ident(), None)) is not None:
            timer.cancel()
        if self.call is not None:
            self.call.left -= duration_secs


_WATCH = _Watch()
