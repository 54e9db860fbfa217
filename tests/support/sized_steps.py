"""Steps of one layer and of three, whose shards are sized."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def step(w, x):
    value, grad = jax.value_and_grad(lambda v: jnp.sum(jnp.tanh(x @ v) ** 2))(w)
    return w - grad, value


def three_layers(w, x):
    def loss(w):
        hidden = jnp.tanh(x @ w["a"])
        return jnp.sum((jax.nn.softmax(hidden @ w["b"]) @ w["c"]) ** 2)

    value, grad = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - g, w, grad), value
