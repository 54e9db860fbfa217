"""Measured curves: in files, in the costs, and in the bounds that rest on their inverse."""

import itertools
import tomllib
from dataclasses import replace
from pathlib import Path

import graphs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cluster_files import OF_KIND, assert_refused, load
from hypothesis import given
from hypothesis import strategies as st

import hapsynth
from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.curves import Curve
from hapsynth.cluster.toml_format import to_toml
from hapsynth.graph.trace import trace
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.report.cost_breakdown import rate_source
from hapsynth.search.cost.device_speed import DeviceFigures
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.network import axis_links
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.cost.work import Work
from hapsynth.search.sizing.sizer import Sizer

MATMUL = Curve(((1e6, 4e-6), (1e8, 1e-4), (1e9, 5e-4)))
WIRE = Curve(((0.0, 2e-5), (1e5, 3e-5), (1e6, 2e-4)))


def measured(cluster: Cluster) -> Cluster:
    """The cluster with curves by which its first kind is fast at small sizes, the others at large ones."""
    fast, *rest = cluster.kinds
    other = Curve(((1e6, 4e-5), (1e9, 6e-4)))
    kinds = {fast: replace(fast, measured={"matmul": {"float32": MATMUL}})}
    kinds |= {kind: replace(kind, measured={"matmul": {"float32": other}}) for kind in rest}
    collectives = {"hap": dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "all_to_all"), WIRE)}
    return replace(cluster, devices=tuple(kinds[d] for d in cluster.devices), collectives=collectives)


rising = st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=5)
amounts = st.floats(0, 1e5, allow_subnormal=False)  # fewer bits than the tolerances below want


@given(rising, st.booleans(), amounts, amounts)
def test_a_curve_and_its_inverse(steps: list[tuple[float, float]], latency: bool, a: float, b: float) -> None:
    points = list(itertools.accumulate(steps, lambda p, q: (p[0] + q[0], p[1] + q[1])))
    curve = Curve(((0.0, points[0][1] / 2), *points) if latency else tuple(points))
    low, high = sorted((a, b))
    assert curve.seconds(low) <= curve.seconds(high)
    # Within t no more can be done than `amount(t)`: what takes less than t is less.
    assert float(curve.amount(curve.seconds(low))) >= low * (1 - 1e-9) - 1e-9
    # Where a curve is steep the last bits of an amount are many seconds.
    amount = float(curve.amount(low)) * (1 - 1e-12)
    assert float(curve.seconds(amount)) <= low * (1 + 1e-9) or amount == 0
    assert [float(curve.seconds(x)) for x, _ in curve.points] == pytest.approx([t for _, t in curve.points])
    # The slope at the middle of each line is that between its ends.
    ends = [curve.points[-1], (2 * curve.points[-1][0], 2 * curve.points[-1][1])]
    for (x, t), (y, u) in [*itertools.pairwise(curve.points), ends]:
        assert curve.slope((x + y) / 2) == pytest.approx((u - t) / (y - x))


def test_round_trip(tmp_path: Path) -> None:
    cluster = replace(
        measured(graphs.cluster([3.0, 1.0])),
        profile={"jax": "0.10.2", "spread": {"a.bandwidth": 0.01}},
        axes=(("data", 2),),
    )
    cluster.save(tmp_path / "c.toml")
    again = Cluster.load(tmp_path / "c.toml")
    assert again == cluster
    assert again.profile == cluster.profile
    assert again.fingerprint() == cluster.fingerprint() == replace(again, profile={}).fingerprint()
    assert replace(cluster, collectives={}).fingerprint() != cluster.fingerprint()
    assert {hash(d) for d in again.devices} == {hash(d) for d in cluster.devices}
    hash(again)
    text = (tmp_path / "c.toml").read_text()
    assert 'float32 = [["1 MFLOP", "4 us"], ["100 MFLOP", "100 us"]' in text
    assert '[collectives.hap]\nall_reduce = [["0 B", "20 us"]' in text
    assert Cluster.from_dict(tomllib.loads(to_toml(cluster.to_dict()))) == cluster
    older = text.replace('["1 MFLOP", "4 us"]', '["1 MFLOP", "4 us", 0.1]')
    assert Cluster.from_dict(tomllib.loads(older)) == cluster


