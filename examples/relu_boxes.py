"""Certified lower bounds on the output of a ReLU network, on several input boxes at once.

Each relu is relaxed to what lies between it and its chord. The boxes share the weights' arrays.
"""

from itertools import pairwise

import jax
import numpy as np

import stagecert as sc

jax.config.update("jax_enable_x64", True)


def chord(weights, bias, low, high):
    """Slope and height of the line above relu, and the range of the layer's output."""
    centre, reach = weights @ (low + high) / 2 + bias, np.abs(weights) @ (high - low) / 2
    l, u = centre - reach, centre + reach
    slope = np.where(l >= 0, 1.0, np.where(u <= 0, 0.0, u / (u - l)))
    return slope, -slope * np.minimum(l, 0), np.maximum(l, 0), np.maximum(u, 0)


def lower(params, s, z):
    """relu of an affine function of the layer before."""
    return sc.relu(params[0] @ (z[-1] if z else s) + params[1])


def upper(params, s, z):
    """Its chord."""
    return params[2] * (params[0] @ (z[-1] if z else s) + params[1]) + params[3]


def output(params, s, z):
    """The last layer, which is affine."""
    return (params[0] @ z[-1] + params[1])[0]


def network(net, middle, radius):
    """The relaxation on one box."""
    low, high = box = middle - radius, middle + radius
    stages = []
    for weights, bias in net[:-1]:
        slope, height, low, high = chord(weights, bias, low, high)
        stages.append(sc.Stage(lower, upper, params=(weights, bias, slope, height)))
    return sc.Problem(sc.Box(*box), stages, sc.Objective(output, net[-1]))


def main():
    """A random network; boxes of growing radius around one point."""
    rng, sizes, radii = np.random.default_rng(0), pairwise((4, 12, 12, 1)), (0.1, 0.2, 0.4, 0.8)
    net = [(rng.normal(0, n**-0.5, (m, n)), rng.normal(0, 0.1, m)) for n, m in sizes]
    problems = [network(net, np.array([0.5, -0.2, 0.1, 0.7]), radius) for radius in radii]
    solutions = sc.solve_batch(problems, rtol=1e-6)
    print("lower bounds", dict(zip(radii, solutions.bound.round(6).tolist(), strict=True)))
    return problems, solutions


if __name__ == "__main__":
    main()
