"""Known ways to distribute training, found from costs alone.

Each test sweeps one parameter across the point where, by hand, the known strategy begins to pay, asserts that the
search flips there, what the program communicates and how the state lies, and by how much a rival is dearer.

A ring's all-reduce moves 2 (n - 1) / n of a tensor's bytes, its reduce-scatter and all-gather half of that, and an
all-to-all between hosts of one device each (n - 1) / n^2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
import pytest
import strategies
from jax.sharding import Mesh
from strategies import Arguments, Step, gpus

import hapsynth
from hapsynth.cluster import Cluster
from hapsynth.instructions.layout import parse_layout
from hapsynth.instructions.program import Convert
from hapsynth.plan import Plan
from hapsynth.search.baselines import Baseline, Baselines
from hapsynth.search.planner import Planner
from hapsynth.search.structure import Restriction

N = 4
EVEN = [1.0] * N
AROUND = (0.25, 0.8, 1.25, 4.0)
"""Where a sweep looks, in units of the flip derived by hand."""
FLIPS = [False, False, True, True]


def planned(step: Step, args: Arguments, cluster: Cluster, **options: object) -> Plan:
    """The plan, on as many host devices as the cluster has."""
    mesh = Mesh(np.array(jax.devices()[: cluster.n]), ("hap",))
    return hapsynth.synthesize(step, args, mesh, cluster=cluster, **options)


def traffic(plan: Plan) -> dict[str, int]:
    """What is communicated: collective and shape -> how often."""
    values = plan.traced.graph.values
    conversions = (i for i in plan.program.instructions if isinstance(i, Convert) and i.is_collective)
    return dict(Counter(f"{i.step} {values[i.value].shape}" for i in conversions))


def layouts(plan: Plan) -> list[str]:
    """Of every argument, in order."""
    return list(plan.layouts.values())


def baseline(plan: Plan, name: str) -> Baseline:
    planner = Planner(plan.traced.graph, plan.cluster)
    return Baselines(plan.traced.graph, planner.table, planner.costs, planner.limit).all()[name]


def with_stored(plan: Plan, stored: Sequence[str]) -> float:
    """Seconds of the best program whose arguments lie like that and are computed with as they lie."""
    graph = plan.traced.graph
    placements = {v: parse_layout(text)[0] for v, text in zip(graph.inputs, stored, strict=True)}
    restriction = Restriction(placements, convertible=lambda v, source, target: v not in placements)
    return Planner(graph, plan.cluster, restriction=restriction).run().cost_s


# ---- data parallelism, and Megatron's pair


def test_data_parallelism_pays_from_a_batch_of_twice_the_hidden_width() -> None:
    """It reduces both weights' gradients, 2 width x hidden; Megatron's pair the output, batch x width."""
    width, hidden = 256, 1024
    plans = [
        planned(strategies.mlp, strategies.mlp_args(int(x * 2 * hidden), width, hidden), gpus(EVEN)) for x in AROUND
    ]
    gradients = {f"all_reduce {(width, hidden)}": 1, f"all_reduce {(hidden, width)}": 1}
    assert [traffic(p) == gradients and layouts(p) == ["R", "R", "S(0)"] for p in plans] == FLIPS
    assert baseline(plans[-1], "tensor_parallel").cost_s > 1.4 * plans[-1].cost
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
    plans = [
        planned(strategies.mlp, strategies.mlp_args(batch, width, int(x * batch / 2)), gpus(EVEN)) for x in AROUND
    ]
    pair = [traffic(p) == {f"all_reduce {(batch, width)}": 1} and layouts(p) == ["S(0)", "S(1)", "R"] for p in plans]
    assert pair == FLIPS
    assert baseline(plans[-1], "data_parallel").cost_s > 1.2 * plans[-1].cost
    # Columns twice: the hidden layer, 64 times as wide as the output, must be gathered.
    assert with_stored(plans[-1], ["S(1)", "S(1)", "R"]) > 2 * plans[-1].cost
    assert plans[2].check().ok
