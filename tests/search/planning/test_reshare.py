"""Reshares: the exchange itself, who decides on them, and programs with them in every room."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exported import assert_exports
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from milp import optimum
from resharing import arguments, cluster, pooled, reshares, running_step, step_arguments
from two_axes import cut_again

import hapsynth
from hapsynth.adapting import rebalance
from hapsynth.cli.main import main
from hapsynth.cluster.curves import Curve
from hapsynth.instructions.collectives import axis_between
from hapsynth.instructions.layout import parse_layout
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, Program, ProgramError
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.moved_rows import moved, moves
from hapsynth.instructions.testing.example_arguments import random_arguments
from hapsynth.instructions.testing.simulate import random_shares
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._recut import Recut
from hapsynth.plan import Plan, PlanError
from hapsynth.search.cost.program_cost import conversion_cost, instruction_costs, program_cost
from hapsynth.search.formulation.emission import Emitter
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.formulation.ways import ChoicesInWays
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.resharding import search as resharding
from hapsynth.search.planning.resharding.insertion import ReshardInserter
from hapsynth.search.planning.resharding.ratio_variants import RatioVariants, VariantBuilder
from hapsynth.search.planning.resharding.rewrite import merged
from hapsynth.search.planning.resharding.search import Resharding
from hapsynth.search.planning.task import Task
from hapsynth.search.result import SETTLED, Result
from hapsynth.search.solver import Solution, solve
from hapsynth.search.solver.min_cut import Hyperedge, cheapest_labels


@st.composite
def recuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two ways to deal some rows to some devices, zero shares among them."""
    n, rows = draw(st.integers(1, 6)), draw(st.integers(1, 24))
    ends = lambda: sorted(draw(st.lists(st.integers(0, rows), min_size=n - 1, max_size=n - 1)))
    return tuple(tuple(b - a for a, b in pairwise((0, *cuts, rows))) for cuts in (ends(), ends()))


