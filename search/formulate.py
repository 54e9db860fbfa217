"""The costs of a `Structure` at given ratios, as a `Problem` for the solver."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from hapsynth.instructions.collectives import Step, step_between
from hapsynth.instructions.factors import Triple
from hapsynth.instructions.layout import Placement, R, S
from hapsynth.instructions.sizes import cut_nodes
from hapsynth.search.costs import CostModel, Floats
from hapsynth.search.problem import Edge, Problem, Resource
from hapsynth.search.ratios import Ratios
from hapsynth.search.structure import Availability, Structure


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
            table = self._use_table(use.value, available, use.needed) * use.runs
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
        ((_, (*_, (value, dim, _))),) = cut_nodes(self.graph, op, self.table[op], (triple,))
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
            runs, uniform = graph.runs[op.region], self.costs.uniform_time(op.index)
            rows = {t: runs * (self.op_time(op.index, t) + uniform) for t in st.triples[op.index]}
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
                    times = [self.step_time(value, s, t) for s, t in a.steps]
                    made[id(a)] = graph.runs[graph.home[value]] * sum(times)
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
