"""haiku: a transformed function with parameters, batch statistics as its state, and a key for dropout."""

import haiku as hk
import jax
import numpy as np
import optax
import unlike

import hapsynth


@hk.transform_with_state
def model(x):
    norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)
    x = jax.nn.relu(norm(hk.Linear(64, with_bias=False)(x), is_training=True))
    return hk.Linear(10)(hk.dropout(hk.next_rng_key(), 0.1, x))


optimizer = optax.sgd(1e-1, momentum=0.9)


def step(state, x, y):
    params, statistics, moments, key = state
    key, dropout = jax.random.split(key)

    def loss_fn(params):
        logits, new = model.apply(params, statistics, dropout, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

    (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), statistics, moments, key), loss


rng = np.random.default_rng(0)
batches = [(rng.normal(size=(512, 32)).astype(np.float32), rng.integers(0, 10, 512, np.int32)) for _ in range(4)]
params, statistics = jax.jit(model.init)(jax.random.key(0), batches[0][0])
state = params, statistics, optimizer.init(params), jax.random.key(1)

mesh, cluster = unlike.devices()
plan = hapsynth.synthesize(step, (state, *batches[0]), mesh, cluster=cluster)
unlike.follow(plan, jax.jit(step), state, batches)
