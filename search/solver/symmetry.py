"""Variables that are alike, as one: the layers of a model are, but for the few at its ends.

Colours tell variables apart by their own costs and, for a few rounds, by their neighbours' (Weisfeiler and Leman, "The
reduction of a graph to canonical form" (1968)). The quotient problem has one variable per colour, with the costs of all
its members. Its assignments are those of the problem in which alike variables take the same state; they cost the same.
It gives no bound: an optimum may treat alike layers unlike. But its dual, spread over the members, is nearly that of
the problem (compare Bui, Huynh, Sontag, "Lifted tree-reweighted variational inference" (2014)).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from hapsynth.search.solver.options import DEFAULT, SolverOptions
from hapsynth.search.solver.problem import Edge, Floats, Ints, Messages, Problem, Resource
from hapsynth.search.solver.reduction import ReducedProblem
from hapsynth.search.solver.trws import Dual
from hapsynth.search.solver.warm_start import begin


@dataclass(frozen=True, eq=False)
class VariableSymmetry:
    """colours: int64 [variables of the whole problem], in the order in which they come; quotient: the problem of
    these."""

    colours: Ints
    quotient: Problem

    @staticmethod
    def of(problem: Problem, options: SolverOptions = DEFAULT) -> VariableSymmetry | None:
        """None where too few variables are alike; those that use unlike amounts of a resource are not."""
        shared = problem.shared
        own: list[Hashable] = [*shared.unary]
        if problem.resources:
            # Rows that limits made are not shared by those who are alike.
            rows = zip(problem.unary, *(r.usage for r in problem.resources), strict=True)
            own = [tuple([row.tobytes() for row in mine]) for mine in rows]
        alike = [(e.u, e.v, key) for e, key in zip(problem.edges, shared.edges, strict=True)]
        colours = _colours(own, alike, options.near_rounds, options)
        if colours is None:
            return None
        return VariableSymmetry(colours, _quotient(problem, colours, shared.edges))

    def usage(self, resource: Resource) -> list[Floats]:
        """What the members of each colour use together, by their state."""
        members = np.bincount(self.colours).tolist()
        return [resource.usage[i] * n for i, n in zip(self._first.tolist(), members, strict=True)]

    def lift(self, assignment: Ints) -> Ints:
        """The whole problem's assignment."""
        return assignment[self.colours]

    def lower(self, assignment: Ints) -> Ints:
        """The quotient problem's assignment that takes the states of each colour's first member."""
        return assignment[self._first]

    @cached_property
    def _first(self) -> Ints:
        return _first_members(self.colours)

    def lift_messages(self, messages: Messages) -> Messages:
        """By each colour's first member: with other costs there may be other colours."""
        first = self._first.tolist()
        return {(first[k], first[l]): message for (k, l), message in messages.items()}

    def lower_messages(self, messages: Messages) -> Messages:
        colour = {i: k for k, i in enumerate(self._first.tolist())}
        return {(colour[i], colour[j]): message for (i, j), message in messages.items() if i in colour and j in colour}


