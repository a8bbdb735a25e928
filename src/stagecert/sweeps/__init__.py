"""Sweeps: many independent items, one work function, and a store that survives anything."""

from stagecert.sweeps.store import Row, Store
from stagecert.sweeps.sweep import Item, run

__all__ = ["Item", "Row", "Store", "run"]
