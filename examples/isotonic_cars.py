"""Fuel economy of cars: miles per gallon fall with weight and with horsepower (auto-mpg).

Two fits that assume nothing else: the mean, and the median, which outliers do not move. The data
are read from `tabular/auto_mpg_seaborn.csv` in the folder that STAGECERT_DATA names.
"""

import csv
import os
from pathlib import Path

import numpy as np

from stagecert.applications.isotonic import IsotonicRegression

DATA = Path(os.environ.get("STAGECERT_DATA", Path(__file__).parents[2] / "shared" / "data"))


def cars():
    """Weight and horsepower, and miles per gallon; None where the data are not here."""
    path = DATA / "tabular" / "auto_mpg_seaborn.csv"
    if not path.exists():
        return print(f"{path} is not here; set STAGECERT_DATA to the folder with the data.")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["horsepower"]]
    table = np.array([[float(row[k]) for k in ("weight", "horsepower", "mpg")] for row in rows])
    return table[:, :2], table[:, 2]


def draw(X, y, models, path="isotonic_cars.png"):
    """The fits as maps under the cars."""
    import matplotlib.pyplot as plt

    weight, power = np.linspace(1500, 5200, 300), np.linspace(40, 235, 300)
    mesh = np.stack(np.meshgrid(weight, power), axis=-1).reshape(-1, 2)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for axis, (name, model) in zip(axes, models.items(), strict=True):
        values = model.predict(mesh).reshape(300, 300)
        image = axis.pcolormesh(weight, power, values, vmin=9, vmax=40)
        axis.scatter(*X.T, c=y, vmin=9, vmax=40, s=22, edgecolor="white", linewidth=0.5)
        axis.set(title=f"{name}, proven gap {model.gap_:.1e}", xlabel="weight (lb)")
    axes[0].set_ylabel("horsepower")
    figure.colorbar(image, ax=axes, label="miles per gallon")
    figure.savefig(path, dpi=120)


def main():
    """Fit and draw."""
    if (data := cars()) is None:
        return None
    X, y = data
    models = {k: IsotonicRegression(increasing=False, loss=k) for k in ("squared", "absolute")}
    for name, m in models.items():
        m.fit(X, y)
        print(f"{name}: {m.objective_:.6f}, at least {m.bound_:.6f} ({m.engine_})")
    draw(X, y, models)
    return X, y, models


if __name__ == "__main__":
    main()
