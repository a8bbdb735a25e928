"""stagecert beside other verifiers on one machine: `python -m benchmarks.vnncomp.peers`.

    python -m benchmarks.vnncomp.peers --nnenum PYTHON --marabou PROGRAM --abcrown PYTHON FOLDER

Five instances of each of fourteen sets, drawn with a seed. Every tool has the same seconds of wall
time for each, start included, one tool and one instance at a time: nothing else should run on the
machine. Those that are not named are left out. Of PYTHON, nnenum's can `import nnenum`. FOLDER is
complete_verifier in a checkout of alpha-beta-CROWN with its submodule auto_LiRPA, and its PYTHON
has what its README says, with torch for the CPU, and an onnx that writes models which its
onnxruntime reads (1.18 for 1.23). It runs with the configuration that its authors wrote for the
set, on the CPU, as far as that goes without CPLEX and with the small problems that Gurobi solves
without a license: see `abcrown`. An answer is wrong if it contradicts expected.csv. An unsat of
stagecert counts only with a certificate, which the independent checker then reads once more,
outside of the time.

What is finished is kept: the same command goes on after an interruption, or adds a tool.
"""

import argparse
import contextlib
import gzip
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.vnncomp.__main__ import DATA, RESULTS
from stagecert.machine import made
from stagecert.verify.instances import Instance, read_lists

# acasxu_v2 asks about the same networks as acasxu; two sets have several networks a property.
SETS = (
    "acasxu", "cersyve", "collins_rul_cnn", "dist_shift", "eran", "lsnc_relu", "ml4acopf",
    "mnist_fc", "oval21", "reach_prob_density", "rl_benchmarks", "safenlp", "traffic_signs", "vit",
)  # fmt: skip
SEED, COUNT = 15, 5
# The configurations of alpha-beta-CROWN, below its exp_configs; by a part of the model's name too.
CONFIGURATIONS = {
    "acasxu": "vnncomp21/acasxu.yaml",
    "cersyve": "vnncomp25/cersyve.yaml",
    "collins_rul_cnn": "vnncomp23/collins-rul-cnn.yaml",
    "dist_shift": "vnncomp23/dist-shift.yaml",
    "eran sigmoid": "vnncomp21/eran_sigmoid.yaml",
    "eran": "vnncomp21/eran_mlp.yaml",
    "lsnc_relu": "vnncomp25/lsnc_relu.yaml",
    "ml4acopf": "vnncomp24/ml4acopf.yaml",
    "mnist_fc": "vnncomp22/mnistfc.yaml",
    "oval21": "vnncomp21/oval21.yaml",
    "reach_prob_density gcas": "vnncomp22/reach_probability_gcas.yaml",
    "reach_prob_density": "vnncomp22/reach_probability.yaml",
    "rl_benchmarks cartpole": "vnncomp22/cartpole.yaml",
    "rl_benchmarks lunarlander": "vnncomp22/lunarlander.yaml",
    "rl_benchmarks": "vnncomp22/dubins-rejoin.yaml",
    "safenlp": "vnncomp24/safenlp.yaml",
    "traffic_signs": "vnncomp23/gtrsb.yaml",
    "vit": "vnncomp23/vit.yaml",
}
# What tools call their answers; the first of these words in what they write is the answer.
WORDS = {"unsat": "unsat", "holds": "unsat", "sat": "sat", "violated": "sat"}


@dataclass(frozen=True)
class Files:
    """Where a run finds and leaves its files: all of them plain, since not all tools unpack."""

    model: Path
    property: Path
    result: Path
    certificate: Path


Command = Callable[[Instance, Files, float], list[str]]


def stagecert(one: Instance, files: Files, seconds: float) -> list[str]:
    """This library."""
    return [
        sys.executable, "-m", "stagecert", "verify", str(files.model), str(files.property),
        "--timeout", str(seconds), "--result", str(files.result),
        "--certificate", str(files.certificate), "--quiet",
    ]  # fmt: skip


