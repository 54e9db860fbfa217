"""Clocks of a cluster: the compute stream of each kind of device, and the link that all collectives take.

A group of devices is of one kind, and all of it takes the same time.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.chains import Resources
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.scheduling.tasks import Machine, TaskGraph
from hapsynth.search.scheduling.timeline import Timeline
from hapsynth.search.sizing.makespan_lp import LINK
from hapsynth.search.solver import Ints


def resources(costs: CostModel) -> Resources:
    """The streams of a cluster's kinds of devices, and the link."""
    return Resources(tuple(kind.slowdown for kind in costs.kinds))


def kinds_of_groups(tasks: TaskGraph, costs: CostModel) -> dict[int, int]:
    """Group of devices -> the number of their kind: those of a group are of one."""
    return dict(zip(tasks.group_of.tolist(), costs.kind_of.tolist(), strict=True))


def first_devices(costs: CostModel) -> Ints:
    """The first device of each kind [kinds]."""
    return np.unique(costs.kind_of, return_index=True)[1]


def busy_seconds(timeline: Timeline, costs: CostModel, *, contention: bool = False) -> dict[int, float]:
    """Number of a kind of device -> the seconds that its busiest device computes; `LINK` -> the seconds of all
    collectives. Loops and branches count in both. `contention`: computing takes as long as concurrent collectives make
    it."""
    tasks = timeline.tasks
    machine = np.array(tasks.machine, dtype=np.int64)
    everything = machine == Machine.EVERYTHING
    each = tasks.seconds[(machine == Machine.COMPUTE) | everything].sum(axis=0)
    if contention:
        each = np.maximum(each, timeline.computed)
    found = {LINK: float(tasks.seconds[(machine == Machine.LINK) | everything].max(axis=1, initial=0.0).sum())}
    for group, kind in kinds_of_groups(tasks, costs).items():
        found[kind] = max(found.get(kind, 0.0), float(each[group]))
    return found


def clocks(timeline: Timeline, costs: CostModel) -> dict[str, float]:
    """Name of a kind of device, or `collectives` -> the seconds that it is busy."""
    busy, tasks = busy_seconds(timeline, costs), timeline.tasks
    found = {f"compute {kind.name}": busy[k] for k, kind in enumerate(costs.kinds)}
    sent = [k for k, machine in enumerate(tasks.machine) if machine is Machine.LINK]
    return found | ({"collectives": float(tasks.seconds[sent].max(axis=1).sum())} if sent else {})


def least_seconds(builder: ProblemBuilder) -> Floats:
    """The least seconds of each op over its ratios and triples [ops]."""
    costs, triples = builder.costs, builder.structure.triples
    works: dict[object, list[Work]] = {}
    found = [(costs.kind(op), triples[op]) for op in range(len(triples))]
    for op, key in enumerate(found):
        if key not in works:
            works[key] = [costs.work(op, ts) for ts in triples[op]]
    # All in one call: one by one they would take most of the time of a first look at many unlike ops.
    seconds = iter(costs.ideal_times(work for mine in works.values() for work in mine))
    least = {key: min(islice(seconds, len(mine))) for key, mine in works.items()}
    return np.array([least[key] for key in found])
