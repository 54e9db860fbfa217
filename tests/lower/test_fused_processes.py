"""Plans in fused form on two processes joined by gloo: each runs a program of its own."""

import re

import pytest
from thoroughness import THOROUGH
from two_processes import run_two

HEAD = """
    import os
    import sys
    import warnings

    if sys.argv[2] == "1":
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + os.environ.get("FLAGS_OF_THE_SECOND", "")
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    import hapsynth
    from hapsynth.plan import Plan
    from fused_cases import CASES, arguments, assert_right, planned
    from slow_devices import slow_cluster, thin_cluster

    jax.config.update("jax_num_cpu_devices", int(os.environ.get("DEVICES", "1")))
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    me = jax.process_index()
    mesh = Mesh(np.array(jax.devices()), ("hap",))
"""

RIGHT = """
    for name, case in CASES.items():
        # Where both have rows XLA knows the same of both: one case of it, or in a thorough run all.
        both = [(0.75, 0.25)] if name == "combined as independent" or sys.argv[3:] else []
        for shares in ((1.0, 0.0), *both):
            shares = tuple(s / len(mesh.local_devices) for s in shares for _ in mesh.local_devices)
            plan = planned(case, mesh, "fused", shares)
            assert plan.form == "fused"
            assert_right(case, plan)
            held = plan.shard(*arguments())[1].data.arrays
            assert [a.shape[0] for a in held] == [round(480 * shares[me * len(held)])] * len(held)
            print(name, len(plan.lowered.compiled_collectives), flush=True)
    print("right")
"""

OWNER = """
    from dataclasses import replace
    from graphs import device
    from hapsynth.cluster.cluster import Cluster, Link

    def step(state, x):
        w, m = state
        m = 0.9 * m + jax.grad(lambda w: jnp.square(x @ w).sum())(w)
        return w - 0.001 * m, m

    rows = 4096
    given = np.linspace(1, 2, rows, dtype=np.float32), np.zeros(rows, np.float32)
    x = np.linspace(-1, 1, 512 * rows, dtype=np.float32).reshape(512, rows)
    want = given
    for _ in range(4):
        want = jax.jit(step)(want, x)
    # The second device is the one that is fast over the update; the batch is cut evenly all the same.
    kinds = [replace(device(name, 1.0), overhead=1e-12, bandwidth=pace) for name, pace in (("a", 3e8), ("b", 1e13))]
    cluster = Cluster("c", tuple(kinds), (0, 1), Link(1e9, 2e-5))
    asked = {"fixed": {"[1]": "S(0)"}, "ratios": [0.5, 0.5], "leave_out": False}
    plan = hapsynth.synthesize(step, (given, x), mesh, cluster=cluster, form="fused", **asked)
    assert plan.form == "fused"
    assert plan.program.collectives() == {"reduce": 1, "broadcast": 1}, plan.program.collectives()
    assert plan.layouts["[0][1]"] == "O(1)"
    state, batch = plan.shard(given, x)
    assert [a.shape[0] for a in state[1].data.arrays] == [rows * me]
    state = plan(state, batch)
    plan.save_state(sys.argv[3], state)
    state = plan(plan.restore_state(sys.argv[3]), batch)
    staged = Plan(plan.traced, plan.result, plan.cluster, mesh, step, form="staged")
    state = staged(staged.adopt(state, plan), batch)
    state = staged(state, batch)
    for a, b in zip(staged.unshard(state), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
    assert plan.check(given, x).ok
    print("right OWNER")
"""

ROUNDS = """
    sums = lambda x: jnp.cumsum(jnp.cumsum(x, axis=1), axis=0).astype(jnp.int32)
    x = np.arange(48 * 32, dtype=np.float32).reshape(48, 32) % 7
    for ratios in ([0.75, 0.25], [0.25, 0.75]):
        for form in ("fused", "staged"):
            asked = {"fixed": {"[0]": "S(0)"}, "ratios": ratios, "leave_out": False, "form": form}
            plan = hapsynth.synthesize(sums, (x,), mesh, cluster=thin_cluster((1.0, 1.0), bandwidth=1e6), **asked)
            assert plan.form == form
            assert plan.program.collectives() == {"pairwise_all_to_all": 1}, plan.program.collectives()
            np.testing.assert_array_equal(plan.unshard(plan(plan.shard(x))), sums(x))
            assert plan.check(x).ok
    print("right ROUNDS")
"""

