"""How far may pixels move before a digits classifier could change its mind?

Needs scikit-learn, which trains the network.
"""

import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from stagecert import networks


def train():
    """A small classifier of 8x8 digits as a JAX function, with images it was not trained on."""
    images, labels = load_digits(return_X_y=True)
    images = images / 16
    model = MLPClassifier((30, 30), max_iter=60, random_state=0, early_stopping=True)
    model.fit(images[:1500], labels[:1500])
    layers = list(zip(model.coefs_, model.intercepts_, strict=True))

    def classify(x):
        for weights, bias in layers[:-1]:
            x = jnp.maximum(x @ weights + bias, 0)
        return x @ layers[-1][0] + layers[-1][1]

    return classify, images[1500:1520], labels[1500:1520]


def main():
    """Certifies 20 images at several radii."""
    classify, images, labels = train()
    network = networks.from_jax(classify, np.zeros(64))
    objectives = networks.margins(labels, 10)
    results = {}
    for radius in (0.01, 0.03, 0.1):
        lower, upper = np.clip(images - radius, 0, 1), np.clip(images + radius, 0, 1)
        result = networks.bound(network, lower, upper, objectives, threshold=0.0)
        proven = np.all(result.bound > 0, axis=1)
        broken = np.any(result.attained <= 0, axis=1)
        print(
            f"radius {radius}: {proven.sum()} of 20 proven robust, {broken.sum()} shown not to be"
        )
        results[radius] = result
    return classify, images, labels, results


if __name__ == "__main__":
    main()
