"""Collectives that go as one: by hand, against every way to bundle small task graphs, and in programs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from cp_sat import exact_makespan
from lowering_options import ALONE
from orders import random_order
from seeds import each_of
from slow_devices import SPEEDS, first_devices, thin_cluster

import hapsynth
from hapsynth.cluster.cluster import Link
from hapsynth.graph.trace import trace
from hapsynth.instructions.collectives import STEPS
from hapsynth.instructions.layout import R, S
from hapsynth.instructions.program.bundles import bundles_of
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Convert, Program, ProgramError
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.lower import Lowered, Staged, own_mesh
from hapsynth.lower._host_schedule import CollectiveStage
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.network import AxisLink
from hapsynth.search.scheduling.bundles import MORE_TRIALS, Neighbours, Trial, cut, rebundled
from hapsynth.search.scheduling.idle_time import filled
from hapsynth.search.scheduling.list_schedule import iterated, least_makespan, refined, schedule
from hapsynth.search.scheduling.tasks import Machine, TaskGraph, Transfer, tasks_of
from hapsynth.search.scheduling.timeline import Simulation, Timeline, simulate

LATENCY = 2.0
LINK = AxisLink(2, LATENCY, 1.0, 1.0, ring_s=0.0, tree_s=0.0, direct_s=0.0)
COMPUTE, NETWORK = Machine.COMPUTE, Machine.LINK
SMALL = LoweringOptions(bundled_bytes=100, bundle_bytes=100)


def graph_of(rows: Sequence[tuple[Machine, float, tuple[int, ...]]], options: LoweringOptions = SMALL) -> TaskGraph:
    """Tasks from (machine, seconds or bytes, makers): a byte takes a second, a collective two more."""
    machine, amount, makers = zip(*rows, strict=True)
    transfers = {
        task: Transfer(
            "all",
            frozenset({(task, R)}),
            LINK,
            "all_reduce",
            sent := amount[task],
            sent,
            0.0,
            sent > options.bundled_bytes,
        )
        for task, each in enumerate(machine)
        if each is Machine.LINK
    }
    seconds = np.array([[transfers[t].seconds if t in transfers else amount[t]] for t in range(len(rows))])
    instructions = tuple((task,) for task in range(len(rows)))
    return TaskGraph(machine, seconds, makers, instructions, np.arange(1), transfers=transfers, lowering=options)


def sent(tasks: TaskGraph) -> list[set[int]]:
    return [set(i) for i, machine in zip(tasks.instructions, tasks.machine, strict=True) if machine is Machine.LINK]


def test_what_waits_for_the_link_goes_together() -> None:
    """The first is sent while the others are made, which then share a latency."""
    rows = [(COMPUTE, 1.0, ()), (NETWORK, 4.0, (0,))]
    rows += [row for k in range(2, 8, 2) for row in ((COMPUTE, 1.0, (k - 2,)), (NETWORK, 1.0, (k,)))]
    tasks = graph_of(rows)
    assert sorted(map(sorted, sent(schedule(tasks).tasks))) == [[1], [3, 5, 7]]
    assert schedule(tasks).makespan_s == 1 + 6 + 3 + 2


def test_what_is_waited_for_starts_at_once() -> None:
    """The second would come so late that what needs the first waits longer than a latency."""
    rows = [(COMPUTE, 1.0, ()), (NETWORK, 3.0, (0,)), (COMPUTE, 9.0, (0,)), (NETWORK, 1.0, (2,))]
    tasks = graph_of([*rows, (COMPUTE, 9.0, (1,))])
    found = schedule(tasks)
    assert sent(found.tasks) == [{1}, {3}]
    together = tasks.joined(range(5), [[1, 3]])
    assert together is not None
    assert simulate(together, range(4)).makespan_s > found.makespan_s == 19


def test_bundles_are_as_large_as_they_may_be() -> None:
    rows = [(COMPUTE, 1.0, ()), *[(NETWORK, 4.0, (0,))] * 4]
    limited = lambda **options: sent(schedule(graph_of(rows, LoweringOptions(**options))).tasks)
    assert sorted(map(len, limited(bundled_bytes=4, bundle_bytes=8))) == [2, 2]
    assert sorted(map(len, limited(bundled_bytes=3, bundle_bytes=8))) == [1] * 4


def test_what_waits_for_another_does_not_go_with_it() -> None:
    tasks = graph_of([(NETWORK, 1.0, ()), (COMPUTE, 1.0, (0,)), (NETWORK, 1.0, (1,))])
    assert tasks.joined(range(3), [[0, 2]]) is None
    assert schedule(tasks).makespan_s == 3 + 1 + 3


def test_what_makes_the_same_does_not_go_together() -> None:
    """A program may gather a value, drop it and gather it again."""
    tasks = graph_of([(COMPUTE, 1.0, ()), *[(NETWORK, 4.0, (0,))] * 3])
    again = replace(tasks, transfers=tasks.transfers | {3: tasks.transfers[1]})
    assert sent(schedule(tasks).tasks) == [{1, 2, 3}]
    found = sent(schedule(again).tasks)
    assert sorted(map(len, found)) == [1, 2]
    assert {1, 3} not in found


def test_a_bundle_that_is_waited_for_is_cut() -> None:
    """Two are needed at once, and one at the end, which would hold them up if it went with them."""
    rows = [(NETWORK, 1.0, ()), (NETWORK, 20.0, ()), (NETWORK, 1.0, ())]
    tasks = graph_of([*rows, (COMPUTE, 30.0, (0, 2)), (COMPUTE, 1.0, (1, 3))])
    together = tasks.joined(range(5), [[0, 1, 2]])
    assert together is not None
    whole = simulate(together, range(3))
    as_it_is = lambda tasks: simulate(tasks, range(len(tasks.machine)))
    found = cut(whole, as_it_is)
    assert whole.makespan_s == 24 + 31
    assert sorted(map(sorted, sent(found.tasks))) == [[0, 2], [1]]
    assert found.makespan_s == 4 + 31
    assert cut(found, as_it_is) is found
    assert cut(as_it_is(tasks), as_it_is).tasks is tasks


def test_what_is_cut_off_goes_where_it_is_needed() -> None:
    """One is needed at once, the other at the end; next to one another they would hold up what comes between."""
    rows = [(NETWORK, 1.0, ()), (NETWORK, 20.0, ()), (COMPUTE, 3.0, ()), (NETWORK, 6.0, (2,))]
    tasks = graph_of([*rows, (COMPUTE, 2.0, (0,)), (COMPUTE, 30.0, (3, 4)), (COMPUTE, 1.0, (1, 5))])
    together = tasks.joined(range(7), [[0, 1]])
    assert together is not None
    whole = simulate(together, range(6))
    assert whole.makespan_s == 23 + 8 + 31
    assert cut(whole, lambda tasks: simulate(tasks, range(len(tasks.machine)))).makespan_s == whole.makespan_s
    found = refined(whole)
    assert sorted(map(sorted, sent(found.tasks))) == [[0], [1], [3]]
    assert found.makespan_s == 3 + 8 + 31


@pytest.mark.parametrize(("latency_s", "most"), [(0.0, 1 << 10), (0.5, 1 << 19), (12.0, 8 << 20)])
def test_larger_ones_go_together_where_copies_take_less_than_a_latency(latency_s: float, most: int) -> None:
    """Two devices take a latency each. Copies into a bundle and out of it have a quarter of a memory's 4 MiB/s; none
    goes with others that is larger than half a bundle."""
    graph = trace(lambda x: x.sum(axis=0), (np.zeros((4, 8), np.float32),)).graph
    small = LoweringOptions(bundled_bytes=1 << 10, bundle_bytes=16 << 20)
    cluster = replace(thin_cluster(((4 << 20) / 1e9,) * 2), network=Link(1e9, latency_s / 2))
    costs = CostModel(graph, cluster, FactorTable(graph), lowering=small)
    assert costs.links[0].seconds("all_gather", 0.0) == latency_s
    assert costs.most_bundled(STEPS["all_gather"], 0) == most


def test_what_is_needed_first_goes_before_the_rest() -> None:
    """Of four the long computing waits for one; the others share a latency."""
    rows = [(NETWORK, 6.0, ()), (COMPUTE, 9.0, (0,)), *[(NETWORK, 6.0, ())] * 3, (COMPUTE, 1.0, (1, 2, 3, 4))]
    found = schedule(graph_of(rows))
    assert sorted(map(sorted, sent(found.tasks))) == [[0], [2, 3, 4]]
    assert found.makespan_s == 8 + 20 + 1


def test_what_is_made_while_others_are_sent_goes_together() -> None:
    """Twelve are made in a row, one each second, and take the link three seconds each: it sends one of them, three,
    five and three."""
    rows = [row for n in range(12) for row in ((COMPUTE, 1.0, (2 * n - 2,)[:n]), (NETWORK, 1.0, (2 * n,)))]
    tasks = graph_of(rows)
    assert simulate(tasks, range(24)).makespan_s == 1 + 36
    assert schedule(tasks).makespan_s <= 1 + 12 + 4 * LATENCY


@each_of(range(40))
def test_what_pairs_come_to_is_told_without_their_tasks(seed: int) -> None:
    """Of random tasks in random orders, also of pairs that would wait for themselves."""
    rng, slower = random.Random(seed), np.array([1.0, 1.5])
    rows = list[tuple[Machine, float, tuple[int, ...]]]()
    for task in range(14):
        machine = rng.choice([COMPUTE, NETWORK, NETWORK, Machine.LOCAL])
        makers = tuple(sorted(rng.sample(range(task), min(task, rng.choice([0, 1, 1, 2])))))
        rows.append((machine, 0.0 if machine is Machine.LOCAL else float(rng.randint(1, 5)), makers))
    alone = graph_of(rows, replace(SMALL, gloo_gathered_bytes=10))
    groups = rng.choice([1, 2])
    tasks = replace(alone, seconds=np.repeat(alone.seconds, groups, axis=1), slowdown=slower[2 - groups :])
    if seed % 2:
        tasks = replace(tasks, delay=2.0 * slower[:groups])
    timeline = simulate(tasks, random_order(rng, tasks))
    neighbours = Neighbours(timeline)
    for together in (set(range(k)) for k in range(len(neighbours.pairs) + 1)):
        found = neighbours.tried(together)
        if found is not None:
            assert found == Trial.of(neighbours.simulated(together))
        elif together:
            joined = neighbours.tasks.joined(timeline.order, [bundle for bundle, _ in neighbours.bundles(together)])
            assert joined is None


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for k, block in enumerate(rest):
            yield [*rest[:k], [items[0], *block], *rest[k + 1 :]]


@each_of(range(25))
def test_bundles_and_orders_are_near_the_best_of_all(seed: int) -> None:
    """CP-SAT orders every way to bundle four collectives."""
    rng = random.Random(seed)
    rows, machines = list[tuple[Machine, float, tuple[int, ...]]](), [COMPUTE] * 5 + [NETWORK] * 4
    rng.shuffle(machines)
    for task, machine in enumerate(machines):
        makers = tuple(sorted(rng.sample(range(task), min(task, rng.choice([0, 1, 1])))))
        rows.append((machine, float(rng.randint(1, 5)), makers))
    tasks = graph_of(rows)
    ways = (tasks.joined(range(9), blocks) for blocks in partitions(sorted(tasks.transfers)))
    least = min(exact_makespan(way) for way in ways if way is not None)
    found = schedule(tasks)
    assert least <= found.makespan_s <= 1.25 * least
    assert found.makespan_s <= exact_makespan(tasks) * 1.25
    assert found.makespan_s == simulate(found.tasks, found.order).makespan_s


@pytest.mark.usefixtures("all_rounds")
@pytest.mark.parametrize("seed", range(6))
def test_local_search_shortens_orders_and_is_the_same_each_time(seed: int) -> None:
    """Of a random order of random tasks; what is proved to be the best stays as it is."""
    rng = random.Random(seed)
    rows = list[tuple[Machine, float, tuple[int, ...]]]()
    for task in range(40):
        makers = tuple(sorted(rng.sample(range(task), min(task, rng.choice([0, 1, 2])))))
        rows.append((rng.choice([COMPUTE, COMPUTE, NETWORK]), float(rng.randint(1, 5)), makers))
    tasks = graph_of(rows)
    begun = simulate(tasks, random_order(rng, tasks))
    found, again = iterated(begun), iterated(begun)
    proved = begun.makespan_s == pytest.approx(least_makespan(begun.tasks))
    assert found is begun if proved else found.makespan_s < begun.makespan_s
    assert (found.order, found.tasks.instructions) == (again.order, again.tasks.instructions)
    assert sorted(at for places in found.tasks.instructions for at in places) == list(range(40))
    assert iterated(begun, lambda: True) is begun


def test_once_it_is_stopped_no_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each simulation takes a second; there are three."""
    rng, rows = random.Random(0), list[tuple[Machine, float, tuple[int, ...]]]()
    for task in range(40):
        makers = tuple(sorted(rng.sample(range(task), min(task, rng.choice([0, 1, 2])))))
        rows.append((rng.choice([COMPUTE, NETWORK]), float(rng.randint(1, 5)), makers))
    tasks = graph_of(rows, LoweringOptions(bundled_bytes=1000, bundle_bytes=1000))
    apart, waiting = simulate(tasks, range(40)), simulate(tasks, random_order(rng, tasks))
    together = rebundled(apart, trials=MORE_TRIALS)
    as_it_is = lambda tasks: simulate(tasks, range(len(tasks.machine)))
    now, run = [0.0], Simulation.run
    monkeypatch.setattr(Simulation, "run", lambda self, order: (now.append(now.pop() + 1.0), run(self, order))[1])
    loops: list[Callable[[Callable[[], bool]], Timeline]] = [
        lambda stopped: rebundled(apart, trials=MORE_TRIALS, stopped=stopped),
        lambda stopped: cut(together, as_it_is, stopped),
        lambda stopped: filled(waiting, stopped),
    ]
    for loop in loops:
        seconds: list[float] = []
        for budget in (np.inf, 3.0):
            now[0] = 0.0
            loop(lambda budget=budget: now[0] >= budget)
            seconds.append(now[0])
        assert seconds[1] <= 3.0 + 2.0 < seconds[0], seconds


