"""equinox: a stateful layer; its batch norm averages over the axis that `vmap` names, and its state is carried."""

import equinox as eqx
import jax
import numpy as np
import optax
import unlike

import hapsynth

optimizer = optax.sgd(1e-1, momentum=0.9)


class Classifier(eqx.Module):
    hidden: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.hidden = eqx.nn.Linear(32, 64, use_bias=False, key=a)
        self.norm = eqx.nn.BatchNorm(64, axis_name="batch", mode="batch")
        self.head = eqx.nn.Linear(64, 10, key=b)

    def __call__(self, x, statistics):
        x, statistics = self.norm(self.hidden(x), statistics)
        return self.head(jax.nn.relu(x)), statistics


def step(state, x, y):
    params, statistics, moments = state

    def loss_fn(params):
        model = jax.vmap(eqx.combine(params, static), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, new = model(x, statistics)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

    (loss, statistics), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(params)
    updates, moments = optimizer.update(grads, moments, params)
    return (eqx.apply_updates(params, updates), statistics, moments), loss


model, statistics = eqx.nn.make_with_state(Classifier)(jax.random.key(0))
params, static = eqx.partition(model, eqx.is_inexact_array)
rng = np.random.default_rng(0)
batches = [(rng.normal(size=(512, 32)).astype(np.float32), rng.integers(0, 10, 512, np.int32)) for _ in range(4)]
state = params, statistics, optimizer.init(params)

mesh, cluster = unlike.devices()
plan = hapsynth.synthesize(step, (state, *batches[0]), mesh, cluster=cluster)
unlike.follow(plan, jax.jit(step), state, batches)
