"""Collectives beside computing, among two processes: one order, the same values, whoever computes how long."""

import re

import pytest
from two_processes import run_two

STEP = """
    def step(state, x):
        def loss(ws):
            h = x
            for w in ws:
                h = jnp.tanh(h @ w)
            return (h ** 2).sum()
        value, grads = jax.value_and_grad(loss)([w for w, _ in state])
        return [(w - 1e-4 * (0.9 * m + g), 0.9 * m + g) for (w, m), g in zip(state, grads)], value

    draw = np.random.default_rng(0)
    # Large enough not to go as one, and all unlike.
    widths = [384, 448, 320, 512, 384]
    w = lambda i: draw.normal(size=widths[i : i + 2]).astype(np.float32) / 20
    state = [(w(i), np.zeros(widths[i : i + 2], np.float32)) for i in range(4)]
    x = draw.normal(size=(rows, 384)).astype(np.float32)
    want = state
    for _ in range(3):
        want, value = jax.jit(step)(want, x)
    mesh = Mesh(np.array(jax.devices()), ("hap",))
    fixed = {f"[0][{i}][{k}]": "R" for i in range(4) for k in range(2)} | {"[1]": "S(0)"}
"""
"""A training step, of so many `rows`, and what three steps make on one device."""

CODE = (
    """
    import random
    import sys
    import time
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    import hapsynth
    from hapsynth.lower._collective_thread import Transfer
    from hapsynth.lower._staged_form import Run
    from hapsynth.plan import Plan
    from slow_devices import slow_cluster

    jax.config.update("jax_cpu_enable_async_dispatch", sys.argv[3] == "async")
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    me = jax.process_index()

    rows = 48
"""
    + STEP
    + """
    options = dict(cluster=slow_cluster((2, 1), bandwidth=1e7), fixed=fixed, form="staged")
    plain = hapsynth.synthesize(step, (state, x), mesh, **options)
    plan = Plan(plain.traced, plain.result, plain.cluster, mesh, step, form="staged", overlap=True)
    assert (plain.overlap, plan.overlap) == (False, True), plan.overlap_reason
    spare = [limit - held for limit, held in zip(plan.result.memory_limit_bytes, plan.memory)]
    assert plan.lowered.spare_bytes == min(spare) < max(plan.result.memory_limit_bytes)

    # Each computes for a while of its own, between any two stages.
    delays = random.Random(me)
    local, serve, order = Run.local, Transfer.serve, []

    def slow(self, stage):
        time.sleep(delays.choice([0, 0, 0.01, 0.03]))
        local(self, stage)
        time.sleep(delays.choice([0, 0, 0.01, 0.03]))

    def noted(self):
        order.append([(x.shape[0], str(x.dtype)) for x in self._operands])
        serve(self)

    Run.local, Transfer.serve = slow, noted

    def trained(plan):
        kept, batch = plan.shard(state, x)
        for _ in range(3):
            kept, value = plan(kept, batch)
        return plan.unshard(kept), plan.unshard(value)

    for each in (plan, plain):
        got, loss = trained(each)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
        np.testing.assert_allclose(loss, value, rtol=1e-5)
    stages = sum(type(item).__name__ == "CollectiveStage" for item in plan.lowered.items)
    assert stages >= 4 and len(order) == 3 * stages, (stages, len(order))

    # A call in which processes meet at every collective: nothing overlaps, so that each knows how long it computes.
    before = len(order)
    plan.lowered.meetings.measured = True
    kept, batch = plan.shard(state, x)
    kept, _ = plan(kept, batch)
    assert len(order) == before and plan.lowered.meetings.local_s > 0

    # What is recorded: one after another, and the wait is part of the call.
    (kept, _), recorded = plan.recorded(kept, batch)
    ran = sorted((c.began_s, c.ended_s) for c in recorded.collectives)
    assert len(ran) == stages and all(a[1] <= b[0] for a, b in zip(ran, ran[1:]))
    assert 0 <= recorded.exposed_s < recorded.total_s and ran[-1][1] <= recorded.total_s
    # As predicted, by the same count: of this process's device.
    assert len(plan.exposed) == 2 and 0 < plan.exposed[me] < plan.timeline.makespan_s
    # One collective after another is all exposed.
    kept, batch = plain.shard(state, x)
    (kept, _), apart = plain.recorded(kept, batch)
    assert abs(apart.exposed_s - apart.communication_s) < 1e-6
    kept, batch = plan.shard(plain.unshard(kept), x)

    # As with debug_nans: nothing is consumed, and the result is looked at.
    with jax.debug_nans(True):
        plan(kept, batch)
        broken = [(w * np.nan, m) for w, m in plan.unshard(kept)]
        try:
            plan(broken, x)
        except FloatingPointError as error:
            print("found", error)
    print("right", order)
"""
)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["inline", "async"])
def test_one_order_and_the_same_values(dispatch: str) -> None:
    said = run_two(CODE, lambda address, i: [address, str(i), dispatch])
    assert all("found invalid value (nan)" in text for text in said), said
    orders = [re.findall(r"right (.*)", text) for text in said]
    assert orders[0] == orders[1]
    assert orders[0]


