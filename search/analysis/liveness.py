"""What is alive at each op of the source program: in the order of that program, or in whatever order ops run.

Every live value lies in memory as some tensor, so the least that its choices may hold, summed over live values, is
never above what the plan really holds at that point: a limit on the sum keeps every plan that fits. In any order a
value is alive at an op that depends on it, or on what it was made with, if something that depends on the op takes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hapsynth.graph.ir import LOOP_CARRY, SCAN_STACK, Graph
from hapsynth.instructions.rules.registry import is_fusible


@dataclass(frozen=True, eq=False)
class LiveSet:
    """What op `op` finds in memory: values that it only passes by, those it reads, those it makes. Op `len(ops)` is the
    end, which makes nothing: what a graph without ops holds is held there."""

    op: int
    live_through: tuple[int, ...]
    read: tuple[int, ...]
    made: tuple[int, ...]
    kept: frozenset[int]
    """Of those it reads, the ones that something else takes later."""
    around: Mapping[int, tuple[int | None, int]] = field(default_factory=dict)
    """Some bystanders -> two ops that take it, one that always runs before this one, if there is, and one after."""


class Liveness:
    """The lives of a graph's stored values, in ops: the first and the last that finds them."""

    def __init__(self, graph: Graph, stored: Sequence[bool]) -> None:
        self.graph, self.stored = graph, stored
        spans = spans_of(graph, (op.region for op in graph.ops))
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
        self._taken = [tuple(v for _, v in op.value_operands) for op in graph.ops]
        self._fused = [o.index for o in reversed(graph.ops) if o.results and not any(stored[v] for v in o.results)]
        for o in self._fused:
            # A fused chain reads its operands when it runs, in whatever op stores its end.
            end = max(int(self.last[v]) for v in graph.ops[o].results)
            for v in self._taken[o]:
                self.last[v] = max(self.last[v], end)
        self._certain: dict[int, LiveSet] = {}

    def is_used_around(self, value: int, op: int) -> bool:
        """Whether ops that are no part of a fused chain read a value before and after one: what they share is held."""
        users = [o for o, _ in self.graph.uses[value] if not is_fusible(self.graph.ops[o])]
        users = users or [o for o, _ in self.graph.uses[value]]
        return bool(users) and min(users) <= op <= max(users)

    def at(self, op: int) -> LiveSet:
        """What is alive while an op runs."""
        there = np.flatnonzero((self.first <= op) & (self.last >= op)).tolist()
        if op == len(self.graph.ops):
            return LiveSet(op, tuple(v for v in there if self.stored[v]), (), (), frozenset())
        o = self.graph.ops[op]
        read = tuple(dict.fromkeys(v for _, v in o.value_operands if self.stored[v]))
        made = tuple(v for v in o.results if self.stored[v])
        touched = {*read, *made}
        kept = frozenset(v for v in read if self.last[v] > op)
        return LiveSet(op, tuple(v for v in there if self.stored[v] and v not in touched), read, made, kept)

    def in_any_order(self, op: int) -> LiveSet:
        """What is alive while an op runs, whichever order ops run in that has every operand first."""
        if op in self._certain:
            return self._certain[op]
        found = self.at(op)
        if op == len(self.graph.ops):
            return found
        before, follows = self._before(op), self._follows(op)
        late = self._taken_after(op, follows)
        # The chain that ends here takes its operands here.
        inside = [v for v in self._taken[op] if not self.stored[v]]
        ending = self._through_chains(inside)
        loops = self.graph.around(self.graph.ops[op].region)[:-1]
        certain = lambda v: (before[v] and (late[v] or ending[v])) or any(self._spans_loop(v, loop) for loop in loops)
        live_through = tuple(v for v in found.live_through if certain(v))
        around: dict[int, tuple[int | None, int]] = {}
        for v in live_through if not loops else ():
            takers = [self.graph.ops[o] for o, _ in self.graph.uses[v]]
            # A fused chain takes it when it runs, which may be later.
            earlier = [o.index for o in takers if not is_fusible(o) and any(before[r] for r in o.results)]
            later = [o.index for o in takers if any(follows[r] or (late[r] and not self.stored[r]) for r in o.results)]
            if later:
                around[v] = earlier[-1] if earlier else None, later[0]
        kept = frozenset(v for v in found.read if late[v])
        self._certain[op] = LiveSet(op, live_through, found.read, found.made, kept, around)
        return self._certain[op]

    def _before(self, op: int) -> bytearray:
        """Per value, whether an op is made of it, directly or not, or it is a source."""
        found = bytearray(len(self.graph.values))
        for v in (*self.graph.sources, *self._taken[op]):
            found[v] = 1
        for o in range(op - 1, -1, -1):
            results = self.graph.ops[o].results
            if any(found[v] for v in results):
                for v in (*results, *self._taken[o]):
                    found[v] = 1
        return found

    def _follows(self, op: int) -> bytearray:
        """Per value, whether it is made of what an op makes, directly or not."""
        ops = self.graph.ops
        found = bytearray(len(self.graph.values))
        for v in ops[op].results:
            found[v] = 1
        for o in range(op + 1, len(ops)):
            if any(found[v] for v in self._taken[o]):
                for v in ops[o].results:
                    found[v] = 1
        return found

    def _taken_after(self, op: int, follows: bytearray) -> bytearray:
        """Per value, whether an op takes it that depends on this one, or it is there at the end."""
        ops = self.graph.ops
        taken = np.flatnonzero(self.last == len(ops)).tolist()
        for o in range(op + 1, len(ops)):
            if any(follows[v] for v in self._taken[o]):
                taken += self._taken[o]
        return self._through_chains(taken)

    def _through_chains(self, taken: Iterable[int]) -> bytearray:
        """Per value, whether it is taken, or a fused chain takes it that ends in one that is."""
        found = bytearray(len(self.graph.values))
        for v in taken:
            found[v] = 1
        for o in self._fused:
            if any(found[v] for v in self.graph.ops[o].results):
                for v in self._taken[o]:
                    found[v] = 1
        return found

    def _spans_loop(self, value: int, loop: int) -> bool:
        """Whether a value is there throughout a region, as it is carried, stacked, or taken from around it."""
        graph = self.graph
        if value in graph.producer:
            maker = graph.ops[graph.producer[value]]
            if maker.region == loop and maker.primitive in (LOOP_CARRY, SCAN_STACK):
                return maker.primitive == SCAN_STACK or maker.results[0] == value
        if loop in graph.around(graph.home[value]):
            return False
        return any(loop in graph.around(graph.read_in(graph.ops[o], i)) for o, i in graph.uses[value])


def spans_of(graph: Graph, regions: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Region -> its first and last place, from the region at each place of an order."""
    found: dict[int, tuple[int, int]] = {}
    for place, region in enumerate(regions):
        for r in graph.around(region):
            found[r] = (found.get(r, (place, place))[0], place)
    return found
