"""Properties of networks from VNN-LIB files: the checker's own reader, under its name of old."""

from stagecert_check.properties import *  # noqa: F403
from stagecert_check.properties import __all__ as __all__
