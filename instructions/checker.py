"""The proof checker: replays a program's triples, independent of whatever made the program.

It derives the valid triples from the registry again, trusts nothing that the program says of itself, and is run on
every plan, built or loaded.
"""

from __future__ import annotations

from hapsynth.graph import Graph, Literal
from hapsynth.instructions.collectives import step_between
from hapsynth.instructions.layout import format_layout
from hapsynth.instructions.program import (
    Compute,
    FactorTable,
    Instruction,
    Program,
    ProgramError,
    Property,
    reads,
    writes,
)
from hapsynth.instructions.sizes import Sizes


def check(graph: Graph, program: Program, sizes: Sizes | None = None) -> None:
    """Raise ProgramError unless the program computes the graph's outputs.

    Every instruction's precondition must hold, every triple must be one of its op's rules, every conversion a
    single step, carried layouts must agree, and the sizes must cut every class completely.
    """
    axes = len(program.axes)
    table = FactorTable(graph)
    if set(program.inputs) != set(graph.sources):
        raise ProgramError("the program's inputs are not those of the function")
    state: set[Property] = set()
    for value, layout in program.inputs.items():
        _check_layout(graph, value, layout, axes, "input")
        if any(p.is_partial for p in layout):
            raise ProgramError(f"input {graph.values[value]} cannot be partial: {format_layout(layout)}")
        state.add((value, layout))
    computed: set[int] = set()
    for number, instruction in enumerate(program.instructions):
        where = f"instruction {number}"
        _check_instruction(graph, table, instruction, axes, where)
        for need in reads(graph, instruction):
            if need not in state:
                value, layout = need
                raise ProgramError(
                    f"{where} needs {graph.values[value].name}|{format_layout(layout)}, which does not hold"
                )
        for value, layout in writes(graph, instruction):
            _check_layout(graph, value, layout, axes, where)
            state.add((value, layout))
        if isinstance(instruction, Compute):
            computed.add(instruction.op)
    if len(program.outputs) != len(graph.outputs):
        raise ProgramError(f"{len(program.outputs)} outputs for a function with {len(graph.outputs)}")
    for position, (operand, layout) in enumerate(zip(graph.outputs, program.outputs)):
        if isinstance(operand, Literal):
            if layout is not None:
                raise ProgramError(f"output {position} is a literal and has no layout")
        elif layout is None or (operand, layout) not in state:
            raise ProgramError(f"output {position} is not available as {layout and format_layout(layout)}")
        elif any(p.is_partial for p in layout):
            raise ProgramError(f"output {position} is left partial")
    for source, target in graph.carry:
        if (
            not isinstance(graph.outputs[target], Literal)
            and program.inputs[graph.inputs[source]] != program.outputs[target]
        ):
            raise ProgramError(f"carried input {source} and output {target} have different layouts")
    if sizes is not None:
        sizes.check(program.axes)


def _check_layout(graph: Graph, value: int, layout: object, axes: int, where: str) -> None:
    assert isinstance(layout, tuple)
    if len(layout) != axes:
        raise ProgramError(f"{where}: a layout of {len(layout)} placements on a mesh of {axes} axes")
    rank = len(graph.values[value].shape)
    for placement in layout:
        if placement.is_sharded and not 0 <= placement.dim < rank:
            raise ProgramError(f"{where}: {graph.values[value]} has no dimension {placement.dim}")


def _check_instruction(graph: Graph, table: FactorTable, instruction: Instruction, axes: int, where: str) -> None:
    if isinstance(instruction, Compute):
        if not 0 <= instruction.op < len(graph.ops):
            raise ProgramError(f"{where}: the function has no op {instruction.op}")
        if len(instruction.triples) != axes:
            raise ProgramError(f"{where}: {len(instruction.triples)} triples on a mesh of {axes} axes")
        for triple in instruction.triples:
            if triple not in table[instruction.op].triples:
                raise ProgramError(f"{where}: {graph.ops[instruction.op].name} has no rule {triple}")
        used = [t.factor for t in instruction.triples if t.factor is not None]
        if len(used) != len(set(used)):
            raise ProgramError(f"{where}: one factor is cut along two mesh axes")
        return
    if not 0 <= instruction.value < len(graph.values):
        raise ProgramError(f"{where}: the function has no value {instruction.value}")
    _check_layout(graph, instruction.value, instruction.source, axes, where)
    _check_layout(graph, instruction.value, instruction.target, axes, where)
    if not 0 <= instruction.axis < axes:
        raise ProgramError(f"{where}: the mesh has no axis {instruction.axis}")
    changed = [a for a in range(axes) if instruction.source[a] != instruction.target[a]]
    if (
        changed != [instruction.axis]
        or step_between(instruction.source[instruction.axis], instruction.target[instruction.axis]) is None
    ):
        raise ProgramError(f"{where}: no single step turns {instruction.source} into {instruction.target}")
