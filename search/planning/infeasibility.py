"""Where no program fits: the one that holds the least, and what any holds.

With weights w >= 0 over ops, of sum 1, the least sum of w . bytes over all choices is never above the least peak of
all. The weights of the next round are the worst for the programs seen so far (fictitious play); each round's program
also shows further ops at which much is held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linprog

from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.formulation.memory_constraints import MemoryConstraints
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.solver import Edge, Problem

_TIE = 1e-6


def weighed(problem: Problem, weights: Floats, *, ties: bool) -> Problem:
    """The problem of the least weighted bytes over its resources, in units of their limits; `ties` are broken by
    seconds, which leaves no bound on bytes."""
    second = _TIE if ties else 0.0
    unary: list[Floats] = []
    for i, seconds in enumerate(problem.unary):
        held = sum(w / r.limit * r.usage[i] for w, r in zip(weights, problem.resources, strict=True))
        unary.append(held + np.where(np.isfinite(seconds), second * np.minimum(seconds, 1e300), np.inf))
    known: dict[int, Floats] = {}
    edges: list[Edge] = []
    for e, (_, _, table) in zip(problem.edges, problem.shared.edges, strict=True):
        if table not in known:
            known[table] = np.where(np.isfinite(e.table), second * np.minimum(e.table, 1e300), np.inf)
        edges.append(e._replace(table=known[table]))
    return Problem(tuple(unary), tuple(edges))


def worst_weights(usages: Sequence[Floats]) -> Floats:
    """Weights [ops] under which the best of the programs seen holds the most; `usages`: each one's bytes [ops]."""
    held = np.array(usages)
    count = held.shape[1]
    unit = held.max() or 1.0
    found = linprog(
        np.r_[-1.0, np.zeros(count)],
        A_ub=np.c_[np.ones(len(held)), -held / unit],
        b_ub=np.zeros(len(held)),
        A_eq=[np.r_[0.0, np.ones(count)]],
        b_eq=[1.0],
        bounds=[(None, None), *[(0.0, 1.0)] * count],
        method="highs",
    )
    return np.full(count, 1.0 / count) if found.x is None else np.maximum(found.x[1:], 0.0)


def certain_bytes(certain: MemoryConstraints, ops: Sequence[int]) -> float:
    """Bytes that every program holds at some point, by what is known of a few ops; 0 where nothing is."""
    return max((certain.least_at(certain.fullest_near(op)) for op in ops), default=0.0)


def shortage(costs: CostModel, least: Candidate | None, certain: float, *, pinned: bool, late: bool = False) -> str:
    """Which device is too small for the program that holds the least of those found, by how much, and what helps.

    `certain`: what every program's bytes count. `pinned`: whether ratios were asked for. `late`:
    whether the time budget ended the search.
    """
    room = costs.room
    device = int(np.argmin([k.memory for k in costs.cluster.devices]))
    mib = lambda nbytes: f"{nbytes / 2**20:.4g} MiB"
    found = "no program keeps to the layouts that are fixed"
    if least is not None:
        held = least.held()
        if room.exact:
            device = int(np.argmax(np.array(held) / room.limits))
        found = f"the smallest program found needs {mib(held[device])}, {mib(held[device] - room.limits[device])}"
        every = mib(min(certain, least.memory))
        if room.proportions is not None:
            every = f"{100 * min(certain, least.memory) / room.limit:.0f} % of what some device has"
        found += f" too much (every program needs {every} or more)" if certain else " too much"
    limit, name = room.limits[device], costs.cluster.devices[device].name
    at, other = (" at these ratios", "other ratios, ") if pinned else ("", "")
    none, more = "no program fits", ""
    if late:
        none, more = "no program that fits was found within the time budget", "more time may find one that does; "
    return (
        f"{none}{at}: device {device} ({name}) has {mib(limit)} and {found}; {more}{other}a device with "
        "that much memory, more devices, or a smaller batch would fit"
    )
