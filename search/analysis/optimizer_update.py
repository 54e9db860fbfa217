"""The part of a training step that brings the state forward: gradients, and what the optimizer makes of them.

These conversions become ready together and are bucketed (`LoweringOptions.bundled_bytes`); each pays its part of one
latency.
"""

from __future__ import annotations

from collections.abc import Set
from functools import cached_property
from math import ceil
from typing import NamedTuple

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from hapsynth.graph.ir import Graph, Op
from hapsynth.instructions.collectives import Collective
from hapsynth.instructions.rules.registry import is_fusible
from hapsynth.instructions.staging.options import LoweringOptions


def updates(graph: Graph) -> frozenset[int]:
    """The gradients and what the optimizer makes of them: back from the new state while shapes stay the same and
    nothing but the update and norms of it read them (a batch norm's mean is read by the model too)."""
    found = {v for _, target in graph.carry if isinstance(v := graph.outputs[target], int)}

    norms: set[int] = set()
    """Values of which only whole sums are used: the squares under a norm."""

    def only_updates(value: int) -> bool:
        made = (r for op, _ in graph.uses[value] for r in graph.ops[op].results)
        return all(r in found or r in norms or not graph.values[r].shape for r in made)

    for op in reversed(graph.ops):
        if is_fusible(op) and {shape for shape in op.shapes if shape} == set(op.result_shapes):
            norms.update(v for v in op.results if v not in found and only_updates(v))
    for op in reversed(graph.ops):
        for made in found.intersection(op.results) if is_fusible(op) else ():
            shape = graph.values[made].shape
            found |= {v for _, v in op.value_operands if graph.values[v].shape == shape and only_updates(v)}
    return frozenset(found)


class UpdateGroup(NamedTuple):
    """What brings one parameter forward, or several that are brought forward together: ops that are no part of a loop
    or branch, norms of the update among them and what casts a parameter for the model. `gradients`: what they begin
    from; `parameters`: what the model reads of them. Values."""

    ops: tuple[int, ...]
    gradients: tuple[int, ...]
    parameters: tuple[int, ...]


def update_groups(graph: Graph, updated: Set[int]) -> tuple[UpdateGroup, ...]:
    """The parts of an optimizer's update that have no tensor in common, `updated` being the values of all of it."""
    tensors = lambda op: [v for v in (*(v for _, v in op.value_operands), *op.results) if graph.values[v].shape]
    held = set(updated)
    mine: list[Op] = []
    casts: set[int] = set()
    for op in graph.ops:
        read = {v for _, v in op.value_operands if graph.values[v].shape}
        brings, norms = not held.isdisjoint(op.results), bool(read) and read <= held
        cast = op.name == "convert_element_type" and read <= graph.state
        if op.region or not (brings or norms or cast) or not tensors(op):
            continue
        shapes = {graph.values[v].shape for v in read}
        alike = is_fusible(op) and (not shapes or shapes == set(op.result_shapes))
        if norms and (alike or not any(op.result_shapes)):
            held.update(op.results)
        elif cast and alike and not brings:
            casts.update(op.results)
        elif not (alike and brings):
            continue
        mine.append(op)
    ends = np.array([(tensors(op)[0], v) for op in mine for v in tensors(op)], dtype=np.int64).reshape(-1, 2).T
    count = len(graph.values)
    _, part = connected_components(
        coo_array((np.ones(ends.shape[1]), tuple(ends)), shape=(count, count)), directed=False
    )
    parts: dict[int, list[Op]] = {}
    for op in mine:
        parts.setdefault(int(part[tensors(op)[0]]), []).append(op)
    groups: list[UpdateGroup] = []
    for ops in parts.values():
        inside, made = {op.index for op in ops}, {v for op in ops for v in op.results}
        read = dict.fromkeys(v for op in ops for v in tensors(op) if v not in made)
        elsewhere = lambda v, inside=inside: any(op not in inside for op, _ in graph.uses[v])
        parameters = tuple(v for v in (*read, *made) if v in graph.state | casts and elsewhere(v))
        gradients = tuple(v for v in read if v in updated and v not in graph.state)
        if parameters and gradients:
            groups.append(UpdateGroup(tuple(op.index for op in ops), gradients, parameters))
    return tuple(groups)


class GradientBucketing:
    """Which conversions go together: those of the state, and of what brings it forward."""

    def __init__(self, graph: Graph, options: LoweringOptions) -> None:
        self.graph, self.options = graph, options
        self._counts: dict[int, float] = {}

    @cached_property
    def values(self) -> frozenset[int]:
        """The state and its updates."""
        return self.updates | self.graph.state

    @cached_property
    def updates(self) -> frozenset[int]:
        """The gradients and what the optimizer makes of them."""
        return updates(self.graph)

    @cached_property
    def groups(self) -> tuple[UpdateGroup, ...]:
        """The parts of the optimizer's update."""
        return update_groups(self.graph, self.updates)

    @cached_property
    def _parameters(self) -> list[int]:
        """Bytes of the state that more than the update reads."""
        state = (self.graph.inputs[source] for source, _ in self.graph.carry)
        return [self.graph.values[v].nbytes for v in state if v not in self.updates]

    def part(self, value: int, step: Collective, n: int) -> float:
        """The part of a latency that a conversion among `n` devices is counted: as many parameters as are small enough
        go together, at equal shares."""
        shards = n if step.joins else 1
        most, bundle = shards * self.options.bundled_bytes, self.options.bundle_bytes
        if not step.bundled or value not in self.values or self.graph.values[value].nbytes > most:
            return 1.0
        if shards not in self._counts:
            small = [size for size in self._parameters if size <= most]
            self._counts[shards] = max(1, ceil(sum(small) / shards / bundle)) / max(1, len(small))
        return min(1.0, self._counts[shards])
