"""Plans that use some of a cluster's devices: which sets are looked at, the bounds that drop them, using such plans."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
import strategies
from counting_clock import count_looks
from jax.sharding import Mesh
from strategies import gpus, hosts

import hapsynth
from hapsynth.cluster.cluster import Cluster, ClusterError, DeviceKind, Link
from hapsynth.cluster.curves import Curve
from hapsynth.cluster.granularity import Granularity
from hapsynth.cluster.links import HostLinks
from hapsynth.graph.trace import trace
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.plan import Plan, PlanError
from hapsynth.report.json_records import search_record
from hapsynth.search.cost.model import CostModel
from hapsynth.search.formulation.choice_space import ChoiceSpace
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.device_subsets import ClusterPlanner, IdealWorkBound, subclusters
from hapsynth.search.planning.planner import InfeasibleError, Planner
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.result import Progress
from hapsynth.search.solver import solve

ARGS = strategies.mlp_args(2048, 64, 256)
MATMUL = Curve(((1e6, 4e-6), (1e8, 1e-4), (1e9, 5e-4)))
CURVES = {"all_reduce": Curve(((0.0, 2e-5), (1e5, 3e-5)))}
UNLIKE = gpus([3.0, 0.1, 3.0, 0.1], bandwidth=3e10, memory_bandwidth=1e12)
"""Two fast devices and two that are thirty times as slow, taking turns."""


def mesh(cluster: Cluster) -> Mesh:
    names, lengths = zip(*cluster.axes)
    return Mesh(np.array(jax.devices()[: cluster.n]).reshape(lengths), names)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hapsynth.synthesize(strategies.mlp, ARGS, mesh(UNLIKE), cluster=UNLIKE)


def test_a_set_is_of_fast_devices_hosts_or_positions() -> None:
    assert subclusters(gpus([1.0])) == []
    assert subclusters(UNLIKE) == [(0, 2), (0,), (1, 3), (1,)]
    found = subclusters(hosts(2, 4))
    assert {(0, 1, 2, 3), (0, 1, 4, 5), (0, 4), (0,)} <= set(found)
    assert len(found) == len(set(found))
    assert all(0 < len(devices) < 8 for devices in found)


def test_hosts_of_slow_links_may_be_left_out() -> None:
    """Though their devices are as fast as the others."""
    own = {host: HostLinks(Link(bandwidth, 1e-5)) for host, bandwidth in enumerate([1e8, 1e9, 1e9])}
    found = set(subclusters(replace(hosts(4, 2, network=1e10), host_links=own)))
    assert {(2, 3, 4, 5, 6, 7), (6, 7), (2, 3, 6, 7)} <= found
    one_slow = replace(hosts(3, 2, network=1e10), host_links={0: own[0]})
    assert hapsynth.synthesize(strategies.mlp, ARGS, one_slow).devices == (2, 3, 4, 5)


def test_a_subset_keeps_the_axes_where_it_is_a_mesh_of_them() -> None:
    cluster = hosts(2, 4)
    assert cluster.subset((0, 2, 4, 6)).axes == (("host", 2), ("device", 2))
    assert cluster.subset((4, 5, 6, 7)).axes == (("host", 1), ("device", 4))
    assert cluster.subset((4, 5, 6, 7)).hosts == (0,) * 4
    assert cluster.subset((0, 1, 6)).axes == (("hap", 3),)
    assert cluster.subset(tuple(range(8))) is cluster
    assert UNLIKE.subset((1, 2)).devices == UNLIKE.devices[1:3]
    for wrong in ((), (2, 1), (1, 1), (-1, 2), (3, 8)):
        with pytest.raises(ClusterError, match="are not positions of its 8 devices"):
            cluster.subset(wrong)


def test_what_was_measured_along_an_axis_counts_for_a_part_of_it() -> None:
    cluster = replace(hosts(2, 4), collectives={"host": CURVES, "device": CURVES})
    assert cluster.subset((0, 1, 4, 5)).collectives == cluster.collectives
    # One host: what it took between two says nothing.
    assert cluster.subset((0, 1, 2, 3)).collectives == {"device": CURVES}
    assert cluster.subset((0, 1)).collectives == {}
    assert cluster.subset((0, 1, 6)).collectives == {}
    flat = replace(UNLIKE, collectives={"hap": CURVES})
    assert flat.subset((0, 2)).collectives == {"hap": CURVES}
    assert flat.subset((0,)).collectives == {}


MEASURED = replace(UNLIKE, devices=tuple(replace(d, measured={"matmul": {"float32": MATMUL}}) for d in UNLIKE.devices))


@pytest.mark.parametrize(
    "cluster", [MEASURED, UNLIKE, gpus([1.0] * 4, bandwidth=1e9), hosts(2, 2), gpus([2.0])], ids=str
)
def test_the_least_work_is_a_bound(cluster: Cluster) -> None:
    graph = trace(strategies.mlp, ARGS).graph
    task = Task(graph, cluster)
    least = IdealWorkBound(task.choices, task.costs).on(cluster)
    joint = Planner(task).joint_bound()
    assert 0 < least <= joint
    if cluster.n == 1:
        assert least == pytest.approx(Planner(task).run().cost_s, rel=0.05), "nothing is communicated"


def test_fewer_kinds_launch_fewer_kernels() -> None:
    """A kind of which nothing is known writes one result with each kernel, others many: a set without it is bounded by
    what its own devices launch."""
    kind = lambda n: DeviceKind(f"x{n}", {"float32": 1e13}, 5e11, 1 << 34, granularity=Granularity(outputs=n))
    many, one = kind(96), kind(1)
    cluster = Cluster("test", (many, many, one, one), (0, 1, 2, 3), Link(1e10, 1e-6))

    def momentum(p: jax.Array, m: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        m = 0.9 * m + g
        return p - 0.1 * m, m

    task = Task(trace(momentum, (np.ones((8, 8), np.float32),) * 3).graph, cluster)
    within = IdealWorkBound(task.choices, task.costs)
    for devices in ((0, 1), (2, 3)):
        subset = cluster.subset(devices)
        alone = Task(task.graph, subset)
        assert within.on(subset) == IdealWorkBound(alone.choices, alone.costs).on(subset)
    assert within.makespan_on(cluster.subset((0, 1))) < within.makespan_on(cluster.subset((2, 3)))


def test_a_bound_that_is_enough_ends_the_search() -> None:
    graph = trace(strategies.mlp, ARGS).graph
    table = FactorTable(graph)
    problem = ProblemBuilder(ChoiceSpace(graph, table), CostModel(graph, UNLIKE, table), None).problem()
    full = solve(problem)
    assert solve(problem, enough=0.9 * full.cost).lower_bound == pytest.approx(0.9 * full.cost)
    assert solve(problem, enough=2 * full.cost).lower_bound == pytest.approx(full.cost)
    assert solve(problem, enough=2 * full.cost).cost == full.cost


def test_a_kind_is_left_out_and_the_plan_computes_the_same(plan: Plan) -> None:
    whole = Planner(Task(plan.traced.graph, UNLIKE)).run()
    assert plan.devices == (0, 2)
    assert plan.used.devices == (UNLIKE.devices[0],) * 2
    # What is not cut, the update of the weights, keeps a slow device thirty times as long as a fast one.
    assert whole.cost_s > 1.2 * plan.cost
    assert plan.cost == pytest.approx(Planner(Task(plan.traced.graph, plan.used)).run().cost_s)
    assert plan.mesh is not None
    assert plan.mesh.devices.tolist() == [jax.devices()[0], jax.devices()[2]]
    assert plan.check().ok
    x = np.ones((2048, 64), np.float32)
    params = {k: np.full(s.shape, 0.01, np.float32) for k, s in ARGS[0].items()}
    placed = plan.shard(params, x)
    made = plan(*placed)
    assert {d.id for leaf in jax.tree.leaves(made) for d in leaf.sharding.device_set} == {0, 2}
    for got, want in zip(jax.tree.leaves(plan.unshard(made)), jax.tree.leaves(strategies.mlp(params, x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_what_is_told_of_devices_left_out(plan: Plan) -> None:
    assert [m > 0 for m in plan.memory] == [True, False, True, False]
    for shares in plan.ratios.values():
        assert shares[1] == shares[3] == 0
        assert sum(shares) == pytest.approx(1)
    record = search_record(plan)
    assert (record["devices"], record["devices_used"]) == (4, [0, 2])
    assert (record["mesh"], record["mesh_used"]) == ({"hap": 4}, {"hap": 2})
    assert record["with_all_s"] > plan.cost
    assert "2 of 4 devices" in repr(plan)


def test_the_joint_bound_holds_on_every_set(plan: Plan) -> None:
    graph = plan.traced.graph
    for devices in (tuple(range(4)), *subclusters(UNLIKE)):
        assert Planner(Task(graph, UNLIKE.subset(devices))).run().cost_s >= plan.joint_lower_bound * (1 - 1e-9)
    assert plan.lower_bound <= plan.cost
    assert plan.joint_lower_bound <= plan.cost


def test_a_saved_plan_knows_its_devices(plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    again = hapsynth.load(file, strategies.mlp, ARGS, mesh(UNLIKE))
    assert (again.devices, again.memory, again.cost) == (plan.devices, plan.memory, plan.cost)
    assert again.result.with_all_s == plan.result.with_all_s
    assert again.ratios == plan.ratios
    assert again.check().ok
    # A mesh of just these devices will do; any other number will not.
    some = hapsynth.load(file, strategies.mlp, ARGS, Mesh(np.array(jax.devices()[4:6]), ("x",)))
    assert some.check().ok
    with pytest.raises(ValueError, match="the program is for 2 devices"):
        hapsynth.load(file, strategies.mlp, ARGS, Mesh(np.array(jax.devices()[:3]), ("x",)))


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([0, 1, 2], "the program is for 2 devices and the file names 3"),
        ([0, 7], "are not positions of its 4 devices"),
        ([2, 0], "are not positions of its 4 devices"),
        ([], "are not positions of its 4 devices"),
        ([0, 1.5], "1.5 is no integer"),
        (2, "was edited, or made by another version"),
        (None, "the program is for 2 devices and the cluster has 4"),
    ],
)
def test_a_plan_file_with_other_devices_is_refused(plan: Plan, tmp_path: Path, devices: object, message: str) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    data = json.loads(file.read_text())
    data["devices"] = devices
    if devices is None:
        del data["devices"]
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message):
        hapsynth.load(file, strategies.mlp, ARGS)


def test_nothing_is_left_out_where_all_help_or_must_take_part() -> None:
    graph = trace(strategies.mlp, ARGS).graph
    for cluster in (gpus([1.0] * 4, bandwidth=1e12), gpus([1.0] * 4, bandwidth=1e6), hosts(2, 2, network=1e11)):
        ours, before = ClusterPlanner(Task(graph, cluster)).run(), Planner(Task(graph, cluster)).run()
        assert ours.devices is None
        assert ours.program.to_dict() == before.program.to_dict()
        assert (ours.sizes.shares, ours.cost_s, ours.lower_bound_s) == (
            before.sizes.shares,
            before.cost_s,
            before.lower_bound_s,
        )
    for options in ({"leave_out": False}, {"fixed": {"[1]": "S(0)"}}):
        plan = hapsynth.synthesize(strategies.mlp, ARGS, UNLIKE, **options)
        assert plan.devices == (0, 1, 2, 3)


def test_an_empty_dict_of_layouts_fixes_none(plan: Plan) -> None:
    free = hapsynth.synthesize(strategies.mlp, ARGS, UNLIKE, fixed={})
    assert (free.devices, free.cost) == (plan.devices, plan.cost)


def test_a_device_too_small_is_left_out() -> None:
    """The small one limits all: the switch form stores every shard padded."""
    big, small = gpus([0.1, 0.09]).devices
    cluster = Cluster("small", (big, replace(small, memory=100_000), big), (0, 1, 2), gpus([1.0]).network)
    plan = hapsynth.synthesize(strategies.mlp, ARGS, mesh(cluster), cluster=cluster)
    assert plan.devices == (0, 2)
    assert plan.memory_limit == big.memory
    with pytest.raises(hapsynth.InfeasibleError, match=r"device 1 \(x0.09\) has"):
        hapsynth.synthesize(strategies.mlp, ARGS, cluster, leave_out=False)
    with pytest.raises(hapsynth.InfeasibleError, match="no program fits"):
        hapsynth.synthesize(strategies.mlp, ARGS, cluster, memory_limit=1e5)


def test_a_slow_network_leaves_out_hosts_or_positions_of_an_axis() -> None:
    """The second host is half as fast: with a whole step of its own it would keep the first one waiting."""
    cluster = hosts(2, 2, speed=0.01, network=1e6, intra=1e11)
    cluster = replace(cluster, devices=cluster.devices[:2] + gpus([0.005] * 2).devices)
    plan = hapsynth.synthesize(strategies.mlp, ARGS, mesh(cluster), cluster=cluster)
    assert plan.devices == (0, 1)
    assert plan.program.axes == (("hap", 2),)
    assert plan.check().ok
    fast = hosts(2, 2, speed=0.01, network=1e11, intra=1e11)
    slow = gpus([0.0001]).devices
    wide = replace(
        fast, devices=(*fast.devices[:2], *slow) * 2, hosts=(0, 0, 0, 1, 1, 1), axes=(("host", 2), ("gpu", 3))
    )
    plan = hapsynth.synthesize(strategies.mlp, ARGS, mesh(wide), cluster=wide)
    assert plan.devices == (0, 1, 3, 4)
    assert plan.program.axes == (("host", 2), ("gpu", 2))
    assert all(len(r) in (2, 3, 6) and sum(r) == pytest.approx(1) for r in plan.ratios.values())
    for name, ratios in plan.ratios.items():
        axes = name.partition("@")[2].split(",")
        held = np.reshape(ratios, [dict(wide.axes)[axis] for axis in axes])
        assert "gpu" not in axes or not held.take(2, axis=axes.index("gpu")).any()
    assert any("gpu" in name.partition("@")[2] for name in plan.ratios)
    assert plan.check().ok


def test_ctrl_c_and_the_time_budget_keep_what_was_found() -> None:
    graph = trace(strategies.mlp, ARGS).graph
    stages: list[Progress] = []

    def interrupted(p: Progress) -> None:
        stages.append(p)
        if "of 4 devices" in p.stage:
            raise KeyboardInterrupt

    result = ClusterPlanner(Task(graph, UNLIKE, PlanningOptions(progress=interrupted))).run()
    assert result.interrupted
    assert result.joint_lower_bound_s <= result.cost_s
    assert all(a.expanded <= b.expanded for a, b in pairwise(stages) if a.stage == b.stage)
    late = ClusterPlanner(Task(graph, UNLIKE, PlanningOptions(time_budget_s=1e-9))).run()
    assert late.cost_s <= Planner(Task(graph, UNLIKE, PlanningOptions(time_budget_s=1e-9))).run().cost_s * (1 + 1e-9)
    assert late.joint_lower_bound_s <= result.cost_s


def test_a_budget_with_overlap_leaves_time_for_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second each time it is looked at. All devices would take all of the budget."""
    graph, now = trace(strategies.mlp, ARGS).graph, count_looks(monkeypatch)
    explore, looked = Planner.explore_makespans, list[int]()

    def dawdling(self: Planner, known_s: float = np.inf) -> float:
        found = explore(self, known_s)
        looked.append(self.task.cluster.n)
        while not self.clock.late():
            pass
        return found

    monkeypatch.setattr(Planner, "explore_makespans", dawdling)
    budget = 10_000.0
    result = ClusterPlanner(Task(graph, UNLIKE, PlanningOptions(overlap=True, time_budget_s=budget))).run()
    assert looked[0] == 4
    assert min(looked) < 4
    assert now[0] < 1.1 * budget
    assert result.lower_bound_s <= result.cost_s


