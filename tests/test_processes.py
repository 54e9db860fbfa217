"""A plan run by two processes of one CPU device each, joined by gloo."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = """
    import sys
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    import hapsynth
    from slow_devices import slow_cluster

    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))

    def step(state, x):
        w, key = state
        key, now = jax.random.split(key)
        y = x @ w
        return (w + 0.1 * x.T @ y, key), (y ** 2).sum() + jax.random.normal(now)

    w, x = np.eye(64, dtype=np.float32), np.arange(48 * 64, dtype=np.float32).reshape(48, 64) / 1000
    want = jax.jit(step)((w, jax.random.key(3)), x)
    speeds = tuple(map(float, sys.argv[3].split(":")))
    mesh = Mesh(np.array(jax.devices()), ("hap",))
    example = (jax.ShapeDtypeStruct(w.shape, w.dtype), jax.eval_shape(lambda: jax.random.key(0)))
    plan = hapsynth.synthesize(step, (example, x), mesh, cluster=slow_cluster(speeds), leave_out=False)
    for given in ((w, jax.random.key(3)), (jnp.array(w), jax.random.key(3))):
        state, batch = plan.shard(given, x)
        got = plan.unshard(plan(state, batch))
        is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        plain = lambda tree: jax.tree.map(lambda a: jax.random.key_data(a) if is_key(a) else a, tree)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), plain(got), plain(want))
        # What was given is nobody else's.
        assert np.array_equal(given[0], np.eye(64))
    print("right", [len(set(s)) for s in plan.sizes.shares])
"""


@pytest.mark.slow
@pytest.mark.parametrize("speeds", ["1:1", "3:1"])
def test_state_and_keys_are_placed_among_processes(speeds: str) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address, "PYTHONPATH": paths}
    run = [sys.executable, "-c", textwrap.dedent(CODE), address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
    processes = [subprocess.Popen([*run, str(i), speeds], **pipes) for i in range(2)]
    said = [p.communicate(timeout=300)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], said
    assert all("right" in text for text in said)
