"""GPUs that compute while they send end a kernel before a permute begins."""

from dataclasses import replace

import graphs
import numpy as np
import pytest
from measured_ops import struct

from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.curves import Curve
from hapsynth.cluster.granularity import GPU_GRANULARITY
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.cost.model import CostModel

SPEEDS = [3.0, 3.0, 1.0]


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Two contractions, of which one is three times the other."""
    return trace(lambda u, v, x: (x @ u, x @ v), (struct(512, 512), struct(512, 1536), struct(4096, 512))).graph


@pytest.fixture
def gpus() -> Cluster:
    plain = graphs.cluster(SPEEDS, bandwidth=1e9, latency=1e-5)
    gpu = {kind: replace(kind, granularity=GPU_GRANULARITY, overhead=2e-6) for kind in plain.kinds}
    return replace(plain, devices=tuple(gpu[kind] for kind in plain.devices))


def handover(graph: Graph, cluster: Cluster, *, overlap: bool) -> float:
    (link,) = CostModel(graph, cluster, FactorTable(graph), overlap=overlap).links
    return link.handover


def test_it_is_as_long_as_the_kernel_that_runs(graph: Graph, gpus: Cluster) -> None:
    """At any moment, that is, and on devices that are done at the same time: the larger runs three quarters of it."""
    kinds = gpus.kinds
    flops = 2.0 * 4096 * 512 * np.array([512, 1536])
    assert all(flops[0] / kind.rate("float32") > 4 * 4 * 4096 * 1024 / kind.bandwidth for kind in kinds)
    seconds = 2e-6 + flops / sum(kind.rate("float32") for kind in gpus.devices)
    expected = (seconds**2).sum() / seconds.sum()
    assert handover(graph, gpus, overlap=True) == pytest.approx(expected)
    assert handover(graph, gpus.subset((0,)), overlap=True) > 2 * expected


def test_what_waits_for_nothing(graph: Graph, gpus: Cluster) -> None:
    """Who computes nothing meanwhile; CPUs, whose collectives are run by a thread of their own; what is no permute."""
    assert handover(graph, gpus, overlap=False) == 0.0
    assert handover(graph, graphs.cluster(SPEEDS), overlap=True) == 0.0
    assert handover(trace(lambda x: x, (struct(8),)).graph, gpus, overlap=True) == 0.0
    costs = CostModel(graph, gpus, FactorTable(graph), overlap=True)
    assert costs.on(gpus).links == costs.links
    (late,), (link,) = costs.links, costs.on(gpus, overlap=False).links
    for step in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        assert late.seconds(step, 1e6) == link.seconds(step, 1e6)


@pytest.mark.parametrize("measured", [False, True])
def test_a_permute_waits_for_it(graph: Graph, gpus: Cluster, measured: bool) -> None:
    if measured:
        gpus = replace(gpus, collectives={"hap": {"reshare": Curve(((0.0, 1e-5), (1e6, 2e-3)))}})
    (link,) = CostModel(graph, gpus, FactorTable(graph)).links
    late = replace(link, handover=1e-4)
    assert late.permute == pytest.approx((link.permute[0] + 1e-4, link.permute[1]))
    assert late.rounds[0] == pytest.approx(link.rounds[0] + 1e-4)
    np.testing.assert_allclose(late.rounds[1], link.rounds[1])
