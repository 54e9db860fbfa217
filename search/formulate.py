"""A planning task as a `Problem`: which triple every op takes, and which conversions of every value are shared.

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
from hapsynth.instructions.collectives import Step, step_between
from hapsynth.instructions.factors import Triple
from hapsynth.instructions.layout import Placement, R, S
from hapsynth.instructions.program import FactorTable
from hapsynth.instructions.sizes import cut_nodes
from hapsynth.search.costs import CostModel, Floats
from hapsynth.search.problem import Edge, Ints, Problem, Resource
from hapsynth.search.ratios import Ratios

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
    """One edge: the layouts that a variable's states ask of a value. `groups` indexes `needed` per state."""

    value: int
    variable: int
    groups: Ints
    needed: tuple[Placement, ...]


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
            t for t in triples if all(allowed(v, d) for v, d, _ in cut_nodes(self.graph, op, self.table[op], t, 0))
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
                yield _use(value, variable, [s.triple.operands[position] for s in self.states[variable] if s.triple])

    def _carry_uses(self) -> Iterable[Use]:
        """A carried output must be brought to the layout in which its input is stored."""
        for source, target in self.graph.carry:
            a, b = self.graph.inputs[source], self.graph.outputs[target]
            if isinstance(b, int) and a != b:
                variable = self.value_variable[a]
                stored = [s.availability.computed for s in self.states[variable] if s.availability]
                yield _use(b, variable, stored)


def _use(value: int, variable: int, placements: list[Placement]) -> Use:
    index: dict[Placement, int] = {}
    groups = np.array([index.setdefault(p, len(index)) for p in placements], dtype=np.int64)
    return Use(value, variable, groups, tuple(index))


