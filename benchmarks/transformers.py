"""How softmax is written, and who chooses the planes of products.

    python -m benchmarks.transformers

Bounds of the small transformer that comes with stagecert, on images of its test set: for each way
to write softmax and each radius, how many images are proven and the mean of their smallest margins.
Once with the checker's own lines, once with lines that are searched for while the planes of
products stay, and once with both. All bounds are the checker's, in float64 with an allowance for
rounding.
"""

import argparse
import json
from importlib.resources import files
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
from onnx import helper

from stagecert.machine import made
from stagecert.verify import ascent
from stagecert.verify.complete import Complete
from stagecert.verify.models import OpenModel
from stagecert.verify.nodes import Lanes, default_slopes
from stagecert.verify.queries import groups_of
from stagecert_check import properties
from stagecert_check.bounds import Facts, lower_bounds
from stagecert_check.checker import Checker
from stagecert_check.functions import Refused

RESULT = Path(__file__).parent / "results" / "transformers.json"
RADII, STEPS = (0.01, 0.02, 0.03), 10
LINES = ("fixed", "planes fixed", "searched")

# The operators that stand for y = Softmax(x), as (operator, inputs, output).
FORMS = {
    "1 / (1 + sum of exp(x_j - x_i))": [("Softmax", "x", "y")],
    "exp(x_i) * (1 / sum of exp(x_j))": [
        ("Exp", "x", "e"), ("ReduceSum", "e axes", "s"), ("Reciprocal", "s", "r"),
        ("Mul", "e r", "y"),
    ],
    "exp(-log(1 + sum of exp(x_j - x_i)))": [("LogSoftmax", "x", "l"), ("Exp", "l", "y")],
    "exp(x_i - log(sum of exp(x_j)))": [
        ("Exp", "x", "e"), ("ReduceSum", "e axes", "s"), ("Log", "s", "l"), ("Sub", "x l", "d"),
        ("Exp", "d", "y"),
    ],
}  # fmt: skip


def written(model: onnx.ModelProto, form: list[tuple[str, str, str]]) -> onnx.ModelProto:
    """The model with softmax, over the last axis, in another form."""
    found = onnx.ModelProto.FromString(model.SerializeToString())
    axes = onnx.numpy_helper.from_array(np.array([-1]), "softmax_axes")
    found.graph.initializer.append(axes)
    nodes = []
    for node in found.graph.node:
        if node.op_type != "Softmax":
            nodes.append(node)
            continue
        names = {"x": node.input[0], "y": node.output[0], "axes": "softmax_axes"}
        for operator, inputs, output in form:
            read = [names.get(x, f"{node.output[0]}_{x}") for x in inputs.split()]
            name = names.get(output, f"{node.output[0]}_{output}")
            nodes.append(helper.make_node(operator, read, [name]))
            if operator.endswith("oftmax"):
                nodes[-1].attribute.append(helper.make_attribute("axis", -1))
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    return found


def unchanged(image: np.ndarray, label: int, radius: float) -> str:
    """The property that no image nearby is taken for another digit."""
    low, high = np.clip(image - radius, 0, 1).ravel(), np.clip(image + radius, 0, 1).ravel()
    names = [f"X_{k}" for k in range(64)] + [f"Y_{k}" for k in range(10)]
    others = " ".join(f"(>= Y_{k} Y_{label})" for k in range(10) if k != label)
    return "\n".join([
        *(f"(declare-const {name} Real)" for name in names),
        *(f"(assert (>= X_{k} {x:.6f}))" for k, x in enumerate(low)),
        *(f"(assert (<= X_{k} {x:.6f}))" for k, x in enumerate(high)),
        f"(assert (or {others}))",
    ])  # fmt: skip


