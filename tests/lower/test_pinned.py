"""Collectives of programs for GPUs: in the plan's order, flat, between barriers; the values stay the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowering_options import ALONE
from slow_devices import first_devices, thin_cluster
from storages import storages

import hapsynth
from hapsynth import _jax
from hapsynth.graph.ir import Graph
from hapsynth.hlo.latency_profile import latency_profile
from hapsynth.hlo.text import HloError
from hapsynth.instructions.layout import R, S
from hapsynth.instructions.program.program import Convert, Instruction, Program, reads
from hapsynth.lower import Lowered, _pinned, compile_with, isolated_runs
from hapsynth.lower._pinned import OPTIONS, is_pinned
from hapsynth.running import drift, transfer
from hapsynth.search.cost.collective_price import NetworkPrice

COLLECTIVES = ("psum", "pmax", "pmin", "all_gather", "reduce_scatter", "all_to_all", "ppermute")
UNEVEN = (3.0, 3.0, 1.0, 1.0)


def step(weights: Any, x: jax.Array) -> Any:
    """Two layers, and a norm that all gradients go into."""

    def loss(weights: Any) -> jax.Array:
        hidden = jnp.tanh(x @ weights[0])
        return jnp.mean((hidden @ weights[1]) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads))
    return [w - 0.1 * g / norm for w, g in zip(weights, grads)], value


def biased(weights: Any, x: jax.Array) -> Any:
    """An elementwise function of an argument is gathered; a contraction reads what is computed before."""
    hidden = x @ weights[0]
    return hidden * jnp.exp(weights[1]), hidden.T @ hidden


def scaled(weights: Any, x: jax.Array) -> jax.Array:
    """As `biased`, but elementwise ops alone read what is computed before."""
    return x @ weights[0] * jnp.exp(weights[1])


def scanned(x: jax.Array, v: jax.Array) -> Any:
    halved = lax.scan(lambda s, _: (jnp.sin(s) - jnp.sum(jnp.sin(s)) / 64, None), x, None, length=5)[0]
    return halved, jnp.sum(jnp.sin(v))


def looped(x: jax.Array, v: jax.Array) -> Any:
    halved = lax.while_loop(lambda s: jnp.sum(s * s) > 1.0, lambda s: jnp.sin(s) * 0.5, x)
    return halved, jnp.min(jnp.sin(v))


def branched(x: jax.Array, v: jax.Array) -> Any:
    return lax.cond(v[0] > 0, lambda: jnp.sum(jnp.sin(x)), lambda: jnp.sum(x * x)), jnp.sum(jnp.sin(v))


def arguments(fn: Callable[..., Any]) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    made = lambda *shape: rng.normal(size=shape).astype(np.float32)
    if fn is step:
        return [made(16, 24), made(24, 8)], made(64, 16)
    if fn in (biased, scaled):
        return [made(16, 24), made(24)], made(64, 16)
    return made(64), made(64)


def lowered_for_gpus(plan: hapsynth.Plan, platform: str = "gpu") -> Lowered:
    """As for GPUs, on this machine's CPUs."""
    assert plan.mesh is not None
    return Lowered(plan.traced.graph, plan.program, plan.sizes, plan.mesh, donate=False, platform=platform)


