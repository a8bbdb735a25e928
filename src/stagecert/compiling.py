"""Keeping compiled programs on disk, so that the next process need not compile them again."""

import os
from pathlib import Path

import jax


def use_compilation_cache(folder: str | os.PathLike | None = None) -> Path:
    """Lets JAX keep compiled programs in a folder; returns it.

    Weights, boxes and objectives are arguments of compiled programs, so one compilation serves
    every network of the same architecture, in this process and, with this cache, in later ones.

    Args:
        folder: where; by default `stagecert` in the user's cache folder ($XDG_CACHE_HOME or
            ~/.cache).
    """
    if folder is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "stagecert" / "compiled"
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Many of our programs compile in less than a second, and there are many of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder
