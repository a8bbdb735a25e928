"""The check of a certificate, under its name of old: see `stagecert_check`."""

from stagecert_check.checker import Report, check

__all__ = ["Report", "check"]
