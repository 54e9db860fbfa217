"""Calls of which nobody reads the results: XLA's CPU devices share few threads, and must not be given more than they
can run."""

import weakref

import numpy as np
from slow_devices import first_devices, thin_cluster
from two_processes import run

import hapsynth

X = np.ones((4, 8), np.float32)

CALLS = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    import hapsynth
    from slow_devices import first_devices, thin_cluster

    jax.config.update("jax_num_cpu_devices", 8)

    def step(w, x):
        value, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))(w)
        return jax.tree.map(lambda p, g: p - 0.01 * g, w, grads), value

    draw = lambda *shape: np.random.default_rng(0).normal(size=shape).astype(np.float32) / 8
    w, x = {"a": draw(32, 64), "b": draw(64, 16)}, draw(64, 32)
    cluster = thin_cluster((3.0,) * 4 + (1.0,) * 4)
    for form in sys.argv[1:]:
        plan = hapsynth.synthesize(step, (w, x), first_devices(8), cluster=cluster, leave_out=False, form=form)
        state, batch = plan.shard(w, x)
        for _ in range(100):
            state, value = plan(state, batch)
        print(float(value))
"""


def test_a_hundred_calls_without_a_look_at_the_results() -> None:
    """In a process of its own: what hangs in XLA can't be ended. In switch form they hung there."""
    (said,) = run(CALLS, [["switch", "staged"]])
    assert [0 < float(value) < 1 for value in said.split()] == [True, True]


def test_a_device_that_waits_for_none_keeps_no_result_alive() -> None:
    """The user's last reference to a result is the last: a large one would stay until the next call."""
    plan = hapsynth.synthesize(lambda x: x * 2, (X,), first_devices(1), cluster=thin_cluster((1.0,)))
    assert plan.form == "switch"
    result = plan(X)
    kept = weakref.ref(result)
    del result
    assert kept() is None
