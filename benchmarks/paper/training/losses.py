"""What is minimised: on attacked images (adversarial), or on interval bounds."""

import jax
import jax.numpy as jnp
import optax

from benchmarks.paper.training.model import logits, worst_margins

TRAININGS = ("plain", "adv", "ibp")


def _cross_entropy(scores, labels):
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def attack(scores_of, images, labels, eps, steps: int, key):
    """Projected gradient ascent on the loss from a random start, in steps of 2.5 eps / steps."""
    noise = jax.random.uniform(key, images.shape, images.dtype, -1, 1)
    ascend = jax.grad(lambda x: _cross_entropy(scores_of(x), labels))
    low, high = jnp.clip(images - eps, 0, 1), jnp.clip(images + eps, 0, 1)

    def step(x, _):
        return jnp.clip(x + 2.5 * eps / steps * jnp.sign(ascend(x)), low, high), None

    start = jnp.clip(images + eps * noise, low, high)
    return jax.lax.scan(step, start, None, length=steps)[0]


def loss(training: str, layers, activation: str, attack_steps: int):
    """A function of (parameters, images, labels, eps, kappa, key) to be minimised.

    With intervals: kappa times the loss on the images, plus 1 - kappa times the loss on the worst
    logits that intervals allow.
    """

    def plain(parameters, images, labels, eps, kappa, key):
        return _cross_entropy(logits(layers, activation, parameters, images), labels)

    def adversarial(parameters, images, labels, eps, kappa, key):
        def scores_of(x):
            return logits(layers, activation, jax.lax.stop_gradient(parameters), x)

        attacked = attack(scores_of, images, labels, eps, attack_steps, key)
        return plain(parameters, attacked, labels, eps, kappa, key)

    def intervals(parameters, images, labels, eps, kappa, key):
        low, high = jnp.clip(images - eps, 0, 1), jnp.clip(images + eps, 0, 1)
        worst = worst_margins(layers, activation, parameters, low, high, labels)
        clean = plain(parameters, images, labels, eps, kappa, key)
        return kappa * clean + (1 - kappa) * _cross_entropy(worst, labels)

    return {"plain": plain, "adv": adversarial, "ibp": intervals}[training]


def accuracies(layers, activation, parameters, images, labels, eps, attack_steps, key):
    """Numbers of images of a batch: right, right under attack, right by intervals."""

    def scores_of(x):
        return logits(layers, activation, parameters, x)

    attacked = attack(scores_of, images, labels, eps, attack_steps, key)
    low, high = jnp.clip(images - eps, 0, 1), jnp.clip(images + eps, 0, 1)
    worst = worst_margins(layers, activation, parameters, low, high, labels)
    others = jnp.arange(worst.shape[1]) != labels[:, None]
    return {
        "clean": jnp.sum(scores_of(images).argmax(1) == labels),
        "attacked": jnp.sum(scores_of(attacked).argmax(1) == labels),
        "intervals": jnp.sum(jnp.all((worst < 0) | ~others, axis=1)),
    }
