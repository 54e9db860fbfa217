"""The names of a plan's values and dimension classes in a report."""

from __future__ import annotations

from hapsynth.graph.ir import Value
from hapsynth.graph.trace import Traced
from hapsynth.instructions.layout import format_layout
from hapsynth.instructions.program.program import Convert, Instruction
from hapsynth.instructions.program.sizes import DimensionClass


class Names:
    """Names by which a user knows values: argument paths, and source lines for computed values."""

    def __init__(self, traced: Traced) -> None:
        self.graph = traced.graph
        self.paths = dict(zip(self.graph.inputs, traced.in_paths, strict=True))
        self.by_path = {path: value for value, path in self.paths.items()}

    def value(self, value: int) -> str:
        """`[0]['params']['w']` for an argument, `v80 dot_general (mlp.py:57)` for an op's result."""
        if value in self.paths:
            return self.paths[value] or "the argument"
        name = self.graph.values[value].name
        if value in self.graph.constants:
            return f"{name} (a constant of the function)"
        op = self.graph.ops[self.graph.producer[value]]
        return f"{name} {op.name}" + (f" ({op.source})" if op.source else "")

    def instruction(self, i: Instruction) -> str:
        """`dot_general -> v80 (mlp.py:57)`, or `all_reduce P(sum) -> R of v80 dot_general (mlp.py:57)`."""
        if isinstance(i, Convert):
            return f"{i.step} {format_layout(i.source)} -> {format_layout(i.target)} of {self.value(i.value)}"
        op = self.graph.ops[i.op]
        # The test of a loop makes nothing.
        results = "".join(f" -> {self.graph.values[v].name}" for v in op.results[:1])
        return f"{op.name}{results}" + (f" ({op.source})" if op.source else "")

    def shape(self, value: int) -> str:
        """`f32[256, 512]`"""
        return str(self.graph.values[value]).partition(":")[2]

    def find(self, name: str) -> int | None:
        """The value that a user means: an argument path, or a name as in a listing (`v80`, `in3`)."""
        if name in self.by_path:
            return self.by_path[name]
        return next((v.index for v in self.graph.values if v.name == name), None)

    def all(self) -> list[str]:
        """Every name that `find` knows."""
        return [*self.by_path, *(v.name for v in self.graph.values)]

    def cut(self, cls: DimensionClass) -> str:
        """A class by its largest member, an argument where it has one: `[1]['x'] dim 0`; what position 2 has alone:
        `[0]['w'] at 2`."""
        value, dim, *_ = max(cls.members, key=lambda m: (m[0] in self.paths, self._weight(m[0]), -m[0], -m[1]))
        return f"{self.value(value)} dim {dim}" if cls.owner is None else f"{self.value(value)} at {cls.owner}"

    def weight(self, cls: DimensionClass) -> float:
        """Bytes of all tensors that a class cuts."""
        return float(sum(self._weight(v) for v in dict.fromkeys(v for v, *_ in cls.members)))

    def _weight(self, value: int) -> int:
        tensor: Value = self.graph.values[value]
        return tensor.nbytes