BAD = {
    "class": ('[kinds.x.measured.matmull]\nfloat32 = [["1 MFLOP", "1 us"]]', ["measured.matmull", "'matmul'"]),
    "dtype": ('[kinds.x.measured.matmul]\nfloat = [["1 MFLOP", "1 us"]]', ["measured.matmul.float", "'bfloat16'"]),
    "no curve": ("[kinds.x.measured.matmul]\nfloat32 = 3", ["measured.matmul.float32", "is not a curve"]),
    "a point": ('[kinds.x.measured.matmul]\nfloat32 = ["1 MFLOP"]', ["'1 MFLOP'", "list of points"]),
    "no unit": ('[kinds.x.measured.matmul]\nfloat32 = [["1", "1 us"]]', ["no unit", "FLOP"]),
    "falling": (
        '[kinds.x.measured.matmul]\nfloat32 = [["1 MFLOP", "2 us"], ["2 MFLOP", "1 us"]]',
        ["measured.matmul.float32", "must both rise"],
    ),
    "third entry": ('[kinds.x.measured.matmul]\nfloat32 = [["1 MFLOP", "2 us", "x"]]', ["the point", "'x'"]),
    "only latency": ('[collectives.hap]\nall_reduce = [["0 B", "2 us"]]', ["collectives.hap.all_reduce", "larger"]),
    "axis": ('[collectives.data]\nall_reduce = [["1 B", "2 us"]]', ["collectives.data", "hap"]),
    "step": ('[collectives.hap]\nall_reduec = [["1 B", "2 us"]]', ["collectives.hap.all_reduec", "'all_reduce'"]),
    "time without unit": (
        '[kinds.x.measured.matmul]\nfloat32 = [["1 MFLOP", 2e-6]]',
        ["measured.matmul.float32", "no unit", "us"],
    ),
    "bytes without unit": ('[collectives.hap]\nall_reduce = [["64", "2 us"]]', ["hap.all_reduce", "no unit", "KiB"]),
    "not a number": ('[kinds.x.measured.matmul]\nfloat32 = [["nan FLOP", "2 us"]]', ["float32", "not a finite"]),
    "no time": ('[collectives.hap]\nall_reduce = [["1 B", "0 us"]]', ["hap.all_reduce", "greater than zero"]),
    "no points": ("[collectives.hap]\nall_reduce = []", ["hap.all_reduce", "list of points"]),
    "profile": ("[profile]\nwhen = 2026-01-01", ["profile.when", "text"]),
}


@pytest.mark.parametrize(("text", "says"), BAD.values(), ids=BAD)
def test_bad_files(text: str, says: list[str], tmp_path: Path) -> None:
    assert load(tmp_path, OF_KIND).n == 2
    assert_refused(tmp_path, OF_KIND + text, says)


def test_what_was_not_measured_counts_as_something_else() -> None:
    kind = measured(graphs.cluster([1.0])).devices[0]
    assert kind.curve("matmul", "float32") == kind.curve("batch_matmul", jnp.bfloat16.dtype) == MATMUL
    assert kind.curve("convolution", "float32") is None
    assert kind.curve("matmul", "float64") is None
    twice = kind.faster(2.0).curve("matmul", "float32")
    assert twice is not None
    assert twice.points[0] == (1e6, 2e-6)


def test_products_of_full_precision_have_a_curve_of_their_own() -> None:
    of_tf32 = MATMUL.scaled(8.0)
    kind = replace(
        measured(graphs.cluster([1.0])).devices[0], measured={"matmul": {"tf32": of_tf32, "float32": MATMUL}}
    )
    for op_class in ("matmul", "batch_matmul"):
        for dtype, precise, curve in (
            ("float32", False, of_tf32),
            ("float32", True, MATMUL),
            ("bfloat16", False, of_tf32),
        ):
            assert kind.curve(op_class, dtype, ordinary=precise) == curve
            (found,) = DeviceFigures([kind]).speeds(op_class, dtype, ordinary=precise).seconds(np.array([1e6]))
            assert found == pytest.approx(float(curve.seconds(1e6)))
    assert rate_source(graphs.cluster([1.0]), kind, "matmul", "float32", ordinary=True).startswith(
        "measured curve of matmul float32"
    )


