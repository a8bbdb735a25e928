"""Keeping compiled programs on disk, so that the next process need not compile them again."""

import hashlib
import os
import platform
from pathlib import Path

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

CACHE = "jax_compilation_cache_dir"


class _Compiled:
    """How many programs this process has compiled or read from the cache, and how long it took."""

    programs, seconds = 0, 0.0

    @classmethod
    def note(cls, event: str, seconds: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            cls.programs += 1
            cls.seconds += seconds


jax.monitoring.register_event_duration_secs_listener(_Compiled.note)


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
