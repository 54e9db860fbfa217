"""Read this first: one small training step, planned, run on eight unequal shares, and compared with plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hapsynth

pytestmark = pytest.mark.optimized


def loss(weights, x, y):
    hidden = jnp.tanh(x @ weights["in"])
    return jnp.mean((hidden @ weights["out"] - y) ** 2)


def train_step(weights, batch):
    value, grads = jax.value_and_grad(loss)(weights, *batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def test_a_training_step_on_unequal_devices(unequal):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    weights = {"in": draw(32, 64), "out": draw(64, 8)}
    batch = (draw(4096, 32), draw(4096, 8))

    mesh = jax.make_mesh((8,), ("data",))
    # Whether the slow ones are worth their latency is a matter of nanoseconds, and of how JAX traces the step.
    plan = hapsynth.synthesize(train_step, (weights, batch), mesh, cluster=unequal, leave_out=False)

    # Four devices are three times as fast as the others, so the batch is cut unevenly.
    sizes = {shares for shares in plan.sizes.shares if len(set(shares)) > 1}
    assert sizes
    assert all(fast > slow for s in sizes for fast, slow in zip(s[:4], s[4:], strict=True))
    assert plan.gap <= 1e-4
    assert plan.lower_bound <= plan.cost
    assert plan.joint_lower_bound <= plan.lower_bound

    placed, rows = plan.shard(weights, batch)
    expected = weights
    for _ in range(3):
        placed, value = plan(placed, rows)
        expected, wanted = jax.jit(train_step)(expected, batch)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plan.unshard(placed), expected)
    assert plan.check(weights, batch).ok