@pytest.fixture(params=[True, False], ids=["barriers", "data"])
def by_barriers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether XLA is taken to schedule around barriers, whichever JAX this is."""
    monkeypatch.setattr(_pinned, "gpus_schedule_around_barriers", lambda: request.param)
    return request.param


@pytest.mark.few(10)
@pytest.mark.usefixtures("by_barriers")
@pytest.mark.parametrize("speeds", [UNEVEN, (1.0,) * 4], ids=["uneven", "even"])
@pytest.mark.parametrize("fn", [step, scanned, looped, branched])
def test_the_values_stay_the_same(fn: Callable[..., Any], speeds: tuple[float, ...]) -> None:
    args = arguments(fn)
    plan = hapsynth.synthesize(fn, args, first_devices(4), cluster=thin_cluster(speeds), leave_out=False)
    results: list[list[np.ndarray]] = []
    for platform in ("cpu", "gpu"):
        lowered = lowered_for_gpus(plan, platform)
        stored = plan.arguments.place(lowered, plan.arguments.flatten(args, {}))
        results.append([np.asarray(x) for x in lowered(stored)])
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def collective_chain(jaxpr: Any, after: Any = None) -> list[tuple[str, bool, bool]]:
    """(name, sends one dimension from behind a barrier, waits there for the collective before) of the collectives of a
    jaxpr itself, in order."""
    found: list[tuple[str, bool, bool]] = []
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        if not any(eqn.primitive.name.startswith(name) for name in COLLECTIVES):
            continue
        (sent,), (made,) = eqn.invars, eqn.outvars
        before = maker.get(sent)
        barrier = before is not None and before.primitive is _jax.barrier_primitive()
        found.append((eqn.primitive.name, barrier and len(sent.aval.shape) <= 1, barrier and after in before.invars))
        closing = [e for e in jaxpr.eqns if e.primitive is _jax.barrier_primitive() and made in e.invars]
        after = closing[0].outvars[0] if closing else None
    return found


def depend(jaxpr: Any) -> list[bool]:
    """Whether what a collective of a jaxpr sends is made of what the one before it gave: barriers make nothing."""
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    found: list[bool] = []
    before: Any = None
    for eqn in jaxpr.eqns:
        if not any(eqn.primitive.name.startswith(name) for name in COLLECTIVES):
            continue
        seen, waiting = set[int](), [*eqn.invars]
        while waiting:
            operand = waiting.pop()
            made = None if hasattr(operand, "val") else maker.get(operand)
            if made is not None and id(made) not in seen:
                seen.add(id(made))
                barrier = made.primitive is _jax.barrier_primitive()
                waiting += [made.invars[made.outvars.index(operand)]] if barrier else made.invars
        found.append(id(before) in seen)
        before = eqn
    return found


def test_each_waits_for_the_one_before(by_barriers: bool) -> None:
    plan = hapsynth.synthesize(step, arguments(step), first_devices(4), cluster=thin_cluster(UNEVEN), leave_out=False)
    bodies = []
    for platform in ("gpu", "cpu"):
        lowered = lowered_for_gpus(plan, platform)
        structs = [s.struct() for s in (*lowered.inputs, *lowered.constants)]
        closed = jax.make_jaxpr(lowered.on_mesh)(*structs)
        (mapped,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map")
        bodies.append(collective_chain(_jax.open_jaxpr(mapped.params["jaxpr"])[0]))
    pinned, free = bodies
    assert len(pinned) > 2
    assert all(flat for _, flat, _ in pinned)
    assert [waits for _, _, waits in pinned] == [False] + [by_barriers] * (len(pinned) - 1)
    assert not any(waits for _, _, waits in free)


def test_data_orders_what_nothing_else_does(by_barriers: bool) -> None:
    apart = lambda x, v: (jnp.sum(jnp.sin(x)), jnp.min(jnp.sin(v)))
    args = arguments(apart)
    plan = hapsynth.synthesize(apart, args, first_devices(4), cluster=thin_cluster(UNEVEN), leave_out=False)
    lowered = lowered_for_gpus(plan)
    closed = jax.make_jaxpr(lowered.on_mesh)(*(s.struct() for s in (*lowered.inputs, *lowered.constants)))
    (mapped,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map")
    assert depend(_jax.open_jaxpr(mapped.params["jaxpr"])[0]) == [False, not by_barriers]


@pytest.mark.parametrize("scheduled", [True, False])
def test_data_orders_what_each_process_schedules_for_itself(scheduled: bool) -> None:
    """With overlap a process takes the scheduler that its threads and its memory allow."""
    apart = lambda x, v: (jnp.sum(jnp.sin(x)), jnp.min(jnp.sin(v)))
    args = arguments(apart)
    plan = hapsynth.synthesize(apart, args, first_devices(4), cluster=thin_cluster(UNEVEN), leave_out=False)
    assert plan.mesh is not None
    lowered = Lowered(plan.traced.graph, plan.program, plan.sizes, plan.mesh, donate=False, scheduled=scheduled)
    lowered.gloo = hapsynth.LoweringOptions()
    closed = jax.make_jaxpr(lowered.on_mesh)(*(s.struct() for s in (*lowered.inputs, *lowered.constants)))
    (mapped,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map")
    ordered = depend(_jax.open_jaxpr(mapped.params["jaxpr"])[0])
    assert len(ordered) > 1
    assert ordered == [False] + [scheduled] * (len(ordered) - 1)


@pytest.mark.parametrize(("name", "sent"), [("exchanger", 2), ("_comparing", 4), ("_copying", 2)])
def test_programs_beside_a_plan_keep_their_order_too(
    name: str, sent: int, by_barriers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_pinned, "is_pinned", lambda platform: True)
    monkeypatch.setattr(_pinned, "OPTIONS", {"no_option": True})
    source = storages((4, 2), (S(0), R), {0: ((0,), (9, 1, 1, 1))}, {}, "float32", (12, 5))[0]
    x = jax.ShapeDtypeStruct(source.struct().shape, np.complex64 if name == "_copying" else np.float32)
    made: dict[str, Any] = {
        "exchanger": (transfer.exchanger, (transfer.Change(0, ("a",), (9, 1, 1, 1), (5, 3, 3, 1)),), False),
        "_comparing": (drift._comparing, ("b",), ()),
        "_copying": (drift._copying, ("b",), False),
    }
    make, *options = made[name]
    # Not what is kept of plans that run here.
    fn = make.__wrapped__(source.mesh, source.spec, *options)
    jaxpr = fn.trace(x).jaxpr.jaxpr
    while not (mapped := [e for e in jaxpr.eqns if e.primitive.name == "shard_map"]):
        jaxpr = _jax.open_jaxpr(jaxpr.eqns[0].params["jaxpr"])[0]
    body = _jax.open_jaxpr(mapped[0].params["jaxpr"])[0]
    chain = collective_chain(body)
    assert [flat for _, flat, _ in chain] == [True] * sent
    waits = [waits for _, _, waits in chain] if by_barriers else depend(body)
    assert waits == [False] + [True] * (sent - 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_option"):
        fn.lower(x).compile()


def test_a_device_alone_sends_nothing_to_wait_for() -> None:
    """What `Monitor` times: it is traced on no mesh."""
    asked: dict[str, Any] = {"cluster": thin_cluster((3.0, 1.0)), "leave_out": False, "fixed": {"[1]": "S(0)"}}
    plan = hapsynth.synthesize(scaled, arguments(scaled), first_devices(2), **asked)
    assert plan.program.collectives()
    assert plan.mesh is not None
    graph, program, sizes = plan.traced.graph, plan.program, plan.sizes
    for alone in isolated_runs(graph, program, sizes, plan.mesh, platform="gpu"):
        made = jax.block_until_ready(alone.run(*alone.operands()))
        assert [x.dtype for x in made] == [s.dtype for s in plan.lowered.outputs if s is not None]


def ancestors(jaxpr: Any, eqn: Any) -> set[str]:
    """Primitives of what an equation of a jaxpr waits for: at a barrier for all that it takes."""
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    seen, waiting = dict[int, Any](), [eqn]
    while waiting:
        for operand in waiting.pop().invars:
            made = None if hasattr(operand, "val") else maker.get(operand)
            if made is not None and id(made) not in seen:
                seen[id(made)] = made
                waiting.append(made)
    return {e.primitive.name for e in seen.values()}


def just_in_time(graph: Graph, program: Program) -> Program:
    """Each gather right before the first that needs what it gives."""
    found: list[Instruction] = []
    collectives = [i for i in program.instructions if isinstance(i, Convert) and i.is_collective]
    waiting = {(i.value, i.target): i for i in collectives if i.collective.joins and not i.collective.splits}
    for i in program.instructions:
        found += [made for p in reads(graph, i) if (made := waiting.pop(p, None)) is not None]
        if not (isinstance(i, Convert) and (i.value, i.target) in waiting) and i not in found:
            found.append(i)
    return replace(program, instructions=tuple(found))


@pytest.mark.usefixtures("by_barriers")
@pytest.mark.parametrize(("fn", "stays"), [(step, True), (biased, True), (scaled, False)])
def test_what_is_computed_before_a_gather_stays_before_it(fn: Callable[..., Any], stays: bool) -> None:
    """In a schedule's order, as XLA hides the last transfers behind whatever it finds; elsewhere it need not, nor does
    a contraction that may be one kernel with its readers."""
    args = arguments(fn)
    fixed = {"[0][0]": "S(0)", "[0][1]": "S(0)", "[1]": "S(0)"}
    cluster = thin_cluster(UNEVEN)
    plan = hapsynth.synthesize(fn, args, first_devices(4), cluster=cluster, leave_out=False, fixed=fixed)
    graph, mesh = plan.traced.graph, plan.mesh
    assert mesh is not None
    program = just_in_time(graph, plan.program)
    waits: dict[bool, list[bool]] = {}
    results: list[list[np.ndarray]] = []
    for scheduled in (True, False):
        lowered = Lowered(
            graph, program, plan.sizes, mesh, donate=False, platform="gpu", options=ALONE, scheduled=scheduled
        )
        closed = jax.make_jaxpr(lowered.on_mesh)(*(s.struct() for s in (*lowered.inputs, *lowered.constants)))
        (mapped,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map")
        body = _jax.open_jaxpr(mapped.params["jaxpr"])[0]
        gathers = [e for e in body.eqns if e.primitive.name.startswith("all_gather")][:2]
        computing = {"dot_general", "cond"}
        waits[scheduled] = [not computing.isdisjoint(ancestors(body, e)) for e in gathers]
        stored = plan.arguments.place(lowered, plan.arguments.flatten(args, {}))
        results.append([np.asarray(x) for x in lowered(stored)])
    assert waits == {True: [False, stays], False: [False, False]}
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("platform", "least", "ratios", "apart"),
    [
        ("gpu", 1 << 8, (3, 3, 1, 1), 2),
        ("gpu", 1 << 8, (2, 2, 2, 2), 0),
        ("gpu", 1 << 20, (3, 3, 1, 1), 0),
        ("cpu", 1 << 8, (3, 3, 1, 1), 0),
    ],
)
def test_large_parts_of_a_bundle_are_cut_out_once(
    platform: str, least: int, ratios: tuple[int, ...], apart: int
) -> None:
    """Behind a barrier each, on GPUs and of unlike blocks, which XLA would join for every reader."""
    args = arguments(step)
    fixed = {"[0][0]": "S(0)", "[0][1]": "S(0)", "[1]": "S(0)"}
    cluster = thin_cluster(UNEVEN)
    shares = tuple(ratio / 8 for ratio in ratios)
    plan = hapsynth.synthesize(step, args, first_devices(4), cluster=cluster, fixed=fixed, ratios=shares)
    graph, mesh = plan.traced.graph, plan.mesh
    assert mesh is not None
    gathered = {graph.inputs[0], graph.inputs[1]}
    instructions = tuple(
        i._replace(bundle=1) if isinstance(i, Convert) and i.value in gathered and i.collective.joins else i
        for i in plan.program.instructions
    )
    assert sum(isinstance(i, Convert) and i.bundle == 1 for i in instructions) == 2
    lowered = Lowered(
        graph,
        replace(plan.program, instructions=instructions),
        plan.sizes,
        mesh,
        donate=False,
        platform=platform,
        options=hapsynth.LoweringOptions(bundled_bytes=least),
        scheduled=True,
    )
    closed = jax.make_jaxpr(lowered.on_mesh)(*(s.struct() for s in (*lowered.inputs, *lowered.constants)))
    (mapped,) = (e for e in closed.jaxpr.eqns if e.primitive.name == "shard_map")
    body = _jax.open_jaxpr(mapped.params["jaxpr"])[0]
    shapes = [graph.values[v].shape for v in sorted(gathered)]
    alone = [
        e.outvars[0].aval.shape for e in body.eqns if e.primitive is _jax.barrier_primitive() and len(e.invars) == 1
    ]
    assert len([shape for shape in alone if shape in shapes]) == apart


def test_where_collectives_are_pinned() -> None:
    assert [is_pinned(p) for p in ("cpu", "tpu", "gpu", "cuda", "rocm")] == [False, False, True, True, True]
    plan = hapsynth.synthesize(step, arguments(step), first_devices(4), cluster=thin_cluster(UNEVEN), leave_out=False)
    assert OPTIONS.items() <= lowered_for_gpus(plan).communicating_options.items()
    assert not OPTIONS.keys() & lowered_for_gpus(plan, "cpu").communicating_options.keys()


class Scheduled:
    """A lowered program that says by which options it is compiled."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def compile(self, compiler_options: Any = None) -> Any:
        self.asked.append(compiler_options)
        return self

    def as_text(self) -> str:
        return "its text"


