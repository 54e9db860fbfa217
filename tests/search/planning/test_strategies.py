"""Known ways to distribute training, found from costs alone.

Each test sweeps one parameter across the point where, by hand, the known strategy begins to pay, asserts that the
search flips there, what the program communicates and how the state lies, and by how much a rival is dearer.

A ring's all-reduce moves 2 (n - 1) / n of a tensor's bytes, its reduce-scatter and all-gather half of that, and an
all-to-all between hosts of one device each (n - 1) / n^2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
import strategies
from jax.sharding import Mesh
from lowering_options import ALONE
from strategies import Arguments, Step, gpus, hosts, shape
from thoroughness import THOROUGH

import hapsynth
from hapsynth.cluster.cluster import Cluster
from hapsynth.instructions.layout import parse_layout
from hapsynth.instructions.program.program import Convert
from hapsynth.plan import Plan
from hapsynth.search.formulation.choice_space import Convertible, Restriction
from hapsynth.search.memory.profile import MemoryProfile
from hapsynth.search.planning.baselines import Baseline, Baselines
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import PlanningOptions, Task

N = 4
EVEN = [1.0] * N
AROUND = (0.25, 0.8, 1.25, 4.0)
"""Where a sweep looks, in units of the flip derived by hand."""
FLIPS = [False, False, True, True]


def planned(step: Step, args: Arguments, cluster: Cluster, **options: Any) -> Plan:
    """The plan, on as many host devices as the cluster has; proven to be the best where memory is no matter. Small
    tensors stand for large ones: each collective has its own latency."""
    names, lengths = zip(*cluster.axes)
    mesh = Mesh(np.array(jax.devices()[: cluster.n]).reshape(lengths), names)
    plan = hapsynth.synthesize(step, args, mesh, cluster=cluster, lowering=ALONE, **options)
    assert "memory_limit" in options or plan.gap <= 1e-4
    return plan


def collectives(plan: Plan) -> list[tuple[str, str, tuple[int, ...]]]:
    """(collective, mesh axis, shape of what is communicated), in order."""
    values, axes = plan.traced.graph.values, plan.program.axes
    conversions = (i for i in plan.program.instructions if isinstance(i, Convert) and i.is_collective)
    return [(str(i.step), axes[i.axis][0], values[i.value].shape) for i in conversions]


def traffic(plan: Plan) -> dict[str, int]:
    """What is communicated: collective and shape -> how often."""
    return dict(Counter(f"{step} {dims}" for step, _, dims in collectives(plan)))


def layouts(plan: Plan) -> list[str]:
    """Of every argument, in order."""
    return list(plan.layouts.values())


def baseline(plan: Plan, name: str) -> Baseline:
    task = Task(plan.traced.graph, plan.cluster, PlanningOptions(lowering=plan.result.lowering))
    return Baselines(task).all([name])[name]


def rival(plan: Plan, stored: Sequence[str] = (), convertible: Convertible | None = None) -> float:
    """Seconds of the best program whose arguments lie like that, of these conversions."""
    graph = plan.traced.graph
    layouts = {v: parse_layout(text) for v, text in zip(graph.inputs, stored)}
    options = PlanningOptions(restriction=Restriction(layouts, convertible=convertible), lowering=plan.result.lowering)
    return Planner(Task(graph, plan.cluster, options)).run().cost_s


def with_weights(plan: Plan, stored: Sequence[str]) -> float:
    """Seconds of the best program whose arguments lie like that and are computed with as they lie."""
    inputs = set(plan.traced.graph.inputs)
    return rival(plan, stored, lambda value, source, target: value not in inputs)


# ---- data parallelism, and Megatron's pair


def test_data_parallelism_pays_from_a_batch_of_twice_the_hidden_width() -> None:
    """It reduces both weights' gradients, 2 width x hidden; Megatron's pair the output, batch x width."""
    width, hidden = 256, 1024
    plans = [
        planned(strategies.mlp, strategies.mlp_args(int(x * 2 * hidden), width, hidden), gpus(EVEN)) for x in AROUND
    ]
    gradients = {f"all_reduce {(width, hidden)}": 1, f"all_reduce {(hidden, width)}": 1}
    assert [traffic(p) == gradients and layouts(p) == ["R", "R", "S(0)"] for p in plans] == FLIPS
    assert with_weights(plans[-1], ["S(0)", "S(1)", "R"]) > 1.4 * plans[-1].cost
    assert plans[-1].cost <= baseline(plans[-1], "data_parallel").cost_s * (1 + 1e-9)
    assert plans[2].check().ok


def test_unlike_devices_take_unlike_parts_of_the_batch() -> None:
    plan = planned(strategies.mlp, strategies.mlp_args(8192, 256, 1024), gpus([3.0, 3.0, 1.0, 1.0]))
    assert layouts(plan) == ["R", "R", "S(0)"]
    assert set(traffic(plan)) == {"all_reduce (256, 1024)", "all_reduce (1024, 256)"}
    (batch,) = plan.ratios.values()
    assert batch == pytest.approx((3 / 8, 3 / 8, 1 / 8, 1 / 8), rel=0.05)
    # Even parts keep the slow devices twice as long: 537 us against 268, and 105 us of collectives with either.
    assert baseline(plan, "data_parallel").cost_s > 1.6 * plan.cost


def test_megatrons_pair_pays_from_a_hidden_width_of_half_the_batch() -> None:
    """Columns of the first weight meet rows of the second: one all-reduce for both."""
    batch, width = 4096, 128
    plans = [planned(strategies.mlp, strategies.mlp_args(batch, width, int(x * batch / 2)), gpus(EVEN)) for x in AROUND]
    pair = [traffic(p) == {f"all_reduce {(batch, width)}": 1} and layouts(p) == ["S(0)", "S(1)", "R"] for p in plans]
    assert pair == FLIPS
    assert baseline(plans[-1], "data_parallel").cost_s > 1.2 * plans[-1].cost
    # Columns twice: the hidden layer, 64 times as wide as the output, must be gathered.
    assert with_weights(plans[-1], ["S(1)", "S(1)", "R"]) > 2 * plans[-1].cost
    assert plans[2].check().ok


# ---- a network too slow to share


def test_a_slow_network_leaves_every_device_to_itself() -> None:
    """What pays first is the first weight's gradient, made in parts and gathered: (n - 1) / n of two contractions,
    4 batch x width x hidden, are saved and as much of a weight, 4 width x hidden bytes, is moved.

    Equal devices that share nothing all do the whole step: as fast as one of them alone.
    """
    batch, width, hidden = 8192, 256, 1024
    flip = 1e13 / batch
    args = strategies.mlp_args(batch, width, hidden)
    plans = [planned(strategies.mlp, args, gpus(EVEN, bandwidth=x * flip)) for x in AROUND]
    assert [bool(traffic(p)) for p in plans] == FLIPS
    assert plans[0].cost == pytest.approx(planned(strategies.mlp, args, gpus([1.0])).cost)
    # A fourth of the five contractions, and four times three quarters of eight for the collectives.
    assert baseline(plans[0], "data_parallel").cost_s > 4 * plans[0].cost
    assert traffic(plans[-1]) == {f"all_reduce {(width, hidden)}": 1, f"all_reduce {(hidden, width)}": 1}


def test_one_device_has_all_where_the_network_is_too_slow_to_share_with_slower_ones() -> None:
    """Three devices of half the speed save 3 / 5 of five contractions, 10 batch x width x hidden, and both weights'
    gradients are reduced then, 2 (n - 1) / n of 8 width x hidden bytes. Without sharing each would do the whole step,
    and the fast one wait for the slow ones: they are left out."""
    batch, width, hidden = 8192, 256, 1024
    flip = 2e13 / batch
    args = strategies.mlp_args(batch, width, hidden)
    clusters = [gpus([1.0, 0.5, 0.5, 0.5], bandwidth=x * flip) for x in AROUND]
    plans = [planned(strategies.mlp, args, c) for c in clusters]
    assert [p.devices == (0, 1, 2, 3) for p in plans] == FLIPS
    for plan in plans[:2]:
        assert (plan.devices, plan.program.axes, traffic(plan)) == ((0,), (("hap", 1),), {})
        assert plan.memory[1:] == (0.0,) * 3
        assert plan.cost == pytest.approx(planned(strategies.mlp, args, gpus([1.0])).cost)
        assert plan.result.status == "optimal"
    assert rival(plans[0]) > 1.9 * plans[0].cost
    assert rival(plans[1]) > 1.05 * plans[1].cost
    assert rival(plans[2]) == pytest.approx(plans[2].cost)
    assert Planner(Task(plans[2].traced.graph, gpus([1.0]))).run().cost_s > 1.1 * plans[2].cost
    assert traffic(plans[-1]) == {f"all_reduce {(width, hidden)}": 1, f"all_reduce {(hidden, width)}": 1}
    assert plans[1].check().ok


# ---- sufficient factor broadcasting


def test_sufficient_factors_pay_up_to_a_batch_of_the_layers_width() -> None:
    """Gathering a square layer's inputs and output gradients, 2 batch x width, and computing all of the weight's
    gradient everywhere is cheaper than reducing it, 2 width^2 (Xie et al. 2016)."""
    size, channels = 16, 64
    width = (size // strategies.POOL) ** 2 * channels
    cluster = gpus([4.0] * N, bandwidth=1e10)
    # Per sample, times 4 (n - 1) / n: 2 width / bandwidth for the factors, width^2 / 2 rate for computing the more.
    flip = 2 * width**2 / (2 * width + width**2 / 2 * 1e10 / 4e13)
    batches = [int(x * flip) for x in (0.25, 0.8, 1.25)]
    plans = [planned(strategies.autoencoder, strategies.autoencoder_args(b, size, channels), cluster) for b in batches]
    for batch, plan in zip(batches, plans):
        gathered = {step for step in traffic(plan).items() if "all_gather" in step[0]}
        assert layouts(plan) == ["R"] * 5 + ["S(0)"]
        reduced = f"all_reduce {(width, width)}" in traffic(plan)
        assert reduced == (batch > flip)
        assert gathered == (set() if reduced else {(f"all_gather {(batch, width)}", 2)})
        assert sum(traffic(plan).values()) == 4 + (1 if reduced else 2), "the kernels' gradients"
    assert baseline(plans[0], "data_parallel").cost_s > 2 * plans[0].cost
    # Tensor parallelism in this layer alone (Krizhevsky 2014) moves as much, and twice a quarter more in all-to-alls.
    for cut in ("S(0)", "S(1)"):
        assert with_weights(plans[0], [cut, *["R"] * 4, "S(0)"]) > 1.05 * plans[0].cost
    assert planned(strategies.autoencoder, strategies.autoencoder_args(128, size, channels), cluster).check().ok


# ---- vocabulary-parallel softmax and embedding


def test_the_vocabulary_is_cut_from_twice_as_many_words_as_tokens() -> None:
    """Reducing the tied embedding's gradient moves 2 vocab x width. With the vocabulary cut, activations are reduced
    after the embedding and before the head in the backward pass, 4 tokens x width, and two numbers per token of the
    softmax. (The block in between costs as much either way.)"""
    tokens, width, hidden = 512, 64, 256
    cluster, sizes = gpus(EVEN, latency=1e-7), [int(x * 2 * tokens) for x in AROUND]
    plans = [
        planned(strategies.language, strategies.language_args(tokens, vocab, width, hidden), cluster) for vocab in sizes
    ]
    softmax = f"all_reduce {(tokens,)}"
    assert [layouts(p)[1] == "S(0)" and traffic(p).get(softmax) == 2 for p in plans] == FLIPS
    assert traffic(plans[-1]) == {softmax: 2, f"all_reduce {(tokens, width)}": 2}
    assert baseline(plans[-1], "data_parallel").cost_s > 1.5 * plans[-1].cost
    assert layouts(plans[0])[1] == "R"
    assert plans[2].check().ok


# ---- expert parallelism


def test_experts_are_cut_from_as_many_as_their_weights_outgrow_their_tokens() -> None:
    """Reducing the experts' gradients moves 4 count x width x hidden; sending tokens to their experts and back, in
    both passes, 4 times 2 groups x tokens x width / n."""
    groups, tokens, width, hidden = 16, 128, 64, 64
    flip = 2 * groups * tokens // (N * hidden)
    slow = gpus([0.1] * N, bandwidth=5e10, latency=4e-8)
    counts = [int(x * flip) for x in (0.25, 0.5, 2, 4)]
    plans = [
        planned(strategies.experts, strategies.experts_args(groups, tokens, width, c, hidden), slow) for c in counts
    ]
    for count, plan in zip(counts, plans):
        values = plan.traced.graph.values
        sent = [
            values[i.value].size for i in plan.program.instructions if isinstance(i, Convert) and i.step == "all_to_all"
        ]
        apart = count > flip
        assert sent == ([2 * groups * tokens * width] * 4 if apart else [])
        assert layouts(plan) == ["R", "S(0)" if apart else "R", "R", "S(0)" if apart else "R", "S(0)", "S(0)"]
    # Beside the tokens: the gradients of the gate and the dense layer.
    assert sum(traffic(plans[-1]).values()) == 4 + 2
    assert baseline(plans[-1], "data_parallel").cost_s > 1.2 * plans[-1].cost
    assert plans[2].check().ok


# ---- sequence-sharded norms


def test_norms_between_tensor_parallel_blocks_are_cut_where_that_is_worth_three_latencies() -> None:
    """A reduce-scatter and an all-gather move what an all-reduce does (Korthikanti et al. 2022). Between them each
    device adds up and normalizes its own tokens: (n - 1) / n of about eight passes over the activations (the sum, the
    centred and the scaled one are written and read, also for the backward pass) are saved. An all-reduce is a tree
    here: of four devices 5 messages in place of 8, for half of the activations' bytes more."""
    tokens, width, hidden = 512, 256, 1024
    memory = 3e11
    nbytes = 4 * tokens * width
    flip = (8 * nbytes / memory * (N - 1) / N + nbytes / 2 / 1e11) / 3
    args = strategies.residual_args(tokens, width, hidden, 2)
    clusters = [gpus(EVEN, bandwidth=1e11, latency=x * flip, memory_bandwidth=memory) for x in (0.25, 0.6, 1.4, 2.0)]
    plans = [planned(strategies.residual, args, c) for c in clusters]
    activations = str((tokens, width))
    for plan in plans:
        assert layouts(plan)[:-1] == ["S(0)", "S(1)"] * 2, "Megatron's pairs"
    # After each block forward, and before the second one's norm backward.
    scattered = [traffic(p).get(f"reduce_scatter {activations}", 0) for p in plans]
    reduced = [traffic(p).get(f"all_reduce {activations}", 0) for p in plans]
    assert (scattered, reduced) == ([3, 3, 0, 0], [0, 0, 3, 3])
    whole = lambda value, source, target: not (source.is_sharded or (source.is_partial and target.is_sharded))
    assert rival(plans[0], convertible=whole) > 1.04 * plans[0].cost
    assert plans[0].check().ok