class Formulator:
    """The problem of a structure on one cluster at given ratios; `ratios` None gives the joint bound's, with every
    instruction at its own ideal ratio."""

    def __init__(self, structure: Structure, costs: CostModel, ratios: Ratios | None) -> None:
        self.structure, self.costs, self.ratios = structure, costs, ratios
        self.graph, self.table = structure.graph, structure.table
        self._step_times: dict[tuple[int, Placement, Placement], float] = {}
        self._op_times: dict[object, float] = {}
        self._tables: dict[object, Floats] = {}

    def problem(self, resources: Iterable[tuple[frozenset[int], float]] = ()) -> Problem:
        """`resources`: (values live at one point of the schedule, bytes that a device has for them)."""
        st = self.structure
        edges = [self._link(op, value) for op, value in st.links]
        for use in st.uses:
            groups, available = st.groups[use.value]
            table = self._use_table(use.value, available, use.needed)
            edges.append(Edge(st.value_variable[use.value], use.variable, groups, use.groups, table))
        return Problem(tuple(self._unary()), tuple(edges), self._resources(resources))

    def step_time(self, value: int, source: Placement, target: Placement) -> float:
        """Seconds of one conversion step at the current ratios, or at the best ones for the joint bound."""
        key = (value, source, target)
        if key not in self._step_times:
            step = step_between(source, target)
            assert step is not None, key
            nbytes = self.graph.values[value].nbytes
            convertible = self.structure.restriction.convertible
            if convertible is not None and not convertible(value, source, target):
                self._step_times[key] = np.inf
            elif self.ratios is None:
                self._step_times[key] = self.costs.ideal_convert_time(step, nbytes)
            else:
                largest = [self.ratios.largest[self.ratios.of(value, p.dim)] for p in (source, target) if p.is_sharded]
                self._step_times[key] = self.costs.convert_time(step, nbytes, *largest)
        return self._step_times[key]

    def path_time(self, value: int, source: Placement, target: Placement) -> float:
        """Seconds of the cheapest conversion; infinite where there is none."""
        steps = conversion(source, target, lambda a, b: self.step_time(value, a, b))
        return np.inf if steps is None else sum(self.step_time(value, a, b) for _, a, b in steps)

    def op_time(self, op: int, triple: Triple) -> float:
        """Seconds of an op under a triple, on the slowest device."""
        work = self.costs.work(op, triple)
        vector = -1 if self.ratios is None or triple.factor is None else self._op_vector(op, triple)
        key = (work, vector)
        if key not in self._op_times:
            if self.ratios is None:
                self._op_times[key] = self.costs.ideal_time(work)
            else:
                self._op_times[key] = self.costs.time(work, self.ratios.vectors[vector] if vector >= 0 else None)
        return self._op_times[key]

    def feed_time(self, value: int, placement: Placement) -> float:
        """Seconds to put an argument that is new at every step where it is stored."""
        work = self.costs.feed_work(value, placement)
        if work is None:
            return 0.0
        if self.ratios is None:
            return self.costs.ideal_time(work)
        cut = placement.is_sharded
        return self.costs.time(work, self.ratios.vectors[self.ratios.of(value, placement.dim)] if cut else None)

    def _op_vector(self, op: int, triple: Triple) -> int:
        """The ratio of a triple's factor: that of the last dimension it cuts, a result's where there is one."""
        assert self.ratios is not None
        assert triple.factor is not None
        *_, (value, dim, _) = cut_nodes(self.graph, op, self.table[op], triple, 0)
        return self.ratios.of(value, dim, self.table[op].sizes[triple.factor])

    def _final_time(self, value: int, available: Availability) -> float:
        """A plain output may be left in any placement that is not partial."""
        if any(not p.is_partial for p in available.placements):
            return 0.0
        return min(self.path_time(value, available.computed, t) for t in self.output_placements(value))

    def output_placements(self, value: int) -> list[Placement]:
        """Where a plain output may end: whole, or cut along any dimension that may be."""
        allowed = self.structure.restriction.allowed
        shape = self.graph.values[value].shape
        return [R, *(S(d) for d, n in enumerate(shape) if n > 1 and (allowed is None or allowed(value, d)))]

    def _unary(self) -> list[Floats]:
        graph, st = self.graph, self.structure
        unary = [np.zeros(len(s)) for s in st.states]
        for op in graph.ops:
            rows = {t: self.op_time(op.index, t) for t in st.triples[op.index]}
            variable = st.op_variable[op.index]
            unary[variable] += [rows[s.triple] if s.triple else 0.0 for s in st.states[variable]]
        for value in graph.sources:
            variable = st.value_variable[value]
            stored = [s.availability.computed for s in st.states[variable] if s.availability]
            times = {p: self.feed_time(value, p) for p in dict.fromkeys(stored)}
            unary[variable] += [times[p] for p in stored]
        tied = {graph.outputs[target] for _, target in graph.carry}
        plain = {v for v in graph.outputs if isinstance(v, int) and v not in tied}
        for value, variable in enumerate(st.value_variable):
            made: dict[int, float] = {}
            extra: list[float] = []
            for state in st.states[variable]:
                a = state.availability
                assert a is not None
                if id(a) not in made:
                    made[id(a)] = sum(self.step_time(value, s, t) for s, t in a.steps)
                    if value in plain:
                        made[id(a)] += self._final_time(value, a)
                extra.append(made[id(a)])
            unary[variable] += extra
        return unary

    def _use_table(
        self, value: int, available: tuple[frozenset[Placement], ...], needed: tuple[Placement, ...]
    ) -> Floats:
        """Seconds of the cheapest private conversion from each availability to each need."""
        dims = self.structure.demands[value]
        vectors = () if self.ratios is None else tuple(self.ratios.of(value, p.dim) for p in dims)
        key = (self.graph.values[value].nbytes, available, needed, vectors)
        if self.structure.restriction.convertible is not None:
            key = (value, *key)
        if key not in self._tables:
            table = np.zeros((len(available), len(needed)))
            for i, have in enumerate(available):
                for j, need in enumerate(needed):
                    if need not in have:
                        table[i, j] = min(self.path_time(value, h, need) for h in sorted(have))
            self._tables[key] = table
        return self._tables[key]

    def _link(self, op: int, value: int) -> Edge:
        """The result of an op with several is made as the op's triple says."""
        st = self.structure
        position = self.graph.ops[op].results.index(value)
        index: dict[Placement, int] = {}
        triples, made = st.states[st.op_variable[op]], st.states[st.value_variable[value]]
        gu = [index.setdefault(s.triple.results[position], len(index)) for s in triples if s.triple]
        gv = [index[s.availability.computed] for s in made if s.availability]
        table = np.where(np.eye(len(index), dtype=bool), 0.0, np.inf)
        return Edge(st.op_variable[op], st.value_variable[value], np.array(gu), np.array(gv), table)

    def _resources(self, resources: Iterable[tuple[frozenset[int], float]]) -> tuple[Resource, ...]:
        st = self.structure
        made: list[Resource] = []
        for number, (live, limit) in enumerate(resources):
            usage = [np.zeros(len(s)) for s in st.states]
            for value in sorted(live):
                variable = st.value_variable[value]
                usage[variable] += [self._held(value, s.availability) for s in st.states[variable]]
            made.append(Resource(tuple(usage), limit, f"memory at point {number}"))
        return tuple(made)

    def _held(self, value: int, available: Availability | None) -> float:
        """Bytes that a device holds of a value: a partial that was reduced is gone, a stored shard stays."""
        if available is None:
            return 0.0
        kept = [p for p in available.tensors if not (p.is_partial and available.steps)]
        return float(sum(self._tensor_bytes(value, p) for p in kept))

    def _tensor_bytes(self, value: int, placement: Placement) -> float:
        """Bytes of one tensor on a device: the largest shard, as the switch form stores it padded (D2)."""
        nbytes = self.graph.values[value].nbytes
        if placement.is_sharded and self.ratios is not None:
            return nbytes * self.ratios.largest[self.ratios.of(value, placement.dim)]
        return float(nbytes)


def conversion(
    source: Placement, target: Placement, time: Callable[[Placement, Placement], float]
) -> tuple[tuple[Step, Placement, Placement], ...] | None:
    """The cheapest sequence of single steps along one mesh axis, or None."""
    if source == target:
        return ()
    direct = step_between(source, target)
    found: list[tuple[float, int, tuple[tuple[Step, Placement, Placement], ...]]] = []
    if direct is not None:
        found.append((time(source, target), 1, ((direct, source, target),)))
    first, second = step_between(source, R), step_between(R, target)
    if first is not None and second is not None:
        found.append((time(source, R) + time(R, target), 2, ((first, source, R), (second, R, target))))
    return min(found)[2] if found else None
