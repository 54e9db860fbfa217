"""A* over a `Space`: best first, equal keys merged, anytime.

Hart, Nilsson, Raphael (1968); what is as good to within `slack` is a tie (Pearl and Kim, "Studies in semi-admissible
heuristics" (1982)). Of ties the deepest goes first, so that they are walked down instead of across: where the heuristic
is exact, to within the slack, a search expands one node per variable. The order of nodes decides the rest, so that a
search is deterministic.
"""

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hapsynth.search.solver.problem import Floats
from hapsynth.search.solver.search_space import Depth, Key, SearchOutcome, Space

_Label = tuple[float, tuple[float, ...], int]  # cost without multipliers, usage, node
_TIE = 1e-12  # of f: choices so close to the cheapest are as good, and the first is taken first


class _Node(NamedTuple):
    f: float
    depth: int
    key: Key
    usage: tuple[float, ...]
    parent: int
    state: int


def astar(
    space: Space,
    threshold: float,
    max_nodes: int,
    stop: Callable[[], bool],
    slack: float = 0.0,
    most_kept: float = math.inf,
) -> SearchOutcome:
    """An assignment below `threshold` that costs at most `slack` more than the cheapest, or where it had to stop the
    least f still open, to within the slack. `max_nodes`: that it expands; `most_kept`: that it keeps, but on a walk
    straight to the end."""
    depths, limits = space.depths, space.limits.tolist()
    nodes = [_Node(space.root, 0, (), (0.0,) * len(limits), -1, -1)]
    labels: list[dict[Key, list[_Label]]] = [{} for _ in range(len(depths) + 1)]
    labels[0][()] = [(space.root, nodes[0].usage, 0)]

    def rank(f: float) -> float:
        return (f - space.root) // slack if slack else f

    heap = [(rank(space.root), 0, 0)] if space.root < threshold else []
    expanded = 0
    while heap:
        level, minus_depth, number = heapq.heappop(heap)
        f, depth, key, usage, _, _ = nodes[number]
        if all(label[2] != number for label in labels[depth][key]):
            continue
        least = space.root + slack * level if slack else f
        if depth == len(depths):
            return SearchOutcome(space.chosen(_path(nodes, number)), least, expanded)
        full = len(nodes) >= most_kept and expanded >= len(depths)
        if full or expanded >= max_nodes or (expanded % 64 == 0 and stop()):
            return SearchOutcome(None, least, expanded)
        expanded += 1
        at = depths[depth]
        rest, costs = at.frontier.rest(key), f + at.added(key)
        for s in _candidates(at, costs, threshold, bool(usage)):
            used, charge = usage, 0.0
            if limits:
                used = tuple([u + float(row[s]) for u, row in zip(usage, at.usage, strict=True)])
                if any(u > limit for u, limit in zip(used, limits, strict=True)):
                    continue
                charge = math.fsum([m * u for m, u in zip(space.multipliers.tolist(), used, strict=True)])
            child = float(costs[s])
            cost = child - charge
            if depth + 1 == len(depths):
                child = max(child, cost + float(space.multipliers @ space.limits))
                if child >= threshold:
                    continue
            after = rest if at.frontier.enters is None else (*rest, at.frontier.enters[s])
            known = labels[depth + 1].setdefault(after, [])
            if any(c <= cost and all(a <= b for a, b in zip(u, used, strict=True)) for c, u, _ in known):
                continue
            known[:] = [
                (c, u, n) for c, u, n in known
                if not (cost <= c and all(a <= b for a, b in zip(used, u, strict=True)))
            ]  # fmt: skip
            known.append((cost, used, len(nodes)))
            heapq.heappush(heap, (rank(child), minus_depth - 1, len(nodes)))
            nodes.append(_Node(child, depth + 1, after, used, number, s))
    return SearchOutcome(None, float("inf"), expanded)


def _candidates(at: Depth, costs: Floats, threshold: float, limited: bool) -> list[int]:
    """The states below the threshold, cheapest first; without resources only the first of those with one key."""
    below = np.flatnonzero(costs < threshold)
    if below.size > 1:
        least = float(costs[below].min())
        tie = _TIE * abs(least) or 1.0
        below = below[np.argsort((costs[below] - least) // tie, kind="stable")]
    states = below.tolist()
    if limited or len(states) < 2:
        return states
    enters = at.frontier.enters
    if enters is None:
        return states[:1]
    first: dict[int, int] = {}
    for s in states:
        first.setdefault(enters[s], s)
    return list(first.values())


def _path(nodes: list[_Node], number: int) -> list[int]:
    states: list[int] = []
    while number > 0:
        states.append(nodes[number].state)
        number = nodes[number].parent
    return states[::-1]
