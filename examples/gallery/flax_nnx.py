"""flax nnx: a model with batch statistics and dropout is split with its optimizer, and merged in the step."""

import jax
import numpy as np
import optax
import unlike
from flax import nnx

import hapsynth


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(32, 64, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def step(state, x, y):
    model, optimizer = nnx.merge(graph, state)

    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), loss


model = Classifier(nnx.Rngs(0))
graph, state = nnx.split((model, nnx.Optimizer(model, optax.sgd(1e-1, momentum=0.9), wrt=nnx.Param)))
rng = np.random.default_rng(0)
batches = [(rng.normal(size=(512, 32)).astype(np.float32), rng.integers(0, 10, 512, np.int32)) for _ in range(4)]

mesh, cluster = unlike.devices()
plan = hapsynth.synthesize(step, (state, *batches[0]), mesh, cluster=cluster)
unlike.follow(plan, jax.jit(step), state, batches)