STATE = """
    def step(state, x):
        w, m, key = state
        key, now = jax.random.split(key)
        m = 0.9 * m + x.T @ jnp.tanh(x @ w)
        return (w - 0.01 * m, m, key), (m ** 2).sum() + jax.random.normal(now)

    draw = np.random.default_rng(0)
    w, x = draw.normal(size=(64, 48)).astype(np.float32), draw.normal(size=(96, 64)).astype(np.float32) / 10
    given = w, np.zeros_like(w), jax.random.key(3)
    want = given
    for _ in range(4):
        want, _ = jax.jit(step)(want, x)

    def near(got, want):
        is_key = lambda a: jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        plain = lambda tree: [jax.random.key_data(a) if is_key(a) else a for a in jax.tree.leaves(tree)]
        for a, b in zip(plain(got), plain(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    fixed = {"[0][0]": "S(0)", "[0][1]": "S(0)", "[1]": "S(0)"}
    plan = hapsynth.synthesize(step, (given, x), mesh, cluster=slow_cluster((3, 1)), fixed=fixed, form="fused")
    rows = plan.local_slices("[0][0]").process[0]
    state, batch = plan.shard(given, x)
    assert state[0].data.arrays[0].shape == (rows.stop - rows.start, 48) != (32, 48)
    first = state
    state, _ = plan(state, batch)
    # Consumed, and freed.
    assert first[0].is_deleted() and first[0].data.arrays[0].is_deleted() and first[2].is_deleted()
    # A result is looked at as one array, and how long each shard is has been counted.
    further = plan.shard(given)
    exact, storage, looked = hapsynth.lower._exact_storage, hapsynth.lower.Storage, []
    parts, slices = exact.parts, storage.slices
    exact.parts = lambda x: looked.append(x) or parts(x)
    storage.slices = lambda self, at: looked.append(at) or slices(self, at)
    further, _ = plan(further, batch)
    plan(further, batch)
    exact.parts, storage.slices = parts, slices
    assert not looked, looked
    traces = plan.lowered.traces
    plan.save_state(sys.argv[4], state)
    state = plan.restore_state(sys.argv[4])
    state, _ = plan(state, batch)
    assert plan.lowered.traces == traces == 1
    # The staged form stores the same, and takes over; so does a plan of other sizes.
    staged = Plan(plan.traced, plan.result, plan.cluster, mesh, step, form="staged")
    state, _ = staged(staged.adopt(state, plan), batch)
    other = plan.rebalance([3.0, 1.0])
    assert other.form == "fused" and other.sizes.shares != plan.sizes.shares
    state, _ = other(other.adopt(plan.adopt(state, staged), plan), other.shard(given, x)[1])
    near(other.unshard(state), want)
    assert plan.check(given, x).ok
    if me:
        # As a device does that rounds otherwise than what the plan runs on.
        plan.fn = lambda state, x: step(state, x * 1.001)
    report = plan.check(given, x)
    assert report.ok and not report.yardsticks, report
    if me:
        plan.fn = lambda *_: [].pop()
    try:
        plan.check(given, x)
    except (IndexError, RuntimeError) as error:
        text = str(error)
    assert text == "pop from empty list" if me else "IndexError: pop from empty list [process 1 on " in text, text
    assert plan.drift(plan.shard(given)).equal
    print("right STATE")
"""

