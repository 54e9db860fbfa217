"""Curves of single ops: in cluster files, and in what plans cost. Every time here is given."""

from dataclasses import replace
from pathlib import Path

import graphs
import jax.numpy as jnp
import numpy as np
import pytest
from cluster_files import OF_KIND, assert_refused
from jax import lax
from measured_ops import STEP, named, only, step, struct

import hapsynth
from hapsynth.cluster.cluster import Cluster, ClusterError
from hapsynth.cluster.curves import Curve
from hapsynth.cluster.device_kinds import MeasuredOp
from hapsynth.cluster.op_classes import POSITION_FLOPS
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.profile.measured_ops import Ops
from hapsynth.report.cost_breakdown import Computing, cost_lines, rate_source
from hapsynth.search.analysis.op_class import amount_of
from hapsynth.search.analysis.op_signature import described
from hapsynth.search.cost.model import CostModel


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(step, STEP).graph


CURVE = Curve(((1e7, 1e-5), (1e9, 5e-4)))
SIGNATURE = "matmul:0123456789ab"


def with_ops(cluster: Cluster, ops: dict[str, MeasuredOp], only: int | None = None) -> Cluster:
    """The cluster with curves of ops for all its kinds, or for one alone."""
    own = {kind: replace(kind, ops=ops) if only in (None, i) else kind for i, kind in enumerate(cluster.kinds)}
    return replace(cluster, devices=tuple(own[d] for d in cluster.devices))


def test_files_hold_ops(tmp_path: Path) -> None:
    plain = graphs.cluster([3.0, 1.0])
    cluster = with_ops(plain, {SIGNATURE: MeasuredOp("dot_general f32[8,8] f32[8,8]", CURVE)}, only=0)
    cluster.save(tmp_path / "c.toml")
    text = (tmp_path / "c.toml").read_text()
    assert f'[kinds."x3.0".ops."{SIGNATURE}"]\nop = "dot_general f32[8,8] f32[8,8]"\nseconds = [["10 MFLOP"' in text
    again = Cluster.load(tmp_path / "c.toml")
    assert again == cluster != plain
    assert again.devices[0].ops[SIGNATURE].op == "dot_general f32[8,8] f32[8,8]"
    assert again.fingerprint() == cluster.fingerprint() != plain.fingerprint()
    # The name changes no cost.
    other = with_ops(plain, {SIGNATURE: MeasuredOp("another name", CURVE)}, only=0)
    assert (other, other.fingerprint()) == (cluster, cluster.fingerprint())
    twice = again.devices[0].faster(2.0).ops[SIGNATURE]
    assert (twice.op, twice.curve) == ("dot_general f32[8,8] f32[8,8]", CURVE.scaled(2.0))


BAD: dict[str, tuple[str, str, list[str]]] = {
    "class": ("matmull:0123456789ab", "", ["ops.matmull:0123456789ab", "did you mean 'matmul'?"]),
    "no digest": ("matmul", "", ["ops.matmul is no signature", "hapsynth profile"]),
    "digest": ("matmul:0123456789AB", "", ["matmul:0123456789AB is no signature"]),
    "no seconds": (SIGNATURE, 'op = "dot"', [f"ops.{SIGNATURE}.seconds is missing"]),
    "no name": (SIGNATURE, 'seconds = [["1 MFLOP", "1 us"]]', [f"ops.{SIGNATURE}.op is missing"]),
    "key": (SIGNATURE, 'second = [["1 MFLOP", "1 us"]]', ["second", "did you mean 'seconds'?"]),
    "no unit": (SIGNATURE, 'op = "dot"\nseconds = [["1", "1 us"]]', [f"ops.{SIGNATURE}.seconds", "no unit"]),
    "falling": (
        SIGNATURE,
        'op = "dot"\nseconds = [["1 MFLOP", "2 us"], ["2 MFLOP", "1 us"]]',
        [f"ops.{SIGNATURE}.seconds", "must both rise"],
    ),
}


@pytest.mark.parametrize(("signature", "text", "says"), BAD.values(), ids=BAD)
def test_bad_entries(signature: str, text: str, says: list[str], tmp_path: Path) -> None:
    assert_refused(tmp_path, f'{OF_KIND}[kinds.x.ops."{signature}"]\n{text}\n', says)