# ---- ZeRO


WIDTH, LAYERS, BATCHES, LATENCY = 256, 3, 2, 2e-6


@cache
def with_adam(memory_limit: float | None = None) -> Plan:
    """Adam on three square layers and two batches, within that many bytes per device."""
    args = strategies.adam_args(3 * WIDTH, WIDTH, LAYERS, BATCHES)
    options = {} if memory_limit is None else {"memory_limit": memory_limit}
    return planned(strategies.adam, args, gpus(EVEN, bandwidth=1e11, latency=LATENCY), **options)


def test_zero_1_one_weight_at_a_time_as_memory_tightens() -> None:
    """Reducing a gradient in parts, updating a part of the weight and gathering it takes 8 messages and 3/2 of the
    weight, an all-reduce by a tree 5 and twice the weight; (n - 1) / n of both its moments is saved (Rajbhandari et al.
    2020)."""
    width, layers = WIDTH, LAYERS
    free = with_adam()
    weight = 4 * width * width
    later = 3 * LATENCY - weight / 2 / 1e11
    assert traffic(free) == {f"all_reduce {(width, width)}": layers}
    assert layouts(free) == ["R"] * 3 * layers + ["S(0)"] * 2
    plan = free
    for cut in range(1, layers + 1) if THOROUGH else (1, layers):
        limit = max(free.memory) - 2 * weight * (N - 1) / N * cut
        plan = with_adam(limit)
        assert max(plan.memory) <= limit
        moments = layouts(plan)[layers : 3 * layers]
        assert moments[:layers] == moments[layers:]
        assert moments[:layers].count("R") == layers - cut
        assert traffic(plan).get(f"all_reduce {(width, width)}", 0) == layers - cut
        assert traffic(plan)[f"reduce_scatter {(width, width)}"] == cut == traffic(plan)[f"all_gather {(width, width)}"]
        # What the update of a part saves is less than that.
        assert free.cost + 0.7 * cut * later < plan.cost < free.cost + 1.01 * cut * later
    # Parameters gathered for every use: in both passes over both batches.
    assert baseline(plan, "zero3").cost_s > 1.3 * plan.cost
    assert plan.check().ok


