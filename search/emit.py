"""An assignment of a formulated problem as a `Program`, in an order with few and large stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hapsynth.graph import Graph
from hapsynth.instructions.layout import Layout, Placement, R
from hapsynth.instructions.program import Compute, Convert, Instruction, Program
from hapsynth.search.formulate import Formulator, conversion


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction and the steps whose results it reads."""

    instruction: Instruction
    needs: tuple[int, ...]


class Emitter:
    """Turns choices into steps. A tensor is known by the step that makes it (-1: an input)."""

    def __init__(self, formulator: Formulator, assignment: Sequence[int]) -> None:
        self.formulator, self.graph = formulator, formulator.graph
        self.structure = formulator.structure
        self.states = [states[int(s)] for states, s in zip(self.structure.states, assignment, strict=True)]
        self.steps: list[Step] = []
        self.tensors: dict[int, dict[Placement, int]] = {}

    def run(self, axes: tuple[tuple[str, int], ...]) -> Program:
        graph = self.graph
        inputs: dict[int, Layout] = {}
        for value in graph.sources:
            available = self.states[self.structure.value_variable[value]].availability
            assert available is not None
            inputs[value] = (available.computed,)
            self.make(value, available.computed, -1)
        for op in graph.ops:
            triple = self.states[self.structure.op_variable[op.index]].triple
            assert triple is not None
            needs = tuple(self.tensor(v, triple.operands[i]) for i, v in op.value_operands)
            self.add(Compute(op.index, (triple,)), needs)
            for value, placement in zip(op.results, triple.results, strict=True):
                self.make(value, placement, len(self.steps) - 1 if len(op.results) == 1 else self._op_step)
        outputs = self.outputs()
        order = schedule(graph, self.steps)
        return Program(axes, inputs, tuple(self.steps[i].instruction for i in order), outputs)

    def add(self, instruction: Instruction, needs: tuple[int, ...]) -> int:
        self.steps.append(Step(instruction, tuple(n for n in needs if n >= 0)))
        if isinstance(instruction, Compute):
            self._op_step = len(self.steps) - 1
        return len(self.steps) - 1

    def convert(self, value: int, source: Placement, target: Placement, made_by: int) -> int:
        return self.add(Convert(value, 0, (source,), (target,)), (made_by,))

    def make(self, value: int, computed: Placement, step: int) -> None:
        """A value exists: its shared conversions follow."""
        available = self.states[self.structure.value_variable[value]].availability
        assert available is not None
        tensors = self.tensors[value] = {computed: step}
        for source, target in available.steps:
            tensors[target] = self.convert(value, source, target, tensors[source])

    def tensor(self, value: int, placement: Placement) -> int:
        """The step that makes a value in a placement; converts where it is not there yet."""
        tensors = self.tensors[value]
        if placement in tensors:
            return tensors[placement]
        if R in tensors:
            tensors[placement] = self.convert(value, R, placement, tensors[R])
            return tensors[placement]
        return self.private(value, placement)

    def private(self, value: int, placement: Placement) -> int:
        """Converted for one use only: the next use converts again."""
        time = lambda a, b: self.formulator.step_time(value, a, b)
        tensors = self.tensors[value]
        paths = [(self.formulator.path_time(value, h, placement), h) for h in sorted(tensors)]
        _, source = min(paths)
        path = conversion(source, placement, time)
        assert path is not None, (value, source, placement)
        step = tensors[source]
        for _, before, after in path:
            step = self.convert(value, before, after, step)
        return step

    def outputs(self) -> tuple[Layout | None, ...]:
        graph = self.graph
        carried = {target: graph.inputs[source] for source, target in graph.carry}
        found: list[Layout | None] = []
        for position, value in enumerate(graph.outputs):
            if not isinstance(value, int):
                found.append(None)
                continue
            if position in carried:
                available = self.states[self.structure.value_variable[carried[position]]].availability
                assert available is not None
                placement = available.computed
            else:
                placement = self._plain_output(value)
            made_by = self.tensor(value, placement)
            self.tensors[value].setdefault(placement, made_by)
            found.append((placement,))
        return tuple(found)

    def _plain_output(self, value: int) -> Placement:
        """Whole where it is there already, else as it lies; a partial one by its cheapest conversion."""
        tensors = self.tensors[value]
        if R in tensors:
            return R
        there = sorted(p for p in tensors if not p.is_partial)
        if there:
            return there[0]
        targets = self.formulator.output_placements(value)
        partial = next(iter(tensors))
        times = [(self.formulator.path_time(value, partial, t), i) for i, t in enumerate(targets)]
        return targets[min(times)[1]]


def schedule(graph: Graph, steps: Sequence[Step]) -> list[int]:
    """An order of the steps with few, large stages.

    The stage of a step is the number of rounds of collectives that must come before it. Reductions run as soon as
    they can, which frees the partial; gathers as late as they can, and so do ops that depend on inputs alone.
    """
    n = len(steps)
    collective = [isinstance(s.instruction, Convert) and s.instruction.is_collective for s in steps]
    users: list[list[int]] = [[] for _ in range(n)]
    stage = [0] * n
    early = [False] * n
    for i, step in enumerate(steps):
        early[i] = all(early[j] for j in step.needs) and not collective[i]
        for j in step.needs:
            users[j].append(i)
            stage[i] = max(stage[i], stage[j] + (1 if collective[j] and not collective[i] else 0))
    for i in reversed(range(n)):
        instruction = steps[i].instruction
        gathers = isinstance(instruction, Convert) and not instruction.source[instruction.axis].is_partial
        if users[i] and (early[i] or gathers):
            stage[i] = max(
                stage[i], min(stage[j] - (1 if collective[i] and not collective[j] else 0) for j in users[i])
            )
    return sorted(range(n), key=lambda i: (stage[i], collective[i], i))
