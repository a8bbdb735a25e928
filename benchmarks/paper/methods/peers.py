"""auto_LiRPA and jax_verify on the same problems, each in the Python where it is installed."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np

from benchmarks.data import ROOT
from benchmarks.paper.methods.base import Method, Outcome, Stop
from stagecert.networks.bounding.relaxation import split


class Peer(Method):
    """A script of benchmarks/networks/peers in a Python of its own.

    Args:
        python: the Python that has the peer installed; by default $STAGECERT_PEERS_PYTHON.
        steps: how many, if `Stop.iterations` does not say.
    """

    module: ClassVar[str]
    steps: ClassVar[int]
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, python: str | None = None, steps: int | None = None):
        self.python = python or os.environ.get("STAGECERT_PEERS_PYTHON")
        self.count = steps or self.steps

    def refusal(self, problems):
        if not self.python:
            return "no Python with the peers was given"
        if problems.path is None or problems.data is None:
            return "peers read network and images from files"
        if problems.first:
            return "peers take the first images of the file"
        return None

    def prepare(self, problems, stop=None):
        """The scripts warm up by themselves, and time without that."""

    def run(self, problems, stop=None, *, trace=False, progress=None) -> Outcome:
        steps = (stop or Stop()).iterations or self.count
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "record.json"
            command = [
                self.python, "-m", f"benchmarks.networks.peers.{self.module}",
                "--network", problems.path, "--images", problems.shape[0], "--eps", problems.eps,
                "--steps", steps, "--data", problems.data, "--out", out, *self.options,
            ]  # fmt: skip
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            subprocess.run(
                [str(part) for part in command], check=True, cwd=ROOT, env=environment,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
            record = json.loads(out.read_text())
        (setting,) = record.pop("settings")
        bound = np.asarray(setting["bounds"])
        value = np.asarray(setting["values"]) if "values" in setting else None
        return Outcome(
            bound, value, np.full(bound.shape, steps), np.zeros(bound.shape, bool),
            setting["wall_seconds"], about=record,
        )  # fmt: skip


class AutoLirpa(Peer):
    """α-CROWN on interval bounds."""

    name = "auto_lirpa"
    label = "auto_LiRPA (α-CROWN)"
    module = "auto_lirpa"
    steps = 20

    def refusal(self, problems):
        kinds = {getattr(layer.operation, "kind", "") for layer in split(problems.network).layers}
        if "softplus" in kinds:
            return "auto_LiRPA has no relaxation of SoftPlus"
        return super().refusal(problems)


class JaxVerify(Peer):
    """The paper's authors' own library: the nonconvex reformulation, FISTA with line search.

    In float64: rounding in its own float32 puts bounds above feasible values.
    """

    name = "jax_verify"
    label = "jax_verify (NonConvex)"
    module = "jax_verify"
    steps = 50
    options = ("--precision", "float64")
