"""The predicted peak of memory along a program, per device, as the switch form allocates it (DESIGN D2).

Sharded tensors count at the size of the largest shard: one HLO serves all devices and stores shards padded. An input
that is carried lives until its last use and its output takes its place (donation); other inputs and constants live
through the whole step. Fused chains hold no memory inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hapsynth.graph import Graph
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program import Program, Property, reads, writes
from hapsynth.instructions.sizes import Classes, Sizes
from hapsynth.search.costs import CostModel, Floats


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a program: `value | layout`, alive from instruction `start` to `stop`, both included."""

    value: int
    layout: Layout
    start: int
    stop: int


def lifetimes(graph: Graph, program: Program) -> list[Tensor]:
    """Every tensor with its life; -1 is before the first instruction, len(instructions) after the last."""
    end = len(program.instructions)
    donated = {graph.inputs[source] for source, _ in graph.carry}
    born: dict[Property, int] = dict.fromkeys(program.inputs.items(), -1)
    last: dict[Property, int] = {p: (-1 if p[0] in donated else end) for p in born}
    done: list[Tensor] = []
    for i, instruction in enumerate(program.instructions):
        for need in reads(graph, instruction):
            last[need] = max(last[need], i)
        for made in writes(graph, instruction):
            if made in born:
                done.append(Tensor(*made, born[made], last[made]))
            born[made], last[made] = i, i
    for value, layout in zip(graph.outputs, program.outputs, strict=True):
        if isinstance(value, int) and layout is not None:
            last[(value, layout)] = end
    return done + [Tensor(*p, start, last[p]) for p, start in born.items()]


def padded_bytes(sizes: Sizes, value: int, layout: Layout) -> float:
    """Bytes of a tensor on one device, at the largest shard."""
    nbytes = float(sizes.graph.values[value].nbytes)
    for axis, placement in enumerate(layout):
        if placement.is_sharded:
            c = sizes.classes.of[(value, placement.dim, axis)]
            nbytes *= max(sizes.shares[c]) / sizes.classes.all[c].units
    return nbytes


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """What a program holds at each point, at any sizes. Point i + 1 is during instruction i; 0 is before the first."""

    graph: Graph
    program: Program
    classes: Classes
    costs: CostModel

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors that lie in memory."""
        return [t for t in lifetimes(self.graph, self.program) if self.costs.is_materialized(t.value)]

    @cached_property
    def _whole_bytes(self) -> Floats:
        return np.array([float(self.graph.values[t.value].nbytes) for t in self.tensors])

    @cached_property
    def _lives(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array([t.start + 1 for t in self.tensors]), np.array([t.stop + 2 for t in self.tensors])

    @cached_property
    def _cuts(self) -> list[tuple[int, np.ndarray]]:
        """(class, the tensors that it cuts)."""
        cut: dict[int, list[int]] = {}
        for n, t in enumerate(self.tensors):
            for axis, p in enumerate(t.layout):
                if p.is_sharded:
                    cut.setdefault(self.classes.of[(t.value, p.dim, axis)], []).append(n)
        return [(c, np.array(members)) for c, members in cut.items()]

    def alive(self, nbytes: Floats) -> Floats:
        """Bytes alive at each point, given each tensor's."""
        change = np.zeros(len(self.program.instructions) + 3)
        starts, stops = self._lives
        np.add.at(change, starts, nbytes)
        np.subtract.at(change, stops, nbytes)
        return np.cumsum(change)[:-1]

    def at(self, sizes: Sizes) -> Floats:
        """Bytes of one device at each point: float64 [instructions + 2]."""
        nbytes = self._whole_bytes.copy()
        for c, members in self._cuts:
            nbytes[members] *= max(sizes.shares[c]) / self.classes.all[c].units
        return self.alive(nbytes)

    def by_class(self) -> tuple[Floats, Floats]:
        """Bytes at each point that no cut divides [points], and whole bytes that each class divides
        [classes, points]. For programs of one mesh axis."""
        whole = self._whole_bytes.copy()
        per_class = np.zeros((len(self.classes.all), len(self.program.instructions) + 2))
        for c, members in self._cuts:
            mine = np.zeros_like(whole)
            mine[members] = self._whole_bytes[members]
            per_class[c] = self.alive(mine)
            whole[members] = 0.0
        return self.alive(whole), per_class

    def peak(self, sizes: Sizes) -> float:
        """Bytes of one device at the fullest point."""
        return float(self.at(sizes).max())

    def live_at_peak(self, sizes: Sizes) -> frozenset[int]:
        """The values that hold memory at the fullest point."""
        point = int(np.argmax(self.at(sizes)))
        return frozenset(t.value for t in self.tensors if t.start + 1 <= point <= t.stop + 1)


def peak(program: Program, sizes: Sizes, costs: CostModel) -> float:
    """Bytes of one device at the fullest point of a program."""
    return MemoryProfile(costs.graph, program, sizes.classes, costs).peak(sizes)
