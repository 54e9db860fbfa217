"""equinox: `eqx.partition` into arrays and the rest, which the step closes over; the arrays into trained and frozen."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import unlike

import hapsynth

optimizer = optax.adamw(1e-2)


def step(state, frozen, x, y):
    trained, moments, key = state
    key, dropout = jax.random.split(key)

    def loss_fn(trained):
        model = eqx.combine(trained, frozen, static)
        return jnp.mean((jax.vmap(model)(x, key=jax.random.split(dropout, len(x))) - y) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(trained)
    updates, moments = optimizer.update(grads, moments, trained)
    return (eqx.apply_updates(trained, updates), moments, key), loss


a, b, c = jax.random.split(jax.random.key(0), 3)
layers = eqx.nn.Linear(32, 256, key=a), eqx.nn.Lambda(jax.nn.gelu), eqx.nn.Dropout(0.1), eqx.nn.Linear(256, 8, key=b)
model = eqx.nn.Sequential(layers)
# Activations, rates and flags: as arguments, numbers and flags would be traced.
arrays, static = eqx.partition(model, eqx.is_array)
trained, frozen = eqx.partition(arrays, eqx.tree_at(lambda m: m[0], jax.tree.map(eqx.is_array, arrays), replace=False))
rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
batches = [(frozen, draw(512, 32), draw(512, 8)) for _ in range(4)]
state = trained, optimizer.init(trained), c

mesh, cluster = unlike.devices()
plan = hapsynth.synthesize(step, (state, *batches[0]), mesh, cluster=cluster)
unlike.follow(plan, jax.jit(step), state, batches)
