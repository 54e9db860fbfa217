"""What people run today, as programs of the same instruction set: for comparison, never as a start of the search.

Each baseline is a restriction of the formulated problem (which inputs are stored how, which dimensions may be cut)
at fixed ratios, solved exactly, passed through the checker and costed with the same model.

    data_parallel        parameters replicated, the batch cut evenly
    zero1                data parallel, optimizer state cut evenly along its longest dimension (Rajbhandari et al.
                         2020): gradients are all-reduced, each device updates its part, new parameters are gathered
    zero2                the same with gradients reduced to where the state lies: less of both memory and bytes
    zero3                parameters cut like the state, and gathered again for every use
    ..._speed            the four with the batch cut in proportion to the devices' speed, all else evenly: what Poplar
                         (arXiv 2408.12596) does
    tensor_parallel      Megatron-LM (Shoeybi et al. 2019): the batch whole, every weight cut in at most one
                         dimension, so that columns meet rows, partial sums reduced where they arise; evenly
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hapsynth.cluster.cluster import DEFAULT_AXIS
from hapsynth.graph.ir import Boundary
from hapsynth.instructions.factors import Triples
from hapsynth.instructions.layout import Layout, Placement, R, S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Classes, Node, Sizes, cut_nodes
from hapsynth.instructions.rules.contraction import CONTRACTIONS
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.search.analysis.dimension_groups import kinship
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.program_cost import program_cost
from hapsynth.search.formulation.choice_space import Allowed, ChoiceSpace, Interned, Restriction
from hapsynth.search.formulation.emission import Emitter
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.memory.profile import held_by, peak
from hapsynth.search.planning.task import Task
from hapsynth.search.result import Result
from hapsynth.search.scheduling.list_schedule import ordered, refined, schedule
from hapsynth.search.scheduling.tasks import tasks_of
from hapsynth.search.sizing.ratios import Ratios, proportional
from hapsynth.search.sizing.sizer import Sizer
from hapsynth.search.solver import solve

_BY_SPEED = "_speed"
_EVENLY = {"data_parallel": "data parallel", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
LABELS = {
    **{
        n + how: f"{label}, {said}"
        for n, label in _EVENLY.items()
        for how, said in (("", "even"), (_BY_SPEED, "by speed"))
    },
    "tensor_parallel": "tensor parallel (Megatron), even",
}
"""Name -> as a report says it."""
NAMES = tuple(LABELS)


@dataclass(frozen=True, eq=False)
class Baseline:
    """A baseline's program at its sizes. `held_bytes`: predicted peak of each device."""

    program: Program
    sizes: Sizes
    cost_s: float
    held_bytes: tuple[float, ...]
    fits: bool
    lowering: LoweringOptions = DEFAULT
    overlap: bool = False
    """Whether `cost_s` is of its collectives beside computing."""

    @property
    def memory_bytes(self) -> float:
        """The largest of the devices' peaks."""
        return max(self.held_bytes)

    def result(self, limits: Sequence[float], devices: tuple[int, ...] | None = None) -> Result:
        """As a plan's, of which nothing is proved. `limits`: bytes of each device of the cluster; `devices`: those that
        the baseline is for, where not all."""
        held = dict(zip(range(len(limits)) if devices is None else devices, self.held_bytes, strict=True))
        memory = tuple(held.get(d, 0.0) for d in range(len(limits)))
        return Result(
            self.program,
            self.sizes,
            self.cost_s,
            lower_bound_s=0.0,
            joint_lower_bound_s=0.0,
            status="gap",
            expanded=0,
            overlap=self.overlap,
            memory_bytes=memory,
            memory_limit_bytes=tuple(limits),
            devices=devices,
            lowering=self.lowering,
        )


class _ReducedAtOnce(ChoiceSpace):
    """Partial tensors are reduced where they arise, as Megatron's operators f and g do: no op takes one, but the sum
    of a value's gradients. (Left free, the search pushes a partial gradient through a whole layer norm where what
    comes after it is smaller; nobody writes that by hand.) Numbers are summed on each device first: a norm."""

    def _triples(self, op: int) -> Interned[Triples]:
        triples = super()._triples(op)
        source = self.graph.ops[op]
        if source.name == "add_any" or isinstance(source.primitive, Boundary):
            return triples
        tensors = tuple(p for p, v in source.value_operands if self.graph.values[v].shape)
        whole = lambda ts: not any(t.operands[p].is_partial for t in ts for p in tensors)
        return self.once(("reduced at once", triples, tensors), lambda: Interned(filter(whole, triples)))


