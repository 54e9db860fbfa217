"""What people run today, as programs of the same instruction set: for comparison, and three of them among the first
programs of a search for the least makespan (`choices_of`).

Each baseline is a restriction of the formulated problem (which inputs are stored how, which dimensions may be cut)
at fixed ratios, solved exactly, passed through the checker and costed with the same model.

    data_parallel        parameters replicated, the batch cut evenly
    zero1                data parallel, optimizer state cut evenly along its longest dimension (Rajbhandari et al.
                         2020): gradients are all-reduced, each device updates its part, new parameters are gathered
    zero2                the same with gradients reduced to where the state lies: less of both memory and bytes
    zero3                parameters cut like the state, and gathered again for every use; with collectives beside
                         computing once for all uses where that is faster and fits (FSDP's
                         reshard_after_forward=False)
    expert_parallel      data parallel, but each device holds some of the experts whole and tokens go where theirs are
                         (GShard: Lepikhin et al. 2020); only where there are experts
    expert_zero2         the same with all other weights as in ZeRO-2 (DeepSpeed-MoE: Rajbhandari et al. 2022)
    ..._speed            these with the batch, and experts, cut in proportion to the devices' speed, all else evenly:
                         what Poplar (arXiv 2408.12596) does. The speed is that of the graph's contractions, each at
                         its own dtype's rate
    tensor_parallel      the cuts of Megatron-LM (Shoeybi et al. 2019): the batch whole, every weight cut in at most
                         one dimension, so that columns meet rows, partial sums reduced where they arise; evenly, over
                         all devices

Each has one axis over its devices. What mixes these along several, as tensor parallel within hosts and data parallel
between them, is none of the baselines, nor are pipelines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hapsynth._jax import is_extended
from hapsynth.cluster.cluster import DEFAULT_AXIS
from hapsynth.graph.ir import Boundary
from hapsynth.instructions.factors import Triples
from hapsynth.instructions.layout import Layout, Placement, R, S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Program
from hapsynth.instructions.program.sizes import Classes, Node, Sizes
from hapsynth.instructions.rules.contraction import CONTRACTIONS
from hapsynth.instructions.rules.factor_table import cut_nodes
from hapsynth.search.analysis.dimension_groups import kinship
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.program_cost import program_cost, without_unread
from hapsynth.search.formulation.choice_space import Allowed, ChoiceSpace, Interned, Restriction
from hapsynth.search.formulation.emission import Emitter
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.memory.profile import held_by
from hapsynth.search.planning.fitting_schedule import scheduled_steps, shortest_fitting, timed
from hapsynth.search.planning.task import Task
from hapsynth.search.result import Result
from hapsynth.search.scheduling.list_schedule import ordered, schedule
from hapsynth.search.scheduling.tasks import TaskGraph, tasks_of
from hapsynth.search.scheduling.timeline import Timeline
from hapsynth.search.sizing.ratios import Ratios, proportional
from hapsynth.search.sizing.sizer import Sizer
from hapsynth.search.solver import Ints, solve

_BY_SPEED = "_speed"
ONE_DEVICE = "one device"
_ZERO = {"data_parallel": "data parallel", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
_EXPERTS = {"expert_parallel": "expert parallel (GShard)", "expert_zero2": "expert parallel, ZeRO-2 (DeepSpeed-MoE)"}
_both = lambda labels: {
    n + how: f"{label}, {said}" for n, label in labels.items() for how, said in (("", "even"), (_BY_SPEED, "by speed"))
}
NAMES = (*_both(_ZERO), "tensor_parallel")
"""Those that there are for every graph."""
LABELS = {**_both(_ZERO), "tensor_parallel": "tensor parallel, even", **_both(_EXPERTS)}
"""Name -> as a report says it."""


@dataclass(frozen=True, eq=False)
class Baseline:
    """A baseline's program at its sizes, as `costs` of its devices have it."""

    program: Program
    sizes: Sizes
    costs: CostModel
    cost_s: float
    fits: bool
    overlap: bool = False
    """Whether `cost_s` is of its collectives beside computing."""
    devices: tuple[int, ...] | None = None
    """Those of the cluster that it is for, where not all."""

    @cached_property
    def held_bytes(self) -> tuple[float, ...]:
        """Predicted peak of each device. It takes longer than all else about a baseline, and few are asked for it."""
        return held_by(self.program, self.sizes, self.costs)

    @property
    def memory_bytes(self) -> float:
        """The largest of the devices' peaks."""
        return max(self.held_bytes)

    def result(self, limits: Sequence[float]) -> Result:
        """As a plan's, of which nothing is proved. `limits`: bytes of each device of the cluster."""
        devices = self.devices
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
            exact=self.costs.memory_budget.exact,
            lowering=self.costs.lowering,
        )


