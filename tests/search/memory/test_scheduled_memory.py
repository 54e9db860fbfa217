"""What the switch form of a program is predicted to hold, against XLA's own account of it: collectives that go as one,
slices that are summed, switches over unlike shares."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from lowering_options import ALONE
from slow_devices import first_devices, thin_cluster
from thoroughness import THOROUGH

import hapsynth
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.instructions.staging.stages import Stage
from hapsynth.lower import Lowered
from hapsynth.plan import Plan
from hapsynth.search.analysis.fusion import FusionPlan
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import padded_bytes
from hapsynth.search.memory.merged_contractions import merge_contractions
from hapsynth.search.memory.profile import held_at_peak, held_by, held_pinned
from hapsynth.search.memory.xla_kernels import XlaKernels
from hapsynth.search.memory.xla_schedule import Library, XlaSchedule

QUICK = 3e-7
"""A latency with which the CNN reduces each gradient by itself, over all devices."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
CLUSTERS = Path(__file__).parents[3] / "examples" / "clusters"


@cache
def compiled_bytes(plan: Plan) -> int:
    used = plan.lower().compile().memory_analysis()
    made = used.output_size_in_bytes - used.alias_size_in_bytes
    return used.argument_size_in_bytes + made + used.temp_size_in_bytes


def costs(plan: Plan, lowering: LoweringOptions = DEFAULT) -> CostModel:
    return CostModel(plan.traced.graph, plan.used, FactorTable(plan.traced.graph), lowering=lowering)


def kernels(plan: Plan) -> XlaKernels:
    graph, sizes = plan.traced.graph, plan.sizes
    return XlaKernels(graph, plan.program, sizes, FusionPlan.of(graph), lambda v, l: padded_bytes(sizes, v, l), DEFAULT)


@cache
def example_plan(name: str, on: str, latency: float | None = None) -> Plan:
    """`latency`: of a message, seconds; None: the cluster's own."""
    cluster = Cluster.load(CLUSTERS / f"{on}.toml")
    if latency is not None:
        network, intra = (link and replace(link, latency=latency) for link in (cluster.network, cluster.intra))
        cluster = replace(cluster, network=network, intra=intra)
    fn, args = importlib.import_module(name).target()
    return hapsynth.synthesize(fn, args, first_devices(8), cluster=cluster)


# Of the CNN, plans that other tests have too. A transformer takes four times as long as the others.
HELD: list[tuple[Any, ...]] = [("mlp", "even8"), ("cnn", "even8", QUICK), ("cnn", "mixed8", QUICK)]
if THOROUGH:
    HELD += [("cnn", "even8"), ("cnn", "mixed8"), ("transformer", "mixed8")]


@pytest.mark.few(2)
@pytest.mark.parametrize("of", HELD, ids=lambda of: "-".join(map(str, of)))
def test_examples_hold_what_is_predicted(of: tuple[Any, ...]) -> None:
    plan = example_plan(*of)
    assert max(plan.memory) == pytest.approx(compiled_bytes(plan), rel=0.1)
    held = held_at_peak(plan.program, plan.sizes, costs(plan))
    assert sum(nbytes for _, nbytes in held) == pytest.approx(max(plan.memory))


def test_collectives_that_go_as_one_end_what_they_wait_for() -> None:
    """A weight's gradient goes with the batch statistics' that the layer below needs: it is made before, and what it is
    made of ends there."""
    plan = example_plan("cnn", "even8", QUICK)
    together = max(held_by(plan.program, plan.sizes, costs(plan)))
    alone = max(held_by(plan.program, plan.sizes, costs(plan, ALONE)))
    assert alone > 1.15 * compiled_bytes(plan) > 1.1 * together


@pytest.mark.parametrize("on", ["even8", "mixed8"])
def test_bundles_are_those_that_are_lowered(on: str) -> None:
    plan = example_plan("cnn", on, QUICK)
    found = kernels(plan)
    joined = {k for k, step in enumerate(found.steps) if step is None}
    collectives = [k for k, step in enumerate(found.steps) if isinstance(step, Convert) and step.is_collective]
    sent_by = Counter(maker if (maker := found.taken[k][0].maker) in joined else k for k in collectives)
    assert max(sent_by.values()) > 1
    text = plan.lower().as_text()
    lowered = sum(text.count(f'"stablehlo.{kind}"') for kind in KINDS)
    assert lowered == len(sent_by)


def test_a_switch_keeps_what_it_takes() -> None:
    """As many switches as are lowered; what comes from around one is in memory, even if it is cheap."""
    plan = example_plan("cnn", "mixed8", QUICK)
    found = kernels(plan)
    assert isinstance(plan.lowered, Lowered)
    switches = [step for step in plan.lowered.steps if isinstance(step, Stage) and step.switch]
    assert len(set(found.switch) - {-1}) == len(switches) > 0
    for k, switch in enumerate(found.switch):
        around = {t for t in found.taken[k] if t.maker >= 0 and found.switch[t.maker] != switch}
        assert around <= set(found.reads(k))


