"""The search space over a reparametrised network: what A* and the beam search both expand.

Variables are assigned in a fixed order in which few of them at a time have unassigned neighbours; ties go to the lower
number. A node at depth d is told apart by its key: for every assigned variable that still has unassigned neighbours
(the frontier), the class of its state, i.e. its groups towards those neighbours. Nodes with equal keys have the same
completions, so only the cheapest is needed, and the frontier's size is the cost of an exhaustive search.

f = cost of what is decided + sum of min theta of unassigned variables + for every edge with one end assigned its
least cost given that end, and its least cost at all if none is. Assigning a variable adds only terms >= 0, so the
heuristic is consistent, hence admissible.
"""

import heapq
import math
from dataclasses import dataclass

import numpy as np

from hapsynth.search.solver.interning import least_by_group
from hapsynth.search.solver.problem import Floats, Ints
from hapsynth.search.solver.reduction import ReducedProblem


@dataclass(slots=True)
class BackEdge:
    """An edge back to a frontier variable: its slot, class -> group, and the extra cost [group, state]."""

    slot: int
    group_of_class: Ints
    cost: Floats
    next_class: Ints | None  # class -> class towards the neighbours then left; None: leaves the frontier


@dataclass(slots=True)
class Depth:
    """One depth: assigning `variable`. base: float64 [states], usage: [resources, states]."""

    variable: int
    base: Floats
    usage: Floats
    touches: list[BackEdge]
    kept: list[int]  # slots that stay in the key, in order
    state_class: Ints  # [states]; the class with which the variable enters the frontier
    classes: int  # 0: it does not enter
    radix: list[int]  # classes of the key's columns afterwards


@dataclass(slots=True)
class Space:
    """stages: by depth; root: f of the empty assignment, whose usage is 0. limits, multipliers: [resources]."""

    stages: list[Depth]
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


def space_bytes(network: ReducedProblem, order: list[int]) -> int:
    """What the tables of `build_space` would take."""
    depth = {i: d for d, i in enumerate(order)}
    cells = 0
    for i in order:
        for j, link in network.links[i].items():
            if depth[j] < depth[i]:
                cells += network.count(i) * network.tables.arrays[link.table].shape[1]
    return 8 * cells


def build_space(network: ReducedProblem, order: list[int], multipliers: Floats) -> Space:
    """The space of a reduced network under the messages in its links and the multipliers [resources]."""
    depth = {i: d for d, i in enumerate(order)}
    later = {i: sorted((j for j in network.links[i] if depth[j] > depth[i]), key=depth.__getitem__) for i in order}
    root = network.offset - float(multipliers @ network.limits)
    frontier: list[int] = []
    remaining: dict[int, int] = {}
    classes: dict[int, list[Ints]] = {}
    stages: list[Depth] = []
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
        touches: list[BackEdge] = []
        for slot, j in enumerate(frontier):
            if i not in network.links[j]:
                continue
            k = len(later[j]) - remaining[j]
            now = classes[j][k]
            representative = _first_index(now)
            own = network.seen_from(j, i)[0]
            remaining[j] -= 1
            after = classes[j][k + 1][representative] if remaining[j] else None
            touches.append(BackEdge(slot, own[representative], _second_cost(network, j, i), after))
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
        stages.append(Depth(i, base, network.usage(i), touches, kept, entering, count, radix))
    return Space(stages, root, network.limits, multipliers)


def _given_first(network: ReducedProblem, i: int, j: int) -> Floats:
    """[groups of i]: the least of table + j's message, over j's states."""
    _, table, others = network.seen_from(i, j)
    return np.min(table + least_by_group(others, network.message(j, i), table.shape[1]), axis=1)


def _first_cost(network: ReducedProblem, i: int, j: int) -> Floats:
    """[states of i]: the least cost of edge (i, j) given i's state."""
    return network.message(i, j) + _given_first(network, i, j)[network.seen_from(i, j)[0]]


def _second_cost(network: ReducedProblem, j: int, i: int) -> Floats:
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


_SCALE = 2**20  # weights are integers: sums that no order of summation changes


def search_order(network: ReducedProblem) -> list[int]:
    """The active variables, in the best of a few orders by the sum of frontier sizes."""
    active = network.active()
    weight = {i: round(_SCALE * math.log(network.count(i))) for i in active}
    near = {i: sorted(network.links[i]) for i in active}
    orders = [active, _greedy(active, near, weight), _greedy(active[::-1], near, weight)]
    return min(orders, key=lambda order: _log_work(order, near, weight))


def _greedy(active: list[int], near: dict[int, list[int]], weight: dict[int, int]) -> list[int]:
    """Next the neighbour of the frontier that leaves the smallest frontier; a new start has the fewest links."""
    place = {i: k for k, i in enumerate(active)}
    left = {i: len(near[i]) for i in active}
    starts = sorted(active, key=lambda i: (len(near[i]), place[i]), reverse=True)
    order: list[int] = []
    done: set[int] = set()
    # (growth of the frontier, place, variable); what is out of date stays in until it comes up.
    border: list[tuple[int, int, int]] = []

    def growth(i: int) -> int:
        closed = sum(weight[j] for j in near[i] if j in done and left[j] == 1)
        return (weight[i] if left[i] else 0) - closed

    while len(order) < len(active):
        if not border:
            while starts[-1] in done:
                starts.pop()
            heapq.heappush(border, (growth(starts[-1]), place[starts[-1]], starts[-1]))
        grown, _, i = heapq.heappop(border)
        if i in done or grown != growth(i):
            continue
        done.add(i)
        order.append(i)
        changed: dict[int, None] = {}
        for j in near[i]:
            left[j] -= 1
            if j not in done:
                changed[j] = None
        for j in (i, *near[i]):
            if j in done and left[j] == 1:
                changed.update((k, None) for k in near[j] if k not in done)
        for j in changed:
            heapq.heappush(border, (growth(j), place[j], j))
    return order


def _log_work(order: list[int], near: dict[int, list[int]], weight: dict[int, int]) -> float:
    """log of sum over depths of the product of the frontier's state counts, the new variable's included."""
    left = {i: len(near[i]) for i in order}
    done: set[int] = set()
    size, sizes = 0, list[int]()
    for i in order:
        size += weight[i]
        sizes.append(size)
        done.add(i)
        for j in near[i]:
            left[j] -= 1
            if j in done and not left[j]:
                size -= weight[j]
        if not left[i]:
            size -= weight[i]
    top = max(sizes, default=0)
    return top / _SCALE + math.log(math.fsum(math.exp((s - top) / _SCALE) for s in sizes) or 1.0)