@pytest.mark.few(0)
def test_zero_2_and_3_as_memory_tightens_further() -> None:
    """Then each batch's gradient is reduced by itself, so that no more than one is whole at a time (of the 2 x layers
    that ZeRO-1 adds up at the end), for as much traffic again; then parameters are stored cut and gathered for each
    of their uses."""
    width, layers, batches = WIDTH, LAYERS, BATCHES
    weight = 4 * width * width
    scattered, gathered = f"reduce_scatter {(width, width)}", f"all_gather {(width, width)}"

    free = with_adam()
    # Limits count the program's own order.
    counted = MemoryProfile(free.program, free.sizes.classes, free.cost_model()).peak(free.sizes)
    first = counted - 2 * weight * (N - 1) / N * layers
    one = with_adam(first)
    two = with_adam(first - layers * weight)
    three = with_adam(first - (layers + 1) * weight)

    assert traffic(one) == {scattered: layers, gathered: layers}
    assert traffic(two) == {scattered: batches * layers, gathered: layers}
    assert traffic(three)[scattered] == batches * layers
    assert traffic(three)[gathered] > layers
    assert "S" in "".join(layouts(three)[:layers])
    for plan in (one, two, three):
        assert "R" not in layouts(plan)[layers : 3 * layers], "the moments are cut"
    # A reduce-scatter each: half of what an all-reduce of a weight takes.
    assert two.cost == pytest.approx(one.cost + layers * (N * LATENCY + weight * (N - 1) / N / 1e11), rel=0.01)
    assert three.cost > two.cost
    assert max(three.memory) < max(two.memory) < max(one.memory) < max(free.memory)
    assert three.check().ok


