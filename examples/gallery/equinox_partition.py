"""equinox: `eqx.partition` into what is trained and what is frozen; the frozen part is an argument of its own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import unlike

import hapsynth

optimizer = optax.adamw(1e-2)


def step(state, frozen, x, y):
    trained, moments = state

    def loss_fn(trained):
        model = eqx.combine(trained, frozen)
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    loss, grads = eqx.filter_value_and_grad(loss_fn)(trained)
    updates, moments = optimizer.update(grads, moments, trained)
    return (eqx.apply_updates(trained, updates), moments), loss


model = eqx.nn.MLP(32, 8, 64, 3, activation=jax.nn.gelu, key=jax.random.key(0))
is_trained = eqx.tree_at(lambda m: m.layers[0], jax.tree.map(eqx.is_array, model), replace=False)
trained, frozen = eqx.partition(model, is_trained)
state = trained, optimizer.init(trained)
rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
batches = [(frozen, draw(512, 32), draw(512, 8)) for _ in range(4)]

mesh, cluster = unlike.devices()
plan = hapsynth.synthesize(step, (state, *batches[0]), mesh, cluster=cluster)
unlike.follow(plan, eqx.filter_jit(step), state, batches)
