"""Trains a small network in two unlike processes: the second is planned for at 0.3 of the first's speed.

hapsynth launch -n 2 examples/multi_process.py
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import hapsynth


def step(w, x):  # written for one device
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["in"]) @ w["out"] - x) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.3 * g, w, grads), loss


jax.distributed.initialize()
rng = np.random.default_rng(0)
w = {"in": rng.normal(size=(32, 128), scale=0.2), "out": rng.normal(size=(128, 32), scale=0.1)}
w, x = jax.tree.map(np.float32, (w, rng.normal(size=(4096, 32))))
cluster = hapsynth.Cluster.load(Path(__file__).parent / "clusters" / "two_unlike.toml")
plan = hapsynth.synthesize(step, (w, x), jax.make_mesh((2,), ("hap",)), cluster=cluster)
w, x = plan.shard(w, x)
for i in range(10):
    w, loss = plan(w, x)
    if jax.process_index() == 0:
        print(f"step {i}  loss {loss:.4f}  rows {x.sizes}")