def test_the_axes_of_measured_collectives() -> None:
    cluster = graphs.cluster([1.0] * 4)
    curves = {"all_reduce": WIRE}
    named = replace(cluster, axes=(("data", 4),), collectives={"data": curves})
    assert named.collectives_along("hap", 4) == named.collectives_along("data", 4) == curves
    square = replace(cluster, axes=(("a", 2), ("b", 2)), collectives={"a": curves})
    assert (square.collectives_along("a", 2), square.collectives_along("b", 2)) == (curves, {})
    assert square.collectives_along("hap", 4) == {}
    assert replace(square, collectives={"hap": curves}).collectives_along("hap", 4) == curves
    link = axis_links(named, (("hap", 4),))[0]
    assert link.seconds("all_reduce", 1e5) == pytest.approx(3e-5)
    assert link.seconds("all_to_all", 1e5) == pytest.approx(4 * link.latency + 1e5 * link.beta)


@pytest.mark.parametrize("lanes", [0, 64, 1024])
def test_no_shares_beat_the_ideal_time(lanes: int, rng: np.random.Generator) -> None:
    cluster = measured(graphs.cluster([3.0, 3.0, 1.0]))
    graph = trace(lambda x, w: x @ w, (jnp.ones((64, 8)), jnp.ones((8, 8)))).graph
    costs = CostModel(graph, cluster, FactorTable(graph))
    for flops in np.geomspace(1e4, 1e11, 15).tolist():
        work = Work(flops, (((), 1e4), ((0,), flops / 50)), 1, "float32", (lanes,), (0,), "matmul")
        best = min(costs.time(work, [f]) for f in rng.dirichlet([0.5] * 3, 400))
        assert 0 < costs.ideal_time(work) <= best * (1 + 1e-9)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def step(w, x):
    value, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"]))(w)
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, grad), value


def test_a_plan_on_measured_figures() -> None:
    cluster = measured(graphs.cluster([3.0, 3.0, 1.0, 1.0]))
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    plan = hapsynth.synthesize(step, ({"a": f32(256, 512), "b": f32(512, 64)}, f32(4096, 256)), cluster)
    assert 0 < max(plan.joint_lower_bound, plan.lower_bound) <= plan.cost * (1 + 1e-9)
    costs = CostModel(plan.traced.graph, cluster, FactorTable(plan.traced.graph))
    result = plan.result
    assert program_cost(result.program, result.sizes, costs) == pytest.approx(plan.cost)
    # What sizing calls cheaper is cheaper, and the measured curves are what it goes by.
    sizer = Sizer(result.program, result.sizes.classes, costs)
    even = sizer.fixed(np.ones(4))
    saved = sizer.variable_cost(even) - sizer.variable_cost(result.sizes)
    assert saved >= 0
    true = program_cost(result.program, even, costs) - program_cost(result.program, result.sizes, costs)
    assert saved == pytest.approx(true, rel=1e-6, abs=1e-12)
    assert sizer.class_costs.has_curves


@pytest.mark.parametrize("curves", [False, True])
def test_times_of_many_works_are_those_of_each(curves: bool) -> None:
    """To the last bit, as they are looked up by either."""
    known = graphs.cluster([3.0, 2.0, 1.0])
    known = measured(known) if curves else known
    graph = graphs.random_graph(1, ops=3).graph
    costs = CostModel(graph, known, FactorTable(graph))
    rng = np.random.default_rng(0)
    works: list[tuple[Work, list[np.ndarray]]] = []
    for _ in range(200):
        cuts = int(rng.integers(3))
        masks = [m for m in ((), (0,), (0, 1), (1,)) if max(m, default=-1) < cuts and rng.integers(2)]
        moved = tuple((m, float(rng.integers(1, 10**8))) for m in sorted(masks))
        lanes = tuple(int(n) for n in rng.choice([0, 3, 48, 1000], cuts))
        name = str(rng.choice(["", "matmul"]))
        work = Work(float(rng.integers(10**9)), moved, int(rng.integers(2)), "float32", lanes, (), name)
        works.append((work, [np.append(rng.dirichlet(np.ones(2)), 0.0) for _ in range(cuts)]))
    assert costs.times(works).tolist() == [costs.time(*work) for work in works]
    assert costs.times([]).tolist() == []