# ---- two mesh axes


def test_gradients_are_reduced_between_hosts_in_parts_where_that_is_worth_a_third_latency() -> None:
    """All devices of a host reduce over its one link: of whole gradients 4 times 2 (2 - 1) / 2 of a weight, of those
    that were reduced in parts inside the host a fourth of that. Reducing in parts and gathering them is an all-reduce
    inside the host, one latency later. So it pays, weight by weight, up to a latency of 3 weights on the network."""
    network = 1e9
    sizes = {"up": 128 * 512, "down": 512 * 64}
    flips = {name: 3 * 4 * size / network for name, size in sizes.items()}
    args = ({"up": shape(128, 512), "down": shape(512, 64)}, shape(1 << 21, 128))
    latencies = [x * flips[name] for name in ("down", "up") for x in AROUND[1:3]]
    plans = [planned(strategies.mlp, args, hosts(2, 4, network=network, latency=x)) for x in latencies]
    for latency, plan in zip(latencies, plans):
        assert layouts(plan)[:2] == ["R,R"] * 2
        for name, size in sizes.items():
            steps = [(step, axis) for step, axis, dims in collectives(plan) if np.prod(dims) == size]
            if latency < flips[name]:
                assert steps == [("reduce_scatter", "device"), ("all_reduce", "host"), ("all_gather", "device")]
            else:
                assert sorted(steps) == [("all_reduce", "device"), ("all_reduce", "host")]
        assert len(collectives(plan)) == sum(3 if latency < flip else 2 for flip in flips.values())
    whole = lambda value, source, target: not (source.is_sharded or (source.is_partial and target.is_sharded))
    saved = sum(flip - latencies[0] for flip in flips.values())
    assert rival(plans[0], convertible=whole) == pytest.approx(plans[0].cost + saved, rel=1e-3)
    assert saved > 0.025 * plans[0].cost
    # Devices 256 times as slow divide a batch that this machine can compute, too.
    slow = hosts(2, 4, network=network, latency=4e-6, speed=2**-8)
    small = planned(strategies.mlp, (args[0], shape(1 << 13, 128)), slow)
    assert Counter(axis for _, axis, _ in collectives(small)) == {"device": 4, "host": 2}
    assert small.check().ok


