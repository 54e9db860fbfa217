"""Mixed precision: float16 compute on float32 parameters, under a loss scale that adapts; some steps are skipped."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import unlike
from flax.training.dynamic_scale import DynamicScale

import hapsynth

optimizer = optax.adam(1e-2)


def loss_fn(params, x, y):
    params, x = jax.tree.map(lambda a: a.astype(jnp.float16), (params, x))
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def step(state, x, y):
    params, moments, scale = state
    scale, finite, loss, grads = scale.value_and_grad(loss_fn)(params, x, y)
    updates, new_moments = optimizer.update(grads, moments, params)
    updated = optax.apply_updates(params, updates), new_moments
    params, moments = jax.tree.map(partial(jnp.where, finite), updated, (params, moments))
    return (params, moments, scale), loss


rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
params = {"in": draw(32, 128), "out": draw(128, 8)}
state = params, optimizer.init(params), DynamicScale(growth_interval=3, scale=jnp.float32(2**20))
batches = [(draw(512, 32), draw(512, 8)) for _ in range(12)]

mesh, cluster = unlike.devices()
plan = hapsynth.synthesize(step, (state, *batches[0]), mesh, cluster=cluster)
_, moments, scale = unlike.follow(plan, jax.jit(step), state, batches, rtol=2e-3)
print(f"{int(moments[0].count)} steps of {len(batches)} were taken, at a scale of {float(scale.scale)}")
assert 0 < int(moments[0].count) < len(batches)
