"""A monotone surface through noisy points of the plane, with a band of quantiles.

Nothing is assumed but that the surface grows with both coordinates. Each fit has a proven bound.
"""

import numpy as np

from stagecert.applications.isotonic import IsotonicRegression


def points(count=2000, seed=0):
    """Points of the unit square and noisy heights above them; the noise grows to the right."""
    rng = np.random.default_rng(seed)
    X = rng.random((count, 2))
    return X, truth(X) + rng.normal(0, 0.1 + 0.3 * X[:, 0])


def truth(X):
    """The surface behind the points."""
    return np.sqrt(X[:, 0]) + X[:, 1] ** 3


def fits(X, y):
    """The mean and two quantiles."""
    return {
        "mean": IsotonicRegression().fit(X, y),
        "10 % quantile": IsotonicRegression(loss="quantile", quantile=0.1).fit(X, y),
        "90 % quantile": IsotonicRegression(loss="quantile", quantile=0.9).fit(X, y),
    }


def draw(X, y, models, path="isotonic_surface.png"):
    """The points, the truth, and the fits as maps."""
    import matplotlib.pyplot as plt

    side = np.linspace(0, 1, 200)
    mesh = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    maps = {"truth": truth(mesh)} | {name: m.predict(mesh) for name, m in models.items()}
    figure, axes = plt.subplots(1, 5, figsize=(16, 3.2), layout="constrained", sharey=True)
    axes[0].scatter(*X.T, c=y, s=4, vmin=0, vmax=2)
    axes[0].set(title=f"{len(y)} noisy points", xlabel="$x_1$", ylabel="$x_2$", box_aspect=1)
    for axis, (name, values) in zip(axes[1:], maps.items(), strict=True):
        image = axis.pcolormesh(side, side, values.reshape(200, 200), vmin=0, vmax=2)
        axis.set(title=name, xlabel="$x_1$", box_aspect=1)
    figure.colorbar(image, ax=axes, label="height")
    figure.savefig(path, dpi=120)


def main():
    """Fit and draw."""
    X, y = points()
    models = fits(X, y)
    for name, m in models.items():
        print(f"{name}: {m.objective_:.6f}, at least {m.bound_:.6f} ({m.engine_})")
    draw(X, y, models)
    return X, y, models


if __name__ == "__main__":
    main()