def test_xla_is_told_what_takes_how_long() -> None:
    def unknown(text: str) -> bytes:
        raise HloError(text)

    one: Any
    for latencies, again in ((str.encode, [b"its text"]), (lambda _: b"", []), (unknown, []), (None, [])):
        one = Scheduled()
        assert compile_with(one, latencies, {"an_option": True}) is one
        options = [{"an_option": True}, *({"an_option": True, "fdo_profile": text} for text in again)]
        assert one.asked == options


def test_latencies_are_the_plans_own() -> None:
    """Those of this process's device, wherever processes with GPUs run one program each."""
    plan = hapsynth.synthesize(step, arguments(step), first_devices(4), cluster=thin_cluster(UNEVEN), leave_out=False)
    assert plan.mesh is not None
    assert plan.latencies is None
    device = lambda process: type("Device", (), {"platform": "gpu", "process_index": process})()
    mesh: Any = type("Mesh", (), {"devices": np.array([*map(device, (1, 1, 0, 2))]), "is_multi_process": True})()
    plan.mesh = mesh
    with_gpus = plan.latencies
    assert with_gpus is not None
    fast, slow = plan.used.devices[0], plan.used.devices[2]
    text = "HloModule f\n\nENTRY %main (z: f32[8]) -> f32[8] {\n  %z = f32[8]{0} parameter(0)\n"
    text += "  %n = f32[8]{0} negate(%z)\n  ROOT %a = f32[8]{0} all-gather(%n), replica_groups={{0,1,2,3}}\n}\n"
    price = NetworkPrice(plan.used, plan.program.axes)
    assert with_gpus(text) == latency_profile(text, slow, price) != latency_profile(text, fast, price)
