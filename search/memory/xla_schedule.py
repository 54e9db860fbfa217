"""What a program in switch form holds, kernel by kernel, in the order in which XLA's CPU backend runs it.

XLA fuses, then orders by itself: each kernel right before the first that reads it, operands with more readers behind
them and larger ones first (`DFSMemoryScheduler`). So it puts the gradients of weights last where one op reads them all,
as the clip by a global norm or a combined all-reduce, with what they are made of. A switch is one kernel to what is
around it. GPUs take the best of three such orders: no more than this one by XLA's own count.

Where collectives are pinned (`lower/_pinned.py`) each waits for what the one before it gave, and XLA's latency-hiding
scheduler moves kernels that a collective does not need behind its start, as far as that takes to hide it. How far is
XLA's secret; `early` is the end of it: every collective as early as it can be, all that none of them needs after the
last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hapsynth.graph.ir import Op
from hapsynth.instructions.program.program import Compute
from hapsynth.instructions.rules.contraction import CONTRACTIONS
from hapsynth.search.analysis.buffer_aliasing import cut_of
from hapsynth.search.memory.xla_kernels import KernelTensor, XlaKernels

Rank = tuple[float, float, int]
"""What of several kernels is run first: the least."""


class Library(NamedTuple):
    """What is not as with XLA's own kernels where contractions are a library's: `workspace`: bytes that each has while
    it runs; `apart`: no kernel writes its result over theirs. `positions_last`: of which
    dtypes its convolutions want positions as the last dimensions; of others channels. `in_float32`: of which narrower
    dtypes contractions are computed in float32: their results are held so, and operands besides while they run."""

    workspace: int = 0
    apart: bool = False
    positions_last: Callable[[str], bool] = lambda dtype: False
    in_float32: Callable[[str], bool] = lambda dtype: False


class XlaSchedule:
    """The order of a program's kernels, and what is held along it. `pinned`: its collectives keep the program's order;
    `early`: and come as early as they can. `library`: of contractions that are calls of a library."""

    def __init__(
        self, kernels: XlaKernels, *, pinned: bool = False, early: bool = False, library: Library | None = None
    ) -> None:
        self.kernels, self.graph = kernels, kernels.graph
        self.library = library or Library()
        self.needs: dict[int, list[KernelTensor]] = {}
        self._before = dict(pairwise(kernels.sent[::-1])) if pinned or early else {}
        """Of each collective the one whose result it waits for."""
        self._first = kernels.sent if early else []
        self.order = self._ordered(_depth_first([_makers(kernels.outputs)], self._needed_by))

    def nbytes(self, tensor: KernelTensor) -> float:
        return self._widened.get(tensor, 1.0) * self.kernels.nbytes(tensor)

    def peak(self) -> float:
        """Bytes at the fullest point."""
        beside = self._beside(self._fullest) if self.order else 0.0
        return sum(map(self.nbytes, self.held)) + beside

    @property
    def held(self) -> list[KernelTensor]:
        """What there is at the fullest point. Arguments are there throughout; what a step leaves of its state takes the
        place of what it found."""
        return self.kernels.inputs + [t for t, (start, stop) in self._own.items() if start <= self._fullest <= stop]

    @cached_property
    def _fullest(self) -> int:
        """The place in the order at which most is held."""
        change = np.zeros(len(self.order) + 2)
        for t, (start, stop) in self._own.items():
            change[start] += self.nbytes(t)
            change[stop + 1] -= self.nbytes(t)
        held = np.cumsum(change)[: len(self.order)]
        return int((held + [self._beside(n) for n in range(len(self.order))]).argmax()) if self.order else 0

    def _contraction(self, k: int) -> Op | None:
        op = self.kernels.op_of(k) if k >= 0 else None
        return self.graph.ops[op] if op is not None and self.graph.ops[op].name in CONTRACTIONS else None

    @cached_property
    def _widened(self) -> dict[KernelTensor, float]:
        """How many times its bytes a tensor takes that is held in float32: what contractions make, and what kernels
        make for them, unless it is sent or leaves a switch."""
        found = dict[KernelTensor, float]()
        for t, takers in self.kernels.readers().items():
            made = self._contraction(t.maker)
            op = self.kernels.op_of(t.maker) if t.maker >= 0 else None
            stays = all(self.kernels.switch[k] == self.kernels.switch[t.maker] for k in takers)
            if made is not None or (op is not None and stays and any(map(self._contraction, takers))):
                found[t] = self._times(t.value if made is None else made.results[0])
        return found

    def _times(self, value: int) -> float:
        dtype = self.graph.values[value].dtype
        return 4 / dtype.itemsize if self.library.in_float32(str(dtype)) else 1.0

    @cached_property
    def _copies(self) -> list[tuple[float, int, int]]:
        """Of what contractions take that is not held in float32 a copy, in each switch one for all of them: its bytes,
        and the places in the order of the first and the last that takes it."""
        found: dict[tuple[KernelTensor, int], list[int]] = {}
        for n, k in enumerate(self.order):
            for t in self.needs[k] if self._contraction(k) is not None else ():
                if t.value >= 0 and t not in self._widened and self._times(t.value) > 1:
                    found.setdefault((t, self.kernels.switch[k]), []).append(n)
        return [(self._times(t.value) * self.nbytes(t), ns[0], ns[-1]) for (t, _), ns in found.items()]

    def _beside(self, n: int) -> float:
        """What there is besides while the kernel at a place in the order runs: a workspace, copies in float32."""
        workspace = self.library.workspace if self._contraction(self.order[n]) is not None else 0
        return workspace + sum(nbytes for nbytes, first, last in self._copies if first <= n <= last)

    @cached_property
    def _own(self) -> dict[KernelTensor, list[int]]:
        """Where in the order each tensor that has memory of its own is made and read last."""
        made, outputs, switch = self.kernels.made, self.kernels.outputs, self.kernels.switch
        place = {k: n for n, k in enumerate(self.order)}
        ends = {switch[k]: n for k, n in place.items()}
        life = {t: [place[k], place[k]] for k in self.order for t in made[k]}
        for k in self.order:
            for t in self.needs[k]:
                if t in life:
                    # What a switch takes is there until it ends.
                    taken = switch[k] not in (-1, switch[t.maker])
                    life[t][1] = max(life[t][1], ends[switch[k]] if taken else place[k])
        for t in outputs:
            if t in life:
                life[t][1] = len(self.order)
        for k in self.order:
            self._write_over(k, place[k], life)
        carried = {self.graph.outputs[target] for _, target in self.graph.carry}
        return {t: span for t, span in life.items() if not (t.value in carried and span[1] == len(self.order))}

    def _write_over(self, k: int, at: int, life: Mapping[KernelTensor, list[int]]) -> None:
        """The result takes the place of an operand that is read for the last time."""
        step, switch = self.kernels.steps[k], self.kernels.switch
        for v in self.kernels.fusing.overwritten[step.op] if isinstance(step, Compute) else ():
            for t in self.needs[k]:
                if self.library.apart and self._contraction(t.maker) is not None:
                    continue
                last = t.value == v and t in life and life[t][1] == at > life[t][0] and switch[t.maker] == switch[k]
                if last and cut_of(t.layout) == cut_of(self.kernels.made[k][0].layout):
                    life[t][1] = at - 1
                    return

    def _needed_by(self, k: int) -> list[int]:
        if k not in self.needs:
            before = self._before.get(k)
            waits = [] if before is None else list(self.kernels.made[before])
            if before in self._before:
                # The token, made of the result before, is taken by the next but one.
                waits += self.kernels.made[self._before[before]]
            self.needs[k] = list(dict.fromkeys([*self.kernels.reads(k), *waits]))
        return _makers(self.needs[k])

    def _ordered(self, found: Sequence[int]) -> list[int]:
        """The order in which XLA runs kernels, those of a switch together."""
        node_of = lambda k: self.kernels.switch[k] if self.kernels.switch[k] >= 0 else k
        node = lambda t: node_of(t.maker) if t.maker >= 0 else -1
        members: dict[int, list[int]] = {}
        for k in found:
            members.setdefault(node_of(k), []).append(k)
        needs = {n: [t for k in ks for t in self.needs[k] if node(t) != n] for n, ks in members.items()}
        needs = {n: list(dict.fromkeys(ts)) for n, ts in needs.items()}
        leave = {t for ts in needs.values() for t in ts}.union(self.kernels.outputs)
        made = {n: [t for k in ks for t in self.kernels.made[k]] for n, ks in members.items()}
        made = {n: [t for t in ts if t in leave] if len(members[n]) > 1 else ts for n, ts in made.items()}
        order: list[int] = []
        ends = [*([node_of(k)] for k in self._first if k in self.needs), map(node, self.kernels.outputs)]
        for n in self._by_rank(ends, needs, made, node):
            order += members[n] if len(members[n]) == 1 else self._inside(members[n], made[n])
        return order

    def _inside(self, members: Sequence[int], leave: Iterable[KernelTensor]) -> list[int]:
        """The order of a switch's kernels. `leave`: what is read after it."""
        mine = set(members)
        maker = lambda t: t.maker if t.maker in mine else -1
        needs, made = ({k: of[k] for k in members} for of in (self.needs, self.kernels.made))
        return self._by_rank([sorted(t.maker for t in leave)], needs, made, maker)

    def _by_rank(
        self,
        ends: Iterable[Iterable[int]],
        needs: Mapping[int, Sequence[KernelTensor]],
        made: Mapping[int, Sequence[KernelTensor]],
        maker: Callable[[KernelTensor], int],
    ) -> list[int]:
        ends, before = [*map(_distinct, ends)], {k: _distinct(map(maker, ts)) for k, ts in needs.items()}
        in_order = _depth_first(ends, before.__getitem__)
        return _depth_first(ends, before.__getitem__, self._ranks(in_order, needs, made, maker))

    def _ranks(
        self,
        in_order: Sequence[int],
        needs: Mapping[int, Sequence[KernelTensor]],
        made: Mapping[int, Sequence[KernelTensor]],
        maker: Callable[[KernelTensor], int],
    ) -> dict[int, Rank]:
        """What of a kernel's operands is run first: readers beyond the first and bytes of all that leads to it, what
        several lead to counted as often."""
        readers: dict[KernelTensor, int] = {}
        for k in in_order:
            for t in needs[k]:
                readers[t] = readers.get(t, 0) + 1
        more = lambda tensors: max(0, sum(readers.get(t, 0) for t in tensors) - 1)
        inputs = self.kernels.inputs
        count, total = len(in_order) + len(inputs), sum(map(self.nbytes, inputs))
        found: dict[int, Rank] = {}
        for k in in_order:
            own = sum(map(self.nbytes, made[k]))
            users, total, size = more(made[k]), total + own, own
            for t in needs[k]:
                before = (more([t]), self.nbytes(t)) if maker(t) < 0 else found[maker(t)]
                users, size = users + abs(before[0]), size + abs(before[1])
            found[k] = (-min(users, count), -min(size, total), k)
        return found


def _makers(tensors: Iterable[KernelTensor]) -> list[int]:
    return _distinct(t.maker for t in tensors)


def _distinct(kernels: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(k for k in kernels if k >= 0))


def _depth_first(
    ends: Iterable[Iterable[int]],
    needs: Callable[[int], Sequence[int]],
    ranks: Mapping[int, Rank] | None = None,
) -> list[int]:
    """Everything that the ends need and they, each after what it needs, in the order of the ranks; of several groups of
    ends the first before the others."""
    rank = ranks.__getitem__ if ranks else lambda k: (0.0, 0.0, 0)
    ordered = lambda kernels: sorted(kernels, key=rank)
    found: dict[int, None] = {}
    seen: set[int] = set()
    for group in ends:
        waiting = [(k, False) for k in ordered(list(group))[::-1]]
        while waiting:
            k, done = waiting.pop()
            if done:
                found[k] = None
            elif k not in seen:
                seen.add(k)
                waiting.append((k, True))
                waiting += [(n, False) for n in ordered(list(needs(k)))[::-1] if n not in seen]
    return list(found)
