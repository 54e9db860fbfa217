"""GPUs that compute beside other collectives wait while a permute runs."""

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
from hapsynth.search.cost.network import AxisLink

SPEEDS = [3.0, 3.0, 1.0]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(lambda w, x: x @ w, (struct(512, 512), struct(4096, 512))).graph


@pytest.fixture
def gpus() -> Cluster:
    plain = graphs.cluster(SPEEDS, bandwidth=1e9, latency=1e-5)
    gpu = {kind: replace(kind, granularity=GPU_GRANULARITY) for kind in plain.kinds}
    return replace(plain, devices=tuple(gpu[kind] for kind in plain.devices))


def along(graph: Graph, cluster: Cluster, *, overlap: bool) -> AxisLink:
    (link,) = CostModel(graph, cluster, FactorTable(graph), overlap=overlap).links
    return link


@pytest.mark.parametrize("measured", [False, True])
def test_a_permute_counts_twice(graph: Graph, gpus: Cluster, measured: bool) -> None:
    """For the link and for the devices, which compute nothing meanwhile; other collectives count once."""
    if measured:
        gpus = replace(gpus, collectives={"hap": {"reshare": Curve(((0.0, 1e-5), (1e6, 2e-3)))}})
    plain, exposed = (along(graph, gpus, overlap=overlap) for overlap in (False, True))
    assert exposed.permute == pytest.approx((2 * plain.permute[0], 2 * plain.permute[1]))
    assert exposed.rounds[0] == pytest.approx(2 * plain.rounds[0])
    np.testing.assert_allclose(exposed.rounds[1], 2 * plain.rounds[1])
    for step in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        assert exposed.seconds(step, 1e6) == plain.seconds(step, 1e6)


def test_where_permutes_are_hidden(graph: Graph, gpus: Cluster) -> None:
    """On CPUs, whose collectives are run by a thread of their own; and in a model of plans without overlap."""
    cpus = graphs.cluster(SPEEDS)
    assert along(graph, cpus, overlap=True) == along(graph, cpus, overlap=False)
    costs = CostModel(graph, gpus, FactorTable(graph), overlap=True)
    assert costs.on(gpus).links == costs.links
    assert costs.on(gpus, overlap=False).links == (along(graph, gpus, overlap=False),)