# They have plans that other tests have too.
@pytest.mark.parametrize("of", [("mlp", "mixed8"), *(x for x in HELD if x[1] == "mixed8")], ids=str)
def test_pinned_collectives_come_in_the_programs_order(of: tuple[Any, ...]) -> None:
    """In each order kernels come after what they read; the early one has its collectives no later."""
    made = kernels(example_plan(*of))
    last: list[int] = []
    for options in ({"pinned": True}, {"early": True}):
        schedule = XlaSchedule(made, **options)
        place = {k: n for n, k in enumerate(schedule.order)}
        sent = [place[k] for k in made.sent if k in place]
        assert sent == sorted(sent)
        for k in schedule.order:
            assert all(place[t.maker] < place[k] for t in schedule.needs[k] if t.maker >= 0)
        last.append(sent[-1])
    pinned, early = last
    assert early <= pinned


def test_kernels_of_a_library_take_a_workspace_and_keep_their_results() -> None:
    made = kernels(example_plan("mlp", "mixed8"))
    plain, beside = XlaSchedule(made, early=True), XlaSchedule(made, early=True, library=Library(1 << 40))
    # So much that it is fullest at a contraction.
    assert 1 << 40 < beside.peak() <= plain.peak() + (1 << 40)
    apart = XlaSchedule(made, early=True, library=Library(apart=True))
    assert apart.peak() > plain.peak() == XlaSchedule(made, early=True, library=Library()).peak()


def test_contractions_that_are_computed_in_float32_hold_their_results_so() -> None:
    """And what is made for them, and a copy of what else they take from the first of them to the last."""

    def fn(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh((x @ w) @ v)

    square = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    args = square, square, jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)
    plan = hapsynth.synthesize(fn, args, first_devices(1), cluster=thin_cluster((1.0,)))
    made = kernels(plan)
    wide = Library(in_float32=lambda dtype: dtype == "bfloat16")
    plain, found = (XlaSchedule(made, early=True, library=each) for each in (Library(), wide))
    rows, weight = 2 * 512 * 64, 2 * 64 * 64
    # Held twice: what either gives; beside the second, a copy of its weight.
    assert plain.peak() == 2 * weight + 3 * rows
    assert found.peak() == 2 * weight + rows + 2 * 2 * rows + 2 * weight
    narrow = XlaSchedule(made, early=True, library=Library(in_float32=lambda dtype: dtype == "float16"))
    assert narrow.peak() == plain.peak()

    def twice(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh((jnp.tanh(x @ w) @ v) @ w)

    made = kernels(hapsynth.synthesize(twice, args, first_devices(1), cluster=thin_cluster((1.0,))))
    found = XlaSchedule(made, early=True, library=wide)
    # Between its contractions the copy of the first weight stays, and what `tanh` makes is no narrower.
    assert found.peak() == 2 * weight + rows + 2 * 2 * rows + 2 * 2 * weight


def test_on_gpus_whole_chains_are_part_of_reductions() -> None:
    def fn(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x) * 3.0 - 1.0)

    graph = trace(fn, (jax.ShapeDtypeStruct((64, 64), jnp.float32),)).graph
    inside = [n for n, v in enumerate(graph.values) if v.shape == (64, 64)][1:]
    cpu, gpu = FusionPlan.of(graph), FusionPlan.of(graph, on_gpu=True)
    assert any(cpu.stored[v] for v in inside)
    assert not any(gpu.stored[v] for v in inside)


def pooled(x: jax.Array, *, window: int) -> jax.Array:
    """Its gradient too: of what is normed, cut off and pooled."""

    def loss(x: jax.Array) -> jax.Array:
        y = jnp.maximum((x - x.mean(0)) * 3.0, 0.0)
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, window, window, 1), (1, 2, 2, 1), "VALID")
        return jnp.sum(y * y)

    return jax.grad(loss)(x)


@pytest.mark.parametrize(("window", "made"), [(2, True), (3, False)])
def test_on_gpus_chains_are_part_of_pooling_where_windows_lie_apart(window: int, made: bool) -> None:
    graph = trace(partial(pooled, window=window), (jax.ShapeDtypeStruct((8, 17, 17, 4), jnp.float32),)).graph
    (cut_off,) = (op.results[0] for op in graph.ops if op.name == "max")
    assert {graph.ops[o].name for o, _ in graph.uses[cut_off]} >= {"reduce_window_max", "select_and_scatter_add"}
    assert FusionPlan.of(graph).stored[cut_off]
    assert FusionPlan.of(graph, on_gpu=True).stored[cut_off] is not made