def margins(model: OpenModel, text: str) -> dict[str, float]:
    """The smallest margin of all rows, by who chooses the lines; infinitely small if refused."""
    wanted = properties.load(text)
    _, (group,) = groups_of(model.network, wanted)
    complete = Complete(Checker(model.program, wanted), (group,))
    ends = (np.array(x, float)[None] for x in (group.inputs.lower64, group.inputs.upper64))
    with np.errstate(all="ignore"):
        try:
            facts = Facts(complete.checker.real, model.program, *ends).derive()
        except Refused:
            return dict.fromkeys(LINES, -np.inf)
        found = {"fixed": _least(complete, facts, group, None)}
        with mock.patch.object(ascent, "_tilt", return_value=None):
            lanes = _searched(complete, facts, group)
        found["planes fixed"] = _least(complete, facts, group, lanes)
        found["searched"] = _least(complete, facts, group, _searched(complete, facts, group))
    return found


def _searched(complete: Complete, facts: Facts, group) -> Lanes:
    """Slopes for every row of a group, by steps of ascent."""
    form, count = complete.form, len(group.matrix)
    low, high = (
        np.concatenate([facts.boxes[k][side].reshape(-1) for k in form.layers])[None]
        for side in (0, 1)
    )
    slopes = default_slopes(form, low, high)
    low, high, below, above = (
        np.repeat(x.astype(np.float32), count, axis=0) for x in (low, high, *slopes)
    )
    first, last = (np.repeat(x.astype(np.float32), count, axis=0) for x in facts.inputs)
    nothing = np.zeros(low.shape, np.float32)
    lanes = Lanes(
        (first, last), low, high, nothing.astype(np.int8), group.matrix[:, None].astype(np.float32),
        group.limits[:, None].astype(np.float32), below, above, nothing,
        np.ones((count, 1), np.float32), np.zeros((count, len(form.layers)), np.float32),
        np.ones(count, np.float32),
    )  # fmt: skip
    return ascent.ascend(form, lanes, STEPS, np.full(count, np.inf, np.float32)).lanes


def _least(complete: Complete, facts: Facts, group, lanes: Lanes | None) -> float:
    """The smallest of the checker's bounds with given slopes; with its own where there are none."""
    (output,) = complete.program.outputs
    shape = complete.program.nodes[output].shape
    of, rows = np.zeros(len(group.matrix), int), group.matrix.reshape(-1, *shape)
    lines = {}
    if lanes is not None:
        for index, layer in complete.form.layers.items():
            pair = (x[:, layer.some].astype(float) for x in (lanes.below, lanes.above))
            below, above = (x.reshape(-1, *layer.shape) for x in pair)
            lines[index] = facts.line(index, of, below, above)
    found = lower_bounds(facts, of, lambda some: {output: rows[some]}, lines)
    return float(np.min(found - group.limits))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    digits = Path(str(files("stagecert") / "digits"))
    model = onnx.load(digits / "transformer.onnx")
    with np.load(digits / "digits.npz") as data:
        images, labels = data["images"][: options.images], data["labels"][: options.images]
    rows = []
    for name, form in FORMS.items():
        opened = OpenModel(written(model, form))
        for radius in RADII:
            found = [
                margins(opened, unchanged(image, int(label), radius))
                for image, label in zip(images, labels, strict=True)
            ]
            for lines in LINES:
                each = [one[lines] for one in found]
                mean = float(np.mean(each)) if np.all(np.isfinite(each)) else None
                rows.append({
                    "softmax": name, "radius": radius, "lines": lines,
                    "proven": int(np.sum(np.array(each) > 0)), "mean_margin": mean,
                })  # fmt: skip
                print(rows[-1], flush=True)
    held = {"images": len(images), "steps": STEPS, "made": made(), "rows": rows}
    options.out.write_text(json.dumps(held, indent=1) + "\n")
    print(table(held))


def table(held: dict) -> str:
    """Images that are proven, and mean margins, in Markdown."""
    lines = ["| softmax as | lines | " + " | ".join(f"{r:g}" for r in RADII) + " |",
             "|---|---|" + "---|" * len(RADII)]  # fmt: skip
    for name in FORMS:
        for how in LINES:
            mine = [r for r in held["rows"] if r["softmax"] == name and r["lines"] == how]
            means = ("-" if r["mean_margin"] is None else f"{r['mean_margin']:.2f}" for r in mine)
            cells = [f"{r['proven']} ({mean})" for r, mean in zip(mine, means, strict=True)]
            lines.append(f"| `{name}` | {how} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
