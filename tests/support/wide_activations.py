"""A step whose activations are most of the memory that it takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

F32 = jnp.float32


ROWS, WIDTH, LAYERS = 512, 32, 4


def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Wide in rows, so that activations are most of what it holds."""
    for w in params:
        h = jnp.tanh(x @ w)
        x = x + h * jax.nn.sigmoid(h)
    return (x * x).mean()


def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    value, gradients = jax.value_and_grad(loss)(params, x)
    return [p - 0.1 * g for p, g in zip(params, gradients, strict=True)], value


ARGS = ([jax.ShapeDtypeStruct((WIDTH, WIDTH), F32)] * LAYERS, jax.ShapeDtypeStruct((ROWS, WIDTH), F32))
