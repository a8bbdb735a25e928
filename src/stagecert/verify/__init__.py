"""Deciding properties of networks: `verify` proves them or finds a counterexample."""

from stagecert.verify.models import OpenModel
from stagecert.verify.replay import Counterexample
from stagecert.verify.verdict import CaseBounds, Verdict
from stagecert.verify.verify import Verification, verify

__all__ = ["CaseBounds", "Counterexample", "OpenModel", "Verdict", "Verification", "verify"]
