"""The baselines are what people run: the same collectives and bytes as in the compiled HLO of `by_hand`, and values."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import by_hand
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_models import example
from jax.sharding import AxisType, Mesh
from lowering_options import ALONE, SWITCHED_ALONE, lowered_by

from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import Traced, trace
from hapsynth.instructions.layout import Placement
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Convert
from hapsynth.plan import Plan
from hapsynth.running.check import relative_error
from hapsynth.search.planning.baselines import Baseline, Baselines
from hapsynth.search.planning.task import PlanningOptions, Task

N = 8
CLUSTERS = Path(__file__).parents[3] / "examples" / "clusters"
EXAMPLES = ("mlp", "transformer", "cnn")
NAMES = tuple(by_hand.STEPS)
ZERO = ("zero1", "zero2", "zero3", "zero1_speed", "zero2_speed", "zero3_speed")
FORMS = tuple(name for name in NAMES if name != "data_parallel_speed")
# Large enough that tensor parallelism cuts what it cuts at full size.
SMALL: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 512, "features": 32, "hidden": (64, 64), "classes": 16},
    "transformer": {"batch": 64, "seq": 32, "vocab": 1024, "layers": 1, "width": 32, "heads": 8, "ff": 64},
    "cnn": {"batch": 16, "size": 16, "channels": (8, 16, 32)},
}
# The CPU backend removes optimization barriers before it looks for common subexpressions, and so would gather a
# parameter once where jax.checkpoint asks for it again. Without that pass what was written is what is compiled.
KEEP_BARRIERS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


class Traffic(NamedTuple):
    """What collectives of one kind bring: bytes of their results per device, and how many tensors."""

    bytes: int
    tensors: int


class OnDemand(Mapping[str, Baseline]):
    """The baselines of a task, each planned when it is first asked for."""

    def __init__(self, task: Task) -> None:
        self._of, self._known = Baselines(task), dict[str, Baseline]()

    def __getitem__(self, name: str) -> Baseline:
        if name not in self._known:
            self._known |= self._of.all([name])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._of.names)

    def __len__(self) -> int:
        return len(self._of.names)


@dataclass(frozen=True, eq=False)
class Case:
    """An example at one size with its baselines."""

    module: ModuleType
    config: Any
    fn: Any
    args: tuple[Any, Any]
    traced: Traced
    task: Task
    baselines: Mapping[str, Baseline]


@cache
def cluster(name: str) -> Cluster:
    return Cluster.load(CLUSTERS / f"{name}.toml")


def quick(cluster: Cluster) -> Cluster:
    """With latencies as small beside the tensors as they are at full size: rules decide what is sent, not messages."""
    network, intra = (link and replace(link, latency=link.latency / 400) for link in (cluster.network, cluster.intra))
    assert network
    return replace(cluster, network=network, intra=intra)


@cache
def case(name: str, on: str = "even8", *, full: bool = False) -> Case:
    module = example(name)
    config = module.Config(**({} if full else SMALL[name]))
    fn, args = module.target_for(config)
    traced = trace(fn, args)
    task = Task(traced.graph, cluster(on) if full else quick(cluster(on)), PlanningOptions(lowering=ALONE))
    return Case(module, config, fn, args, traced, task, OnDemand(task))


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), (by_hand.AXIS,), axis_types=(AxisType.Auto,))


def totals(found: Iterator[tuple[str, int]]) -> dict[str, Traffic]:
    nbytes: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    for kind, size in found:
        nbytes[kind] += size
        tensors[kind] += 1
    return {kind: Traffic(nbytes[kind], tensors[kind]) for kind in nbytes}


def in_hlo(text: str) -> dict[str, Traffic]:
    """The traffic of a compiled module. XLA combines collectives: one may have many tensors."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"

    def found() -> Iterator[tuple[str, int]]:
        for shapes, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
                bits = 8 if dtype == "pred" else int(dtype.lstrip("bfsu"))
                yield kind, prod(int(d) for d in dims.split(",") if d) * bits // 8

    return totals(found())