def layers(ws: Any, x: Any) -> Any:
    """The gradients of all layers are partial sums, in whole numbers."""

    def forward(ws: Any) -> Any:
        y = x
        for w in ws:
            y = y @ w
        return (y**2).sum()

    return [w - g for w, g in zip(ws, jax.grad(forward)(ws), strict=True)], forward(ws)


ARGS = [np.eye(8, dtype=np.float32)] * 5, np.arange(96, dtype=np.float32).reshape(12, 8)
CLUSTER = replace(thin_cluster(SPEEDS["3:1"]), network=Link(1e9, 1e-6))
FIXED = {f"[0][{k}]": "R" for k in range(5)} | {"[1]": "S(0)"}


@pytest.fixture(scope="module")
def plan() -> hapsynth.Plan:
    """Data parallel where latency is most of what a collective takes."""
    return hapsynth.synthesize(layers, ARGS, CLUSTER, leave_out=False, fixed=FIXED, overlap=True)


def test_a_program_says_what_goes_together(plan: hapsynth.Plan) -> None:
    program, sizes, costs = plan.program, plan.sizes, plan.cost_model()
    bundles = bundles_of(program.instructions)
    assert max(map(len, bundles.values())) > 1
    tasks = tasks_of(program, sizes, costs)
    assert simulate(tasks, range(len(tasks.machine))).makespan_s == plan.cost
    assert {frozenset(b) for b in bundles.values()} == {frozenset(b) for b in sent(tasks) if len(b) > 1}
    alone = [i._replace(bundle=0) if isinstance(i, Convert) else i for i in program.instructions]
    apart = tasks_of(replace(program, instructions=tuple(alone)), sizes, costs)
    assert schedule(replace(apart, transfers={})).makespan_s > plan.cost
    again = Program.from_dict(program.to_dict())
    assert (again.instructions, again.text(plan.traced.graph)) == (
        program.instructions,
        program.text(plan.traced.graph),
    )


