"""Functions that draw random numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def large_draws(key: jax.Array) -> Any:
    return jax.random.normal(key, (512, 1200)), jax.random.bits(key, (600_000,))


def dropout_step(params: Any, key: Any, x: Any) -> Any:
    """A step of gradient descent on a dropout network; also the mask it drew."""
    key, use = jax.random.split(key)

    def loss(params: Any) -> Any:
        hidden = jax.nn.relu(x @ params[0])
        mask = jax.random.bernoulli(use, 0.7, hidden.shape)
        return (jnp.where(mask, hidden / 0.7, 0.0) @ params[1]).var(), mask

    (value, mask), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return [p - 0.1 * g for p, g in zip(params, grads)], key, value, mask
