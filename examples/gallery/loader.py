"""A data loader that reads from disk only what this process holds of each batch: `plan.local_slices`."""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import unlike

import hapsynth

ROWS = 512


def step(w, x, y):
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["in"]) @ w["out"] - y) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), loss


rng = np.random.default_rng(0)
draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
w = {"in": draw(32, 128), "out": draw(128, 8)}
folder = Path(tempfile.mkdtemp())
np.save(folder / "x.npy", draw(4 * ROWS, 32))
np.save(folder / "y.npy", draw(4 * ROWS, 8))
x, y = (np.load(folder / name, mmap_mode="r") for name in ("x.npy", "y.npy"))

mesh, cluster = unlike.devices()
batch = [jax.ShapeDtypeStruct((ROWS, *a.shape[1:]), a.dtype) for a in (x, y)]
plan = hapsynth.synthesize(step, (w, *batch), mesh, cluster=cluster)
unlike.show(plan, 1)

state, one, alone = plan.shard(w), jax.jit(step), w
for start in range(0, len(x), ROWS):
    bx, by = x[start : start + ROWS], y[start : start + ROWS]
    state, loss = plan(
        state,
        plan.shard_from_process_local_data(bx[plan.local_slices(1).process], 1),
        plan.shard_from_callback(lambda path, s, rows=by: rows[s], 2),
    )
    alone, expected = one(alone, bx, by)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4), plan.unshard(state), alone)