def test_collectives_stand_where_they_start(plan: hapsynth.Plan) -> None:
    """Behind what has been computed then, before the rest."""
    tasks = tasks_of(plan.program, plan.sizes, plan.cost_model())
    order = range(len(tasks.machine))
    found = simulate(tasks, order)
    ended = found.end.max(axis=1)
    computes = [task for task in order if tasks.machine[task] is COMPUTE]
    transfers = [task for task in order if tasks.machine[task] is Machine.LINK]
    assert transfers
    for task in transfers:
        start = float(found.start[task].max())
        assert all(ended[c] <= start for c in computes if c < task)
        assert all(ended[c] > start for c in computes if c > task)


def test_programs_for_gpus_send_as_the_schedule_says(plan: hapsynth.Plan) -> None:
    """Whatever the thresholds say; without a schedule by these."""
    graph, program, sizes = plan.traced.graph, plan.program, plan.sizes
    mesh = own_mesh(first_devices(4), program.axes)
    count: dict[bool, int] = {}
    for scheduled in (True, False):
        lowered = Lowered(graph, program, sizes, mesh, platform="gpu", options=ALONE, scheduled=scheduled, donate=False)
        count[scheduled] = lowered.lower().as_text().count('"stablehlo.all_reduce"')
    sent = [i for i in program.instructions if isinstance(i, Convert) and i.is_collective]
    assert {i.step for i in sent} == {"all_reduce"}
    together = bundles_of(program.instructions).values()
    assert count == {True: len(sent) - sum(len(b) - 1 for b in together), False: len(sent)}


