"""A convolutional image classifier with batch norm, and its training step.

    hapsynth search examples/cnn.py --cluster examples/clusters/mixed8.toml

Three stages of 3x3 convolution, batch norm over the batch's own statistics, ReLU and max pooling; then average
pooling over what is left and a dense head. Batch norm couples all examples of the batch, also when devices hold
unequal parts of it. Its running averages, for use after training, are carried beside the parameters. Plain JAX and
optax, written for one device. Nothing here knows of hapsynth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

State = dict[str, Any]
Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class Config:
    batch: int = 256
    size: int = 32
    channels: tuple[int, ...] = (32, 64, 128)
    classes: int = 10
    momentum: float = 0.9
    learning_rate: float = 1e-3


def optimizer(config: Config) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(config.learning_rate, weight_decay=1e-2),
    )


def init(key: jax.Array, config: Config = Config()) -> State:
    """Parameters, running statistics and optimizer state."""
    keys = jax.random.split(key, len(config.channels) + 1)
    params: State = {}
    stats: State = {}
    fan = 3
    for i, (channels, k) in enumerate(zip(config.channels, keys)):
        params[f"conv{i}"] = jax.random.normal(k, (3, 3, fan, channels)) * (2.0 / (9 * fan)) ** 0.5
        params[f"norm{i}"] = {"scale": jnp.ones(channels), "bias": jnp.zeros(channels)}
        stats[f"norm{i}"] = {"mean": jnp.zeros(channels), "var": jnp.ones(channels)}
        fan = channels
    kernel = jax.random.normal(keys[-1], (fan, config.classes)) * fan**-0.5
    params["dense"] = {"kernel": kernel, "bias": jnp.zeros(config.classes)}
    return {"params": params, "stats": stats, "opt": optimizer(config).init(params)}


def make_batch(key: jax.Array, config: Config = Config()) -> Batch:
    """Noisy gratings (NHWC), whose class is their direction: a task that can be learnt."""
    k1, k2, k3 = jax.random.split(key, 3)
    label = jax.random.randint(k1, (config.batch,), 0, config.classes)
    phase = jax.random.uniform(k2, (config.batch, 1, 1, 1), maxval=2 * jnp.pi)
    angle = (label * jnp.pi / config.classes)[:, None, None, None]
    grid = jnp.arange(config.size, dtype=jnp.float32)
    y, x = grid[None, :, None, None], grid[None, None, :, None]
    wave = jnp.sin(0.8 * (x * jnp.cos(angle) + y * jnp.sin(angle)) + phase)
    noise = jax.random.normal(k3, (config.batch, config.size, config.size, 3))
    return {"image": wave + 0.5 * noise, "label": label}


def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """3x3 convolution of x (N, H, W, C) at stride 1, keeping H and W."""
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def max_pool(x: jax.Array, window: int = 2) -> jax.Array:
    shape = (1, window, window, 1)
    return lax.reduce_window(x, -jnp.inf, lax.max, shape, shape, "VALID")


def avg_pool(x: jax.Array, window: int) -> jax.Array:
    shape = (1, window, window, 1)
    return lax.reduce_window(x, 0.0, lax.add, shape, shape, "VALID") / window**2


def batch_norm(p: State, x: jax.Array) -> tuple[jax.Array, State]:
    """x (N, H, W, C) normalised over N, H, W; and the statistics that were used."""
    mean = x.mean((0, 1, 2))
    var = x.var((0, 1, 2))
    return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"], {"mean": mean, "var": var}


def apply(params: State, image: jax.Array) -> tuple[jax.Array, State]:
    """Logits (batch, classes) of images (batch, size, size, 3), and each layer's batch statistics."""
    x, stats = image, {}
    for i in range(sum(name.startswith("conv") for name in params)):
        x, stats[f"norm{i}"] = batch_norm(params[f"norm{i}"], conv(x, params[f"conv{i}"]))
        x = max_pool(jax.nn.relu(x))
    x = avg_pool(x, x.shape[1]).reshape(x.shape[0], -1)
    return x @ params["dense"]["kernel"] + params["dense"]["bias"], stats


def make_step(config: Config = Config()) -> Callable[[State, Batch], tuple[State, jax.Array]]:
    """`train_step(state, batch) -> (state, loss)`."""

    def loss_fn(params: State, batch: Batch) -> tuple[jax.Array, State]:
        logits, stats = apply(params, batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), stats

    def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        (loss, seen), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch)
        updates, opt = optimizer(config).update(grads, state["opt"], state["params"])
        m = config.momentum
        stats = jax.tree.map(lambda old, new: m * old + (1 - m) * new, state["stats"], seen)
        return {"params": optax.apply_updates(state["params"], updates), "stats": stats, "opt": opt}, loss

    return train_step


def target_for(config: Config) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """`target` at another size."""
    key = jax.random.key(0)
    state = jax.eval_shape(lambda k: init(k, config), key)
    batch = jax.eval_shape(lambda k: make_batch(k, config), key)
    return make_step(config), (state, batch)


def target() -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """For hapsynth to plan: the training step and its arguments as shapes; nothing is allocated."""
    return target_for(Config())
