"""Trains the paper's networks on CIFAR-10: `python -m benchmarks.paper.train --help`.

    python -m benchmarks.paper.train --data train.npz --test test.npz --out networks
    python -m benchmarks.paper.train --data train.npz --out networks --networks tiny_relu_ibp

The .npz files have `images` (uint8, batch x height x width x channels) and `labels`. For each
network the folder gets `NAME.onnx`, `NAME.json` (settings, accuracies) and, while it is trained,
`NAME.checkpoint`, from which a run that was stopped goes on. Needs the extra `train` (Optax).
"""

import argparse
import dataclasses
import json
from fractions import Fraction
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from benchmarks.paper.training.architectures import PAPER, hidden_units
from benchmarks.paper.training.loop import Images, Settings, Trainer
from stagecert.files import write_whole

NETWORKS = {
    f"{size}_{activation}_{training}": (size, activation, training)
    for size in PAPER
    for activation in ("relu", "softplus")
    for training in ("adv", "ibp")
}


def train(name: str, settings: Settings, data: Images, test: Images | None, out: Path) -> dict:
    """Trains one network, or goes on with it; returns what its record says."""
    record_file = out / f"{name}.json"
    about = dataclasses.asdict(settings)
    if record_file.exists() and (out / f"{name}.onnx").exists():
        record = json.loads(record_file.read_text())
        if record["settings"] != about:
            raise ValueError(f"{record_file} is of other settings: give another folder")
        return record
    trainer = Trainer(settings, data)
    checkpoint = out / f"{name}.checkpoint"
    if checkpoint.exists():
        trainer.restore(checkpoint)
    columns = (
        *Progress.get_default_columns()[:-1],
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=settings.steps, completed=trainer.step, loss="")

        def show(step: int, value) -> None:
            if step % 50 == 0 or step == settings.steps:
                bar.update(task, completed=step, loss=f"loss {float(value):.3f}")

        trainer.run(checkpoint, progress=show)
    trainer.save_onnx(out / f"{name}.onnx")
    record = {
        "settings": about,
        "hidden units": hidden_units(trainer.layers, trainer.input_shape),
        "images": len(data.labels),
        "jax": jax.__version__,
        "accuracy": None if test is None else trainer.measure(test),
    }
    write_whole(record_file, json.dumps(record, indent=1) + "\n")
    checkpoint.unlink()
    return record


def main(arguments: list[str] | None = None) -> None:
    """Trains what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, required=True, help="training images, .npz")
    parser.add_argument("--test", type=Path, help="test images, .npz: accuracies are measured")
    parser.add_argument("--out", type=Path, required=True, help="the folder for the networks")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument(
        "--architecture", help="other layers for all of them, e.g. 'conv8x3/1 fc32'"
    )
    parser.add_argument("--eps", type=lambda s: float(Fraction(s)), default=8 / 255)
    for field in dataclasses.fields(Settings):
        if field.name in ("architecture", "activation", "training", "eps"):
            continue
        name = "--" + field.name.replace("_", "-")
        if field.name == "augment":
            parser.add_argument(name, action="store_true", help="mirrors and moves images")
        else:
            parser.add_argument(
                name, type=type(field.default), default=field.default, help="default: %(default)s"
            )
    options = vars(parser.parse_args(arguments))
    data, test, out = (options.pop(name) for name in ("data", "test", "out"))
    names, architecture = options.pop("networks"), options.pop("architecture")
    try:
        images, others = Images.load(data), None if test is None else Images.load(test)
        out.mkdir(parents=True, exist_ok=True)
        for name in names:
            size, activation, training = NETWORKS[name]
            settings = Settings(
                architecture=architecture or size,
                activation=activation,
                training=training,
                **options,
            )
            record = train(name, settings, images, others, out)
            print(f"{name}: {json.dumps(record['accuracy'])}", flush=True)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