@hypothesis.given(recuts())
def test_every_row_goes_straight_to_its_new_owner(cuts: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    old, new = cuts
    owner = np.repeat(np.arange(len(old)), old)
    due = np.repeat(np.arange(len(new)), new)
    first = np.concatenate([[0], np.cumsum(old)])
    found = np.full(sum(old), -1)
    for move in moves(old, new):
        for i, (start, rows) in enumerate(zip(move.start, move.rows, strict=True)):
            mine = np.arange(first[i] + start, first[i] + start + rows)
            assert (owner[mine] == i).all()
            assert (found[mine] == -1).all()
            found[mine] = i + move.distance
    np.testing.assert_array_equal(found, due)
    # What it costs is what is sent: permutes, and their longest pieces.
    sent = [m.longest for m in moves(old, new) if m.distance]
    longest, sends = moved(np.array(old) / sum(old), np.array(new) / sum(old))
    assert longest[longest > 0].tolist() == pytest.approx([x / sum(old) for x in reversed(sent)])
    pairs = [[i, i + m.distance] for m in moves(old, new) for i, rows in enumerate(m.rows) if rows]
    assert sorted(pairs) == np.argwhere(sends).tolist()
    assert (old == new) <= (not sent)


def test_where_neighbours_exchange_the_cost_is_linear_in_how_far_boundaries_move() -> None:
    old = np.array([0.25, 0.25, 0.25, 0.25])
    for shift in (0.02, 0.04, 0.08):
        new = old + np.array([shift, 0.0, -shift, 0.0])
        assert moved(old, new)[0].sum() == pytest.approx(shift)
    with pytest.raises(ValueError, match="do not become"):
        moves((1, 2), (2, 2))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_shards_become_those_of_other_sizes(dtype: str, apart: bool) -> None:
    """Random sizes, zero shares too, cut along either dimension: what each device then holds, in code of them all and
    in each one's own."""
    rng, n, rows = np.random.default_rng(5), 4, 13
    mesh = Mesh(np.array(jax.devices()[:n]), ("d",))
    cuts = [(random_shares(rng, rows, n), random_shares(rng, rows, n), trial % 2) for trial in range(12)]
    full = [jnp.asarray(rng.integers(0, 99, (rows, 3) if dim == 0 else (3, rows))).astype(dtype) for *_, dim in cuts]

    def shards(x: Any, lengths: tuple[int, ...], dim: int) -> np.ndarray:
        """Padded to the longest, with something else than zeros: [devices, ...]."""
        parts = np.split(np.asarray(x), np.cumsum(lengths)[:-1], axis=dim)
        widths = [[(0, max(lengths) - p.shape[d]) if d == dim else (0, 0) for d in range(2)] for p in parts]
        return np.stack([np.pad(p, w, constant_values=1) for p, w in zip(parts, widths, strict=True)])

    def each(fn: Any, x: jax.Array) -> jax.Array:
        if not apart:
            return fn(x, MeshPosition((n,), tuple(np.ndindex(n)), (lax.axis_index("d"),)))
        own = [partial(fn, here=MeshPosition((n,), ((i,),), (jnp.int32(i),))) for i in range(n)]
        return lax.switch(lax.axis_index("d"), own, x)

    def run(*held: jax.Array) -> list[jax.Array]:
        out: list[jax.Array] = []
        for (old, new, dim), x in zip(cuts, held, strict=True):
            recut = Recut.between(dim, (0,), old, new)
            out.append(each(recut.receive, recut.exchange("d", each(recut.send, x[0])))[None])
        return out

    given = [shards(x, old, dim) for x, (old, _, dim) in zip(full, cuts, strict=True)]
    spec = PartitionSpec("d")
    made = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(*given)
    for x, (_, new, dim), got in zip(full, cuts, made, strict=True):
        parts = np.split(np.asarray(x), np.cumsum(new)[:-1], axis=dim)
        for i, part in enumerate(parts):
            np.testing.assert_array_equal(np.take(np.asarray(got)[i], np.arange(new[i]), axis=dim), part)


@hypothesis.given(st.integers(0, 10_000))
def test_two_labels_are_the_cheapest_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    atoms = int(rng.integers(2, 8))
    first, second = rng.integers(0, 20, (2, atoms)).astype(float)
    flows = []
    for _ in range(int(rng.integers(1, 8))):
        maker, *takers = rng.permutation(atoms)[: rng.integers(2, atoms + 1)].tolist()
        flows.append(Hyperedge(maker, tuple(takers), 1.0))
    up, down = rng.integers(0, 12, (2, len(flows))).astype(float)

    def cost(labels: np.ndarray) -> float:
        total = np.where(labels == 0, first, second).sum()
        for flow, a, b in zip(flows, up, down, strict=True):
            if any(labels[t] != labels[flow.maker] for t in flow.takers):
                total += b if labels[flow.maker] else a
        return float(total)

    every = [np.array(bits) for bits in np.ndindex(*[2] * atoms)]
    assert cost(cheapest_labels(first, second, flows, (up, down))) == pytest.approx(min(map(cost, every)), abs=1e-4)


# Who decides


def task_of(fn: Any, args: Any, where: hapsynth.Cluster) -> Task:
    return Task(hapsynth.graph.trace.trace(fn, args, {}).graph, where)


def planned(fn: Any, args: Any, where: hapsynth.Cluster) -> Result:
    return Planner(task_of(fn, args, where)).run()


def without(fn: Any, args: Any, where: hapsynth.Cluster) -> Any:
    """The result of planning with one ratio for each class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReshardInserter, "improved", lambda self, candidate: candidate)
        return planned(fn, args, where)


BANDWIDTHS = ("1 GB/s", "400 MB/s", "100 MB/s", "25 MB/s", "5 MB/s")


@pytest.fixture(scope="module")
def sweep() -> list[tuple[Any, Any]]:
    """(with, without) reshares, as the link slows."""
    return [(planned(pooled, arguments(), w), without(pooled, arguments(), w)) for w in map(cluster, BANDWIDTHS)]


def test_a_ratio_changes_where_the_link_is_fast_and_does_not_where_it_is_slow(sweep: list[tuple[Any, Any]]) -> None:
    counts = [len(reshares(found.program)) for found, _ in sweep]
    assert counts == [1, 1, 1, 0, 0]
    gains = [plain.cost_s / found.cost_s for found, plain in sweep]
    assert gains[0] > 1.45
    assert gains[1] > 1.4
    assert gains[2] > 1.25
    assert all(a >= b for a, b in pairwise(gains))
    assert gains[-1] == 1.0
    # What reads goes by bandwidth, which is alike, what computes by FLOP/s.
    ratios = dict(zip(("reads", "computes"), sweep[1][0].sizes.shares, strict=True))
    assert len(set(ratios["reads"])) == 1
    assert ratios["computes"][0] > 8 * ratios["computes"][-1]


def test_where_no_reshare_pays_the_result_is_the_same(sweep: list[tuple[Any, Any]]) -> None:
    found, plain = sweep[-1]
    assert found.program == plain.program or found.program.to_dict() == plain.program.to_dict()
    assert (found.sizes.shares, found.cost_s, found.lower_bound_s) == (
        plain.sizes.shares,
        plain.cost_s,
        plain.lower_bound_s,
    )


@pytest.mark.parametrize(("bandwidth", "counts"), [("400 MB/s", [1, 1]), ("34 MB/s", [1, 0])])
def test_where_devices_were_measured_it_has_to_gain_what_they_may_be_off(bandwidth: str, counts: list[int]) -> None:
    """As fast as the table says, one point of a curve each: at 34 MB/s a reshare gains 3 %."""
    table = cluster(bandwidth)
    curve = lambda kind: {"matmul": {"float32": Curve(((1e6, 1e6 / kind.rate("float32")),))}}
    measured = replace(table, devices=tuple(replace(kind, measured=curve(kind)) for kind in table.devices))
    found = [planned(pooled, arguments(), where) for where in (table, measured)]
    assert [len(reshares(each.program)) for each in found] == counts


def test_bounds_hold_with_reshares(sweep: list[tuple[Any, Any]]) -> None:
    for found, plain in sweep:
        assert found.joint_lower_bound_s <= found.lower_bound_s <= found.cost_s
        assert found.ratio_bound_s <= found.cost_s
        assert found.joint_lower_bound_s == pytest.approx(plain.joint_lower_bound_s, rel=1e-3)
        # At several ratios at once there are more programs.
        assert found.lower_bound_s <= plain.lower_bound_s * (1 + 1e-9)
        assert 0 <= found.gap <= SETTLED


def test_where_cuts_are_too_many_the_joint_bound_is_all_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resharding, "_CUTS", 0)
    found = planned(pooled, arguments(), cluster("1 GB/s"))
    assert reshares(found.program)
    assert 0 < found.joint_lower_bound_s == found.lower_bound_s < found.cost_s


def at_each_way(task: Task, best: Candidate) -> tuple[ProblemBuilder, Solution]:
    """The cheapest program whose instructions are each at one of a candidate's ratios."""
    ways = RatioVariants(task.costs, best.sizes)
    builder = VariantBuilder(ChoicesInWays(task.costs, ways.count), task.costs, ways.ratios().strictly())
    return builder, solve(builder.problem(), tolerance=1e-9)


@pytest.mark.parametrize(
    ("fn", "args", "bandwidth"),
    [
        (pooled, arguments(), "1 GB/s"),
        (pooled, arguments(), "100 MB/s"),
        (running_step, step_arguments(features=128, read=8, layers=6), "100 MB/s"),
    ],
)
def test_programs_with_reshares_are_searched_at_what_these_cost(fn: Any, args: Any, bandwidth: str) -> None:
    where = cluster(bandwidth)
    with pytest.MonkeyPatch.context() as patch:
        seen: list[Candidate] = []
        patch.setattr(Resharding, "_in_every_way", lambda self, best: (seen.append(best) or best, 0.0))
        task = task_of(fn, args, where)
        Planner(task).run()
    (chosen,) = seen
    assert reshares(chosen.program)
    builder, solution = at_each_way(task, chosen)
    # What was chosen is one of these programs; each costs what the problem says, at sizes that there are.
    assert solution.status == "optimal"
    assert solution.cost <= chosen.cost * (1 + 1e-9)
    assert solution.assignment is not None
    program = Emitter(builder, solution.assignment.tolist()).ordered(task.costs.axes)
    check(task.graph, program)
    assert builder.ratios is not None
    sizes = builder.ratios.sizes_of(Classes.build(task.graph, program, task.factors))
    assert sizes is not None
    assert program_cost(program, sizes, task.costs) == pytest.approx(solution.cost, rel=1e-9)
    # The independent oracle.
    assert optimum(builder.problem()).cost == pytest.approx(solution.cost, rel=1e-6)
    found = planned(fn, args, where)
    assert found.cost_s <= solution.cost * (1 + 1e-9)
    assert found.gap <= SETTLED


def test_where_another_cut_is_cheaper_than_a_reshare_it_is_found() -> None:
    """What is read could be cut by features too: an all-to-all changes the ratio with the dimension."""

    def summed(x: Any, weights: Any) -> Any:
        h = jnp.tanh(x).sum(axis=2)
        for w in weights:
            h = jnp.tanh(h @ w)
        return h

    found = planned(summed, arguments(), cluster("100 MB/s"))
    assert found.program.collectives() == {"all_to_all": 1}
    # With the reshare that is the best for the program of one ratio: 4.0708 ms.
    assert found.cost_s < 0.98 * 4.0708e-3
    assert found.gap <= SETTLED


@pytest.mark.parametrize("bandwidth", ["400 MB/s", "100 MB/s", "30 MB/s", "10 MB/s"])
@pytest.mark.parametrize("read", [4, 16])
def test_no_way_of_changing_ratios_along_a_chain_is_much_cheaper(bandwidth: str, read: int) -> None:
    """Every instruction of a chain at any of all ratios of two devices, by dynamic programming."""
    where, args = cluster(bandwidth, (1, 1)), arguments(rows=128, features=64, read=read)
    plain, task = without(pooled, args, where), task_of(pooled, args, where)
    assert not plain.program.collectives()
    costs, graph, (cls,) = task.costs, task.graph, plain.sizes.classes.all
    every = [(k, cls.units - k) for k in range(cls.units + 1)]
    fractions = np.array(every) / cls.units
    longest, _ = moved(fractions[:, None], fractions[None])
    permutes, rows = (longest > 0).sum(axis=-1), longest.sum(axis=-1)

    def seconds(shares: tuple[int, ...]) -> list[float]:
        sizes = Sizes(graph, plain.sizes.classes, (shares,))
        spent = [c.seconds for c in instruction_costs(plain.program, sizes, costs)]
        # What is fed, before the first.
        return [spent[0] + program_cost(plain.program, sizes, costs) - sum(spent), *spent[1:]]

    table = np.array([seconds(shares) for shares in every])
    least = table[:, 0]
    for i, (before, _) in enumerate(pairwise(plain.program.instructions), 1):
        assert isinstance(before, Compute)
        (value,) = graph.ops[before.op].results
        if costs.is_materialized(value):
            link = costs.links[0]
            change = permutes * link.latency + rows * graph.values[value].nbytes * link.beta
            least = np.minimum(least, (least[:, None] + change).min(axis=0))
        least = least + table[:, i]
    found = Planner(task).run()
    assert least.min() * (1 - 1e-9) <= found.cost_s <= least.min() * 1.01
    assert bool(reshares(found.program)) == bool(found.cost_s < plain.cost_s)


# In every room


def mesh(n: int = 4) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), ("hap",))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return hapsynth.synthesize(pooled, arguments(), mesh(), cluster=cluster(), leave_out=False, form="switch")


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_a_plan_with_reshares_runs_in_both_forms(form: Any) -> None:
    found = hapsynth.synthesize(pooled, arguments(), mesh(), cluster=cluster(), leave_out=False, form=form)
    assert reshares(found.program)
    assert found.check()


