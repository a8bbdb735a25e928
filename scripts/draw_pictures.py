"""Makes the pictures of README.md and of the documentation, most by running the examples.

    python scripts/draw_pictures.py              all of them; some need data (STAGECERT_DATA)
    python scripts/draw_pictures.py readme isotonic

An example that draws is left to do so; for the others there is a function here that draws what
`main` returns. Pictures go to docs/images with few colours, so that they stay small.
"""

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
COLOURS = 96
PROVEN, MET = "tab:green", "tab:red"


def readme():
    """What is proven of one digit as pixels may move further, and where that ends."""
    from stagecert import networks

    folder = ROOT / "src" / "stagecert" / "digits"
    network = networks.load(folder / "digits.onnx")
    with np.load(folder / "digits.npz") as file:
        images, labels = file["images"].reshape(-1, 1, 8, 8), file["labels"].astype(int)
    chosen = 135  # a three
    image, label = images[chosen], labels[chosen]
    radii = np.linspace(0.0, 0.12, 25)[1:]
    low = np.clip(image - radii[:, None, None, None], 0, 1).astype(np.float32)
    high = np.clip(image + radii[:, None, None, None], 0, 1).astype(np.float32)
    margins = np.repeat(networks.margins(np.array([label]), 10), len(radii), axis=0)
    found = networks.bound(network, low, high, margins, rtol=1e-2)
    bound, met = found.bound.min(axis=1), found.attained.min(axis=1)
    worst = int(np.argmax(met < 0))
    entry = int(np.argmin(found.attained[worst]))
    fooled = np.asarray(found.inputs[worst, entry])

    figure, axes = plt.subplot_mosaic(
        [["digit", "curve"], ["fooled", "curve"]],
        figsize=(9, 4.2),
        width_ratios=(1, 3.6),
        layout="constrained",
    )
    seen = int(np.delete(np.arange(10), label)[entry])
    for axis, pixels, title in (
        (axes["digit"], image, f"a test image: {label}"),
        (axes["fooled"], fooled, f"moved by {radii[worst]:.3f}: {seen}"),
    ):
        axis.imshow(pixels.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
        axis.set_title(title, fontsize=10)
        axis.set(xticks=[], yticks=[])
    curve = axes["curve"]
    curve.plot(radii, met, color=MET, label="smallest margin met (an input attains it)")
    curve.plot(radii, bound, color=PROVEN, label="proven bound (no input is below)")
    curve.fill_between(radii, bound, met, color="0.9", label="gap")
    curve.axhline(0, color="black", linewidth=0.8)
    last, first = radii[bound > 0].max(), radii[worst]
    curve.axvspan(0, last, color=PROVEN, alpha=0.08)
    curve.axvspan(first, radii[-1], color=MET, alpha=0.08)
    top = met.max()
    curve.text(last / 2, 0.06 * top, "proven robust", ha="center", color=PROVEN)
    curve.text((first + radii[-1]) / 2, 0.06 * top, "counterexamples", ha="center", color=MET)
    curve.set(
        xlim=(0, radii[-1]),
        xlabel="how far every pixel may move",
        ylabel=f"margin of class {label} over all others",
    )
    curve.legend(loc="upper right", frameon=False)
    return figure


def envelope():
    """relu of a neuron with two inputs, its triangle and its envelope."""
    from stagecert.networks import neurons

    weights, bias = np.array([1.0, 0.6]), -0.9
    delta, deficit = np.abs(weights), -bias  # both inputs go from 0 to 1
    grid = np.linspace(0, 1, 81)
    x = np.stack(np.meshgrid(grid, grid, indexing="ij"), axis=-1)
    argument = x @ weights + bias
    low, high = bias, weights.sum() + bias
    heights = {
        "relu(x + 0.6 y - 0.9)": np.maximum(argument, 0),
        "triangle": high / (high - low) * (argument - low),
        "envelope": neurons.envelope(
            x, np.broadcast_to(delta, x.shape), np.full(x.shape[:2], deficit)
        ),
    }
    figure, axes = plt.subplots(
        1, 3, figsize=(9.6, 3.4), subplot_kw={"projection": "3d"}, layout="constrained"
    )
    relu = heights["relu(x + 0.6 y - 0.9)"]
    for axis, (title, height) in zip(axes, heights.items(), strict=True):
        axis.plot_surface(
            x[..., 0], x[..., 1], height, cmap="viridis", vmin=0, vmax=high, rcount=27, ccount=27
        )
        above = np.mean(height - relu)
        axis.set_title(title if height is relu else f"{title}: {above:.3f} above on average")
        axis.set(xlabel="x", ylabel="y", zlim=(0, high), xticks=[0, 1], yticks=[0, 1])
        axis.set_zticks([0, 0.35, 0.7])
        axis.view_init(elev=24, azim=-125)
    return figure


def spurious_minimum(solutions):
    """The lens, where the methods start and where each of them ends."""
    figure, axis = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    s = np.linspace(-1, 1, 200)
    axis.fill_between(s, s**2 - 1, 1 - s**2, color="0.9", label="feasible")
    axis.plot(1, 0, "k*", markersize=14, label="start: a tip of the lens")
    for (name, solution), marker in zip(solutions.items(), "osD^", strict=True):
        axis.plot(
            float(solution.inputs),
            float(solution.blocks[0]),
            marker,
            fillstyle="none",
            markersize=12,
            label=f"{name}: {solution.value:+.3f}, at least {solution.bound:+.3f}",
        )
    axis.set(xlabel="s", ylabel="z (minimised)")
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
    return figure


def wedge_control(solution):
    """The forces, and where the cart goes."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    states = np.asarray(solution.blocks[0])
    time = 0.1 * np.arange(1, len(states) + 1)
    axes[0].step(time, np.asarray(solution.inputs), where="post")
    axes[0].axhspan(-1, 1, alpha=0.1)
    axes[0].set(xlabel="time", title="force")
    axes[1].plot(time, states, label=["position", "velocity"])
    axes[1].set(xlabel="time", title=f"cost {solution.value:.4f}, at least {solution.bound:.4f}")
    axes[1].legend(frameon=False)
    return figure


def isotonic(solution, observations):
    """The observations and the fit, cell by cell."""
    side = len(observations)
    fit = np.zeros((side, side))
    blocks = (np.atleast_1d(solution.inputs), *map(np.asarray, solution.blocks))
    for d, block in enumerate(blocks):
        cells = [(i, d - i) for i in range(side) if 0 <= d - i < side]
        for cell, value in zip(cells, block, strict=True):
            fit[cell] = value
    figure, axes = plt.subplots(1, 2, figsize=(6, 3), layout="constrained")
    for axis, values, title in ((axes[0], observations, "observed"), (axes[1], fit, "fitted")):
        image = axis.imshow(values, vmin=observations.min(), vmax=observations.max())
        axis.set(title=title, xticks=range(side), yticks=range(side))
        for (i, j), value in np.ndenumerate(values):
            axis.text(j, i, f"{value:.2f}", ha="center", va="center", color="white")
    figure.colorbar(image, ax=axes)
    return figure


def relu_boxes(answer):
    """Bounds against the radius, and what random inputs attain."""
    problems, solutions = answer
    radii, seen = [], []
    for problem in problems:
        low, high = np.asarray(problem.inputs.lower), np.asarray(problem.inputs.upper)
        points = np.random.default_rng(0).uniform(low, high, (2000, len(low))).T
        for stage in problem.stages:
            points = np.maximum(stage.params[0] @ points + stage.params[1][:, None], 0)
        weights, bias = problem.objective.params
        radii.append((high - low)[0] / 2)
        seen.append((weights @ points + bias[:, None])[0])
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for radius, outputs in zip(radii, seen, strict=True):
        axis.plot(np.full(len(outputs), radius), outputs, ".", color="0.7", markersize=2)
    axis.plot([], [], ".", color="0.7", label="outputs at random inputs")
    axis.plot(radii, [s.bound for s in solutions], "o-", color=PROVEN, label="proven lower bound")
    axis.set(xlabel="radius of the box", ylabel="output of the network")
    axis.legend(frameon=False)
    return figure


def robust_digits(answer):
    """How many of the images are proven robust, shown not to be, or neither."""
    *_, results = answer
    figure, axis = plt.subplots(figsize=(6, 2.6), layout="constrained")
    for row, result in enumerate(results.values()):
        proven = int(np.all(result.bound > 0, axis=1).sum())
        broken = int(np.any(result.attained <= 0, axis=1).sum())
        rest = len(result.bound) - proven - broken
        parts = ((proven, PROVEN, "proven"), (rest, "0.8", "open"), (broken, MET, "not robust"))
        left = 0
        for count, colour, label in parts:
            axis.barh(row, count, left=left, color=colour, label=None if row else label)
            if count:
                axis.text(left + count / 2, row, str(count), ha="center", va="center")
            left += count
    axis.set(yticks=range(len(results)), yticklabels=[f"radius {r}" for r in results])
    axis.set(xlabel="images", xlim=(0, 20), xticks=range(0, 21, 5))
    axis.invert_yaxis()
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False)
    return figure


def transformer_digits(answer):
    """The images, with what is proven of the lead over each other digit."""
    _, images, labels, verdicts = answer
    figure, axes = plt.subplots(2, len(images), figsize=(8, 4), layout="constrained",
                                height_ratios=(1.4, 1))  # fmt: skip
    for (above, below), image, label, verdict in zip(axes.T, images, labels, verdicts, strict=True):
        above.imshow(image[0], cmap="gray_r", vmin=0, vmax=1)
        above.set(xticks=[], yticks=[], title=f"a {label}, proven: {verdict.answer}")
        others = [k for k in range(10) if k != label]
        below.bar(others, [case.proven for case in verdict.cases], color=PROVEN)
        below.set(xticks=range(10), xlabel="another digit")
    axes[1, 0].set(ylabel="lead, at least")
    return figure


def picture_of(name: str, folder: Path) -> Path | None:
    """Runs an example in a folder; its picture there, or None where its data are missing."""
    path = folder / f"{name}.png"
    if name in ("readme", "envelope"):
        globals()[name]().savefig(path, dpi=110)
        return path
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        if name == "battery_limits":  # the tutorial draws it
            page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
            exec("".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)), {})
            return path
        example = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name=name)
        answer = example["main"]()
    if answer is None:
        print(f"{name}: {printed.getvalue().strip()}")
        return None
    if not path.exists():
        rest = (example["observations"](),) if name == "isotonic" else ()
        globals()[name](answer, *rest).savefig(path, dpi=110)
    plt.close("all")
    return path


def shrink(source: Path, target: Path) -> None:
    """Writes a picture with few colours."""
    with Image.open(source) as picture:
        plain = Image.new("RGB", picture.size, "white")
        plain.paste(picture, mask=picture.getchannel("A") if picture.mode == "RGBA" else None)
        plain.quantize(COLOURS).save(target, optimize=True)


def main(names) -> None:
    """Draws the pictures of these names, or all."""
    known = ("readme", "envelope", "battery_limits", *EXAMPLES)
    if unknown := sorted({*names} - {*known}):
        raise SystemExit(f"no such picture: {', '.join(unknown)}; there are {', '.join(known)}")
    os.environ["MPLBACKEND"] = "agg"
    for name in names or known:
        with tempfile.TemporaryDirectory() as folder:
            if (source := picture_of(name, Path(folder))) is not None:
                target = IMAGES / source.name
                shrink(source, target)
                print(f"{target.relative_to(ROOT)}: {target.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
