"""What is alive at each op of the source program: a plan that runs ops in that order holds it, whatever it chooses.

Every live value lies in memory as some tensor, so the least that its choices may hold, summed over live values, is
never above what the plan really holds at that point: a limit on the sum keeps every plan that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hapsynth.graph import LOOP_CARRY, SCAN_STACK, Graph
from hapsynth.instructions.rules.registry import is_fusible


@dataclass(frozen=True, eq=False)
class Alive:
    """What op `op` finds in memory: values that it only passes by, those it reads, those it makes."""

    op: int
    bystanders: tuple[int, ...]
    read: tuple[int, ...]
    made: tuple[int, ...]


class Liveness:
    """The lives of a graph's stored values, in ops: the first and the last that finds them."""

    def __init__(self, graph: Graph, stored: Sequence[bool]) -> None:
        self.graph, self.stored = graph, stored
        spans = _spans(graph)
        n = len(graph.ops)
        donated = {graph.inputs[source] for source, _ in graph.carry}
        self.first = np.full(len(graph.values), -1)
        self.last = np.array([n if v.index in graph.constants else -1 for v in graph.values])
        for v in graph.inputs:
            self.last[v] = -1 if v in donated else n
        for op in graph.ops:
            self.first[list(op.results)] = op.index
            for position, v in op.value_operands:
                around = graph.around(graph.read_in(op, position))
                depth = around.index(graph.home[v]) if graph.home[v] in around else 0
                self.last[v] = max(self.last[v], spans[around[depth - 1]][1] if depth else op.index)
            if op.primitive == LOOP_CARRY:
                self.last[op.results[0]] = spans[op.region][1]
                self.first[op.results[1]] = spans[op.region][1]
            elif op.primitive == SCAN_STACK:
                self.first[op.results[0]] = spans[op.region][0]
        for v in graph.outputs:
            if isinstance(v, int):
                self.last[v] = n
        for op in reversed(graph.ops):
            if op.results and not any(stored[v] for v in op.results):
                # A fused chain reads its operands when it runs, in whatever op stores its end.
                end = max(int(self.last[v]) for v in op.results)
                for _, v in op.value_operands:
                    self.last[v] = max(self.last[v], end)

    def is_used_around(self, value: int, op: int) -> bool:
        """Whether ops that are no part of a fused chain read a value before and after one: what they share is held."""
        users = [o for o, _ in self.graph.uses[value] if not is_fusible(self.graph.ops[o])]
        users = users or [o for o, _ in self.graph.uses[value]]
        return bool(users) and min(users) <= op <= max(users)

    def at(self, op: int) -> Alive:
        """What is alive while an op runs."""
        o = self.graph.ops[op]
        read = tuple(dict.fromkeys(v for _, v in o.value_operands if self.stored[v]))
        made = tuple(v for v in o.results if self.stored[v])
        there = np.flatnonzero((self.first <= op) & (self.last >= op)).tolist()
        touched = {*read, *made}
        return Alive(op, tuple(v for v in there if self.stored[v] and v not in touched), read, made)


def _spans(graph: Graph) -> dict[int, tuple[int, int]]:
    """Region -> its first and last op."""
    found: dict[int, tuple[int, int]] = {}
    for op in graph.ops:
        for r in graph.around(op.region):
            found[r] = (found.get(r, (op.index, 0))[0], op.index)
    return found