@pytest.mark.parametrize(("window", "held"), [(2, False), (3, True)])
def test_on_gpus_the_gradient_of_pooling_is_part_of_chains_where_windows_lie_apart(window: int, held: bool) -> None:
    graph = trace(partial(pooled, window=window), (jax.ShapeDtypeStruct((8, 17, 17, 4), jnp.float32),)).graph
    (given,) = (op.results[0] for op in graph.ops if op.name == "select_and_scatter_add")
    assert FusionPlan.of(graph).stored[given]
    assert FusionPlan.of(graph, on_gpu=True).stored[given] is held


def test_on_gpus_a_kernel_that_reduces_writes_over_nothing() -> None:
    """What a contraction reads besides: the gradients of a bias and of what it was added to are one kernel."""

    def fn(x: jax.Array, w: jax.Array) -> Any:
        gradient = jnp.tanh(x @ w)
        return gradient.sum(0), gradient @ w

    graph = trace(fn, tuple(jax.ShapeDtypeStruct((64, 64), jnp.float32) for _ in range(2))).graph
    ((made, at),) = ((op.operands[0], op.index) for op in graph.ops if op.name == "tanh")
    assert FusionPlan.of(graph).overwritten[at] == (made,)
    assert FusionPlan.of(graph, on_gpu=True).overwritten[at] == ()


def test_merged_contractions_make_one_array() -> None:
    """Attention reads the key in two orders, the array once more for the second, and query and value in one."""

    def fn(params: list[jax.Array], x: jax.Array) -> Any:
        def loss(params: list[jax.Array]) -> jax.Array:
            query, key, value = (jnp.einsum("btd,dhk->bthk", x, w) for w in params)
            weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", query, key))
            return (jnp.einsum("bhts,bshk->bthk", weights, value) ** 2).sum()

        return jax.grad(loss)(params)

    fixed = {**{f"[0][{n}]": "R" for n in range(3)}, "[1]": "S(0)"}
    args = [jax.ShapeDtypeStruct((32, 4, 16), jnp.float32)] * 3, jax.ShapeDtypeStruct((8, 16, 32), jnp.float32)
    plan = hapsynth.synthesize(fn, args, thin_cluster((1.0, 1.0)), fixed=fixed)
    graph, sizes = plan.traced.graph, plan.sizes
    nbytes = lambda v, l: padded_bytes(sizes, v, l)
    options = {"switches": False, "near": False}
    found = XlaKernels(graph, plan.program, sizes, FusionPlan.of(graph, on_gpu=True), nbytes, DEFAULT, **options)
    before = len(found.steps)
    merge_contractions(found)
    arrays = [(k, found.nbytes(found.made[k][0])) for k in range(before, len(found.steps))]
    one = 4 * 16 * 4 * 16 * 4
    (forward,) = (k for k, n in arrays if n == 3 * one and len(found.taken[k]) == 4)
    copies = [k for k, n in arrays if n == one and found.taken[k] == found.made[forward]]
    assert len(copies) == 4
    # Of the gradients one too: their contractions read the input.
    assert len([k for k, _ in arrays if len(found.taken[k]) == 4]) == 2


def test_contractions_that_need_one_another_are_not_merged() -> None:
    def fn(x: jax.Array, w: jax.Array) -> Any:
        return jnp.tanh(x @ w) @ w

    args = tuple(jax.ShapeDtypeStruct((64, 64), jnp.float32) for _ in range(2))
    plan = hapsynth.synthesize(fn, args, thin_cluster((1.0,)))
    nbytes = lambda v, l: padded_bytes(plan.sizes, v, l)
    fusing = FusionPlan.of(plan.traced.graph, on_gpu=True)
    found = XlaKernels(plan.traced.graph, plan.program, plan.sizes, fusing, nbytes, DEFAULT, switches=False)
    before = len(found.steps)
    merge_contractions(found)
    assert len(found.steps) == before


def test_contractions_of_triton_find_what_took_more_in_memory() -> None:
    """A norm's result is made of what it is of and a bias besides, and read by two contractions."""

    def fn(x: jax.Array, bias: jax.Array, a: jax.Array, b: jax.Array) -> Any:
        made = jnp.tanh(x) + bias
        return made @ a, made @ b

    for width, stored in ((512, True), (128, False)):
        shapes = [(64, width), (width,), (width, 64), (width, 64)]
        graph = trace(fn, tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).graph
        (shifted,) = (op.results[0] for op in graph.ops if op.name == "add")
        fusing = FusionPlan.of(graph, on_gpu=True, triton=True)
        assert fusing.stored[shifted] is stored
        assert not fusing.again[shifted]