ZOO = """
    from zoo import functional, language, solvers, vision

    for name in sys.argv[3:]:
        module = next(m for m in (functional, language, solvers, vision) if hasattr(m, name))
        fn, args = getattr(module, name)()
        speeds = (3.0, 1.0) * len(mesh.local_devices)
        plan = hapsynth.synthesize(fn, args, mesh, cluster=thin_cluster((3.0, 1.0)), leave_out=False, form="fused")
        assert any(len(set(shares)) > 1 for shares in plan.sizes.shares)
        report = plan.check()
        assert report.ok, (name, report)
        print("right", name, len(plan.lowered.compiled_collectives), flush=True)
"""
MODELS = (
    *("gpt_scanned", "experts_einsum", "resnet", "gru", "unet", "diffusion"),
    *("vit", "gpt", "mixer", "convolutional", "greedy_decoding", "experts_scatter", "mlp_accumulated", "hessian"),
    *("jvp", "lineax_lu", "lineax_qr", "lineax_auto", "lineax_cg", "optimistix_newton", "optimistix_fixed_point"),
    *("optimistix_levenberg_marquardt", "optimistix_bfgs", "diffrax_kvaerno3", "diffrax_tsit5"),
)

PLANTED = """
    from hapsynth.jobs import PreflightError
    from hapsynth.lower import Fused
    from hapsynth.lower._collective_order import Order
    from hapsynth.running import form

    planted, asked = sys.argv[3:]
    if planted == "program" and me == 1:
        Fused._order = lambda self: Order(False)
    if asked == "auto":
        # As on GPUs.
        form.is_pinned = lambda platform: True

    case = CASES["invariant in a loop" if planted == "flag" else "combined as independent"]
    plan = planned(case, mesh, asked)
    assert plan.form == "fused"
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert_right(case, plan)
        print("ran", plan.form, [str(w.message) for w in said])
    except PreflightError as error:
        print("refused", error)
"""


def two(code: str, *options: str, **environment: str) -> list[str]:
    return run_two(HEAD + code, lambda address, i: [address, str(i), *options], environment)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("devices", ["1", "2"])
def test_values_where_xla_knows_other_things(devices: str) -> None:
    for said in two(RIGHT, *["all"] * THOROUGH, DEVICES=devices):
        assert said.splitlines()[-1] == "right"


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What each of two processes, which take as long to start as one of these takes, has found right."""
    folders = (str(tmp_path_factory.mktemp(name) / "state") for name in ("owner", "state"))
    return [re.findall(r"^right (\w+)$", said, re.MULTILINE) for said in two(OWNER + ROUNDS + STATE, *folders)]


@pytest.mark.slow
def test_an_owners_state_is_in_its_process_alone(right: list[list[str]]) -> None:
    assert all("OWNER" in each for each in right)


@pytest.mark.slow
def test_an_all_to_all_in_rounds(right: list[list[str]]) -> None:
    assert all("ROUNDS" in each for each in right)


@pytest.mark.slow
def test_state_is_carried_saved_and_moved(right: list[list[str]]) -> None:
    assert all("STATE" in each for each in right)


# A model among two processes is in tests/examples/test_gpt.py too.
@pytest.mark.few(0)
@pytest.mark.slow
def test_models_of_the_zoo() -> None:
    for said in two(ZOO, *MODELS):
        assert re.findall(r"right (\w+) ([1-9]\d*)", said), said
        assert [name for name, _ in re.findall(r"right (\w+) ([1-9]\d*)", said)] == [*MODELS]


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["program", "flag"])
def test_what_differs_is_refused_by_its_collective(planted: str) -> None:
    # By this pass XLA knows how often a loop runs.
    flags = " --xla_disable_hlo_passes=while-loop-trip-count-annotator" if planted == "flag" else ""
    for said in two(PLANTED, planted, "fused", FLAGS_OF_THE_SECOND=flags):
        assert re.search(
            r"refused process 0 on .* has compiled its collective \d as [a-z-]+ .*, and process 1", said
        ), said


@pytest.mark.slow
def test_what_was_not_asked_for_runs_staged_then() -> None:
    for said in two(PLANTED, "program", "auto"):
        assert re.search(
            r"ran staged \[.*in staged form, not fused, as process 0 on .* compiled its collective", said
        ), said