# In switch form random programs that change ratios run in test_reshare_random.py.
@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["switch", "staged"])
def test_a_training_step_changes_its_ratio_forward_and_backward(form: Any) -> None:
    shape = {"features": 128, "read": 8, "layers": 6}
    where, args = cluster("100 MB/s"), step_arguments(**shape)
    plain = without(running_step, args, where)
    found = hapsynth.synthesize(running_step, args, mesh(), cluster=where, leave_out=False, form=form)
    assert len(reshares(found.program)) == 2
    assert plain.cost_s > 1.15 * found.cost
    assert found.joint_lower_bound <= found.lower_bound <= found.cost
    assert found.check()
    # What is carried lies as before: a second step takes it on.
    state, x = found.shard(*random_arguments(found.traced)[0])
    state, first = found(state, x)
    _, second = found(state, x)
    assert np.isfinite([float(first), float(second)]).all()


def test_it_is_saved_and_loaded(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = hapsynth.load(tmp_path / "plan.json", pooled, arguments(), mesh())
    assert again.program.instructions == plan.program.instructions
    assert again.sizes.shares == plan.sizes.shares
    assert again.cost == plan.cost
    assert again.check()


def test_it_is_told_in_text_and_in_json(plan: Plan) -> None:
    (step,) = reshares(plan.program)
    assert "reshare" in plan.program.text(plan.traced.graph)
    assert "S(0)~1" in plan.program.text(plan.traced.graph)
    assert plan.program.collectives() == {"reshare": 1}
    assert Program.from_dict(json.loads(json.dumps(plan.program.to_dict()))).instructions == plan.program.instructions
    assert parse_layout("S(0)~1") == step.target
    assert any(name.endswith("~1") for name in plan.ratios)


def test_its_source_gives_the_same(plan: Plan) -> None:
    assert "ppermute" in assert_exports(plan)


def test_it_is_explained(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.save(tmp_path / "plan.json")
    model = "import resharing\n\n\ndef target():\n    return resharing.pooled, resharing.arguments()\n"
    (tmp_path / "model.py").write_text(model)
    asked = ["explain", str(tmp_path / "plan.json"), str(tmp_path / "model.py")]
    assert main(asked) == 0
    assert "reshare" in capsys.readouterr().out
    assert main([*asked, "--cost", "--json", "-"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["sending"]
    (step,) = reshares(plan.program)
    assert line["seconds"] == pytest.approx(conversion_cost(plan.cost_model(), plan.sizes, step)[0])


def test_it_is_made_for_other_shapes_and_other_speeds(plan: Plan) -> None:
    longer = plan.for_shapes(*arguments(rows=1024))
    assert longer.sizes.shares != plan.sizes.shares
    assert longer.check()
    busy = rebalance.busy_seconds(plan)
    slower = plan.rebalance(busy * [1.0, 1.0, 1.0, 3.0])
    assert slower.sizes.shares != plan.sizes.shares
    assert slower.check()


def _without_the_reshare(program: Program) -> Program:
    return replace(program, instructions=tuple(i for i in program.instructions if i not in reshares(program)))


def _of_another_class(program: Program) -> Program:
    """The op after the reshare takes the tensor as it was before: its operand and result are then of two classes."""
    (step,) = reshares(program)
    to_old = {step.target[0]: step.source[0]}
    at = program.instructions.index(step) + 1
    op = program.instructions[at]
    assert isinstance(op, Compute)
    triples = tuple(t._replace(operands=tuple(to_old.get(p, p) for p in t.operands)) for t in op.triples)
    changed = (*program.instructions[:at], Compute(op.op, triples), *program.instructions[at + 1 :])
    return replace(program, instructions=changed)


def test_the_checker_refuses_a_reshare_that_is_missing_or_of_another_class(plan: Plan, tmp_path: Path) -> None:
    graph, program, sizes = plan.traced.graph, plan.program, plan.sizes
    check(graph, program, sizes)
    with pytest.raises(ProgramError, match=r"S\(0\)~1, which does not hold"):
        check(graph, _without_the_reshare(program))
    with pytest.raises(ProgramError, match="alike, and the sizes are of classes in which they are not"):
        check(graph, _of_another_class(program), sizes)
    (step,) = reshares(program)
    twice = replace(program, instructions=tuple(i._replace(axis=1) if i == step else i for i in program.instructions))
    with pytest.raises(ProgramError):
        check(graph, twice, sizes)
    one = replace(sizes.classes, all=sizes.classes.all[:1], of=dict.fromkeys(sizes.classes.of, 0))
    with pytest.raises(ProgramError, match="between shards that are of one class"):
        check(graph, program, Sizes(graph, one, sizes.shares[:1]))
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    data["program"] = _without_the_reshare(program).to_dict()
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match="which does not hold"):
        hapsynth.load(tmp_path / "plan.json", pooled, arguments(), mesh())


def test_a_reshare_costs_nothing_between_equal_shards(plan: Plan) -> None:
    (step,) = reshares(plan.program)
    costs = plan.cost_model()
    assert conversion_cost(costs, plan.sizes, step)[0] > 0
    alike = Sizes(plan.traced.graph, plan.sizes.classes, (plan.sizes.shares[0],) * 2)
    assert conversion_cost(costs, alike, step) == (0.0, 0.0)


def test_asked_ratios_are_kept() -> None:
    ratios = [0.375, 0.375, 0.125, 0.125]
    found = hapsynth.synthesize(pooled, arguments(), cluster(), leave_out=False, ratios=ratios)
    assert not reshares(found.program)


def test_what_two_axes_cut_is_not_reshared() -> None:
    way = parse_layout
    assert axis_between(way("S(0),S(1)"), way("S(0)~1,S(1)")) == 0
    assert axis_between(way("R,S(1)"), way("R,S(1)~2")) == 1
    assert axis_between(way("S(0),S(0)/1"), way("S(0)~1,S(0)/1~1")) is None
    assert axis_between(way("S(0),S(0)/1"), way("S(0),S(0)/1~1")) is None
    assert axis_between(way("S(0)~1,S(0)/1~1"), way("S(0)~1,R")) == 1
    assert axis_between(way("S(0)~1,S(0)/1~1"), way("S(0),R")) is None


def test_shards_that_another_axis_cuts_again_stay_the_same() -> None:
    """A conversion cuts the shards that there are: of another way they would be other ones."""
    traced, program = cut_again()
    table = FactorTable(traced.graph)
    classes = Classes.build(traced.graph, program, table)
    uneven = [(1, *[0] * (2 ** len(cls.axes) - 2), cls.units - 1) for cls in classes.all]
    sizes = Sizes(traced.graph, classes, tuple(uneven))
    check(traced.graph, program, sizes)
    same, same_sizes = merged(traced.graph, program, sizes, table)
    assert (same, same_sizes) == (program, sizes)
