"""What a plan may choose: which triple every op takes, and which conversions of every value are shared.

Variables: one per source value (how it is stored, which conversions are made once for all its uses), one per op
(its triple, and the same for its result). An op of several results has a variable of its own and one per result.
Edges: a use costs nothing where the layout it needs is among the producer's available ones, else the cheapest
private conversion; carried outputs must be brought to the layout in which their input is stored. So every
assignment that is not contradictory is a program, and every program of the instruction set that converts a value
from what is available is an assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from hapsynth.graph import Graph
from hapsynth.instructions.collectives import step_between
from hapsynth.instructions.factors import Triple
from hapsynth.instructions.layout import Placement, R, S
from hapsynth.instructions.program import FactorTable
from hapsynth.instructions.sizes import cut_nodes
from hapsynth.search.problem import Ints

Allowed = Callable[[int, int], bool]
"""Whether (value, dimension) may be cut: baselines restrict it."""
Convertible = Callable[[int, Placement, Placement], bool]
"""Whether a value may be converted by a step between two placements."""


class Availability(NamedTuple):
    """A value made as `computed` and converted once by `steps`; every use finds `placements` at no cost."""

    computed: Placement
    steps: tuple[tuple[Placement, Placement], ...]
    placements: frozenset[Placement]

    @property
    def tensors(self) -> tuple[Placement, ...]:
        return (self.computed, *(target for _, target in self.steps))


class State(NamedTuple):
    """One choice: the triple (None for a source or a separate result) and the availability (None for an op whose
    results have variables of their own)."""

    triple: Triple | None
    availability: Availability | None


@dataclass
class Restriction:
    """What a caller may pin: stored layouts of inputs, dimensions that may be cut, values never converted once for
    all uses (ZeRO-3 gathers its parameters again for every use), conversions that may be made."""

    stored: Mapping[int, Placement] = field(default_factory=dict)
    allowed: Allowed | None = None
    private: frozenset[int] = frozenset()
    convertible: Convertible | None = None


@dataclass(frozen=True, eq=False)
class Use:
    """One edge: the layouts that a variable's states ask of a value. `groups` indexes `needed` per state; `runs` is how
    often a conversion for this use runs in a step."""

    value: int
    variable: int
    groups: Ints
    needed: tuple[Placement, ...]
    runs: float = 1.0


class Structure:
    """What may be chosen: variables, states and edges of one graph under one restriction, at any ratio."""

    def __init__(self, graph: Graph, table: FactorTable, restriction: Restriction | None = None) -> None:
        self.graph, self.table = graph, table
        self.restriction = restriction or Restriction()
        self.triples = [self._allowed_triples(op.index) for op in graph.ops]
        self.demands = self._demands()
        self._options: dict[object, list[Availability]] = {}
        self.states: list[tuple[State, ...]] = []
        self.value_variable = [-1] * len(graph.values)
        self.op_variable = [-1] * len(graph.ops)
        self.links: list[tuple[int, int]] = []
        """(op, result) of ops with several results."""
        self._add_variables()
        self.groups = [self._groups(self.states[v]) for v in self.value_variable]
        """Per value: a group per state of its variable, and the placements available in each group."""
        self.uses = [*self._op_uses(), *self._carry_uses()]

    def _add_variables(self) -> None:
        graph = self.graph
        for value in graph.sources:
            self.value_variable[value] = len(self.states)
            self.states.append(tuple(State(None, a) for c in self._stored(value) for a in self.options(value, c)))
        for op in graph.ops:
            self.op_variable[op.index] = len(self.states)
            triples = self.triples[op.index]
            if len(op.results) == 1:
                value = op.results[0]
                self.value_variable[value] = len(self.states)
                self.states.append(tuple(State(t, a) for t in triples for a in self.options(value, t.results[0])))
                continue
            self.states.append(tuple(State(t, None) for t in triples))
            for position, value in enumerate(op.results):
                self.value_variable[value] = len(self.states)
                self.links.append((op.index, value))
                made = dict.fromkeys(t.results[position] for t in triples)
                self.states.append(tuple(State(None, a) for c in made for a in self.options(value, c)))

    def _allowed_triples(self, op: int) -> tuple[Triple, ...]:
        triples = self.table[op].triples
        allowed = self.restriction.allowed
        if allowed is None:
            return triples
        return tuple(
            t
            for t in triples
            if all(allowed(v, d) for _, nodes in cut_nodes(self.graph, op, self.table[op], (t,)) for v, d, _ in nodes)
        )

    def _demands(self) -> list[tuple[Placement, ...]]:
        """The sharded placements of each value that some use, or the storage of a carried input, asks for."""
        graph = self.graph
        found: list[set[int]] = [set() for _ in graph.values]
        for op in graph.ops:
            for triple in self.triples[op.index]:
                for position, value in op.value_operands:
                    placement = triple.operands[position]
                    if placement.is_sharded:
                        found[value].add(placement.dim)
        for value, placement in self.restriction.stored.items():
            if placement.is_sharded:
                found[value].add(placement.dim)
        for source, target in graph.carry:
            a, b = graph.inputs[source], graph.outputs[target]
            if isinstance(b, int):
                found[b] |= found[a]
        for op, value in graph.ties.items():
            found[value].update(t.results[0].dim for t in self.triples[op] if t.results[0].is_sharded)
        return [tuple(S(d) for d in sorted(dims)) for dims in found]

    def _stored(self, value: int) -> tuple[Placement, ...]:
        if value in self.restriction.stored:
            return (self.restriction.stored[value],)
        return (R, *self.demands[value])

    def options(self, value: int, computed: Placement) -> list[Availability]:
        """Every set of conversions worth sharing: to R (which gives every slice for free), or to a set of cuts."""
        cuts, private = self.demands[value], value in self.restriction.private
        key = (cuts, private, computed)
        if key not in self._options:
            everything = frozenset((R, *cuts))
            found = [Availability(computed, (), everything if computed == R else frozenset((computed,)))]
            if not private and computed != R:
                found.append(Availability(computed, ((computed, R),), everything | {computed}))
                found += self._cut_options(computed, cuts)
            self._options[key] = found
        return self._options[key]

    def _cut_options(self, computed: Placement, cuts: tuple[Placement, ...]) -> Iterable[Availability]:
        others = [c for c in cuts if c != computed]
        if computed.is_partial and step_between(computed, S(0)) is None:
            return
        for count in range(1, len(others) + 1):
            for chosen in combinations(others, count):
                if computed.is_sharded:
                    yield Availability(computed, tuple((computed, c) for c in chosen), frozenset((computed, *chosen)))
                    continue
                for first in chosen:
                    # One reduce-scatter, the other cuts from it: cheaper than reducing twice.
                    rest = tuple((first, c) for c in chosen if c != first)
                    yield Availability(computed, ((computed, first), *rest), frozenset((computed, *chosen)))

    def replicated(self) -> list[int]:
        """The assignment in which every device runs the whole function: there is always one."""
        found: list[int] = []
        for states in self.states:
            whole = (
                i
                for i, s in enumerate(states)
                if (s.triple is None or all(p == R for p in (*s.triple.operands, *s.triple.results)))
                and (s.availability is None or R in s.availability.placements)
            )
            found.append(next(whole, 0))
        return found

    def _groups(self, states: tuple[State, ...]) -> tuple[Ints, tuple[frozenset[Placement], ...]]:
        index: dict[frozenset[Placement], int] = {}
        groups = [index.setdefault(s.availability.placements, len(index)) for s in states if s.availability]
        return np.array(groups, dtype=np.int64), tuple(index)

    def _op_uses(self) -> Iterable[Use]:
        for op in self.graph.ops:
            variable = self.op_variable[op.index]
            for position, value in op.value_operands:
                placements = [s.triple.operands[position] for s in self.states[variable] if s.triple]
                yield _use(value, variable, placements, self._runs(value, self.graph.read_in(op, position)))

    def _carry_uses(self) -> Iterable[Use]:
        """A carried output must be brought to the layout in which its input is stored, and so in every loop."""
        for source, target in self.graph.carry:
            a, b = self.graph.inputs[source], self.graph.outputs[target]
            if isinstance(b, int) and a != b:
                variable = self.value_variable[a]
                stored = [s.availability.computed for s in self.states[variable] if s.availability]
                yield _use(b, variable, stored, 1.0)
        for op, value in self.graph.ties.items():
            variable = self.op_variable[op]
            carried = [s.triple.results[0] for s in self.states[variable] if s.triple]
            yield _use(value, variable, carried, self._runs(value, self.graph.ops[op].region))

    def _runs(self, value: int, region: int) -> float:
        return self.graph.runs[self.graph.place_of_conversion(value, region)]


def _use(value: int, variable: int, placements: list[Placement], runs: float) -> Use:
    index: dict[Placement, int] = {}
    groups = np.array([index.setdefault(p, len(index)) for p in placements], dtype=np.int64)
    return Use(value, variable, groups, tuple(index), runs)
