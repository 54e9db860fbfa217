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
    users = jax.sharding.NamedSharding(jax.make_mesh((2,), ("data",)), jax.sharding.PartitionSpec("data"))
    for fed in (batch, jax.make_array_from_process_local_data(users, part("[1]"))):
        state, _ = plan(state, fed)
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

PLACED = """
    import tracemalloc
    from jax.sharding import NamedSharding, PartitionSpec as P
    from hapsynth.instructions.layout import R, S
    from hapsynth.lower import ExactStorage, Shards, Storage, _storage, parts

    me, own, users = jax.process_index(), _storage.own_mesh(mesh, [("hap", 2)]), jax.make_mesh((2,), ("data",))
    host_array, read, compiled = _storage.host_array, [], []
    _storage.host_array = lambda x: read.append(x) or host_array(x)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.startswith("/jax/core/compile/") else None
    )
    lies = lambda spec, make, on=users: jax.jit(make, out_shardings=NamedSharding(on, spec))()
    numbers = lambda: jnp.arange(16.0).reshape(8, 2)
    keys = lambda: jax.random.split(jax.random.key(5), 8)

    def placed(kind, x, *lengths, reads=0, weak=False):
        cut = ((S(0),), {0: ((0,), lengths)}) if lengths else ((R,), {})
        storage = kind(x.shape, x.dtype, weak, *cut, own)
        rows = storage.slices((me,))
        for copy in (False, True):
            stored = storage.put(x, copy=copy)
            assert len(read) == reads, (x, read)
            (shard,) = stored.arrays if isinstance(stored, Shards) else parts(stored)
            assert isinstance(stored, Shards) or storage.holds(stored) or not storage.is_even
            pieces = [s.data for s in x.addressable_shards] if isinstance(x, jax.Array) else []
            data = jax.random.key_data if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else lambda a: a
            shared = [data(p).unsafe_buffer_pointer() == data(shard).unsafe_buffer_pointer() for p in pieces]
            assert not (copy and x.size and any(shared))
            whole = host_array(x)
            read.clear()
            due = data(whole)[rows]
            np.testing.assert_array_equal(data(shard)[: len(due)] if lengths else data(shard), due)
        return stored

    for kind in (Storage, ExactStorage):
        # As the user's own mesh has it, of other axes and types.
        rows = numbers()[4 * me : 4 * me + 4]
        placed(kind, jax.make_array_from_process_local_data(NamedSharding(users, P("data")), np.asarray(rows)), 4, 4)
        placed(kind, lies(P("data"), keys), 4, 4)
        placed(kind, lies(P(), numbers))
        for shape in ((8, 0), (0, 2)):
            placed(kind, lies(P("data"), lambda: jnp.zeros(shape)), *[shape[0] // 2] * 2)
        # On the same devices in another order.
        placed(kind, lies(P("data"), numbers, Mesh(np.array(jax.devices()[::-1]), ("data",))), 4, 4, reads=1)
        # What this process alone has, whole.
        placed(kind, jax.random.fold_in(jax.random.key(1), 3))
        placed(kind, jnp.full((), 0.1), weak=True)
        for x in (numbers(), lies(P(), numbers)):
            for lengths in ((4, 4), (6, 2), (0, 8)):
                placed(kind, x, *lengths)
        # NumPy's, of which each takes its own rows.
        x = np.ones((1 << 20, 2), np.float32)
        storage = kind(x.shape, x.dtype, False, (S(0),), {0: ((0,), (1 << 19, 1 << 19))}, own)
        tracemalloc.start()
        stored = storage.put(x, copy=False)
        assert x.nbytes / 2 <= tracemalloc.get_traced_memory()[1] < 0.75 * x.nbytes
        tracemalloc.stop()
        x[:] = 0
        assert parts(stored)[0].min() == 1
        read.clear()

    # What is gathered all the same is compiled once.
    for _ in range(2):
        compiled.clear()
        x = jax.make_array_from_process_local_data(NamedSharding(users, P("data")), np.asarray(rows))
        compiled.clear()
        np.testing.assert_array_equal(host_array(x), numbers())
    assert not compiled, compiled
    _storage.host_array = host_array
    print("placed ", flush=True)
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
    from hapsynth.search.planning.device_subsets import ClusterPlanner

    search = ClusterPlanner.run
    if jax.process_index() == 1:
        # The other searches for both.
        ClusterPlanner.run = None
    # That of the process that searches counts.
    budget_s = 60 - jax.process_index()
    one = hapsynth.synthesize(
        train, (example, x), mesh, cluster=slow_cluster((3, 1)), time_budget_s=budget_s, leave_out=False, cache=False
    )
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    near(one.unshard(one(*one.shard(want, x)))[1], jax.jit(train)(want, x)[1])
    try:
        hapsynth.synthesize(train, (example, x), mesh, cluster=slow_cluster((3, 1)), memory_limit=9)
    except hapsynth.InfeasibleError as error:
        print("searched", one.sizes.shares, one.joint_lower_bound, len(one.result.bounds), error.needs, error)
    plans = hapsynth.synthesize_several(
        {"train": train, "eval": evaluate, "init": init},
        {"train": (example, x), "eval": (example, x), "init": (key,)},
        mesh,
        cluster=slow_cluster((3, 1)),
        fixed={"[0]['w']": "S(0)", "[0]['m']": "S(0)"},
        form="staged",
    )
    ClusterPlanner.run = search
    assert {plan.form for plan in plans.values()} == {"staged"}
    state = plans["init"](key)
    rows = plans["train"].local_slices("[0]['w']").process[0]
    assert rows.stop - rows.start == state["w"].data.arrays[0].shape[0] != 32, rows
    # The last batch is short.
    short = plans["train"].for_shapes(example, x[:52])
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
    """All by the same two processes, which take longer to start than for any."""
    return two(HEAD + PLACED + SEVERAL + FED)


def ended(said: str, what: str) -> str:
    """The line that is printed at its end."""
    (line,) = (line for line in said.splitlines() if line.startswith(f"{what} "))
    return line


@pytest.mark.slow
def test_arrays_of_devices_are_placed_by_them() -> None:
    for said in fed_and_several():
        ended(said, "placed")


@pytest.mark.slow
def test_processes_feed_their_own_rows_and_are_rebalanced() -> None:
    first, second = (ended(said, "fed") for said in fed_and_several())
    assert first == second


@pytest.mark.slow
def test_processes_keep_one_state_for_several_functions_and_shapes() -> None:
    first, second = (ended(said, "several") for said in fed_and_several())
    assert first == second


@pytest.mark.slow
def test_one_process_searches_for_all() -> None:
    """What it found and what it raises."""
    first, second = (ended(said, "searched") for said in fed_and_several())
    assert first == second
    assert "memory" in first
