"""House values in California: they grow with income and with rooms a person (20,640 districts).

Three quantiles of the value, each monotone in both. The data are read from
`tabular/california_housing.csv` in the folder that STAGECERT_DATA names.
"""

import csv
import os
from pathlib import Path

import numpy as np

from stagecert.applications.isotonic import IsotonicRegression

DATA = Path(os.environ.get("STAGECERT_DATA", Path(__file__).parents[2] / "shared" / "data"))


def houses():
    """Income and rooms a person, and the median value; None where the data are not here."""
    path = DATA / "tabular" / "california_housing.csv"
    if not path.exists():
        return print(f"{path} is not here; set STAGECERT_DATA to the folder with the data.")
    names = ("median_income", "total_rooms", "population", "median_house_value")
    with path.open() as file:
        table = np.array([[float(row[k]) for k in names] for row in csv.DictReader(file)])
    return np.stack([table[:, 0], table[:, 1] / table[:, 2]], axis=1), table[:, 3] / 1000


def draw(models, path="isotonic_houses.png"):
    """The quantiles as maps."""
    import matplotlib.pyplot as plt

    income, rooms = np.linspace(0.5, 12, 250), np.linspace(0.8, 5, 250)
    mesh = np.stack(np.meshgrid(income, rooms), axis=-1).reshape(-1, 2)
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained", sharey=True)
    for axis, (level, model) in zip(axes, models.items(), strict=True):
        values = model.predict(mesh).reshape(250, 250)
        image = axis.pcolormesh(income, rooms, values, vmin=0, vmax=500)
        axis.set(title=f"{level:.0%} quantile", xlabel="median income ($10,000)")
    axes[0].set_ylabel("rooms a person")
    figure.colorbar(image, ax=axes, label="house value ($1,000)")
    figure.savefig(path, dpi=120)


def main():
    """Fit and draw."""
    if (data := houses()) is None:
        return None
    X, y = data
    models = {q: IsotonicRegression(loss="quantile", quantile=q) for q in (0.1, 0.5, 0.9)}
    for level, m in models.items():
        below = np.mean(y <= m.fit(X, y).fitted_)
        print(f"{level:.0%}: {m.objective_:.2f}, gap {m.gap_:.1e}, {below:.1%} at or below it")
    draw(models)
    return X, y, models


if __name__ == "__main__":
    main()