def nnenum(python: str) -> Command:
    """https://github.com/stanleybak/nnenum."""
    # It refuses to work with more threads: it has processes of its own.
    return lambda one, files, seconds: [
        "env", "OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1", python, "-m", "nnenum.nnenum",
        str(files.model), str(files.property), str(seconds), str(files.result),
    ]  # fmt: skip


def marabou(program: str) -> Command:
    """https://github.com/NeuralNetworkVerification/Marabou, the program that maraboupy has."""
    return lambda one, files, seconds: [
        program, str(files.model), str(files.property), "--timeout", str(round(seconds)),
        "--summary-file", str(files.result), "--verbosity", "0",
    ]  # fmt: skip


def abcrown(python: str, folder: str) -> Command:
    """https://github.com/Verified-Intelligence/alpha-beta-CROWN."""

    def command(one: Instance, files: Files, seconds: float) -> list[str]:
        name = f"{one.set} {one.model}".lower()
        wanted = next(k for k in CONFIGURATIONS if all(part in name for part in k.split()))
        text = (Path(folder) / "exp_configs" / CONFIGURATIONS[wanted]).read_text()
        # Cuts (oval21) come from CPLEX. To refine bounds (eran, mnist_fc) takes Gurobi with a
        # license, and 80 % of the time: it gets plain branch and bound instead.
        text = re.sub(r"(\bcut:\s+enabled:) True", r"\1 False", text).replace("bab-refine", "bab")
        configuration = files.result.with_name("configuration.yaml")
        configuration.write_text(text)
        # Its authors start it with one thread, too.
        return [
            "env", "OMP_NUM_THREADS=1", python, str(Path(folder) / "abcrown.py"),
            "--config", str(configuration), "--device", "cpu",
            "--onnx_path", str(files.model), "--vnnlib_path", str(files.property),
            "--timeout", str(seconds), "--results_file", str(files.result),
        ]  # fmt: skip

    return command


def sample() -> list[Instance]:
    """The instances, the same ones whoever asks."""
    draw, found = random.Random(SEED), []
    for name in SETS:
        folder = DATA / name
        every = read_lists([folder / "instances.csv"], answers=[folder / "expected.csv"])
        found += draw.sample(every, min(COUNT, len(every)))
    return found


def plain(path: Path, to: Path) -> Path:
    """A copy of a file, unpacked."""
    data = path.read_bytes()
    to.write_bytes(gzip.decompress(data) if path.suffix == ".gz" else data)
    return to


def answered(result: Path, output: str) -> str:
    """The answer: in the file, if the tool has written one, or in what it printed."""
    text = result.read_text(errors="replace") if result.exists() else ""
    words = (word.strip(" ,.:'\"").lower() for word in (text or output).split())
    return next((WORDS[word] for word in words if word in WORDS), "none")