def test_parts_of_what_a_bundle_gives_are_cut_out_on_gpus() -> None:
    """By kernels of their own; on CPUs elementwise kernels that read a part make it themselves."""
    plan = example_plan("mlp", "mixed8")
    graph, nbytes = plan.traced.graph, lambda v, l: padded_bytes(plan.sizes, v, l)
    fusing = FusionPlan.of(graph, on_gpu=True)

    def are_cut_out(cuts_parts: bool) -> set[bool]:
        options = {"switches": False, "near": False, "cuts_parts": cuts_parts}
        found = XlaKernels(graph, plan.program, plan.sizes, fusing, nbytes, DEFAULT, **options)
        arrays = {t for k in found.sent for t in found.made[k] if t.value < 0}
        needs = XlaSchedule(found).needs
        return {isinstance(found.steps[k], Convert) for k, needed in needs.items() if arrays.intersection(needed)}

    assert are_cut_out(True) == {True}
    assert False in are_cut_out(False)


def test_what_a_bundle_sends_and_gives_is_as_large_on_all_devices() -> None:
    """Blocks of the largest shard, of which a gather gives one of each device."""
    args = jax.ShapeDtypeStruct((640,), jnp.float32), jax.ShapeDtypeStruct((320,), jnp.float32)
    cluster, fixed = thin_cluster((3.0, 1.0)), {"[0]": "S(0)", "[1]": "S(0)"}
    fn = lambda x, y: (jnp.sort(x), jnp.sort(y))
    plan = hapsynth.synthesize(fn, args, first_devices(2), cluster=cluster, fixed=fixed, ratios=(0.75, 0.25))
    graph, sizes = plan.traced.graph, plan.sizes
    largest = sum(max(sizes.lengths(v, 0, (0,))) for v in graph.inputs)
    assert largest > 960 / 2
    for stored in (lambda v, l: padded_bytes(sizes, v, l), lambda v, l: padded_bytes(sizes, v, l) / 3):
        found = XlaKernels(graph, plan.program, sizes, FusionPlan.of(graph), stored, DEFAULT)
        arrays = [found.nbytes(t) for made in found.made for t in made if t.value < 0]
        assert arrays == [4 * largest, 2 * 4 * largest]


def convolved(w: jax.Array, x: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        y = jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        y = lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(y * y)

    gradient = jax.grad(loss)(w)
    return w - 0.1 * gradient


def test_convolutions_copy_what_is_given_in_another_form() -> None:
    """The filter, once for both directions; images where channels come first; nothing on CPUs."""
    args = jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8, 8, 8), jnp.float32)
    cluster = thin_cluster((3.0, 1.0))
    fixed = {"[0]": "R", "[1]": "S(0)"}
    plan = hapsynth.synthesize(convolved, args, first_devices(2), cluster=cluster, leave_out=False, fixed=fixed)
    graph, sizes = plan.traced.graph, plan.sizes
    nbytes = lambda v, l: padded_bytes(sizes, v, l)
    fusing = FusionPlan.of(graph, on_gpu=True)

    def copied(positions_last: Any) -> list[str]:
        options = {"switches": False, "near": False, "positions_last": positions_last}
        found = XlaKernels(graph, plan.program, sizes, fusing, nbytes, DEFAULT, **options)
        copies = [found.taken[k][0] for k, step in enumerate(found.steps) if step is None]
        return sorted("x" if graph.values[t.value].shape[0] == 16 else "w" for t in copies if t.maker < 0)

    assert copied(None) == []
    assert copied(lambda dtype: False) == ["w"]
    assert copied(lambda dtype: True) == ["w", "x"]


def test_a_result_waits_for_the_next_collective_but_one() -> None:
    """The token that is made of it is taken there."""
    made = kernels(example_plan("cnn", "mixed8", QUICK))
    schedule = XlaSchedule(made, pinned=True)
    sent = [k for k in made.sent if k in schedule.needs]
    for before, after in zip(sent, sent[2:]):
        assert {*made.made[before]} <= {*schedule.needs[after]}


def test_pinned_programs_of_exact_shards_hold_each_devices_own() -> None:
    plan = example_plan("mlp", "mixed8")
    model = costs(plan)
    model.memory_budget = replace(model.memory_budget, exact=False)
    padded = [held_pinned(plan.program, plan.sizes, model, d, Library()) for d in range(plan.used.n)]
    assert len(set(padded)) == 1
    model.memory_budget = replace(model.memory_budget, exact=True)
    exact = [held_pinned(plan.program, plan.sizes, model, d, Library()) for d in range(plan.used.n)]
    assert max(exact) <= padded[0]
    # So much that it is fullest at a contraction.
    workspace = held_pinned(plan.program, plan.sizes, model, 0, Library(1 << 30))
    assert exact[0] < workspace <= exact[0] + 1.01 * (1 << 30)
