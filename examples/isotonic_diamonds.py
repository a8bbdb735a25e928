"""Prices of 53,940 diamonds: they grow with carat, colour, clarity and cut, all four at once.

Least squares on logarithms. The data are `tabular/diamonds.csv` in the folder STAGECERT_DATA names.
"""

import csv
import os
from pathlib import Path

import numpy as np

from stagecert.applications.isotonic import IsotonicRegression

DATA = Path(os.environ.get("STAGECERT_DATA", Path(__file__).parents[2] / "shared" / "data"))
GRADES = {
    "color": list("JIHGFED"),
    "clarity": ["I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"],
    "cut": ["Fair", "Good", "Very Good", "Premium", "Ideal"],
}


def diamonds():
    """Carat and three grades from bad to good, and the price; None where the data are not here."""
    path = DATA / "tabular" / "diamonds.csv"
    if not path.exists():
        return print(f"{path} is not here; set STAGECERT_DATA to the folder with the data.")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    grades = [[float(r["carat"]), *(g.index(r[k]) for k, g in GRADES.items())] for r in rows]
    return np.array(grades), np.array([float(r["price"]) for r in rows])


def draw(X, price, model, path="isotonic_diamonds.png"):
    """Price against carat for several clarities, colour G and an ideal cut."""
    import matplotlib.pyplot as plt

    carat = np.linspace(0.25, 2.5, 600)
    figure, axis = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for step, clarity in enumerate(("SI2", "VS2", "VVS2", "IF")):
        rest = [3, GRADES["clarity"].index(clarity), 4]
        mine = np.all(X[:, 1:] == rest, axis=1)
        axis.plot(X[mine, 0], price[mine], ".", ms=3, alpha=0.4, color=f"C{step}")
        new = np.column_stack([carat, np.tile(rest, (len(carat), 1))])
        axis.plot(carat, np.exp(model.predict(new)), color=f"C{step}", label=clarity)
    axis.set(xlim=(0.2, 2.5), ylim=(300, 20000), yscale="log", xlabel="carat", ylabel="price ($)")
    axis.legend(title="clarity (colour G, ideal cut)")
    figure.savefig(path, dpi=120)


def main():
    """Fit and draw."""
    if (data := diamonds()) is None:
        return None
    m = IsotonicRegression().fit(data[0], np.log(data[1]))
    print(f"{m.objective_:.6f}, at least {m.bound_:.6f} ({m.engine_}, {m.n_comparisons_} pairs)")
    draw(*data, m)
    return *data, m


if __name__ == "__main__":
    main()