def ask(command: Command, one: Instance, seconds: float) -> dict:
    """One tool on one instance: a process group of its own, ended when its time is up."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        assert isinstance(one.model_path, Path)
        files = Files(
            plain(one.model_path, here / "model.onnx"),
            plain(one.property_path, here / "property.vnnlib"),
            here / "result",
            here / "certificate",
        )
        begin = time.monotonic()
        with (here / "output").open("w") as output:
            process = subprocess.Popen(
                command(one, files, seconds), cwd=folder, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(seconds)
                late = False
            except subprocess.TimeoutExpired:
                late = True
            spent = time.monotonic() - begin
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, too
            process.wait()
        text = (here / "output").read_text(errors="replace")
        answer = "timeout" if late else answered(files.result, text)
        accepted = None
        if command is stagecert and answer == "unsat":
            accepted = subprocess.run(
                [sys.executable, "-m", "stagecert_check", files.model, files.property,
                 files.certificate], capture_output=True, check=False,
            ).returncode == 0  # fmt: skip
        return {
            "answer": answer,
            "seconds": round(spent, 2),
            "wrong": {answer, one.expected} == {"sat", "unsat"},
            **({} if accepted is None else {"accepted": accepted}),
            **({} if answer != "none" else {"says": " ".join(text.splitlines()[-1:])[-200:]}),
        }


def table(held: dict) -> str:
    """What came out, in Markdown."""
    tools = list(held["tools"])
    lines = [
        "# Side by side",
        "",
        "Written by `python -m benchmarks.vnncomp.peers`. Solved instances of each set within "
        f"{held['seconds']:g} s of wall time, start included; one tool at a time.",
        "",
        "| set | instances | " + " | ".join(tools) + " |",
        "|---|---|" + "---|" * len(tools),
    ]
    names = list(dict.fromkeys(row["set"] for row in held["instances"]))
    for name in [*names, "all"]:
        rows = [row for row in held["instances"] if name in (row["set"], "all")]
        cells = [str(sum(_solved(row["found"].get(tool)) for row in rows)) for tool in tools]
        lines.append(f"| {name} | {len(rows)} | " + " | ".join(cells) + " |")
    for what, of in (
        ("wrong", lambda found: str(sum(one["wrong"] for one in found))),
        (
            "unsat, certificate accepted",
            lambda found: str(sum(x.get("accepted", False) for x in found)),
        ),
        ("asked", lambda found: str(len(found))),
        ("median seconds of those solved", lambda found: _median(found)),
    ):
        every = [[row["found"][tool] for row in held["instances"] if tool in row["found"]]
                 for tool in tools]  # fmt: skip
        lines.append(f"| {what} | | " + " | ".join(map(of, every)) + " |")
    return "\n".join(lines) + "\n"


def _solved(found: dict | None) -> bool:
    if found is None or found["wrong"] or found["answer"] not in ("unsat", "sat"):
        return False
    return found.get("accepted", True)


def _median(found: list[dict]) -> str:
    seconds = [one["seconds"] for one in found if _solved(one)]
    return f"{statistics.median(seconds):.1f}" if seconds else "-"


def main() -> None:
    """Asks what has not been asked yet, and writes the results and the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vnncomp.peers", description=__doc__)
    parser.add_argument("--nnenum", metavar="PYTHON")
    parser.add_argument("--marabou", metavar="PROGRAM")
    parser.add_argument("--abcrown", nargs=2, metavar=("PYTHON", "FOLDER"))
    parser.add_argument("--seconds", type=float, default=20.0, help="for each, start included")
    parser.add_argument("--limit", type=int, help="ask no more than so many instances now")
    parser.add_argument("--out", type=Path, default=RESULTS / "peers", help="folder of the results")
    options = parser.parse_args()
    tools: dict[str, Command] = {"stagecert": stagecert}
    if options.abcrown:
        tools["alpha-beta-CROWN"] = abcrown(*options.abcrown)
    if options.nnenum:
        tools["nnenum"] = nnenum(options.nnenum)
    if options.marabou:
        tools["Marabou"] = marabou(options.marabou)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "peers.json"
    held: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"instances": []}
    if held.setdefault("seconds", options.seconds) != options.seconds:
        parser.error(f"{file} was made with {held['seconds']:g} s")
    held["tools"] = list(dict.fromkeys([*held.get("tools", ()), *tools]))
    held["made"] = made()
    rows = {(row["set"], row["model"], row["property"]): row for row in held["instances"]}
    for number, one in enumerate(sample()[: options.limit], 1):
        key = one.set, one.model, one.property
        if key not in rows:
            rows[key] = dict(zip(("set", "model", "property"), key, strict=True))
            rows[key] |= {"expected": one.expected, "found": {}}
            held["instances"].append(rows[key])
        for name, command in tools.items():
            if name not in rows[key]["found"]:
                rows[key]["found"][name] = found = ask(command, one, options.seconds)
                print(
                    f"{number} {one.set} {one.name()}: {name} says {found['answer']} (expected "
                    f"{one.expected}) {found['seconds']:.1f} s",
                    flush=True,
                )
                file.write_text(json.dumps(held, indent=1) + "\n")
    (options.out / "README.md").write_text(table(held))


if __name__ == "__main__":
    main()