def in_program(c: Case, baseline: Baseline, *, repeated: bool = False) -> dict[str, Traffic]:
    """The traffic of a program; with `repeated` only of collectives that XLA's common-subexpression elimination
    takes for others: the same step on the same value, or on results of equal ops."""
    graph = c.traced.graph
    makers = {v: op for op in graph.ops for v in op.results}

    def found() -> Iterator[tuple[str, int]]:
        seen: set[Any] = set()
        for i in baseline.program.instructions:
            if not isinstance(i, Convert) or not i.is_collective:
                continue
            value, op = graph.values[i.value], makers.get(i.value)
            made = (op.name, op.operands, str(op.params)) if op else i.value
            key = (made, i.source, i.target)
            known = key in seen
            seen.add(key)
            if repeated and not known:
                continue
            # Uneven shards are padded on the wire: what every device receives is that many equal shards.
            shape = list(baseline.sizes.padded_shape(i.value, i.source if i.step == "all_gather" else i.target))
            if i.step == "all_gather":
                shape[i.source[0].dim] *= N
            yield str(i.step).replace("_", "-"), prod(shape) * value.dtype.itemsize

    return totals(found())


def without(traffic: Mapping[str, Traffic], less: Mapping[str, Traffic]) -> dict[str, Traffic]:
    none = Traffic(0, 0)
    return {k: Traffic(*(a - b for a, b in zip(t, less.get(k, none)))) for k, t in traffic.items()}


def as_plan(c: Case, baseline: Baseline) -> Plan:
    plan = Plan(c.traced, baseline.result([baseline.memory_bytes] * N), cluster("even8"), mesh(), c.fn)
    return lowered_by(plan, SWITCHED_ALONE)


def arguments(c: Case) -> tuple[Any, Any]:
    """Parameters about as large as at the start of training, optimizer state zero, inputs normal, labels any."""
    rng = np.random.default_rng(0)
    labels = c.config.vocab if "tokens" in c.args[1] else c.config.classes

    def fill(path: Any, like: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "opt" in name:
            return np.zeros(like.shape, like.dtype)
        if like.dtype == np.int32:
            return rng.integers(0, labels, like.shape, np.int32)
        scale = 1.0 if name.startswith("[1]") else 0.3
        return rng.normal("scale" in name or "var" in name, scale, like.shape).astype(like.dtype)

    return jax.tree_util.tree_map_with_path(fill, c.args)


def assert_same_step(got: Any, want: Any) -> None:
    flat, tree = jax.tree_util.tree_flatten_with_path(want)
    assert jax.tree.structure(got) == tree
    for (path, a), b in zip(flat, jax.tree.leaves(got), strict=True):
        error = relative_error(np.asarray(b), np.asarray(a))
        assert error <= 1e-4, (jax.tree_util.keystr(path), error)


# Traffic, at full size


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("of", EXAMPLES)
def test_collectives_and_bytes_are_those_of_the_same_thing_by_hand(of: str, name: str) -> None:
    c = case(of, full=True)
    ours = in_program(c, c.baselines[name])
    if name == "data_parallel_speed":
        assert ours == in_program(c, c.baselines["data_parallel"])
        return
    step, pack, _ = by_hand.STEPS[name](c.module, c.config, mesh())
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), c.args[0])
    theirs = in_hlo(step.lower(pack(state), c.args[1]).compile(compiler_options=KEEP_BARRIERS).as_text())
    if (of, name) == ("cnn", "zero3"):
        # Each batch norm sums its input twice, for x.mean and for the mean in x.var. XLA makes one of the two inside
        # shard_map; in a jit that it partitions itself (data_parallel) it doesn't.
        norms = Traffic(4 * sum(c.config.channels), len(c.config.channels))
        assert in_program(c, c.baselines[name], repeated=True)["all-reduce"] == norms == Traffic(896, 3)
        ours = without(ours, {"all-reduce": norms})
    assert ours == theirs


def test_zero3_gathers_what_the_backward_pass_needs_again() -> None:
    """Weights that make an input's gradient are gathered twice, the first layer's and every bias once."""
    for of, twice in (("mlp", 2), ("transformer", 6 * 2 + 1), ("cnn", 3)):
        c = case(of, full=True)
        gathers = in_program(c, c.baselines["zero3"])["all-gather"]
        assert gathers.tensors == len(jax.tree.leaves(c.args[0]["params"])) + twice