def test_with_overlap_ctrl_c_while_a_set_has_no_plan_keeps_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, looks = trace(strategies.mlp, ARGS).graph, list[float]()
    first_look, explore = Planner.explore_makespans, Planner.explore

    def looked(self: Planner, known_s: float = np.inf) -> float:
        looks.append(first_look(self, known_s))
        return looks[-1]

    def pressed(self: Planner, cutoff: float = np.inf) -> float:
        if self.task.cluster.n < UNLIKE.n:
            raise KeyboardInterrupt
        return explore(self, cutoff)

    monkeypatch.setattr(Planner, "explore_makespans", looked)
    monkeypatch.setattr(Planner, "explore", pressed)
    result = ClusterPlanner(Task(graph, UNLIKE, PlanningOptions(overlap=True))).run()
    assert result.interrupted
    assert result.devices is None
    assert result.cost_s <= looks[0] * (1 + 1e-9)


def test_where_nothing_fits_all_devices_are_told_of() -> None:
    graph = trace(strategies.mlp, ARGS).graph

    def lacking(*, overlap: bool) -> InfeasibleError:
        options = PlanningOptions(memory_limit=1e4, overlap=overlap)
        with pytest.raises(InfeasibleError) as raised:
            ClusterPlanner(Task(graph, UNLIKE, options)).run()
        return raised.value

    with_overlap, without = lacking(overlap=True), lacking(overlap=False)
    assert str(with_overlap) == str(without)
    assert (with_overlap.needs, with_overlap.excess) == (without.needs, without.excess)


def test_with_overlap_too_a_set_is_made_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices never hold it, as one is tiny; others do once the least is sought."""
    tiny = replace(UNLIKE.devices[1], name="tiny", memory=1 << 10)
    cluster = replace(UNLIKE, devices=(*UNLIKE.devices[:3], tiny))
    monkeypatch.setattr(Planner, "_explore", lambda self: None)
    graph = trace(strategies.mlp, ARGS).graph
    for overlap in (False, True):
        result = ClusterPlanner(Task(graph, cluster, PlanningOptions(overlap=overlap))).run()
        assert result.devices is not None
        assert 3 not in result.devices


def test_ctrl_c_in_the_plan_for_one_axis_ends_that_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = trace(strategies.mlp, ARGS).graph, replace(UNLIKE, axes=(("a", 2), ("b", 2)))
    flat = list[PlanningOptions]()

    def pressed(self: Planner, best: Candidate) -> None:
        assert len(self.task.cluster.axes) == 1, "nothing is certified after Ctrl-C"
        flat.append(self.task.options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Planner, "_certify", pressed)
    result = ClusterPlanner(Task(graph, cluster, PlanningOptions(joint_gap=0.01))).run()
    assert result.interrupted
    assert [options.joint_gap for options in flat] == [None]
