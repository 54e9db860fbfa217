"""A plan's program for arguments of other shapes, without a search: traced again, matched op by op, sized anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic

import numpy as np
from jax.tree_util import tree_flatten, tree_structure

from hapsynth._quantities import nbytes
from hapsynth.adapting.resize import best_sizes, resized
from hapsynth.graph.ir import Graph, Literal, Op, Operand
from hapsynth.graph.rematerialize import recomputed
from hapsynth.graph.trace import Traced, trace
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, ProgramError
from hapsynth.instructions.program.sizes import Classes, Node, Sizes, layout_nodes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.running.base import P, Planned
from hapsynth.search.cost.model import CostModel

_AGAIN = "synthesize for these shapes"


class ShapeError(ValueError):
    """A plan's program is not that of the function at other shapes."""


def for_shapes(plan: P, args: Sequence[Any], kwargs: Mapping[str, Any]) -> P:
    """`Plan.for_shapes`."""
    traced = _traced(plan, args, kwargs)
    graph, old = traced.graph, plan.traced.graph
    if all(a.shape == b.shape for a, b in zip(graph.values, old.values)):
        return plan
    table = FactorTable(graph)
    for i in plan.program.instructions:
        if isinstance(i, Compute) and not table[i.op].allows(i.triples):
            raise ShapeError(f"{_named(graph.ops[i.op])} cannot be divided as it is in the plan: {_AGAIN}")
    axes, result = plan.program.axes, plan.result
    costs = CostModel(graph, plan.used, table, axes, result.memory_budget, result.lowering)
    try:
        classes = Classes.build(graph, plan.program, table)
        pinned = list(_kept(plan, graph))
        sizes, peak = best_sizes(plan, costs, classes, dict(_pinned(plan.sizes, classes, pinned)))
        check(graph, plan.program, sizes)
    except ProgramError as error:
        raise ShapeError(f"the plan's program is none at these shapes ({error}): {_AGAIN}") from error
    for node in pinned:
        before, after = (s.lengths(*node) for s in (plan.sizes, sizes))
        if before != after:
            path = traced.in_paths[graph.inputs.index(node[0])]
            raise ShapeError(
                f"argument {path}, whose shape stays, is kept in shards of {list(before)}, and at these shapes that "
                f"dimension is cut with others in shards of {list(after)}: {_AGAIN}"
            )
    if peak > plan.memory_limit:
        raise ShapeError(f"the program needs {nbytes(peak)} on a device that has {nbytes(plan.memory_limit)}: {_AGAIN}")
    uneven = any(len({*sizes.lengths(*node)}) > 1 for node in pinned)
    try:
        return resized(plan, sizes, costs, plan.cluster, traced, like=plan if uneven else None)
    except ProgramError as error:
        raise ShapeError(f"{error}: {_AGAIN}") from error


