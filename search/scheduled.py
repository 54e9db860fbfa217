"""What a program in switch form holds, kernel by kernel, in the order in which XLA's CPU backend runs it.

XLA fuses, then orders by itself: each kernel right before the first that reads it, operands with more readers behind
them and larger ones first (`DFSMemoryScheduler`). So it puts the gradients of weights last where one op reads them all,
as the clip by a global norm or a combined all-reduce, with what they are made of. GPUs take the best of three such
orders: no more than this one by XLA's own count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from hapsynth.graph import Graph
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program import Compute, Convert, Program, reads, writes
from hapsynth.search.fusing import Fusing
from hapsynth.search.inplace import cut_of

Rank = tuple[float, float, int]
"""What of several kernels is run first: the least."""


class Tensor(NamedTuple):
    """`value | layout`, made by an instruction; -1: an input."""

    value: int
    layout: Layout
    maker: int


class Scheduled:
    """The kernels of a program without control flow and what each reads, by the instruction that ends it."""

    def __init__(self, graph: Graph, program: Program, fusing: Fusing, nbytes: Callable[[int, Layout], float]) -> None:
        self.graph, self.program, self.fusing = graph, program, fusing
        self._nbytes = cache(nbytes)
        made = {p: Tensor(*p, -1) for p in program.inputs.items()}
        self.inputs = list(made.values())
        self.taken: list[list[Tensor]] = []
        self.made: list[list[Tensor]] = []
        for i, step in enumerate(program.instructions):
            self.taken.append([made[p] for p in reads(graph, step)])
            self.made.append([Tensor(*p, i) for p in writes(graph, step)])
            made |= {(t.value, t.layout): t for t in self.made[-1]}
        ends = zip(graph.outputs, program.outputs, strict=True)
        self.outputs = [made[v, layout] for v, layout in ends if isinstance(v, int) and layout is not None]
        self.needs: dict[int, list[Tensor]] = {}
        in_order = _depth_first(_makers(self.outputs), self._needed_by)
        self.order = _depth_first(_makers(self.outputs), self._needed_by, self._ranks(in_order))

    def nbytes(self, tensor: Tensor) -> float:
        return self._nbytes(tensor.value, tensor.layout)

    def peak(self) -> float:
        """Bytes at the fullest point. Arguments are there throughout; what a step leaves of its state takes the place
        of what it found."""
        place = {k: n for n, k in enumerate(self.order)}
        life = {t: [place[k], place[k]] for k in self.order for t in self.made[k]}
        for k in self.order:
            for t in self.needs[k]:
                if t in life:
                    life[t][1] = place[k]
        for t in self.outputs:
            if t in life:
                life[t][1] = len(self.order)
        for k in self.order:
            self._write_over(k, place[k], life)
        carried = {self.graph.outputs[target] for _, target in self.graph.carry}
        change = np.zeros(len(self.order) + 2)
        for t, (start, stop) in life.items():
            if not (t.value in carried and stop == len(self.order)):
                change[start] += self.nbytes(t)
                change[stop + 1] -= self.nbytes(t)
        return sum(map(self.nbytes, self.inputs)) + float(np.cumsum(change).max())

    def _write_over(self, k: int, at: int, life: Mapping[Tensor, list[int]]) -> None:
        """The result takes the place of an operand that is read for the last time."""
        step = self.program.instructions[k]
        for v in self.fusing.overwritten[step.op] if isinstance(step, Compute) else ():
            for t in self.needs[k]:
                last = t.value == v and t in life and life[t][1] == at > life[t][0]
                if last and cut_of(t.layout) == cut_of(self.made[k][0].layout):
                    life[t][1] = at - 1
                    return

    def _needed_by(self, k: int) -> list[int]:
        if k not in self.needs:
            self.needs[k] = list(self._reads_of(k))
        return _makers(self.needs[k])

    def _reads_of(self, k: int) -> dict[Tensor, None]:
        """What the kernel that ends in an instruction finds in memory."""
        found: dict[Tensor, None] = {}
        seen, waiting = {k}, [k]
        while waiting:
            i = waiting.pop()
            for t in self.taken[i]:
                if t.maker < 0 or self._is_stored(t, i):
                    found[t] = None
                elif t.maker not in seen:
                    seen.add(t.maker)
                    waiting.append(t.maker)
        return found

    def _is_stored(self, tensor: Tensor, reader: int) -> bool:
        """Whether a reader finds a tensor in memory rather than makes it again."""
        step, by = self.program.instructions[tensor.maker], self.program.instructions[reader]
        if isinstance(step, Convert) and step.is_collective:
            return True
        inside = isinstance(by, Compute) and not self.fusing.reads_stored[by.op]
        again = self.fusing.again[tensor.value] and isinstance(step, Compute) and inside
        return self.fusing.stored[tensor.value] and not again

    def _ranks(self, in_order: Sequence[int]) -> dict[int, Rank]:
        """What of a kernel's operands is run first: readers beyond the first and bytes of all that leads to it, what
        several lead to counted as often."""
        readers: dict[Tensor, int] = {}
        for k in in_order:
            for t in self.needs[k]:
                readers[t] = readers.get(t, 0) + 1
        more = lambda tensors: max(0, sum(readers.get(t, 0) for t in tensors) - 1)
        count, total = len(in_order) + len(self.inputs), sum(map(self.nbytes, self.inputs))
        found: dict[int, Rank] = {}
        for k in in_order:
            own = sum(map(self.nbytes, self.made[k]))
            users, total, size = more(self.made[k]), total + own, own
            for t in self.needs[k]:
                before = (more([t]), self.nbytes(t)) if t.maker < 0 else found[t.maker]
                users, size = users + abs(before[0]), size + abs(before[1])
            found[k] = (-min(users, count), -min(size, total), k)
        return found


def _makers(tensors: Iterable[Tensor]) -> list[int]:
    return list(dict.fromkeys(t.maker for t in tensors if t.maker >= 0))


def _depth_first(
    ends: Iterable[int],
    needs: Callable[[int], Sequence[int]],
    ranks: Mapping[int, Rank] | None = None,
) -> list[int]:
    """Everything that the ends need and they, each after what it needs, in the order of the ranks."""
    rank = ranks.__getitem__ if ranks else lambda k: (0.0, 0.0, 0)
    ordered = lambda kernels: sorted(kernels, key=rank)
    found: dict[int, None] = {}
    seen: set[int] = set()
    waiting = [(k, False) for k in ordered(list(ends))[::-1]]
    while waiting:
        k, done = waiting.pop()
        if done:
            found[k] = None
        elif k not in seen:
            seen.add(k)
            waiting.append((k, True))
            waiting += [(n, False) for n in ordered(list(needs(k)))[::-1] if n not in seen]
    return list(found)