def test_tensor_parallelism_is_megatrons() -> None:
    """Two all-reduces of activations per layer and direction, one for the head's input, three numbers per token."""
    c = case("transformer", full=True)
    tokens = 4 * c.config.batch * c.config.seq
    activations = (4 * c.config.layers + 1) * tokens * c.config.width
    norm = 4
    expected = Traffic(activations + 3 * tokens + norm, 4 * c.config.layers + 1 + 3 + 1)
    assert in_program(c, c.baselines["tensor_parallel"]) == {"all-reduce": expected}


# Values, at small size


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("of", EXAMPLES)
def test_by_hand_and_baseline_compute_the_step(of: str, name: str) -> None:
    """Both are the plain step; the baseline's compiled program has its own traffic, and that by hand."""
    c = case(of)
    state, batch = arguments(c)
    want = jax.tree.map(np.asarray, plain_step(of)(state, batch))
    first_moments = [np.square(m, dtype=np.float64).sum() for m in jax.tree.leaves(want[0]["opt"][1][0].mu)]
    assert np.sqrt(sum(first_moments)) == pytest.approx(0.1, rel=1e-4), "the gradient is clipped to norm 1"

    step, pack, unpack = by_hand.STEPS[name](c.module, c.config, mesh())
    run = step.lower(pack(state), batch).compile(compiler_options=KEEP_BARRIERS)
    theirs = in_hlo(run.as_text())
    placed = jax.tree.map(jax.device_put, (pack(state), batch), run.input_shardings[0])
    new, loss = run(*placed)
    assert_same_step((unpack(new), loss), want)

    plan = as_plan(c, c.baselines[name])
    lowered = plan.lowered
    run = plan.lower().compile()
    leaves = jax.tree.leaves((state, batch))
    stored = [s.put(x, copy=True) for s, x in zip(lowered.inputs, leaves, strict=True)]
    made = run(*stored, *lowered.placed_constants)
    got = [s.fetch(x) for s, x in zip(lowered.outputs, made, strict=True) if s is not None]
    assert_same_step(jax.tree.unflatten(jax.tree.structure(want), got), want)
    # On CPU XLA makes one collective of two equal ones: the batch norms' sums, and ZeRO-3's second gathers.
    repeated = in_program(c, c.baselines[name], repeated=True)
    assert in_hlo(run.as_text()) == without(in_program(c, c.baselines[name]), repeated)
    assert {k for k in repeated if repeated[k].tensors} <= {"all-gather", "all-reduce"}
    assert "all-gather" not in repeated or name == "zero3"
    assert "all-reduce" not in repeated or of == "cnn"
    kept = repeated.get("all-reduce") if (of, name) == ("cnn", "zero3") else None
    assert theirs == without(in_program(c, c.baselines[name]), {"all-reduce": kept} if kept else {})


@cache
def plain_step(of: str) -> Any:
    c = case(of)
    return jax.jit(c.fn).lower(*c.args).compile()


# Costs


@pytest.mark.few(1)
@pytest.mark.parametrize(("of", "on"), [("mlp", "even8"), ("cnn", "even8"), *((of, "mixed8") for of in EXAMPLES)])
def test_every_baseline_is_sound(of: str, on: str) -> None:
    """That none is cheaper than a plan is tests/examples/test_examples_planned.py's."""
    c = case(of, on)
    assert set(c.baselines) == {*NAMES, *ZERO}
    for baseline in c.baselines.values():
        check(c.traced.graph, baseline.program, baseline.sizes)
    if on == "mixed8":
        for name in ("data_parallel", *ZERO[:3]):
            assert c.baselines[f"{name}_speed"].cost_s <= c.baselines[name].cost_s * (1 + 1e-9)