def _traced(plan: Planned, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Traced:
    """The function at the new shapes, the same in all but sizes; ShapeError where it is not."""
    planned, function = plan.traced, plan.function
    if tree_structure((tuple(args), dict(kwargs))) != planned.in_tree:
        raise ShapeError(plan.arguments.structure_error(args, dict(kwargs)))
    traced = trace(function, args, dict(kwargs), carry=[])
    graph, old = traced.graph, planned.graph
    for path, i in zip(traced.in_paths, range(len(graph.inputs))):
        a, b = graph.values[graph.inputs[i]], old.values[old.inputs[i]]
        if a.dtype != b.dtype or len(a.shape) != len(b.shape):
            raise ShapeError(f"argument {path} is {a}, and the plan is for {b}: only sizes may differ")
    if old.again is not None:
        try:
            graph = recomputed(graph, old.again)
        except ValueError as error:
            raise ShapeError(f"the function does something else at these shapes: {error}; {_AGAIN}") from error
    if traced.out_tree != planned.out_tree:
        raise ShapeError(f"the function returns {traced.out_tree}, and in the plan {planned.out_tree}: {_AGAIN}")
    for a, b in zip(graph.ops, old.ops):
        if _structure(a) != _structure(b):
            what = f"{_named(a)}, where the plan has {_named(b)}"
            raise ShapeError(f"the function does something else at these shapes: {what}; {_AGAIN}")
    kinds = [[(r.kind, r.parent) for r in g.regions] for g in (graph, old)]
    counts = [(len(g.ops), len(g.constants), _operands(g.outputs), g.ties) for g in (graph, old)]
    if kinds[0] != kinds[1] or counts[0] != counts[1]:
        what = f"{len(graph.ops)} ops, where the plan has {len(old.ops)}"
        raise ShapeError(f"the function does something else at these shapes, in {what}: {_AGAIN}")
    for source, target in old.carry:
        path, result = traced.in_paths[source], graph.output(target)
        if result.shape != graph.values[graph.inputs[source]].shape:
            raise ShapeError(f"argument {path} is carried state, and its successor has shape {result.shape}")
    # Declared counts of loops and branches hold on; a scan's trips are traced.
    regions = [r if r.kind == "scan" else replace(r, count=b.count) for r, b in zip(graph.regions, old.regions)]
    kept = {
        name: getattr(old, name) for name in ("carry", "kept", "inexact_inputs", "selecting_outputs", "strong_inputs")
    }
    return replace(traced, graph=replace(graph, **kept, regions=tuple(regions)))


def _structure(op: Op) -> tuple[Any, ...]:
    ranks = [len(s) for s in (*op.shapes, *op.result_shapes)]
    dtypes = [str(d) for d in (*op.dtypes, *op.result_dtypes)]
    return op.name, _operands(op.operands), op.results, ranks, dtypes, op.region


def _operands(operands: Sequence[Operand]) -> tuple[int, ...]:
    return tuple(-1 if isinstance(o, Literal) else o for o in operands)


def _named(op: Op) -> str:
    shapes = ", ".join(str(list(s)) for s in op.shapes)
    return f"{op.name} of {shapes or 'nothing'}" + (f" ({op.source})" if op.source else "")


def _kept(plan: Planned, graph: Graph) -> Iterator[Node]:
    """The dimensions, cut by the plan, of arguments that have the same shape as before."""
    for value in graph.inputs:
        if graph.values[value].shape == plan.traced.graph.values[value].shape:
            yield from layout_nodes(value, plan.program.inputs[value])


def _pinned(old: Sizes, classes: Classes, nodes: Sequence[Node]) -> Iterator[tuple[Node, np.ndarray]]:
    """The fractions by which the classes of some nodes were cut."""
    for node in nodes:
        c, before = classes.all[classes.of[node]], old.classes.of[node]
        whole = next(m for m in c.members if m[2] == c.axes)
        shares = np.array(old.shares[before], np.float64)
        if old.classes.all[before].axes == c.axes and shares.sum():
            yield whole, shares / shares.sum()


class Buckets(Generic[P]):
    """Plans of one program for several sets of shapes: a call takes the one for its arguments' shapes.

    `plans`: shapes of all array leaves -> plan. All share how they keep what has the same shape in all, like carried
    state, so it passes from a call to the next as it is.
    """

    def __init__(self, plans: Sequence[P]) -> None:
        self.plans: dict[tuple[tuple[int, ...], ...], P] = {}
        for i, plan in enumerate(plans):
            if _function(plan) != _function(plans[0]):
                raise ShapeError(f"plan {i} is of another function: give what plan.for_shapes made")
            shapes = _shapes(plan)
            if shapes in self.plans:
                raise ShapeError(f"plan {i} is for the same shapes as one before it: give one for each")
            self.plans[shapes] = plan

    def plan_for(self, *args: Any, **kwargs: Any) -> P:
        """The plan for just these shapes; ShapeError, with those that there are, for others."""
        first = next(iter(self.plans.values()))
        leaves, tree = tree_flatten((args, kwargs))
        if tree != first.traced.in_tree:
            first(*args, **kwargs)  # raises the error of the user's own
        key = tuple(tuple(np.shape(leaves[i])) for i in first.traced.array_leaves)
        if key in self.plans:
            return self.plans[key]
        positions = range(len(key))
        changing = [n for n in positions if len({shapes[n] for shapes in self.plans}) > 1]
        fixed = [n for n in positions if n not in changing and key[n] != next(iter(self.plans))[n]]
        paths, show = first.traced.in_paths, fixed or changing
        describe = lambda shapes: ", ".join(f"{paths[n]}: {list(shapes[n])}" for n in show)
        listed = "; ".join(dict.fromkeys(map(describe, self.plans)))
        raise ShapeError(f"no bucket is for {describe(key)}; there are {listed}. Pad to one, or add one")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a call of the plan for these shapes."""
        return self.plan_for(*args, **kwargs)(*args, **kwargs)

    def shard(self, *args: Any, **kwargs: Any) -> Any:
        """All arguments, placed as the plan for their shapes keeps them; as `Plan.shard`."""
        return self.plan_for(*args, **kwargs).shard(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Buckets({len(self.plans)} of {next(iter(self.plans.values()))!r})"


def _function(plan: Planned) -> tuple[Any, ...]:
    """What plans of one function have in common, whatever their shapes."""
    traced = plan.traced
    return traced.in_tree, traced.out_tree, [_structure(op) for op in traced.graph.ops]


def _shapes(plan: Planned) -> tuple[tuple[int, ...], ...]:
    graph = plan.traced.graph
    return tuple(graph.values[v].shape for v in graph.inputs)
