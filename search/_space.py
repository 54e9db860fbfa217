"""The search space over a reparametrised network: what A* and the layered search both expand.

Variables are assigned in a fixed order. A node at depth d is told apart by its key: for every assigned variable
that still has unassigned neighbours (the frontier), the class of its state, i.e. its groups towards those
neighbours. Nodes with equal keys have the same completions, so only the cheapest is needed.

f = cost of what is decided + sum of min theta of unassigned variables + for every edge with one end assigned its
least cost given that end, and its least cost at all if none is. Assigning a variable adds only terms >= 0, so the
heuristic is consistent, hence admissible.
"""

from dataclasses import dataclass

import numpy as np

from hapsynth.search._pairwise import Floats, Ints
from hapsynth.search._reduce import Network
from hapsynth.search._tables import least_by_group


@dataclass(slots=True)
class Touch:
    """An edge back to a frontier variable: its slot, class -> group, and the extra cost [group, state]."""

    slot: int
    group_of_class: Ints
    cost: Floats
    next_class: Ints | None  # class -> class towards the neighbours then left; None: leaves the frontier


@dataclass(slots=True)
class Stage:
    """One depth: assigning `variable`. base: float64 [states], usage: [resources, states]."""

    variable: int
    base: Floats
    usage: Floats
    touches: list[Touch]
    kept: list[int]  # slots that stay in the key, in order
    state_class: Ints  # [states]; the class with which the variable enters the frontier
    classes: int  # 0: it does not enter
    radix: list[int]  # classes of the key's columns afterwards


@dataclass(slots=True)
class Space:
    """stages: by depth; root: f of the empty assignment, whose usage is 0. limits, multipliers: [resources]."""

    stages: list[Stage]
    root: float
    limits: Floats
    multipliers: Floats

    def chosen(self, states: list[int]) -> dict[int, int]:
        return {stage.variable: s for stage, s in zip(self.stages, states, strict=True)}


@dataclass(slots=True)
class Found:
    """chosen: variable -> state, None if nothing below the threshold was found; lower_bound: no assignment below
    the threshold costs less than this (so >= threshold, or inf, when there is none)."""

    chosen: dict[int, int] | None
    lower_bound: float
    expanded: int


def space_bytes(network: Network, order: list[int]) -> int:
    """What the tables of `build_space` would take."""
    depth = {i: d for d, i in enumerate(order)}
    cells = 0
    for i in order:
        for j, link in network.links[i].items():
            if depth[j] < depth[i]:
                cells += network.count(i) * network.tables.arrays[link.table].shape[1]
    return 8 * cells


def build_space(network: Network, order: list[int], multipliers: Floats) -> Space:
    """The space of a reduced network under the messages in its links and the multipliers [resources]."""
    depth = {i: d for d, i in enumerate(order)}
    later = {i: sorted((j for j in network.links[i] if depth[j] > depth[i]), key=depth.__getitem__) for i in order}
    root = network.offset - float(multipliers @ network.limits)
    frontier: list[int] = []
    remaining: dict[int, int] = {}
    classes: dict[int, list[Ints]] = {}
    stages: list[Stage] = []
    for i in order:
        theta = network.unary(i) + multipliers @ network.usage(i)
        for j in network.links[i]:
            theta = theta - network.message(i, j)
        root += float(theta.min())
        base = theta - theta.min()
        for j in later[i]:
            first = _first_cost(network, i, j)
            root += float(first.min())
            base = base + (first - first.min())
        touches: list[Touch] = []
        for slot, j in enumerate(frontier):
            if i not in network.links[j]:
                continue
            k = len(later[j]) - remaining[j]
            now = classes[j][k]
            representative = _first_index(now)
            own = network.seen_from(j, i)[0]
            remaining[j] -= 1
            after = classes[j][k + 1][representative] if remaining[j] else None
            touches.append(Touch(slot, own[representative], _second_cost(network, j, i), after))
        kept = [slot for slot, j in enumerate(frontier) if remaining[j]]
        frontier = [frontier[slot] for slot in kept]
        remaining[i] = len(later[i])
        if later[i]:
            classes[i] = _classes([network.seen_from(i, j)[0] for j in later[i]])
            frontier.append(i)
            entering, count = classes[i][0], int(classes[i][0].max()) + 1
        else:
            entering, count = np.zeros(base.size, dtype=np.int64), 0
        radix = [int(classes[j][len(later[j]) - remaining[j]].max()) + 1 for j in frontier]
        stages.append(Stage(i, base, network.usage(i), touches, kept, entering, count, radix))
    return Space(stages, root, network.limits, multipliers)


def _given_first(network: Network, i: int, j: int) -> Floats:
    """[groups of i]: the least of table + j's message, over j's states."""
    _, table, others = network.seen_from(i, j)
    return np.min(table + least_by_group(others, network.message(j, i), table.shape[1]), axis=1)


def _first_cost(network: Network, i: int, j: int) -> Floats:
    """[states of i]: the least cost of edge (i, j) given i's state."""
    return network.message(i, j) + _given_first(network, i, j)[network.seen_from(i, j)[0]]


def _second_cost(network: Network, j: int, i: int) -> Floats:
    """[groups of j, states of i]: what edge (j, i) costs beyond its least cost given j's group. >= 0."""
    _, table, others = network.seen_from(j, i)
    cost = table[:, others] + network.message(i, j)[None, :] - _given_first(network, j, i)[:, None]
    return np.maximum(cost, 0.0)


def _classes(groupings: list[Ints]) -> list[Ints]:
    """For each suffix of the groupings: which states none of them tells apart, numbered from 0."""
    out: list[Ints] = []
    current = np.zeros(groupings[0].size, dtype=np.int64)
    for groups in reversed(groupings):
        key = groups * (int(current.max()) + 1) + current
        current = np.unique(key, return_inverse=True)[1].astype(np.int64)
        out.append(current)
    return out[::-1]


def _first_index(numbers: Ints) -> Ints:
    return np.unique(numbers, return_index=True)[1]