def spread_messages(network: ReducedProblem, multipliers: Floats) -> bool:
    """Gives all links of a reduced network the messages of its quotient dual; whether enough is alike for that."""
    active = network.active()
    place = {i: k for k, i in enumerate(active)}
    tables = network.tables
    ends = [(i, j, link) for i in active for j, link in network.links[i].items() if i < j]
    edges = [(place[i], place[j], tuple(link)) for i, j, link in ends]
    colours = _colours([network.kind(i) for i in active], edges, network.options.far_rounds, network.options)
    if colours is None:
        return False
    array = tables.arrays.__getitem__
    problem = Problem(
        tuple(network.unary(i) + multipliers @ network.usage(i) for i in active),
        tuple(Edge(place[i], place[j], array(own), array(other), array(table)) for i, j, (own, table, other) in ends),
    )
    quotient = ReducedProblem(_quotient(problem, colours, [key for _, _, key in edges]), options=network.options)
    for k in quotient.active():
        quotient.restrict(k, np.isfinite(quotient.unary(k)))
    if quotient.infeasible:
        return False
    dual = Dual(quotient, {})
    for _ in range(network.options.quotient_sweeps):
        dual.sweep()
    dual.store()
    colour = dict(zip(active, colours.tolist(), strict=True))
    count = Counter((colour[i], colour[j]) for i in active for j in network.links[i])

    def share(i: int, j: int) -> Floats:
        """One link's of what all that are alike have together; states that the quotient network lost have none."""
        pair = colour[i], colour[j]
        message = np.full(network.count(i), np.nan)
        message[quotient.states(pair[0])] = quotient.messages[pair] / count[pair]
        return message

    for i, j, _ in ends:
        if (colour[i], colour[j]) in quotient.messages:
            begin(network, i, j, share(i, j), share(j, i))
    return True


def _colours(
    own: Sequence[Hashable], edges: Iterable[tuple[int, int, Hashable]], rounds: int, options: SolverOptions
) -> Ints | None:
    """The colour of each variable, numbered as they come; None where there are too many."""
    kinds: dict[Hashable, int] = {}
    colour = np.array([kinds.setdefault(kind, len(kinds)) for kind in own], dtype=np.int64)
    keys: dict[Hashable, int] = {}
    ends = np.array([(u, v, keys.setdefault(key, len(keys))) for u, v, key in edges], dtype=np.int64).reshape(-1, 3)
    # Each edge as either end sees it.
    at, near = np.concatenate([ends[:, 0], ends[:, 1]]), np.concatenate([ends[:, 1], ends[:, 0]])
    kind = np.concatenate([2 * ends[:, 2], 2 * ends[:, 2] + 1])
    starts = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=len(own)))]) * kind.itemsize
    spans = list(pairwise(starts.tolist()))
    for _ in range(rounds):
        seen = kind * len(own) + colour[near]
        rows = seen[np.lexsort((seen, at))].tobytes()
        kinds = {}
        before = colour.tolist()
        found = [kinds.setdefault((c, rows[a:b]), len(kinds)) for c, (a, b) in zip(before, spans, strict=True)]
        colour = np.array(found, dtype=np.int64)
    return None if len(kinds) > options.quotient_worthwhile * len(own) else colour


def _first_members(colours: Ints) -> Ints:
    """Of each colour."""
    return np.unique(colours, return_index=True)[1]


def _quotient(problem: Problem, colours: Ints, keys: Sequence[Hashable]) -> Problem:
    """keys: what makes two edges alike, besides the colours of their ends."""
    colour = colours.tolist()
    first = _first_members(colours).tolist()
    members = np.bincount(colours).tolist()
    many: dict[tuple[int, int], Floats] = {}

    def times(costs: Floats, number: int, count: int) -> Floats:
        """What is one array stays one."""
        found = many.get((number, count))
        if found is None:
            found = many[number, count] = costs * count
        return found

    shared = problem.shared
    unary = [times(problem.unary[i], shared.unary[i], n) for i, n in zip(first, members, strict=True)]
    count: Counter[tuple[int, int, Hashable]] = Counter()
    one: dict[tuple[int, int, Hashable], tuple[Edge, int]] = {}
    for edge, key, (_, _, table) in zip(problem.edges, keys, shared.edges, strict=True):
        kind = colour[edge.u], colour[edge.v], key
        count[kind] += 1
        one.setdefault(kind, (edge, table))
    edges: list[Edge] = []
    for (u, v, key), (edge, table) in one.items():
        n = count[u, v, key]
        if u == v:
            unary[u] = unary[u] + n * edge.table[edge.gu, edge.gv]
        else:
            edges.append(Edge(u, v, edge.gu, edge.gv, times(edge.table, table, n)))
    return Problem(tuple(unary), tuple(edges), offset=problem.offset)
