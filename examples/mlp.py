"""A multilayer perceptron classifier: the smallest real training step.

    hapsynth search examples/mlp.py --cluster examples/clusters/mixed8.toml

Plain JAX and optax, written for one device. Nothing here knows of hapsynth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

State = dict[str, Any]
Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class Config:
    batch: int = 8192
    features: int = 256
    hidden: tuple[int, ...] = (512, 512)
    classes: int = 16
    learning_rate: float = 1e-3


def optimizer(config: Config) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(config.learning_rate, weight_decay=1e-2),
    )


def init(key: jax.Array, config: Config = Config()) -> State:
    """Parameters and optimizer state: dense layers with He-scaled weights."""
    widths = (config.features, *config.hidden, config.classes)
    params = {}
    for i, (fan_in, fan_out, k) in enumerate(zip(widths, widths[1:], jax.random.split(key, len(widths) - 1))):
        weight = jax.random.normal(k, (fan_in, fan_out)) * (2.0 / fan_in) ** 0.5
        params[f"dense{i}"] = {"kernel": weight, "bias": jnp.zeros(fan_out)}
    return {"params": params, "opt": optimizer(config).init(params)}


def make_batch(key: jax.Array, config: Config = Config()) -> Batch:
    """Gaussian inputs, labelled by the largest of `classes` fixed random projections: a task that can be learnt."""
    x = jax.random.normal(key, (config.batch, config.features))
    teacher = jax.random.normal(jax.random.key(0), (config.features, config.classes))
    return {"x": x, "y": jnp.argmax(x @ teacher, axis=-1).astype(jnp.int32)}


def apply(params: State, x: jax.Array) -> jax.Array:
    """Logits (batch, classes) of inputs (batch, features)."""
    for i in range(len(params)):
        layer = params[f"dense{i}"]
        x = x @ layer["kernel"] + layer["bias"]
        if i + 1 < len(params):
            x = jax.nn.relu(x)
    return x


def make_step(config: Config = Config()) -> Callable[[State, Batch], tuple[State, jax.Array]]:
    """`train_step(state, batch) -> (state, loss)`."""

    def loss_fn(params: State, batch: Batch) -> jax.Array:
        logits = apply(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    def train_step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt = optimizer(config).update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

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