def test_each_axis_is_given_the_batch_or_the_hidden_width() -> None:
    """In units of width floats, inside a host Megatron's pair reduces 2 batch, divided by what cuts the batch between
    hosts, and data parallelism 2 weights of the hidden width each; between hosts likewise, in parts. So inside a host
    the pair pays from a hidden width of batch / 4 where the batch is cut between hosts, which is the layout of
    Narayanan et al. (2021), from a whole batch where it is not; between hosts it pays from batch / 2."""
    batch, width = 2048, 128
    cluster = hosts(2, 4, network=7.5e9, latency=1e-7, speed=0.16)
    # Hidden width / batch, what is reduced inside a host and between hosts, and how the weights and the batch lie.
    expected: list[tuple[list[float], str, str, list[str]]] = [
        ([0.5 / 4, 0.8 / 4] if THOROUGH else [0.8 / 4], "weights", "weights", ["R,R", "R,R", "S(0),S(0)"]),
        ([1.25 / 4, 0.8 / 2], "activations", "weights", ["R,S(0)", "R,S(1)", "S(0),R"]),
        ([1.25 / 2, 0.8], "weights", "activations", ["S(0),R", "S(1),R", "R,S(0)"]),
        ([1.25, 2] if THOROUGH else [1.25], "activations", "activations", ["S(0),S(0)", "S(1),S(1)", "R,R"]),
    ]
    ways: list[list[str]] = []
    for sweep, inside, between, lie in expected:
        for x in sweep:
            hidden = int(x * batch) // 8 * 8
            plan = planned(strategies.mlp, strategies.mlp_args(batch, width, hidden), cluster)
            moved = {(axis, dims) for _, axis, dims in collectives(plan)}
            shapes = {"weights": {(width, hidden), (hidden, width)}, "activations": {(batch, width)}}
            assert moved == {("device", d) for d in shapes[inside]} | {("host", d) for d in shapes[between]}
            assert [text.replace("/1", "") for text in layouts(plan)] == lie, "in either order of the axes"
        ways.append(layouts(plan))
    plan = planned(strategies.mlp, strategies.mlp_args(batch, width, 3 * batch // 8), cluster)
    assert all(with_weights(plan, lie) > 1.04 * plan.cost for lie in (ways[0], *ways[2:]))
    assert plan.check().ok
