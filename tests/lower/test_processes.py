"""A plan run by two processes of one CPU device each, joined by gloo."""

import re
from functools import cache

import pytest
from two_processes import run_two

CODE = """
    import os
    import sys
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    import hapsynth
    from hapsynth.jobs import preflight
    from hapsynth.lower._host_schedule import CollectiveStage
    from hapsynth.plan import Plan
    from slow_devices import slow_cluster

    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))

    def step(state, x):
        w, key = state
        key, now = jax.random.split(key)
        y = x @ w
        return (w + 0.1 * x.T @ y, key), (y ** 2).sum() + jax.random.normal(now)

    w, x = np.eye(64, dtype=np.float32), np.arange(48 * 64, dtype=np.float32).reshape(48, 64) / 1000
    want = jax.jit(step)((w, jax.random.key(3)), x)
    mesh = Mesh(np.array(jax.devices()), ("hap",))
    example = (jax.ShapeDtypeStruct(w.shape, w.dtype), jax.eval_shape(lambda: jax.random.key(0)))
    for text in sys.argv[3:]:
        speeds = tuple(map(float, text.split(":")))
        plan = hapsynth.synthesize(step, (example, x), mesh, cluster=slow_cluster(speeds), leave_out=False)
        for given in ((w, jax.random.key(3)), (jnp.array(w), jax.random.key(3))):
            state, batch = plan.shard(given, x)
            got = plan.unshard(plan(state, batch))
            is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
            plain = lambda tree: jax.tree.map(lambda a: jax.random.key_data(a) if is_key(a) else a, tree)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), plain(got), plain(want))
            # What was given is nobody else's.
            assert np.array_equal(given[0], np.eye(64))
        uneven = any(len(set(s)) > 1 for s in plan.sizes.shares)
        assert plan.form == ("fused" if uneven else "switch"), plan.form_reason
        threads = list(map(int, os.listdir("/proc/self/task"))) if hasattr(os, "SCHED_BATCH") else []
        assert {os.sched_getscheduler(t) for t in threads} <= {os.SCHED_BATCH}
        # The other forms as well, which are not what "auto" came to.
        forms = {f: Plan(plan.traced, plan.result, plan.cluster, mesh, step, form=f) for f in ("switch", "staged")}
        for other in forms.values():
            state, batch = other.shard((w, jax.random.key(3)), x)
            got = plain(other.unshard(other(state, batch)))
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, plain(want))
        switch, staged = forms.values()
        kept = staged.shard((w, jax.random.key(3)), x)
        held = sum(a.nbytes for a in kept[1].data.arrays) if uneven else kept[1].addressable_data(0).nbytes
        assert staged.check((w, jax.random.key(3)), x).ok

        def meetings(measured):
            staged.lowered.meetings.measured = measured
            before = preflight.meeting.held[0, 1]
            staged(*staged.shard((w, jax.random.key(3)), x))
            return preflight.meeting.held[0, 1] - before

        stages = sum(isinstance(item, CollectiveStage) for item in staged.lowered.items)
        assert stages and meetings(True) == stages and meetings(False) == 0
        # gloo's own reduce-scatter spins.
        assert "reduce_scatter" not in switch.lower().as_text() + staged.lower().as_text()
        print("right", staged.lowered.fingerprint, held)
"""


HEAD = """
    import sys
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    import hapsynth
    from hapsynth.adapting.rebalance import busy_seconds
    from slow_devices import slow_cluster

    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    mesh = Mesh(np.array(jax.devices()), ("hap",))
"""