ONE_PROGRAM = (
    """
    import sys
    import time
    import warnings
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    import hapsynth
    from hapsynth.plan import Plan
    from slow_devices import slow_cluster

    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    me = jax.process_index()

    rows = 1024
"""
    + STEP
    + """
    plain = hapsynth.synthesize(step, (state, x), mesh, cluster=slow_cluster((2, 1), bandwidth=1e7), fixed=fixed)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        links = slow_cluster((2, 1), bandwidth=1e12)
        without = hapsynth.synthesize(step, (state, x), mesh, cluster=links, fixed=fixed, overlap=True)
    (one,) = [w for w in told if w.category is hapsynth.OverlapWarning]
    assert "it makes 1.2 times as fast" in str(one.message), one.message
    assert not without.overlap and without.form == "fused"
    plan = Plan(plain.traced, plain.result, plain.cluster, mesh, step, form="fused", overlap=True)
    assert plan.overlap, plan.overlap_reason
    kept, batch = plan.shard(state, x)
    for _ in range(2):
        kept, value = plan(kept, batch)
    # A process that is late: the other goes on with what is not sent yet.
    time.sleep(me)
    (kept, value), call = plan.recorded(kept, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4), plan.unshard(kept), want)
    ops = [c.op for c in call.collectives]
    spans = [(c.began_s, c.ended_s) for c in call.collectives]
    assert len(ops) == len(plan.lowered.compiled_collectives) and all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
    assert all(c.began_s <= c.awaited_s <= c.ended_s for c in call.collectives)
    assert 0 <= call.exposed_s <= call.communication_s <= call.total_s
    if me == 0:
        assert call.communication_s > 0.5, call
        assert call.exposed_s < call.communication_s, call

    # More than the process has: in the order that holds least, with the same collectives.
    before = plan.lowered.compiled_collectives
    plan.lowered.memory_limit_bytes = 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan.lowered.prepare()
    (one,) = [w for w in told if w.category is hapsynth.OverlapWarning]
    assert "and it has 1 B: it computes in the order that holds least" in str(one.message), one.message
    assert plan.lowered.compiled_collectives == before
    kept, batch = plan.shard(plan.unshard(kept), x)
    plan(kept, batch)
    print("right", before)
"""
)


@pytest.mark.slow
def test_one_program_for_each_process_hides_collectives() -> None:
    said = run_two(ONE_PROGRAM, lambda address, i: [address, str(i)], {"NPROC": "2"})
    orders = [re.findall(r"right (.*)", text) for text in said]
    assert orders[0] == orders[1]
    assert orders[0]
