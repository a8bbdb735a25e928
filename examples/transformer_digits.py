"""A transformer that reads digits: images of which it is proven that attention stays on course.

The model is a PyTorch one, as PyTorch exports it (scripts/train_transformer.py): four patches, a
block with layer normalisations, two heads of attention and gelu. It comes with stagecert.
"""

from importlib.resources import files
from pathlib import Path

import numpy as np

from stagecert.verify import OpenModel, verify

RADIUS, IMAGES = 0.02, 3


def unchanged(image, label, radius) -> str:
    """The property that no image nearby is taken for another digit, in VNN-LIB."""
    lower, upper = np.clip(image - radius, 0, 1).ravel(), np.clip(image + radius, 0, 1).ravel()
    names = [f"X_{k}" for k in range(64)] + [f"Y_{k}" for k in range(10)]
    others = " ".join(f"(>= Y_{k} Y_{label})" for k in range(10) if k != label)
    return "\n".join(
        [
            *(f"(declare-const {name} Real)" for name in names),
            *(f"(assert (>= X_{k} {x:.6f}))" for k, x in enumerate(lower)),
            *(f"(assert (<= X_{k} {x:.6f}))" for k, x in enumerate(upper)),
            f"(assert (or {others}))",  # what must not happen
        ]
    )


def main():
    """Certifies a few images; the checker accepts every proof before the answer is unsat."""
    digits = Path(str(files("stagecert") / "digits"))
    with np.load(digits / "digits.npz") as data:
        images, labels = data["images"][:IMAGES], data["labels"][:IMAGES]
    model, verdicts = OpenModel(digits / "transformer.onnx"), []
    for image, label in zip(images, labels, strict=True):
        verdict = verify(model, unchanged(image, label, RADIUS))
        lead = min(case.proven for case in verdict.cases)
        print(f"a {label}: {verdict.answer}, it leads by {lead:.2f} or more")
        verdicts.append(verdict)
    return model, images, labels, verdicts


if __name__ == "__main__":
    main()
