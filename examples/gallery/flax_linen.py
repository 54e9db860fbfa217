"""flax linen: a TrainState with batch statistics and a key for dropout beside the parameters."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import unlike
from flax.training import train_state

import hapsynth


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(64, use_bias=False)(x)))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=False)(x))


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: jax.Array


def step(state, x, y):
    dropout = jax.random.fold_in(state.key, state.step)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, x, mutable="batch_stats", rngs={"dropout": dropout})
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), updates["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


rng = np.random.default_rng(0)
batches = [(rng.normal(size=(512, 32)).astype(np.float32), rng.integers(0, 10, 512, np.int32)) for _ in range(4)]
model = Classifier()
variables = jax.jit(model.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batches[0][0])
state = TrainState.create(apply_fn=model.apply, tx=optax.sgd(1e-1, momentum=0.9), key=jax.random.key(2), **variables)

mesh, cluster = unlike.devices()
plan = hapsynth.synthesize(step, (state, *batches[0]), mesh, cluster=cluster)
unlike.follow(plan, jax.jit(step), state, batches)
