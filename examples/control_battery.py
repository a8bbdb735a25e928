"""A battery buys and sells energy: what it stores is wedged, since losses are convex.

Charging with power u for one step stores at most u - LOSS u^2, and never less than if the loss were
as at full power. A trajectory on the upper bound obeys the battery's physics exactly.
"""

import jax
import jax.numpy as jnp
import numpy as np

from stagecert.applications import control

STEPS, HOURS, CAPACITY, POWER, LOSS = 96, 0.25, 10.0, 4.0, 0.03  # h, kWh, kW, share per kW


def least(now, energy, power):
    return energy + HOURS * (power - LOSS * POWER**2)


def most(now, energy, power):
    return energy + HOURS * (power - LOSS * power**2)


def cost(now, energy, power):
    # Cells age when they are worked hard, and when nearly full or nearly empty.
    full, empty = jax.nn.relu(energy - 0.9 * CAPACITY), jax.nn.relu(0.1 * CAPACITY - energy)
    ageing = 0.005 * power**2 + 50 * (full**2 + empty**2)
    end = now["end"] * (energy - 0.5 * CAPACITY) ** 2
    return jnp.sum(now["price"] * HOURS * power + ageing + end)


def main():
    """Solve, see whether the physics hold, draw."""
    hour = HOURS * np.arange(STEPS)
    price = 0.25 + 0.1 * np.cos(np.pi * (hour - 8) / 6) + 0.08 * np.cos(np.pi * (hour - 17) / 12)
    params = dict(price=price, end=np.append(np.zeros(STEPS - 1), 20.0))
    limits = dict(low=[-POWER], high=POWER, input_curvature=0.01)
    battery = control.ConvexControl(cost, least, most, [5.0], STEPS, params=params, **limits)
    plan = control.solve(battery)
    energy, power = plan.states[:, 0], plan.inputs[:, 0]
    wasted = most(None, energy[:-1], power) - energy[1:]
    print(plan)
    print(f"beyond its losses the battery wastes {np.abs(wasted).max():.4f} kWh a step at most")
    draw(hour, {"price, €/kWh": price, "power, kW": power, "energy, kWh": energy[1:]})
    return battery, plan


def draw(hour, rows):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, 1, figsize=(7, 6), sharex=True, layout="constrained")
    for axis, (label, row) in zip(axes, rows.items(), strict=True):
        axis.step(hour, row, where="post")
        axis.set(ylabel=label, xlabel="hour" if axis is axes[-1] else "")
    axes[-1].axhspan(0.1 * CAPACITY, 0.9 * CAPACITY, alpha=0.1)
    figure.savefig("control_battery.png", dpi=120)


if __name__ == "__main__":
    main()