class Solved:
    """What a search came to, as programs to be sized for the devices of some `costs`: in few and large stages, and in
    the order that spares memory."""

    def __init__(self, emitter: Emitter, costs: CostModel) -> None:
        self._emitter, self.costs = emitter, costs

    @cached_property
    def staged(self) -> Sizer:
        return self._sizer(sparing=False)

    @cached_property
    def sparing(self) -> Sizer:
        return self._sizer(sparing=True)

    def _sizer(self, *, sparing: bool) -> Sizer:
        costs = self.costs
        program = self._emitter.ordered(costs.axes, sparing=sparing)
        return Sizer(program, Classes.build(costs.graph, program, costs.table), costs)


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
    """Builds the baselines of one task, of which they take the graph, the devices and what these may hold. `devices`:
    those of a larger cluster that the task's are, where not all."""

    def __init__(self, task: Task, devices: tuple[int, ...] | None = None) -> None:
        graph, table = task.graph, task.factors
        self.devices = devices
        axes = ((DEFAULT_AXIS, task.cluster.n),)
        self.costs = CostModel(graph, task.cluster, table, axes, task.memory_budget, task.options.lowering)
        self.graph, self.table, self.task, self.limit = graph, table, task, task.memory_budget.limit
        self.kin = kinship(graph, table)
        self.state = [graph.inputs[source] for source, _ in graph.carry]
        held = set(self.state)
        self.batch = [v for v in graph.inputs if v not in held and graph.values[v].shape]
        self.batch_roots = {r for v in self.batch if (r := self.kin.root(v, 0)) is not None}
        self._structures: dict[str, ChoiceSpace] = {}
        """What each may choose, whatever the devices."""

    def on(self, devices: tuple[int, ...]) -> Baselines:
        """Those for some of the devices, with which the others share what no device decides."""
        other, cluster = copy(self), self.task.cluster.subset(devices)
        other.task, other.devices = self.task.on(cluster), devices
        axes = ((DEFAULT_AXIS, cluster.n),)
        other.costs = self.costs.on(cluster, other.task.memory_budget, axes)
        other.limit = other.task.memory_budget.limit
        return other

    def overlapped(self, baseline: Baseline, tasks: TaskGraph | None = None) -> Baseline:
        """A baseline in the order found that takes the least with its collectives beside computing, of those in which
        it fits, if there are any: by the steps that it has, or those that go together, without a gather that nothing
        reads before it is made again. `tasks`: its own, where they are known."""
        plain, sizes, costs = without_unread(baseline.program, self.graph), baseline.sizes, self.costs

        def scheduled(program: Program) -> Timeline:
            own = tasks if program is baseline.program else None
            return schedule(own or tasks_of(program, sizes, costs, dominated=False))

        ways = scheduled_steps(plain, sizes, costs, scheduled)
        fitting = shortest_fitting(plain, sizes, costs, ways)
        every = [fitting] if fitting else [timed(ordered(*way), sizes, costs) for way in ways]
        found = min(every, key=lambda each: each.timeline.makespan_s)
        cost, fits = found.timeline.makespan_s, fitting is not None
        return replace(baseline, program=found.program, cost_s=cost, fits=fits, overlap=True)

    @property
    def speed(self) -> Floats:
        """Fractions of the devices by how fast they run the graph's contractions."""
        return proportional(self.costs.speed)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that there are for the graph."""
        return (*NAMES, *(_both(_EXPERTS) if self.expert_dims else ()))

    def all(self, names: Iterable[str] | None = None) -> dict[str, Baseline]:
        """Baselines by name: some, or every one that there is for the graph."""
        even = np.full(self.costs.n, 1.0 / self.costs.n)
        restrictions = {
            "data_parallel": self._data_parallel,
            "zero1": lambda: self._zero12(reduced_whole=True),
            "zero2": lambda: self._zero12(reduced_whole=False),
            "zero3": self._zero3,
            "tensor_parallel": self._tensor_parallel,
            "expert_parallel": lambda: self._expert_parallel(self._data_parallel()),
            "expert_zero2": lambda: self._expert_parallel(self._zero12(reduced_whole=False)),
        }
        asked = self.names if names is None else tuple(names)
        found: dict[str, Baseline] = {}
        for name, restriction in restrictions.items():
            by = {n: self.speed if n.endswith(_BY_SPEED) else even for n in (name, name + _BY_SPEED) if n in asked}
            if not by:
                continue
            if name not in self._structures:
                make = _ReducedAtOnce if name == "tensor_parallel" else ChoiceSpace
                self._structures[name] = make(self.graph, self.table, restriction())
            solved = self._solved(self._structures[name])
            experts = name in _EXPERTS
            found |= {n: self.sized(solved, batch, even, experts=experts) for n, batch in by.items()}
        return {name: found[name] for name in asked}

    def alone(self) -> Baseline:
        """All that there is on one device, where nothing is cut: of a task with one device."""
        if ONE_DEVICE not in self._structures:
            nothing = Restriction(allowed=lambda value, dim: False)
            self._structures[ONE_DEVICE] = ChoiceSpace(self.graph, self.table, nothing)
        return self.sized(self._solved(self._structures[ONE_DEVICE]), np.ones(1), np.ones(1))

    def _stored_batch(self) -> dict[int, Layout]:
        return {v: (S(0),) for v in self.batch if self.kin.root(v, 0) is not None and self.graph.values[v].shape[0] > 1}

    def _data_parallel(self) -> Restriction:
        stored = {**dict.fromkeys(self.state, (R,)), **self._stored_batch()}
        # Only gradients and sums over the batch are communicated.
        convertible = lambda v, source, target: not source.is_sharded
        allowed = lambda v, d: self.kin.root(v, d) in self.batch_roots
        return Restriction(stored, allowed, convertible=convertible, role=lambda _: None)

    def _cut_state(self, state: Iterable[int]) -> tuple[dict[int, Layout], Allowed]:
        """Some of the state stored cut along its longest dimension, and the cuts that this and the batch call for."""
        stored: dict[int, Layout] = {}
        cut_shapes: set[tuple[tuple[int, ...], int]] = set()
        for v in state:
            shape = self.graph.values[v].shape
            dim = max(range(len(shape)), key=lambda d: shape[d], default=-1)
            # What is empty can't be cut, and typed keys are held whole.
            if dim < 0 or shape[dim] <= 1 or is_extended(self.graph.values[v].dtype):
                stored[v] = (R,)
            else:
                stored[v] = (S(dim),)
                cut_shapes.add((shape, dim))

        def allowed(value: int, dim: int) -> bool:
            if self.kin.root(value, dim) in self.batch_roots:
                return True
            shape = self.graph.values[value].shape
            batched = any(self.kin.root(value, d) in self.batch_roots for d in range(len(shape)))
            return (shape, dim) in cut_shapes and not batched

        return stored, allowed

    def _scattered(self, allowed: Allowed) -> Callable[[int], bool]:
        """Whether a value is a gradient that is only needed in parts. Where none of the state of its shape is cut, as
        under plain SGD without moments and of one element, it is needed whole."""
        gradients, values = self.costs.bucketing.updates, self.graph.values
        return lambda v: v in gradients and any(allowed(v, d) for d in range(len(values[v].shape)))

    def _zero12(self, *, reduced_whole: bool) -> Restriction:
        gradients, graph = self.costs.bucketing.updates, self.graph
        # Nothing but the update reads optimizer state.
        moments = [v for v in self.state if v in gradients]
        stored, allowed = self._cut_state(moments)
        stored |= {v: (R,) for v in self.state if v not in gradients}
        ends = {graph.inputs[source]: graph.outputs[target] for source, target in graph.carry}
        renewed = {ends[v] for v in self.state if v not in gradients}
        scattered = self._scattered(allowed)

        def convertible(value: int, source: Placement, target: Placement) -> bool:
            if source.is_sharded:
                return value in renewed
            if source.is_partial and reduced_whole:
                return not target.is_sharded
            return target.is_sharded or not scattered(value)

        role = lambda v: (v in renewed, scattered(v))
        return Restriction({**stored, **self._stored_batch()}, allowed, convertible=convertible, role=role)

    def _zero3(self) -> Restriction:
        stored, allowed = self._cut_state(self.state)
        held, scattered = set(self.state), self._scattered(allowed)

        def convertible(value: int, source: Placement, target: Placement) -> bool:
            if source.is_sharded:
                return value in held
            return target.is_sharded or not scattered(value)

        role = lambda v: (v in held, scattered(v))
        return Restriction({**stored, **self._stored_batch()}, allowed, frozenset(held), convertible, role)

    @cached_property
    def expert_dims(self) -> dict[int, int]:
        """State -> the dimension along which its experts lie: one that weights share with what they are multiplied
        with, and that the result has too."""
        makers = {v: op for op in self.graph.ops for v in op.results}

        def origin(value: int) -> int:
            """What a value is, but for its dtype."""
            while (op := makers.get(value)) is not None and op.name == "convert_element_type":
                value = op.value_operands[0][1]
            return value

        weights = set(self.state) - self.costs.bucketing.updates
        found: set[tuple[tuple[int, ...], int, Node]] = set()
        for op in self.graph.ops:
            if op.name not in CONTRACTIONS:
                continue
            factors, values = self.table[op.index], dict(op.value_operands)
            inside = [{f for dim in dims for f in dim} for dims in (*factors.operands, factors.results[0])]
            for factor in set.intersection(*inside):
                for position, value in values.items():
                    weight = origin(value)
                    d = next(d for d, dim in enumerate(factors.operands[position]) if factor in dim)
                    if weight in weights and (root := self.kin.root(weight, d)) is not None:
                        found.add((self.graph.values[weight].shape, d, root))
        return {
            v: d
            for v in self.state
            for d in range(len(self.graph.values[v].shape))
            if (self.graph.values[v].shape, d, self.kin.root(v, d)) in found
        }

    @cached_property
    def _expert_roots(self) -> set[Node]:
        return {r for v, d in self.expert_dims.items() if (r := self.kin.root(v, d)) is not None}

    def _expert_parallel(self, rest: Restriction) -> Restriction:
        """`rest`: of all that is no expert's."""
        held = set(self.state)
        stored = {**rest.stored, **{v: (S(d),) for v, d in self.expert_dims.items()}}
        allowed_of_rest, convertible_of_rest = rest.allowed, rest.convertible
        assert allowed_of_rest is not None
        assert convertible_of_rest is not None
        allowed = lambda v, d: self.kin.root(v, d) in self._expert_roots or allowed_of_rest(v, d)

        def convertible(value: int, source: Placement, target: Placement) -> bool:
            if value in self.expert_dims:
                return False
            sent = source.is_sharded and target.is_sharded and value not in held
            return sent or convertible_of_rest(value, source, target)

        role = lambda v: (v in self.expert_dims, v in held, rest.role(v))
        return Restriction(stored, allowed, convertible=convertible, role=role)

    def _tensor_parallel(self) -> Restriction:
        cut = self._alternating_roots()
        stored: dict[int, Layout] = dict.fromkeys(self.batch, (R,))
        for v in self.state:
            dims = [d for d in range(len(self.graph.values[v].shape)) if self.kin.root(v, d) in cut]
            stored[v] = (S(dims[0]) if dims else R,)
        held = set(self.state)
        convertible = lambda v, source, target: v not in held or source == R
        allowed = lambda v, d: self.kin.root(v, d) in cut
        return Restriction(stored, allowed, convertible=convertible, role=held.__contains__)

    def _alternating_roots(self) -> set[Node]:
        """Classes of weight dimensions to cut, at most one per weight.

        The width that most weights share (a transformer's residual stream) stays whole. Of the others, the one with
        the fewest sums over it per weight comes first: heads before the width of a head.
        """
        fed = {self.kin.root(v, d) for v in self.batch for d in range(len(self.graph.values[v].shape))}
        contracted, summed = self._contracted_roots()
        weights = [
            [
                r
                for d in range(len(self.graph.values[v].shape))
                if (r := self.kin.root(v, d)) is not None and r in contracted
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

    def choices_of(self, space: ChoiceSpace) -> list[Ints]:
        """Data parallelism, ZeRO-2 and ZeRO-3 as choices of another choice space, those that it has."""
        zero2, agreed = self._zero12(reduced_whole=False), space.agreed_axes
        solved = (
            self._chosen(ChoiceSpace(self.graph, self.table, restriction, agreed_axes=agreed))
            for restriction in (self._data_parallel(), zero2, self._zero3())
        )
        return [found for builder, chosen in solved if (found := space.alike(builder.structure, chosen)) is not None]

    def _solved(self, structure: ChoiceSpace) -> Solved:
        """The best program at even sizes."""
        builder, chosen = self._chosen(structure)
        return Solved(Emitter(builder, chosen.tolist()), self.costs)

    def _chosen(self, structure: ChoiceSpace) -> tuple[ProblemBuilder, Ints]:
        ratios = Ratios(self.graph, self.table, np.full(self.costs.n, 1.0 / self.costs.n))
        builder = ProblemBuilder(structure, self.costs, ratios)
        solution = solve(builder.problem(), tolerance=1e-4)
        if solution.interrupted:
            raise KeyboardInterrupt
        if solution.assignment is not None:
            return builder, solution.assignment
        # Some weight's cut dimension meets no op that takes it cut (a flattened image): it may be gathered.
        free = replace(structure.restriction, convertible=None)
        assert structure.restriction.convertible is not None, "with every conversion the replicated program is there"
        return self._chosen(type(structure)(self.graph, self.table, free, agreed_axes=structure.agreed_axes))

    def sized(self, solved: Solved, batch: Floats, rest: Floats, *, experts: bool = False) -> Baseline:
        """A program with its batch, and `experts`, and with everything else cut by these fractions; in the order that
        spares memory where it must be, as the plan is."""
        like_batch = self.batch_roots | (self._expert_roots if experts else set())
        found = self._costed(solved.staged, batch, rest, like_batch)
        return found if found.fits else self._costed(solved.sparing, batch, rest, like_batch)

    def _costed(self, sizer: Sizer, batch: Floats, rest: Floats, like_batch: Set[Node]) -> Baseline:
        program, classes = sizer.program, sizer.classes
        of_batch, of_rest = sizer.fixed(batch), sizer.fixed(rest)
        batched = [any(self.kin.root(v, d) in like_batch for v, d, *_ in c.members) for c in classes.all]
        chosen = (of_batch if b else of_rest for b in batched)
        sizes = Sizes(self.graph, classes, tuple(s.shares[i] for i, s in enumerate(chosen)))
        check(self.graph, program, sizes)
        fits = sizer.memory.peak(sizes) <= self.limit
        cost = program_cost(program, sizes, self.costs)
        return Baseline(program, sizes, self.costs, cost, fits, devices=self.devices)
