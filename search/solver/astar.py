"""A* over a `Space`: best first, equal keys merged, anytime.

Hart, Nilsson, Raphael (1968). Order (f, -depth, counter): of equal f the deepest, so that ties are walked
down instead of across; the counter makes it deterministic.
"""

import heapq
import math
from collections.abc import Callable

import numpy as np

from hapsynth.search.solver.search_space import Depth, Found, Space

_Label = tuple[float, tuple[float, ...], int]  # cost without multipliers, usage, node
_Key = tuple[int, ...]


def astar(space: Space, threshold: float, max_nodes: int, stop: Callable[[], bool]) -> Found:
    """The cheapest assignment below `threshold`, or where it had to stop the least f still open."""
    nodes: list[tuple[int, _Key, tuple[float, ...], int, int]] = [(0, (), (0.0,) * space.limits.size, -1, -1)]
    labels: list[dict[_Key, list[_Label]]] = [{} for _ in range(len(space.stages) + 1)]
    labels[0][()] = [(space.root, nodes[0][2], 0)]
    heap = [(space.root, 0, 0)] if space.root < threshold else []
    expanded = 0
    while heap:
        f, minus_depth, number = heapq.heappop(heap)
        depth, key, usage, _, _ = nodes[number]
        if all(label[2] != number for label in labels[depth][key]):
            continue
        if depth == len(space.stages):
            return Found(space.chosen(_path(nodes, number)), f, expanded)
        if expanded >= max_nodes or (expanded % 64 == 0 and stop()):
            return Found(None, f, expanded)
        expanded += 1
        stage = space.stages[depth]
        rest, costs = _step(stage, f, key)
        for s in _candidates(stage, costs, threshold, bool(usage)):
            used = tuple(u + float(row[s]) for u, row in zip(usage, stage.usage, strict=True))
            if any(u > limit for u, limit in zip(used, space.limits.tolist(), strict=True)):
                continue
            child = float(costs[s])
            charge = math.fsum(m * u for m, u in zip(space.multipliers.tolist(), used, strict=True))
            cost = child - charge
            if depth + 1 == len(space.stages):
                child = max(child, cost + float(space.multipliers @ space.limits))
                if child >= threshold:
                    continue
            after = (*rest, int(stage.state_class[s])) if stage.classes else rest
            known = labels[depth + 1].setdefault(after, [])
            if any(c <= cost and all(a <= b for a, b in zip(u, used, strict=True)) for c, u, _ in known):
                continue
            known[:] = [
                (c, u, n) for c, u, n in known
                if not (cost <= c and all(a <= b for a, b in zip(used, u, strict=True)))
            ]  # fmt: skip
            known.append((cost, used, len(nodes)))
            heapq.heappush(heap, (child, minus_depth - 1, len(nodes)))
            nodes.append((depth + 1, after, used, number, s))
    return Found(None, float("inf"), expanded)


def _step(stage: Depth, f: float, key: _Key) -> tuple[_Key, np.ndarray]:
    """The key without the new variable, and f of every choice for it: [states]."""
    costs = f + stage.base
    moved = list(key)
    for touch in stage.touches:
        label = key[touch.slot]
        costs = costs + touch.cost[touch.group_of_class[label]]
        if touch.next_class is not None:
            moved[touch.slot] = int(touch.next_class[label])
    return tuple(moved[slot] for slot in stage.kept), costs


def _candidates(stage: Depth, costs: np.ndarray, threshold: float, limited: bool) -> list[int]:
    """The states below the threshold, cheapest first; without resources only the first of each class."""
    below = np.flatnonzero(costs < threshold)
    states = below[np.argsort(costs[below], kind="stable")].tolist()
    if limited:
        return states
    first: dict[int, int] = {}
    for s in states:
        first.setdefault(int(stage.state_class[s]), s)
    return list(first.values())


def _path(nodes: list[tuple[int, _Key, tuple[float, ...], int, int]], number: int) -> list[int]:
    states: list[int] = []
    while number > 0:
        states.append(nodes[number][4])
        number = nodes[number][3]
    return states[::-1]
