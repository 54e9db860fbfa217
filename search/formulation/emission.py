"""An assignment of a formulated problem as a `Program`, in an order with few and large stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hapsynth.instructions.layout import Layout, R, is_partial
from hapsynth.instructions.program.program import Access, Convert, Instruction, Program, region_of
from hapsynth.search.formulation.choice_space import AvailableLayouts
from hapsynth.search.formulation.instruction_order import Step, schedule
from hapsynth.search.formulation.problem_builder import Hop, ProblemBuilder


class Emitter:
    """Turns choices into steps. A tensor is known by the step that makes it (-1: an input)."""

    def __init__(self, builder: ProblemBuilder, assignment: Sequence[int]) -> None:
        self.builder, self.graph = builder, builder.graph
        self.structure = builder.structure
        self.assignment = assignment
        self.steps: list[Step] = []
        self.op_steps: dict[int, int] = {}
        self.tensors: dict[int, dict[Layout, int]] = {}
        self._build()
        self.ends = self.outputs()

    def ordered(self, axes: tuple[tuple[str, int], ...], *, sparing: bool = False) -> Program:
        """The program, in few and large stages or in the order that spares memory."""
        inputs = {v: self.available(v).computed for v in self.graph.sources}
        order = schedule(self.graph, self.steps, self.structure.widening, sparing=sparing)
        instructions = tuple([self.steps[i].instruction for i in order])
        program = Program(axes, inputs, instructions, self.ends, self.builder.costs.hosts)
        program.know(self.graph, tuple([self.steps[i].access for i in order]))
        return program

    def _build(self) -> None:
        graph = self.graph
        for value in graph.sources:
            self.make(value, -1)
        tensors, steps, made_by = self.tensors, self.steps, self.op_steps
        for op in graph.ops:
            compute, access = self.structure.compute(op.index, self._triple(op.index))
            needs: list[int] = []
            for n, (value, layout) in enumerate(access[0]):
                there = tensors[value].get(layout)
                if there is None:
                    there = self.tensor(value, layout, graph.read_in(op, op.value_operands[n][0]))
                if there >= 0:
                    needs.append(there)
            step = made_by[op.index] = len(steps)
            steps.append(Step(compute, tuple(needs), access))
            for value in op.results:
                self.make(value, step)
        for op, value in graph.ties.items():
            compute, _ = self.structure.compute(op, self._triple(op))
            carried, loop = compute.result_layout(0), graph.ops[op].region
            made_by = self.tensor(value, carried, loop)
            if made_by < 0:
                continue
            made_in = region_of(graph, self.steps[made_by].instruction)
            if made_in == graph.home[value]:
                self.tensors[value].setdefault(carried, made_by)
            if loop not in graph.around(made_in):
                # No op of the body reads what comes from around the loop: its first one waits for it.
                at = self.op_steps[op]
                self.steps[at] = self.steps[at]._replace(needs=(*self.steps[at].needs, made_by))

    def _triple(self, op: int) -> int:
        """The number of an op's triples."""
        variable = self.structure.op_variable[op]
        return self.structure.listed[variable][0][self.assignment[variable]]

    def available(self, value: int) -> AvailableLayouts:
        st = self.structure
        variable = st.value_variable[value]
        return st.choices[variable].options[st.listed[variable][1][self.assignment[variable]]]

    def add(self, instruction: Instruction, needs: Iterable[int], access: Access) -> int:
        self.steps.append(Step(instruction, tuple([n for n in needs if n >= 0]), access))
        return len(self.steps) - 1

    def convert(self, value: int, hop: Hop, made_by: int, region: int) -> int:
        source, target, axis = hop
        step = self.builder.step(value, source, target, axis)
        access: Access = ((value, source),), ((value, target),)
        return self.add(Convert(value, axis, source, target, region).with_step(step), (made_by,), access)

    def make(self, value: int, step: int) -> None:
        """A value exists: its shared conversions follow."""
        available = self.available(value)
        tensors = self.tensors[value] = {available.computed: step}
        if not available.targets:
            return
        for hop in self.builder.offer(value, available).hops:
            tensors[hop[1]] = self.convert(value, hop, tensors[hop[0]], self.graph.home[value])

    def tensor(self, value: int, layout: Layout, region: int = 0) -> int:
        """The step that makes a value in a layout for a use in a region; converts where it is not there yet.

        What follows by local steps is made once, where the value lives; for anything else the next use converts again.
        """
        tensors = self.tensors[value]
        if layout in tensors:
            return tensors[layout]
        ways = self.builder.conversions(value)
        number, free = ways.layouts.number, ways.layouts.free
        near = [t for t in tensors if free[number[t], number[layout]]]
        source = ways.nearest(near or tensors, layout)
        place = self.graph.home[value] if near else self.graph.place_of_conversion(value, region)
        path = ways.path(source, layout)
        assert path is not None, (value, source, layout)
        step = tensors[source]
        for hop in path:
            step = self.convert(value, hop, step, place)
            if near:
                tensors.setdefault(hop[1], step)
        return step

    def outputs(self) -> tuple[Layout | None, ...]:
        graph = self.graph
        due = dict(self.structure.restriction.ends)
        due |= {target: self.available(graph.inputs[source]).computed for source, target in graph.carry}
        found: list[Layout | None] = []
        for position, value in enumerate(graph.outputs):
            if not isinstance(value, int):
                found.append(None)
                continue
            layout = due[position] if position in due else self._plain_output(value)
            made_by = self.tensor(value, layout)
            self.tensors[value].setdefault(layout, made_by)
            found.append(layout)
        return tuple(found)

    def _plain_output(self, value: int) -> Layout:
        """Whole where it is there already, else as it lies; a partial one by its cheapest conversion."""
        tensors = self.tensors[value]
        whole = (R,) * self.structure.axes
        if whole in tensors:
            return whole
        there = sorted(t for t in tensors if not is_partial(t))
        if there:
            return there[0]
        targets = self.builder.output_layouts(value)
        times = [(min(self.builder.path_time(value, t, o) for t in tensors), i) for i, o in enumerate(targets)]
        return targets[min(times)[1]]