FED = """
    me = jax.process_index()

    def step(state, x):
        w, m, n = state
        m = 0.9 * m + x.T @ jnp.tanh(x @ w)
        return (w - 0.01 * m, m, n + 1), (m ** 2).sum()

    draw = np.random.default_rng(0)
    w, x = draw.normal(size=(64, 48)).astype(np.float32), draw.normal(size=(96, 64)).astype(np.float32) / 10
    want = given = (w, np.zeros_like(w), np.int32(0))
    for _ in range(4):
        want, _ = jax.jit(step)(want, x)
    fixed = {"[0][0]": "S(0)", "[1]": "S(0)"}
    plan = hapsynth.synthesize(step, (given, x), mesh, cluster=slow_cluster((1, 1)), fixed=fixed, form="staged")

    def part(path):
        # A loader that reads only what this process holds.
        rows, columns = plan.local_slices(path).process
        return {"[1]": x, "[0][0]": w, "[0][1]": given[1]}[path][rows, columns]

    batch = plan.shard_from_process_local_data(part("[1]"), 1)
    assert plan.local_slices(1).process[0] == (slice(0, 48), slice(48, 96))[me]
    state = plan.shard_from_process_local_data((part("[0][0]"), part("[0][1]"), np.int32(0)), 0)
    for _ in range(2):
        state, _ = plan(state, batch)
    assert plan.drift(state).equal and plan.drift(state).leaves

    # The second process has become half as fast, as each measures for itself.
    monitor = hapsynth.Monitor(plan, every=2, window=2)
    mine = float(busy_seconds(plan).max()) * (1, 2)[me]
    said = [monitor.step(seconds=mine) for _ in range(4)]
    assert said[:3] == [None] * 3 and said[3].gain > 1.2, said
    new = said[3].plan
    assert new.sizes.shares == plan.rebalance([1.0, 2.0] * busy_seconds(plan)).sizes.shares
    assert plan.rebalance([1.0, 1.02] * busy_seconds(plan)) is plan
    held = plan.unshard(state)
    state = new.adopt(state, plan)
    jax.tree.map(np.testing.assert_array_equal, new.unshard(state), held)
    plan, even = new, plan
    rows = plan.local_slices(1).process[0]
    assert rows.stop - rows.start == (64, 32)[me], rows
    batch = plan.shard_from_callback(lambda path, s: x[s], 1)
    for _ in range(2):
        state, _ = plan(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), plan.unshard(state), want)
    # Where stages meet, a call now and then tells how long each computes, and no op is run by itself.
    hapsynth.adapting.monitor.Probe.slowdown = None
    assert plan.form == "staged"
    watching = hapsynth.Monitor(plan, every=2, window=3, threshold=0.99)
    for i in range(4):
        plan.lowered.meetings.local_s = 0.0
        state, _ = plan(state, batch)
        assert (plan.lowered.meetings.local_s > 0) == (i % 2 == 1), i
        assert watching.step() is None
    # Both tell the same of a contest.
    found = hapsynth.autotune({"new": plan, "even": even}, given, x, steps=1)
    assert min(found.seconds.values()) > 0
    # Also where no plan is everyone's.
    ends = {str(d.id): Mesh(np.array([d]), ("hap",)) for d in jax.devices()}
    lone = {name: hapsynth.synthesize(step, (given, x), end, cluster=slow_cluster((1,))) for name, end in ends.items()}
    apart = hapsynth.autotune(lone, given, x, steps=1)
    assert len(apart.seconds) == 2 and min(apart.seconds.values()) > 0
    print("fed", plan.sizes.shares, found.name, found.seconds, apart.name, apart.seconds)
"""

SEVERAL = """
    def evaluate(state, x):
        return (jnp.tanh(x @ state["w"]) ** 2).mean()

    def train(state, x):
        value, g = jax.value_and_grad(lambda w: evaluate({"w": w}, x))(state["w"])
        m = 0.9 * state["m"] + g
        return {"w": state["w"] - m, "m": m}, value

    def init(key):
        w = jax.random.normal(key, (64, 48))
        return {"w": w, "m": jnp.zeros_like(w)}

    key, x = jax.random.key(3), np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
    want = jax.jit(init)(key)
    example = jax.eval_shape(init, key)
    plans = hapsynth.synthesize(
        {"train": train, "eval": evaluate, "init": init},
        {"train": (example, x), "eval": (example, x), "init": (key,)},
        mesh,
        cluster=slow_cluster((3, 1)),
        fixed={"[0]['w']": "S(0)", "[0]['m']": "S(0)"},
        form="staged",
    )
    assert {plan.form for plan in plans.values()} == {"staged"}
    state = plans["init"](key)
    rows = plans["train"].local_slices("[0]['w']").process[0]
    assert rows.stop - rows.start == state["w"].data.arrays[0].shape[0] != 32, rows
    # The last batch is short.
    short = plans["train"].for_shapes(example, x[:52])
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for plan, batch in ((plans["train"], x), (short, x[:52]), (plans["train"], x)):
        near(plans["eval"].unshard(plans["eval"](state, x)), evaluate(want, x))
        (state, value), (want, loss) = plan(state, batch), jax.jit(train)(want, batch)
        near(plan.unshard(value), loss)
        jax.tree.map(near, plan.unshard(state), want)
    print("several", plans.layouts, short.sizes.shares)
"""


def two(code: str, *options: str) -> list[str]:
    return run_two(code, lambda address, i: [address, str(i), *options])


@pytest.mark.slow
def test_state_and_keys_are_placed_among_processes() -> None:
    """Between alike devices and unlike ones."""
    said = two(CODE, "1:1", "3:1")
    found = [re.findall(r"right (\w+) (\d+)", text) for text in said]
    assert [len(each) for each in found] == [2, 2], said
    for (fingerprint, held), (other, rest) in zip(*found, strict=True):
        # Nothing differs where processes meet, and each holds its own rows and no more.
        assert fingerprint == other
        assert int(held) + int(rest) == 48 * 64 * 4


@cache
def fed_and_several() -> list[str]:
    """Both by the same two processes, which take longer to start than for either."""
    return two(HEAD + SEVERAL + FED)


def ended(said: str, what: str) -> str:
    """The line that is printed at its end."""
    (line,) = (line for line in said.splitlines() if line.startswith(f"{what} "))
    return line


@pytest.mark.slow
def test_processes_feed_their_own_rows_and_are_rebalanced() -> None:
    first, second = (ended(said, "fed") for said in fed_and_several())
    assert first == second


@pytest.mark.slow
def test_processes_keep_one_state_for_several_functions_and_shapes() -> None:
    first, second = (ended(said, "several") for said in fed_and_several())
    assert first == second
