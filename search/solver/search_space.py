"""The search space over a reparametrised network: what A* expands.

Variables are assigned in a fixed order. A node is told apart by its key: of every assigned variable that still has
unassigned neighbours (the frontier), the first state that the links to those neighbours cannot tell from its own. Nodes
with equal keys have the same completions, so only the cheapest is needed.

f = what is decided + the heuristic of what is not. Under a dual's messages that is the sum of the least that each
unassigned variable costs and of the least that each edge costs given the end that is assigned; with the tables of a
bucket elimination (`bucket_elimination.py`) it is the exact cost to go. A choice adds only terms >= 0 to either, so
both are consistent, hence admissible.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hapsynth.search.solver.interning import NONE, Id
from hapsynth.search.solver.problem import Floats, Ints
from hapsynth.search.solver.reduction import ReducedProblem
from hapsynth.search.solver.trws import Dual

Key = tuple[int, ...]


@dataclass(slots=True)
class Frontier:
    """How assigning a variable changes the key."""

    moves: list[tuple[int, list[int]]]  # (slot, state -> first state like it towards the neighbours then left)
    kept: list[int]  # slots that stay, in order
    enters: list[int] | None  # the same of the variable's own states; None: it has no neighbours to come

    def rest(self, key: Key) -> Key:
        """The key without the new variable."""
        if self.moves:
            moved = list(key)
            for slot, like in self.moves:
                moved[slot] = like[moved[slot]]
            return tuple([moved[slot] for slot in self.kept])
        return key if len(self.kept) == len(key) else tuple([key[slot] for slot in self.kept])


@dataclass(slots=True)
class Depth:
    """One depth: assigning `variable`. `added`: of a key, what each state adds to f, float64 [states]; `usage`:
    [resources, states]; `states`: their numbers in the network, None where it has all of them."""

    variable: int
    added: Callable[[Key], Floats]
    usage: Floats
    frontier: Frontier
    states: Ints | None = None


@dataclass(slots=True)
class Space:
    """`depths`: by depth; `root`: f of the empty assignment, whose usage is 0. limits, multipliers: [resources]."""

    depths: Sequence[Depth]
    root: float
    limits: Floats
    multipliers: Floats

    def chosen(self, path: list[int]) -> dict[int, int]:
        """variable -> state of the network, of the states taken at each depth."""
        pairs = zip(self.depths, path, strict=True)
        return {d.variable: s if d.states is None else int(d.states[s]) for d, s in pairs}


@dataclass(slots=True)
class SearchOutcome:
    """chosen: variable -> state, None if nothing below the threshold was found; lower_bound: no assignment below
    the threshold costs less than this (so >= threshold, or inf, when there is none)."""

    chosen: dict[int, int] | None
    lower_bound: float
    expanded: int


def dual_space(network: ReducedProblem, dual: Dual, multipliers: Floats) -> Space:
    """The space under the messages that a dual has stored, in its order, in which the least that an edge costs given
    its earlier end is 0."""
    frontiers, slots = frontiers_of(network, dual.nodes, {})
    depths: list[Depth] = []
    for i, at, frontier, slot in zip(dual.nodes, dual.starts.tolist(), frontiers, slots, strict=False):
        base = dual.theta[at : at + network.count(i)]
        near = sorted([(slot[j], j) for j in network.links[i] if j in slot])
        depths.append(Depth(i, _DualCosts(network, i, base, near), network.usage(i), frontier))
    return Space(depths, dual.bound, network.limits, multipliers)


class _DualCosts:
    """What the states of a variable add to f: their own cost, and what the edge from each earlier neighbour costs
    beyond its least cost given that one's state."""

    def __init__(self, network: ReducedProblem, i: int, base: Floats, near: list[tuple[int, int]]) -> None:
        self.network, self.i, self.base, self.near = network, i, base, near
        self._known: dict[tuple[int, int], Floats] = {}

    def __call__(self, key: Key) -> Floats:
        costs = self.base
        for slot, j in self.near:
            row = self._known.get((j, key[slot]))
            if row is None:
                row = self._known[j, key[slot]] = self._row(j, key[slot])
            costs = costs + row
        return costs

    def _row(self, j: int, state: int) -> Floats:
        own, table, others = self.network.seen_from(self.i, j)
        row = table[:, others[state]][own] + self.network.message(self.i, j)
        least = row.min()
        return row - least if least < np.inf else row


def frontiers_of(
    network: ReducedProblem, order: Sequence[int], likely: Mapping[int, Id]
) -> tuple[list[Frontier], list[dict[int, int]]]:
    """Per variable of an order, how the key changes, and the slots in the key before it, by variable.

    `likely`: of each variable the states that it has in the space, where those are not all.
    """
    depth = {i: d for d, i in enumerate(order)}
    first_like = network.tables.first_like
    left: dict[int, list[Id]] = {}  # of each assigned variable the groups towards its neighbours to come
    slots: dict[int, int] = {}
    frontiers: list[Frontier] = []
    before: list[dict[int, int]] = []
    for at, i in enumerate(order):
        before.append(slots)
        links = network.links[i]
        moves: list[tuple[int, list[int]]] = []
        gone = False
        for j in [j for j in links if j in slots]:
            groups = left[j]
            groups.remove(links[j].other)
            if groups:
                moves.append((slots[j], first_like(tuple(groups), likely.get(j, NONE))))
            else:
                gone = True
        kept = [slot for j, slot in slots.items() if left[j]] if gone else list(slots.values())
        slots = {j: slot for slot, j in enumerate([j for j in slots if left[j]])} if gone else dict(slots)
        groups = left[i] = [link.own for d, link in sorted([(depth[j], x) for j, x in links.items()]) if d > at]
        if groups:
            slots[i] = len(slots)
        frontiers.append(Frontier(moves, kept, first_like(tuple(groups), likely.get(i, NONE)) if groups else None))
    return frontiers, before
