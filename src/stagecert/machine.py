"""What a result was made with: for reports and result files."""

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

PACKAGES = ("stagecert", "jax", "jaxlib", "equinox", "numpy", "onnxruntime")


def cpu() -> str:
    """The processor's name and its number of cores."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass  # not Linux: the name from `platform` has to do
    return f"{name}, {os.cpu_count()} cores"


def cores() -> int:
    """How many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def made(packages: Sequence[str] = PACKAGES) -> dict:
    """Date, processor, load, Python and the versions of some packages, as plain data."""
    facts: dict = {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }
    if hasattr(os, "getloadavg"):  # not on Windows
        facts["load"] = round(os.getloadavg()[0], 1)
    return facts