def test_bundles_that_cannot_be(plan: hapsynth.Plan) -> None:
    graph, program = plan.traced.graph, plan.program
    x = graph.inputs[-1]
    gather = Convert(x, 0, (S(0),), (R,), bundle=99)

    def broken(*inserted: tuple[int, Convert]) -> str:
        instructions = list(program.instructions)
        for at, step in inserted:
            instructions.insert(at, step)
        with pytest.raises(ProgramError) as error:
            check(graph, replace(program, instructions=tuple(instructions)))
        return str(error.value)

    check(graph, replace(program, instructions=(gather, *program.instructions)))
    bundle, places = next(iter(bundles_of(program.instructions).items()))
    assert "cannot go as one" in broken((places[-1] + 1, gather._replace(bundle=bundle)))
    assert "cannot go as one" in broken((0, Convert(x, 0, (R,), (S(0),), bundle=99)), (0, gather))
    assert "do not stand together" in broken((0, gather), (2, gather))
    assert "needs what another one makes" in broken((0, gather), (0, gather))


def test_devices_send_as_the_program_says(plan: hapsynth.Plan) -> None:
    graph, program, sizes = plan.traced.graph, plan.program, plan.sizes
    staged = Staged(graph, program, sizes, first_devices(4), overlap=True)
    stages = [item.steps for item in staged.items if isinstance(item, CollectiveStage)]
    numbers = [tuple(step.bundle for step in steps if isinstance(step, Convert)) for steps in stages]
    assert all(len(set(n)) == 1 and (len(n) == 1) == (n[0] == 0) for n in numbers)
    assert sorted(n[0] for n in numbers if n[0]) == sorted(bundles_of(program.instructions))
    assert all(len(staged.sent(steps)) == 1 for steps in stages)
    stored = [s.put(x, copy=True) for s, x in zip(staged.inputs, jax.tree.leaves(ARGS), strict=True)]
    given = [x if s is None else s.fetch(x) for s, x in zip(staged.outputs, staged(stored), strict=True)]
    for x, expected in zip(given, jax.tree.leaves(jax.jit(layers)(*ARGS)), strict=True):
        np.testing.assert_array_equal(x, expected)
