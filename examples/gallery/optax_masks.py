"""optax: a chain with weight decay on matrices only, and a schedule of its own for each group of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import unlike

import hapsynth

warmup = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 100)
optimizer = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(),
    optax.masked(optax.add_decayed_weights(1e-2), lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    optax.partition(
        {
            "body": optax.scale_by_learning_rate(warmup),
            "head": optax.scale_by_learning_rate(optax.exponential_decay(1e-2, 10, 0.5)),
            "frozen": optax.set_to_zero(),
        },
        {"embed": "frozen", "dense": "body", "bias": "body", "head": "head"},
    ),
)


def step(state, tokens, labels):
    params, moments = state

    def loss_fn(params):
        hidden = jnp.tanh(params["embed"][tokens].mean(axis=1) @ params["dense"] + params["bias"])
        return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["head"], labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss


rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
params = {"embed": draw(100, 32), "dense": draw(32, 64), "bias": draw(64), "head": draw(64, 10)}
batches = [(rng.integers(0, 100, (512, 16), np.int32), rng.integers(0, 10, 512, np.int32)) for _ in range(4)]
state = params, optimizer.init(params)

mesh, cluster = unlike.devices()
plan = hapsynth.synthesize(step, (state, *batches[0]), mesh, cluster=cluster)
trained, _ = unlike.follow(plan, jax.jit(step), state, batches)
np.testing.assert_array_equal(plan.unshard(trained["embed"]), params["embed"])
