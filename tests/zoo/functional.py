"""Transformations and losses: accumulated gradients, a diffusion loss, a Hessian, a Jacobian-vector product."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from zoo.kinds import Model, abstract, f32, key


def mlp_accumulated() -> Model:
    """equinox; `optax.MultiSteps` applies the mean of every third step's gradients."""
    make = lambda k: eqx.nn.MLP(12, 4, 32, 2, key=k)
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    dynamic, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    optimizer = optax.MultiSteps(optax.sgd(0.1, momentum=0.9), every_k_schedule=3)

    def step(state: Any, x: Any, y: Any) -> Any:
        weights, moments = state
        loss = lambda w: jnp.mean((jax.vmap(eqx.combine(w, static))(x) - y) ** 2)
        value, grads = jax.value_and_grad(loss)(weights)
        updates, moments = optimizer.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    return step, ((dynamic, abstract(optimizer.init, dynamic)), f32(40, 12), f32(40, 4))


class Denoiser(nn.Module):
    @nn.compact
    def __call__(self, x: Any, t: Any) -> Any:
        angles = t[:, None] * 2.0 ** jnp.arange(8)
        when = nn.Dense(32)(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))
        return nn.Dense(x.shape[-1])(nn.swish(nn.Dense(32)(x) + when))


def diffusion() -> Model:
    """Times and noise drawn inside the step; Adam and an exponential moving average by optax."""
    module, optimizer = Denoiser(), optax.chain(optax.adam(1e-3), optax.ema(0.9))
    x = f32(40, 24)
    params = abstract(module.init, jax.random.key(0), x, f32(40))

    def step(state: Any, x: Any) -> Any:
        params, moments, rng = state
        rng, when, what = jax.random.split(rng, 3)
        t = jax.random.uniform(when, x.shape[:1])
        noise = jax.random.normal(what, x.shape)
        alpha = jnp.cos(t * jnp.pi / 2)[:, None]
        mixed = alpha * x + jnp.sqrt(1 - alpha**2) * noise
        value, grads = jax.value_and_grad(lambda p: jnp.mean((module.apply(p, mixed, t) - noise) ** 2))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments, rng), value

    return step, ((params, abstract(optimizer.init, params), key()), x)


def _mlp(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["in"]) @ p["out"]


_WEIGHTS = {"in": f32(6, 8), "out": f32(8, 3)}


def hessian() -> Model:
    """Newton's directions need all second derivatives of the loss."""

    def step(p: Any, x: Any, y: Any) -> Any:
        return jax.hessian(lambda p: jnp.mean((_mlp(p, x) - y) ** 2))(p)

    return step, (_WEIGHTS, f32(40, 6), f32(40, 3))


def jvp() -> Model:
    """The Gauss-Newton product of one direction: J^T J v."""

    def step(p: Any, v: Any, x: Any) -> Any:
        out, tangent = jax.jvp(lambda p: _mlp(p, x), (p,), (v,))
        _, back = jax.vjp(lambda p: _mlp(p, x), p)
        return back(tangent)[0], out

    return step, (_WEIGHTS, _WEIGHTS, f32(40, 6))
