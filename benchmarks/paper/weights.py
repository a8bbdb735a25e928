"""What other weights change: `python -m benchmarks.paper.weights --help`.

The paper's method stops early on nearly all problems of the paper's networks of interval-bound
training, and on few of ours. Are our networks other ones, or is our method? Here our networks are
trained on for a short while, on interval bounds alone and at larger radii, and the method is run on
what comes out, always at 8/255. Nothing but the weights changes from row to row.

The images to verify and to measure accuracies on are the first ones of the test set, the images to
train on are those after them. Needs the extra `train` (Optax).
"""

import argparse
import json
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import DATA, ROOT, images_file, network_file
from benchmarks.networks.peers.common import load_network
from benchmarks.paper import published
from benchmarks.paper.methods import PaperProblems, named
from benchmarks.paper.methods.relaxed import lanes_of, shared_of
from benchmarks.paper.plan import EPS, PAPER_INTERVALS
from benchmarks.paper.training.loop import Images, Settings, Trainer
from stagecert import machine
from stagecert.files import write_whole

NETWORKS = ("tiny_relu_ibp", "tiny_softplus_ibp", "small_relu_ibp", "small_softplus_ibp")
RADII = ("16/255", "24/255", "32/255")
HELD_OUT = 1000  # images that are not trained on
RESULT = ROOT / "benchmarks" / "results" / "paper" / "weights.json"


def trained_on(path: Path, radius: str | None, steps: int, images: Images) -> Trainer:
    """The network in an ONNX file after so many steps on interval bounds of a radius.

    The radius grows from 0 and the loss on the images themselves fades away over half of the steps.
    Without a radius: the network as it is.
    """
    size, activation, _ = path.stem.split("_")
    eps = float(Fraction(radius or EPS))
    settings = Settings(
        architecture=size, activation=activation, training="ibp", eps=eps, steps=steps,
        batch=64, rate=5e-4, warm_up=0.0, ramp=0.5, kappa=0.0,
    )  # fmt: skip
    trainer = Trainer(settings, images)
    trainer.begin([(layer.weight, layer.bias) for layer in load_network(path).layers])
    if radius is not None:
        trainer.run()
    return trainer


def measured(problems: PaperProblems) -> dict:
    """How the paper's method does, and how much is left for it to do."""
    with jax.enable_x64(True):
        arguments = lanes_of(shared_of(problems), problems).arguments
        changing = sum(int(jnp.sum((low < 0) & (high > 0))) for low, high in arguments)
    intervals = named("ibp").run(problems).bound
    outcome = named("paper").run(problems, PAPER_INTERVALS)
    if outcome.value is None:
        raise ValueError("the paper's method has feasible points")
    gap = outcome.value - outcome.bound
    return {
        "neurons of either sign": changing / gap.size,
        "intervals below the least value": float(np.mean(outcome.value - intervals)),
        "early": float(outcome.early.mean()),
        "iterations": float(outcome.iterations.mean()),
        "median gap": float(np.median(gap)),
        "mean bound": float(outcome.bound.mean()),
        "problems": gap.size,
    }


def rows(data: Path, name: str, radii, images: int, steps: int, folder: Path) -> list[dict]:
    """One network as it is, and trained on at each radius."""
    path, pictures = network_file(data, name), images_file(data)
    everything = Images.load(pictures)
    held_out = Images(everything.images[:HELD_OUT], everything.labels[:HELD_OUT])
    others = Images(everything.images[HELD_OUT:], everything.labels[HELD_OUT:])
    found = []
    for radius in (None, *radii):
        trainer = trained_on(path, radius, steps, others)
        file = folder / f"{name}_{(radius or 'given').replace('/', '_')}.onnx"
        trainer.save_onnx(file)
        problems = PaperProblems.load(file, pictures, images)
        accuracy = trainer.measure(held_out, eps=float(Fraction(EPS)))
        row = {"network": name, "radius": radius, "accuracy": accuracy, **measured(problems)}
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def table(record: dict) -> str:
    """The result as Markdown."""
    lines = [
        "| network | trained on at | clean | by intervals | neurons of either sign | "
        "early stopping | iterations | *published* |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in record["rows"]:
        early, iterations = published.STOPPING["paper", row["network"]]
        accuracy = row["accuracy"]
        lines.append(
            f"| {row['network']} | {row['radius'] or 'as given'} | {accuracy['clean']:.1%} | "
            f"{accuracy['intervals']:.1%} | {row['neurons of either sign']:.0f} | "
            f"{row['early']:.0%} | {row['iterations']:.1f} | {early:.0f}%, {iterations:g} |"
        )
    return "\n".join(lines).replace("%", " %") + "\n"


def main(arguments: list[str] | None = None) -> None:
    """Trains, measures, writes one JSON file and prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, default=DATA, help="default: %(default)s")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--radii", nargs="+", default=RADII, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=800, help="default: %(default)s")
    parser.add_argument("--images", type=int, default=4, help="to verify; default: %(default)s")
    parser.add_argument(
        "--trained", type=Path, default=ROOT / "build" / "weights", help="the folder for networks"
    )
    parser.add_argument("--out", type=Path, default=RESULT, help="default: %(default)s")
    options = parser.parse_args(arguments)
    found = []
    try:
        options.trained.mkdir(parents=True, exist_ok=True)
        for name in options.networks:
            found += rows(
                options.data, name, options.radii, options.images, options.steps, options.trained
            )
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    record = {"eps": EPS, "steps": options.steps, "rows": found, "made": machine.made()}
    write_whole(options.out, json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