def test_a_kind_refuses_what_is_no_signature() -> None:
    with pytest.raises(ClusterError, match=r"device kind 'x1.0': ops.dot is of no class of ops; use one of matmul"):
        with_ops(graphs.cluster([1.0]), {"dot": MeasuredOp("dot", CURVE)})


def test_what_a_kind_was_not_measured_at_falls_back(graph: Graph) -> None:
    """To its class, then to its rate; an op that no kind was measured at stays in its class."""
    first, second = list(named(graph).values())[:2]
    by_class = Curve(((1e6, 1e-6), (1e9, 9e-4)))
    plain = graphs.cluster([3.0, 2.0, 1.0])
    cluster = with_ops(plain, {first: MeasuredOp("", CURVE)}, only=0)
    middle = replace(cluster.devices[1], measured={"matmul": {"float32": by_class}})
    cluster = replace(cluster, devices=(cluster.devices[0], middle, cluster.devices[2]))
    costs = CostModel(graph, cluster, Ops(graph).table)
    works = {}
    for signature, op in Ops(graph).by_signature.items():
        works[signature] = costs.work(op.index, costs.table[op.index].joint(1)[0])
    assert works[first].op_class == first
    assert works[second].op_class == "matmul"
    found = costs.speeds(first, "float32").seconds(np.full(3, 1e8))
    assert found.tolist() == [float(CURVE.seconds(1e8)), float(by_class.seconds(1e8)), 1e8 / 1e13]
    # Without any, works are the same objects' likes as ever.
    bare = CostModel(graph, plain, costs.table)
    op = Ops(graph).by_signature[first]
    assert bare.work(op.index, costs.table[op.index].joint(1)[0]) == works[first]._replace(op_class="matmul")


def test_a_plan_goes_by_the_ops_it_was_measured_at() -> None:
    """The first device is said to be three times as fast, and takes three times as long over this very op."""
    fn, args = lambda w, x: (w, x @ w), (struct(1024, 1024), struct(4096, 1024))
    cluster = graphs.cluster([3.0, 1.0])
    ((signature, op),) = Ops(trace(fn, args).graph).by_signature.items()
    times = Curve(((1e9, 1e9 / 5e12), (1e10, 1e10 / (1e13 / 3))))
    measured = with_ops(cluster, {signature: MeasuredOp(described(op), times)}, only=0)
    before, after = (hapsynth.synthesize(fn, args, c, leave_out=False) for c in (cluster, measured))
    (rows,) = before.ratios.values()
    assert rows[0] == pytest.approx(0.75, abs=0.01)
    (rows,) = after.ratios.values()
    # Both take as long: it does 2.5 GFLOP of 8.6, at 4 TFLOP/s.
    flops = rows[0] * amount_of(op)
    assert float(times.seconds(flops)) == pytest.approx(rows[1] * amount_of(op) / 1e13, rel=0.02)
    assert 0.2 < rows[0] < 0.35
    assert max(after.lower_bound, after.joint_lower_bound) <= after.cost * (1 + 1e-9)
    assert after.gap < 1e-3
    (line,) = (line for line in cost_lines(after) if isinstance(line, Computing) and line.op_class == "matmul")
    assert line.compute_s == pytest.approx(float(times.seconds(flops)), rel=0.02)
    sources = {rate_source(measured, kind, signature, "float32") for kind in measured.kinds}
    assert sources == {"measured curve of the op itself, the cluster file", "float32 peak, the cluster file"}


def test_what_ops_come_to() -> None:
    """Beside their FLOPs: positions of convolutions, and few elements side by side of reductions."""
    total = lambda *shape: amount_of(only(lambda x: jnp.sum(x, axis=0), struct(*shape)))
    assert (total(4096, 8), total(4096, 24)) == (6 * 4096 * 8, 2 * 4096 * 24)
    assert (total(4096, 64), total(4096)) == (4096 * 64, 4096)
    images, kernels = struct(2, 16, 16, 3), struct(3, 3, 3, 4)
    convolved = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert amount_of(only(convolved, images, kernels)) == 2 * 14 * 14 * (2 * 3 * 3 * 3 * 4 + POSITION_FLOPS)