class Baselines:
    """Builds the baselines of one task, of which they take the graph, the devices and what these may hold."""

    def __init__(self, task: Task) -> None:
        graph, table = task.graph, task.factors
        # What people run today knows one axis over all devices.
        axes = ((DEFAULT_AXIS, task.cluster.n),)
        self.costs = CostModel(graph, task.cluster, table, axes, lowering=task.options.lowering)
        self.graph, self.table, self.limit = graph, table, task.memory_budget.limit
        self.kin = kinship(graph, table)
        self.state = [graph.inputs[source] for source, _ in graph.carry]
        held = set(self.state)
        self.batch = [v for v in graph.inputs if v not in held and graph.values[v].shape]
        self.batch_roots = {r for v in self.batch if (r := self.root(v, 0)) is not None}

    def overlapped(self, baseline: Baseline) -> Baseline:
        """A baseline in the order found that takes the least with its collectives beside computing."""
        timeline = refined(schedule(tasks_of(baseline.program, baseline.sizes, self.costs)))
        program = ordered(baseline.program, timeline)
        return replace(baseline, program=program, cost_s=timeline.makespan_s, overlap=True)

    def all(self, names: Iterable[str] | None = None) -> Mapping[str, Baseline]:
        """Baselines by name: every one, or some."""
        even = np.full(self.costs.n, 1.0 / self.costs.n)
        speed = proportional(self.costs.rate("float32"))
        structures = {
            "data_parallel": lambda: ChoiceSpace(self.graph, self.table, self._data_parallel()),
            "zero1": lambda: ChoiceSpace(self.graph, self.table, self._zero12(reduced_whole=True)),
            "zero2": lambda: ChoiceSpace(self.graph, self.table, self._zero12(reduced_whole=False)),
            "zero3": lambda: ChoiceSpace(self.graph, self.table, self._zero3()),
            "tensor_parallel": lambda: _ReducedAtOnce(self.graph, self.table, self._tensor_parallel()),
        }
        asked = NAMES if names is None else tuple(names)
        found: dict[str, Baseline] = {}
        for name, make in structures.items():
            by = {n: speed if n.endswith(_BY_SPEED) else even for n in (name, name + _BY_SPEED) if n in asked}
            if by:
                emitter = self._solved(make())
                found |= {n: self.sized(emitter, batch, even) for n, batch in by.items()}
        return {name: found[name] for name in asked}

    def root(self, value: int, dim: int) -> Node | None:
        """What stands for all dimensions that some op could cut together with this one; None where none cuts it."""
        node = (value, dim, (), 0)
        return self.kin.find(node) if node in self.kin.parent else None

    def _stored_batch(self) -> dict[int, Layout]:
        return {v: (S(0),) for v in self.batch if self.root(v, 0) is not None and self.graph.values[v].shape[0] > 1}

    def _data_parallel(self) -> Restriction:
        stored = {**dict.fromkeys(self.state, (R,)), **self._stored_batch()}
        # Only gradients and sums over the batch are communicated.
        convertible = lambda v, source, target: not source.is_sharded
        allowed = lambda v, d: self.root(v, d) in self.batch_roots
        return Restriction(stored, allowed, convertible=convertible, role=lambda _: None)

    def _cut_state(self, state: Iterable[int]) -> tuple[dict[int, Layout], Allowed]:
        """Some of the state stored cut along its longest dimension, and the cuts that this and the batch call for."""
        stored: dict[int, Layout] = {}
        cut_shapes: set[tuple[tuple[int, ...], int]] = set()
        for v in state:
            shape = self.graph.values[v].shape
            dim = max(range(len(shape)), key=lambda d: shape[d], default=-1)
            if dim < 0 or shape[dim] == 1:
                stored[v] = (R,)
            else:
                stored[v] = (S(dim),)
                cut_shapes.add((shape, dim))

        def allowed(value: int, dim: int) -> bool:
            if self.root(value, dim) in self.batch_roots:
                return True
            shape = self.graph.values[value].shape
            batched = any(self.root(value, d) in self.batch_roots for d in range(len(shape)))
            return (shape, dim) in cut_shapes and not batched

        return stored, allowed

    def _zero12(self, *, reduced_whole: bool) -> Restriction:
        gradients, graph = self.costs.together.updates, self.graph
        # Nothing but the update reads optimizer state.
        moments = [v for v in self.state if v in gradients]
        stored, allowed = self._cut_state(moments)
        stored |= {v: (R,) for v in self.state if v not in gradients}
        ends = {graph.inputs[source]: graph.outputs[target] for source, target in graph.carry}
        renewed = {ends[v] for v in self.state if v not in gradients}

        def convertible(value: int, source: Placement, target: Placement) -> bool:
            if source.is_sharded:
                return value in renewed
            if source.is_partial and reduced_whole:
                return not target.is_sharded
            return target.is_sharded or value not in gradients or not graph.values[value].shape

        role = lambda v: (v in renewed, v in gradients and bool(graph.values[v].shape))
        return Restriction({**stored, **self._stored_batch()}, allowed, convertible=convertible, role=role)

    def _zero3(self) -> Restriction:
        stored, allowed = self._cut_state(self.state)
        gradients, held = self.costs.together.updates, set(self.state)

        def convertible(value: int, source: Placement, target: Placement) -> bool:
            if source.is_sharded:
                return value in held
            return target.is_sharded or value not in gradients or not self.graph.values[value].shape

        role = lambda v: (v in held, v in gradients and bool(self.graph.values[v].shape))
        return Restriction({**stored, **self._stored_batch()}, allowed, frozenset(held), convertible, role)

    def _tensor_parallel(self) -> Restriction:
        cut = self._alternating_roots()
        stored: dict[int, Layout] = dict.fromkeys(self.batch, (R,))
        for v in self.state:
            dims = [d for d in range(len(self.graph.values[v].shape)) if self.root(v, d) in cut]
            stored[v] = (S(dims[0]) if dims else R,)
        held = set(self.state)
        convertible = lambda v, source, target: v not in held or source == R
        allowed = lambda v, d: self.root(v, d) in cut
        return Restriction(stored, allowed, convertible=convertible, role=held.__contains__)

    def _alternating_roots(self) -> set[Node]:
        """Classes of weight dimensions to cut, at most one per weight.

        The width that most weights share (a transformer's residual stream) stays whole. Of the others, the one with
        the fewest sums over it per weight comes first: heads before the width of a head.
        """
        fed = {self.root(v, d) for v in self.batch for d in range(len(self.graph.values[v].shape))}
        contracted, summed = self._contracted_roots()
        weights = [
            [
                r
                for d in range(len(self.graph.values[v].shape))
                if (r := self.root(v, d)) is not None and r in contracted
            ]
            for v in self.state
        ]
        neighbours: dict[Node, set[Node]] = {}
        for roots in weights:
            for r in roots:
                neighbours.setdefault(r, set()).update(o for o in roots if o != r)
        chosen: set[Node] = set()
        covered = Counter(r for roots in weights for r in set(roots))
        shared = {r for r, count in covered.items() if 2 * count > len([w for w in weights if w])}
        for r in sorted(neighbours, key=lambda r: (summed[r] / covered[r], len(neighbours[r]), r)):
            if r not in fed | shared and not neighbours[r] & chosen:
                chosen.add(r)
        return chosen

    def _contracted_roots(self) -> tuple[set[Node], Counter[Node]]:
        """Classes that some contraction can cut, and how many of them each is summed over by."""
        found: set[Node] = set()
        summed: Counter[Node] = Counter()
        for op in self.graph.ops:
            if op.name not in CONTRACTIONS:
                continue
            for triple in self.table[op.index].triples:
                roots = {
                    self.kin.find((v, d, (), 0))
                    for _, nodes in cut_nodes(self.graph, op.index, self.table[op.index], (triple,))
                    for v, d, *_ in nodes
                }
                found |= roots
                if triple.factor in self.table[op.index].reductions:
                    summed.update(roots)
        return found, summed

    def _solved(self, structure: ChoiceSpace) -> Emitter:
        """The best program at even sizes."""
        ratios = Ratios(self.graph, self.table, np.full(self.costs.n, 1.0 / self.costs.n))
        builder = ProblemBuilder(structure, self.costs, ratios)
        solution = solve(builder.problem(), tolerance=1e-4)
        if solution.assignment is not None:
            emitter = Emitter(builder, solution.assignment.tolist())
            emitter.build()
            return emitter
        # Some weight's cut dimension meets no op that takes it cut (a flattened image): it may be gathered.
        free = replace(structure.restriction, convertible=None)
        assert structure.restriction.convertible is not None, "with every conversion the replicated program is there"
        return self._solved(type(structure)(self.graph, self.table, free))

    def sized(self, emitter: Emitter, batch: Floats, rest: Floats) -> Baseline:
        """A program with its batch and everything else cut by these fractions; in the order that spares memory where it
        must be, as the plan is."""
        found = self._costed(emitter.ordered(self.costs.axes), batch, rest)
        return found if found.fits else self._costed(emitter.ordered(self.costs.axes, sparing=True), batch, rest)

    def _costed(self, program: Program, batch: Floats, rest: Floats) -> Baseline:
        classes = Classes.build(self.graph, program, self.table)
        sizer = Sizer(program, classes, self.costs)
        of_batch, of_rest = sizer.fixed(batch), sizer.fixed(rest)
        batched = [any(self.root(v, d) in self.batch_roots for v, d, *_ in c.members) for c in classes.all]
        chosen = (of_batch if b else of_rest for b in batched)
        sizes = Sizes(self.graph, classes, tuple(s.shares[i] for i, s in enumerate(chosen)))
        check(self.graph, program, sizes)
        fits = peak(program, sizes, self.costs) <= self.limit
        cost, held = program_cost(program, sizes, self.costs), held_by(program, sizes, self.costs)
        return Baseline(program, sizes, cost, held, fits, self.costs.lowering)