@pytest.mark.parametrize("of", EXAMPLES)
def test_the_stages_of_zero(of: str) -> None:
    """As much communication as data parallelism in stage 2, half as much again in 1 and 3; less memory at each."""
    c = case(of, full=True)
    gathered = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(c.args[0]["params"]))
    one, two = (in_program(c, c.baselines[name]) for name in ("zero1", "zero2"))
    # Those that have nothing to cut are not gathered, and batch statistics are cut like optimizer state.
    cut = {kind: t.bytes for kind, t in one.items() if kind == "all-gather"}["all-gather"]
    assert 0.9 * gathered <= cut <= 1.01 * gathered, "10 classes are padded to 16"
    assert "reduce-scatter" not in one
    assert two["all-gather"].bytes == cut
    assert two["reduce-scatter"].bytes * N >= cut
    whole = in_program(c, c.baselines["data_parallel"])["all-reduce"].bytes
    assert two["all-reduce"].bytes < 0.1 * whole < one["all-reduce"].bytes
    memory = [c.baselines[name].memory_bytes for name in ("data_parallel", "zero1", "zero2")]
    assert memory[0] > memory[1] >= memory[2]


def test_without_moments_the_second_stage_of_zero_is_data_parallelism() -> None:
    """And of a parameter that is not cut, the gradient is reduced as in the first stage."""

    def step(state: Any, x: Any, y: Any, momentum: float) -> Any:
        w, m = state
        value, gradient = jax.value_and_grad(lambda w: ((jnp.tanh(x @ w["in"]) @ w["out"] + w["b"] - y) ** 2).mean())(w)
        if momentum:
            m = gradient = jax.tree.map(lambda m, g: momentum * m + g, m, gradient)
        return (jax.tree.map(lambda w, g: w - 0.1 * g, w, gradient), m), value

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)
    w = {"in": f32(32, 64), "out": f32(64, 1), "b": f32(1)}
    x, y = f32(512, 32), f32(512, 1)
    cluster = Cluster.load(CLUSTERS / "mixed8.toml")
    of = lambda momentum, m: OnDemand(
        Task(trace(partial(step, momentum=momentum), ((w, m), x, y), {}).graph, cluster, PlanningOptions())
    )
    sgd = of(0.0, {})
    assert sgd["zero2"].cost_s == pytest.approx(sgd["data_parallel"].cost_s)
    assert sgd["zero2"].program.collectives() == sgd["data_parallel"].program.collectives() == {"all_reduce": 4}
    moments = of(0.9, w)
    assert moments["zero2"].program.collectives() == {"all_gather": 2, "all_reduce": 2, "reduce_scatter": 2}


@pytest.mark.parametrize("of", EXAMPLES)
def test_by_speed_cuts_the_batch_by_speed_and_the_state_evenly(of: str) -> None:
    c = case(of, "mixed8")
    zero = c.baselines["zero2_speed"]
    state = [
        v for v in c.traced.graph.inputs[: len(jax.tree.leaves(c.args[0]))] if zero.program.inputs[v][0].is_sharded
    ]
    assert state
    for value in state:
        lengths = zero.sizes.lengths(value, zero.program.inputs[value][0].dim, (0,))
        assert max(lengths) - min(lengths) <= 1
    batch = c.traced.graph.inputs[-1]
    fast, *_, slow = zero.sizes.lengths(batch, 0, (0,))
    assert fast > slow


@pytest.mark.parametrize("of", EXAMPLES)
def test_state_lies_as_each_baseline_says(of: str) -> None:
    c = case(of)
    layouts = lambda name: [c.baselines[name].program.inputs[v][0] for v in c.traced.graph.inputs]
    leaves = len(jax.tree.leaves(c.args[0]))
    shapes = [x.shape for x in jax.tree.leaves(c.args)]
    batch = [Placement("S", 0)] * (len(shapes) - leaves)
    assert layouts("data_parallel") == [Placement("R")] * leaves + batch
    cut = [Placement("R") if (d := by_hand.longest(s)) < 0 else Placement("S", d) for s in shapes[:leaves]]
    assert layouts("zero3") == cut + batch
    assert layouts("tensor_parallel")[leaves:] == [Placement("R")] * len(batch)
    held = layouts("tensor_parallel")[:leaves]
    assert any(p.is_sharded for p in held)
