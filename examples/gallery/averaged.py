"""An exponential moving average of the parameters, by which the model is judged while it trains."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import unlike

import hapsynth

optimizer = optax.adam(1e-2)


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def step(state, x, y):
    grads = jax.grad(loss_fn)(state["params"], x, y)
    updates, moments = optimizer.update(grads, state["moments"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    averaged = optax.incremental_update(params, state["averaged"], step_size=0.1)
    return {"params": params, "moments": moments, "averaged": averaged}, loss_fn(averaged, x, y)


rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
params = {"in": draw(32, 128), "out": draw(128, 8)}
state = {"params": params, "moments": optimizer.init(params), "averaged": params}
batches = [(draw(512, 32), draw(512, 8)) for _ in range(4)]

mesh, cluster = unlike.devices()
plan = hapsynth.synthesize(step, (state, *batches[0]), mesh, cluster=cluster)
state = plan.unshard(unlike.follow(plan, jax.jit(step), state, batches))
assert np.linalg.norm(state["averaged"]["in"] - params["in"]) < np.linalg.norm(state["params"]["in"] - params["in"])
