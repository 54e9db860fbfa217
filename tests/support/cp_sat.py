"""The exact answers of CP-SAT to what the search approximates: whole units of a program, and orders of tasks.

The cheapest whole units: one boolean per class, position and number of units. One mesh axis; classes of few units.
Made of the cost model's times and conversions, not of what the sizing makes of them. ortools cannot share a process
with highspy; scipy's HiGHS is no matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np

from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.program.sizes import Node, Sizes, layout_nodes
from hapsynth.search.cost.program_index import cut_nodes_of
from hapsynth.search.cost.work import Work
from hapsynth.search.scheduling.tasks import Machine, TaskGraph
from hapsynth.search.sizing.sizer import Sizer

_TICKS = 10**11
"""Of the cost at the sizes that are given."""


def exact_sizes(sizer: Sizer, at: Sizes, limit: float = np.inf) -> Sizes | None:
    """The cheapest sizes of all that hold at most `limit` bytes, None where there are none; `at`: any sizes."""
    from ortools.sat.python import cp_model

    costs, classes = sizer.costs, sizer.classes
    model, ticks = cp_model.CpModel(), _TICKS / sizer.variable_cost(at)
    units = [c.units for c in classes.all]
    chosen = [[[model.new_bool_var("") for _ in range(u + 1)] for _ in range(costs.n)] for u in units]
    largest = [model.new_int_var(0, u, "") for u in units]
    for c, positions in enumerate(chosen):
        held = [sum(k * choice for k, choice in enumerate(choices)) for choices in positions]
        for number, choices in zip(held, positions, strict=True):
            model.add_exactly_one(choices)
            model.add(largest[c] >= number)
        model.add(sum(held) == units[c])
    parts = []
    for (node, work), count in _works(sizer).items():
        c = classes.of[node]
        shares = [np.full(costs.n, k / units[c]) for k in range(units[c] + 1)]
        times = np.array([costs.device_times(work, [s]) for s in shares]) * count * ticks
        parts.append(model.new_int_var(0, int(times.max()) + 1, ""))
        for p, choices in enumerate(chosen[c]):
            model.add(parts[-1] >= sum(round(times[k, p]) * choice for k, choice in enumerate(choices)))
    for i in sizer.program.instructions:
        if not isinstance(i, Convert) or not i.is_collective:
            continue
        cuts = [classes.of[n] for layout in (i.source, i.target) for n in layout_nodes(i.value, layout)]
        whole, nothing = (
            costs.conversion(i.value, i.source, i.target, i.axis, lambda *_, x=x: x)[0] for x in (1.0, 0.0)
        )
        sent = largest[cuts[0]] if cuts else 0
        if len(cuts) == 2:
            sent = model.new_int_var(0, units[cuts[0]] * units[cuts[1]], "")
            model.add_multiplication_equality(sent, [largest[c] for c in cuts])
        parts.append(sent * round((whole - nothing) * ticks / prod(units[c] for c in cuts)))
    if np.isfinite(limit):
        whole, divided = sizer.memory.by_cut(at, [(c, 1) for c in range(len(units))])
        for point, fixed in enumerate(whole[0]):
            bytes_of = [(c, nbytes[0, point] / units[c]) for ((c, _), _), nbytes in divided.items()]
            model.add(sum(int(np.ceil(b)) * largest[c] for c, b in bytes_of) <= int(limit - fixed))
    model.minimize(sum(parts))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None
    assert status == cp_model.OPTIMAL
    shares = [tuple(next(k for k, x in enumerate(p) if solver.value(x)) for p in positions) for positions in chosen]
    return Sizes(costs.graph, classes, tuple(shares))


def _works(sizer: Sizer) -> dict[tuple[Node, Work], float]:
    """One of the dimensions that divide a work, and the work -> how often it runs."""
    costs, found = sizer.costs, dict[tuple[Node, Work], float]()
    for value, layout in sizer.program.inputs.items():
        if (work := costs.feed_work(value, layout)) is not None and work.divided:
            (node,) = layout_nodes(value, layout)
            found[node, work] = 1.0
    for i in sizer.program.instructions:
        if not isinstance(i, Convert) and (work := costs.work(i.op, i.triples)).divided:
            (node,) = cut_nodes_of(costs, i)
            found[node, work] = found.get((node, work), 0.0) + costs.graph.runs[costs.graph.ops[i.op].region]
    return found


def exact_makespan(tasks: TaskGraph, order: Sequence[int] | None = None) -> int:
    """The least makespan of tasks whose seconds are whole numbers: of an order, or of all."""
    from ortools.sat.python import cp_model

    model, seconds = cp_model.CpModel(), tasks.seconds.astype(int)
    groups, latest = range(seconds.shape[1]), int(seconds.max(axis=1).sum())
    alone = lambda: model.new_int_var(0, latest, "")
    # What takes all devices begins on all at once.
    start = [
        [alone() for _ in groups] if machine in (Machine.COMPUTE, Machine.LOCAL) else [alone()] * len(groups)
        for machine in tasks.machine
    ]
    place = {task: k for k, task in enumerate(order or ())}
    used: dict[object, list[tuple[int, int]]] = {}
    for task, machine in enumerate(tasks.machine):
        for group in groups:
            for maker in tasks.makers[task]:
                model.add(start[task][group] >= start[maker][group] + int(seconds[maker, group]))
            if machine in (Machine.COMPUTE, Machine.EVERYTHING):
                used.setdefault(group, []).append((task, group))
        if machine in (Machine.LINK, Machine.EVERYTHING):
            used.setdefault("link", []).append((task, 0))
    for pairs in used.values():
        taken = [(start[t][g], int(seconds[t, g])) for t, g in pairs]
        if order is None:
            model.add_no_overlap([model.new_interval_var(s, n, s + n, "") for s, n in taken])
            continue
        taken = [taken[k] for k in sorted(range(len(pairs)), key=lambda k: place[pairs[k][0]])]
        for (before, length), (after, _) in pairwise(taken):
            model.add(after >= before + length)
    makespan = alone()
    for task, starts in enumerate(start):
        for group in groups:
            model.add(makespan >= starts[group] + int(seconds[task, group]))
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)
