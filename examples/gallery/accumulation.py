"""Gradient accumulation: a `lax.scan` over microbatches, whose gradients are averaged before the one update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import unlike

import hapsynth

MICROBATCHES = 4
optimizer = optax.adam(1e-2)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def step(state, x, y):
    params, moments = state

    def accumulate(total, micro):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *micro)), None

    # Every fourth row: so each device has a part of each microbatch. Of reshape(MICROBATCHES, -1, ...) it would need
    # rows from all over the batch, and hold all of it.
    micros = jax.tree.map(lambda a: a.reshape(-1, MICROBATCHES, a.shape[-1]).swapaxes(0, 1), (x, y))
    zero = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(accumulate, zero, micros)
    loss, grads = jax.tree.map(lambda t: t / MICROBATCHES, total)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
params = {"in": draw(32, 128), "out": draw(128, 8)}
batches = [(draw(2048, 32), draw(2048, 8)) for _ in range(4)]
state = params, optimizer.init(params)

mesh, cluster = unlike.devices()
plan = hapsynth.synthesize(step, (state, *batches[0]), mesh, cluster=cluster)
unlike.follow(plan, jax.jit(step), state, batches)
