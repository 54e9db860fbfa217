"""Exact minimisation of a thin network: one variable after another is minimised out (bucket elimination).

What a variable's neighbours may choose is one table over all of them, so the work grows with the product of their
state counts: little where a network is nearly a chain and has few states left, as layers have. Orders are found by
least fill (Kjaerulff, "Triangulation of graphs", 1990; Dechter, "Bucket elimination", 1999).
"""

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hapsynth.search.solver.problem import Floats, Ints
from hapsynth.search.solver.reduction import ReducedProblem


@dataclass(frozen=True)
class EliminationOrder:
    """An order of elimination. scopes: per variable, in that order, those that its table is over, itself last."""

    scopes: tuple[tuple[int, ...], ...]

    def cells(self, count: Callable[[int], int]) -> float:
        """Entries of all tables, given each variable's number of states."""
        return math.fsum(math.prod(map(float, map(count, scope))) for scope in self.scopes)


def buckets(network: ReducedProblem) -> EliminationOrder:
    """The better of the orders of least fill and of least weight, ties to the lower number."""
    near = {i: set(network.links[i]) for i in network.active()}
    # Whole numbers: their sums are the same in any order.
    weight = {i: round(2**20 * math.log2(network.count(i))) for i in near}
    size = lambda graph, i: weight[i] + sum([weight[j] for j in graph[i]])
    found = (EliminationOrder(_scopes(near, score)) for score in (_fill, size))
    return min(found, key=lambda b: b.cells(network.count))


_Graph = dict[int, set[int]]


def _fill(graph: _Graph, i: int) -> int:
    """Pairs of neighbours that are no neighbours of each other."""
    near = graph[i]
    count = len(near) - 1
    return sum([count - len(near & graph[j]) for j in near])


def _scopes(near: Mapping[int, set[int]], score: Callable[[_Graph, int], int]) -> tuple[tuple[int, ...], ...]:
    graph = {i: set(js) for i, js in near.items()}
    now = {i: score(graph, i) for i in graph}
    heap = [(s, i) for i, s in now.items()]
    heapq.heapify(heap)
    place: dict[int, int] = {}
    cliques: list[tuple[int, set[int]]] = []
    while heap:
        s, i = heapq.heappop(heap)
        if i not in graph or s != now[i]:
            continue
        clique = graph.pop(i)
        place[i] = len(place)
        cliques.append((i, clique))
        for j in clique:
            graph[j] |= clique
            graph[j] -= {i, j}
        for j in sorted(clique.union(*(graph[j] for j in clique))):
            if (changed := score(graph, j)) != now[j]:
                now[j] = changed
                heapq.heappush(heap, (changed, j))
    return tuple((*sorted(clique, key=place.__getitem__, reverse=True), i) for i, clique in cliques)


def eliminate(
    network: ReducedProblem, multipliers: Floats, order: EliminationOrder, likely: Mapping[int, Ints]
) -> tuple[float, dict[int, int]]:
    """(least, an assignment that has it: active variable -> state now) of cost + multipliers . (usage - limits), over
    the `likely` states of each active variable."""
    total = network.offset - float(multipliers @ network.limits)
    place = {scope[-1]: k for k, scope in enumerate(order.scopes)}
    waiting: list[list[tuple[tuple[int, ...], Floats]]] = [[] for _ in order.scopes]
    best: list[Ints] = []
    for k, scope in enumerate(order.scopes):
        i = scope[-1]
        axis = {j: a for a, j in enumerate(scope)}
        table = np.zeros([likely[j].size for j in scope])
        table += (network.unary(i) + multipliers @ network.usage(i))[likely[i]]
        for j in network.links[i]:
            if place[j] > k:
                own, pair, other = network.seen_from(i, j)
                waiting[k].append(((j, i), pair.T[other[likely[j], None], own[likely[i]]]))
        for over, part in waiting[k]:
            # Scopes list variables in one order, so a part needs only new axes.
            sizes = [1] * len(scope)
            for j, n in zip(over, part.shape, strict=True):
                sizes[axis[j]] = n
            table += part.reshape(sizes)
        waiting[k] = []
        states = np.argmin(table, axis=-1)
        best.append(states.astype(np.uint16))
        rest = np.take_along_axis(table, states[..., None], axis=-1)[..., 0]
        if len(scope) == 1:
            total += float(rest)
        else:
            waiting[place[scope[-2]]].append((scope[:-1], rest))
    chosen: dict[int, int] = {}
    for scope, states in zip(reversed(order.scopes), reversed(best), strict=True):
        chosen[scope[-1]] = int(states[tuple(chosen[j] for j in scope[:-1])])
    return total, {i: int(likely[i][s]) for i, s in chosen.items()}
