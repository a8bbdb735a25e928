"""Sweeps: many independent items, one work, a store that survives anything, and engines.

`run` computes the rows of all items that have none. What computes them is an engine: this process
(`InProcess`), processes on this machine (`Processes`) or a Ray cluster (`Ray`).
"""

from stagecert.sweeps.cluster import Ray
from stagecert.sweeps.engines import Engine, InProcess, Processes
from stagecert.sweeps.store import Row, Store
from stagecert.sweeps.sweep import run
from stagecert.sweeps.tasks import Item, Work

__all__ = ["Engine", "InProcess", "Item", "Processes", "Ray", "Row", "Store", "Work", "run"]
