"""The proof checker: replays a program's triples, independent of whatever made the program.

It derives the valid triples from the registry again, trusts nothing that the program says of itself, and is run on
every plan, built or loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from hapsynth.graph.ir import COND_JOIN, LOOP_CARRY, LOOP_TEST, SCAN_SLICE, SCAN_STACK, Boundary, Graph, Literal
from hapsynth.instructions.collectives import Moved, axis_between
from hapsynth.instructions.factors import can_be
from hapsynth.instructions.layout import format_layout, is_consistent, is_partial
from hapsynth.instructions.program.bundles import bundles_of, family, independent
from hapsynth.instructions.program.program import (
    Block,
    Compute,
    Convert,
    Instruction,
    Program,
    ProgramError,
    Property,
    nested,
    reads,
    writes,
)
from hapsynth.instructions.program.sizes import Classes, Node, Sizes, cut_name, layout_nodes, tied
from hapsynth.instructions.rules.factor_table import FactorTable

Axes = tuple[tuple[str, int], ...]
"""(name, length) of the axes of a mesh."""


def check(graph: Graph, program: Program, sizes: Sizes | None = None) -> None:
    """Raise ProgramError unless the program computes the graph's outputs.

    Every instruction's precondition must hold, every triple must be one of its op's rules, every conversion a
    single step, carried layouts must agree, and the sizes must cut every class completely.
    """
    table = FactorTable(graph)
    check_program(graph, program, table)
    if sizes is not None:
        check_sizes(graph, program, sizes, table)


def check_program(graph: Graph, program: Program, table: FactorTable) -> None:
    """`check` without sizes; `table`: made of the graph by whoever trusts nobody else's."""
    axes = program.axes
    if set(program.inputs) != set(graph.sources):
        raise ProgramError("the program's inputs are not those of the function")
    state: set[Property] = set()
    for value, layout in program.inputs.items():
        _check_layout(graph, value, layout, axes, "input")
        if is_partial(layout):
            raise ProgramError(f"input {graph.values[value]} cannot be partial: {format_layout(layout)}")
        state.add((value, layout))
    state = _Replay(graph, table, axes).block(nested(graph, program.instructions), state)
    _check_bundles(graph, program)
    _check_hosts(program)
    if len(program.outputs) != len(graph.outputs):
        raise ProgramError(f"{len(program.outputs)} outputs for a function with {len(graph.outputs)}")
    for position, (operand, layout) in enumerate(zip(graph.outputs, program.outputs)):
        if isinstance(operand, Literal):
            if layout is not None:
                raise ProgramError(f"output {position} is a literal and has no layout")
        elif layout is None or (operand, layout) not in state:
            raise ProgramError(f"output {position} is not available as {layout and format_layout(layout)}")
        elif is_partial(layout):
            raise ProgramError(f"output {position} is left partial")
    for source, target in graph.carry:
        if (
            not isinstance(graph.outputs[target], Literal)
            and program.inputs[graph.inputs[source]] != program.outputs[target]
        ):
            raise ProgramError(f"carried input {source} and output {target} have different layouts")


def check_sizes(graph: Graph, program: Program, sizes: Sizes, table: FactorTable) -> None:
    """The rest of `check`, of a program that has passed `check_program`."""
    sizes.check(program.axes)
    _check_cuts(graph, program, table, sizes.classes)


def _check_bundles(graph: Graph, program: Program) -> None:
    """Whether what goes as one can: collectives of one kind that stand together and need nothing of one another."""
    for bundle, places in bundles_of(program.instructions).items():
        steps = [i for at in places if isinstance(i := program.instructions[at], Convert)]
        kinds = {family(step, graph.values[step.value].dtype) for step in steps}
        if len(kinds) > 1 or None in kinds:
            raise ProgramError(f"bundle {bundle} has steps that cannot go as one")
        if any(step.region for step in steps) or places != [*range(places[0], places[-1] + 1)]:
            raise ProgramError(f"the instructions of bundle {bundle} do not stand together, outside loops and branches")
        if not all(independent(steps[:n], step) for n, step in enumerate(steps)):
            raise ProgramError(f"bundle {bundle} has a collective that needs what another one makes")


def _check_hosts(program: Program) -> None:
    """Whether the hosts of each axis are its positions, each once, and what goes over hosts can."""
    if program.hosts and len(program.hosts) != len(program.axes):
        raise ProgramError(f"the program tells of the hosts of {len(program.hosts)} axes, and has {len(program.axes)}")
    for (name, size), hosts in zip(program.axes, program.hosts):
        if hosts and (sorted(p for host in hosts for p in host) != [*range(size)] or not all(hosts)):
            raise ProgramError(
                f"the hosts of axis {name} have positions {list(map(list, hosts))}, not each of {size} once"
            )
    for number, i in enumerate(program.instructions):
        if isinstance(i, Convert) and not i.collective.goes_over(program.hosts_along(i.axis)):
            where = f"instruction {number}: {i.step} along {program.axes[i.axis][0]}"
            raise ProgramError(f"{where} is for {i.collective.over}, and there are none, or not such, along that axis")


def _check_cuts(graph: Graph, program: Program, table: FactorTable, classes: Classes) -> None:
    """Whether what an op, or a tie, takes to be cut alike is of one class, and what is reshared of two."""

    def alike(nodes: Sequence[Node], what: str) -> None:
        found = dict.fromkeys(classes.of.get(node, -1) for node in nodes)
        if len(found) > 1 or -1 in found:
            named = ", ".join(f"{graph.values[v].name}{cut_name(d, way)}" for v, d, _, way in nodes)
            raise ProgramError(f"{what} cuts {named} alike, and the sizes are of classes in which they are not")

    for number, i in enumerate(program.instructions):
        where = f"instruction {number}"
        if isinstance(i, Compute):
            for _, nodes in table.cut(i.op, i.triples):
                alike(nodes, f"{where}, {graph.ops[i.op].name},")
        elif isinstance(moved := i.traffic, Moved):
            old, new = (classes.of.get((i.value, *cut), -1) for cut in (moved.old, moved.new))
            if old == new or -1 in (old, new):
                name = graph.values[i.value].name
                raise ProgramError(f"{where} reshares {name} between shards that are of one class, or of none")
    for a, b, layout in tied(graph, program):
        for pair in zip(layout_nodes(a, layout), layout_nodes(b, layout), strict=True):
            alike(pair, "a tie")


class _Replay:
    """Runs a program's triples over a set of properties."""

    def __init__(self, graph: Graph, table: FactorTable, axes: Axes) -> None:
        self.graph, self.table, self.axes = graph, table, axes
        self.number = 0
        self._allowed: set[tuple[int, int]] = set()
        """Factors and triples that were found to be a rule's, and to leave results as these can lie, by identity: ops
        that are alike share both, and the program at hand holds them."""
        self.left: dict[int, set[Property]] = {}
        """Region -> what held at its end, for branches."""

    def block(self, block: Block, outside: set[Property]) -> set[Property]:
        """Replay a region in the state around it, to which what leaves it is added; what holds at its end."""
        graph, inside, leaving = self.graph, set(outside), set[Property]()
        kind = graph.regions[block.region].kind
        carried: list[Property] = []
        tested = set(outside)
        for item in block.items:
            if isinstance(item, Block):
                # The test runs before the body.
                self.block(item, tested if graph.regions[item.region].kind == "test" else inside)
                continue
            where = f"instruction {self.number}"
            self.number += 1
            if kind == "cond" and isinstance(item, Convert):
                raise ProgramError(f"{where} stands in a cond, but in none of its branches")
            self.allowed(item, where)
            self.needs(item, outside, inside, where)
            primitive = _boundary(graph, item)
            for position, (value, layout) in enumerate(writes(graph, item)):
                leaves = primitive in (SCAN_STACK, COND_JOIN) or (primitive == LOOP_CARRY and position == 1)
                looks = primitive == LOOP_CARRY and position == 2
                (leaving if leaves else tested if looks else inside).add((value, layout))
            if isinstance(item, Compute) and primitive == LOOP_CARRY:
                carried.append((graph.ties[item.op], item.result_layout(0)))
        for value, layout in carried:
            if (value, layout) not in inside:
                what = f"{graph.values[value].name}|{format_layout(layout)}"
                raise ProgramError(f"a loop must carry on {what}, which does not hold at the end of its body")
        if kind == "while" and not any(self._is_test(i) for i in block.inner(graph.test(block.region)).items):
            raise ProgramError("a while loop has no test")
        self.left[block.region] = inside
        outside |= leaving
        return inside

    def needs(self, item: Instruction, outside: set[Property], inside: set[Property], where: str) -> None:
        """What an instruction reads must hold in the region in which it reads it."""
        graph = self.graph
        primitive, needed = _boundary(graph, item), reads(graph, item)
        states = [inside] * len(needed)
        if primitive in (LOOP_CARRY, SCAN_SLICE):
            states = [outside] * len(states)
        elif isinstance(item, Compute) and primitive == COND_JOIN:
            op = graph.ops[item.op]
            regions = [graph.read_in(op, position) for position, _ in op.value_operands]
            # A branch in which nothing happens has the state around it.
            states = [self.left.get(r, outside) for r in regions]
        for (value, layout), state in zip(needed, states, strict=True):
            if (value, layout) not in state:
                raise ProgramError(
                    f"{where} needs {graph.values[value].name}|{format_layout(layout)}, which does not hold"
                )

    def allowed(self, item: Instruction, where: str) -> None:
        """An instruction must be one that there is."""
        known = (id(self.table[item.op]), id(item.triples)) if isinstance(item, Compute) else None
        if known is None or known not in self._allowed:
            _check_instruction(self.graph, self.table, item, self.axes, where)
            self._allowed |= {known} if known else set()

    def _is_test(self, item: Instruction | Block) -> bool:
        return isinstance(item, Compute) and self.graph.ops[item.op].primitive == LOOP_TEST


def _boundary(graph: Graph, item: Instruction) -> Boundary | None:
    """Which boundary between regions an instruction is."""
    primitive = graph.ops[item.op].primitive if isinstance(item, Compute) else None
    return primitive if isinstance(primitive, Boundary) else None


def _check_layout(graph: Graph, value: int, layout: object, axes: Axes, where: str) -> None:
    assert isinstance(layout, tuple)
    if len(layout) != len(axes):
        raise ProgramError(f"{where}: a layout of {len(layout)} placements on a mesh of {len(axes)} axes")
    if not is_consistent(layout):
        raise ProgramError(f"{where}: no value can lie as {format_layout(layout)}")
    rank = len(graph.values[value].shape)
    for placement, (name, length) in zip(layout, axes, strict=True):
        if placement.owner is not None and placement.owner >= length:
            raise ProgramError(f"{where}: {graph.values[value]} is {placement}, and {name} has {length} positions")
        if placement.is_sharded and not 0 <= placement.dim < rank:
            raise ProgramError(f"{where}: {graph.values[value]} has no dimension {placement.dim}")
        if placement.is_sharded and not graph.values[value].shape[placement.dim]:
            raise ProgramError(
                f"{where}: dimension {placement.dim} of {graph.values[value]} is empty, and can't be cut"
            )
        if not can_be(placement, graph.values[value].dtype):
            raise ProgramError(f"{where}: {graph.values[value]} cannot be {placement}")


def _check_instruction(graph: Graph, table: FactorTable, instruction: Instruction, axes: Axes, where: str) -> None:
    if isinstance(instruction, Compute):
        if len(instruction.triples) != len(axes):
            raise ProgramError(f"{where}: {len(instruction.triples)} triples on a mesh of {len(axes)} axes")
        if not table[instruction.op].allows(instruction.triples):
            triples = ", ".join(map(str, instruction.triples))
            raise ProgramError(f"{where}: {graph.ops[instruction.op].name} has no rule {triples}")
        for value, layout in writes(graph, instruction):
            _check_layout(graph, value, layout, axes, where)
        return
    if not 0 <= instruction.value < len(graph.values):
        raise ProgramError(f"{where}: the function has no value {instruction.value}")
    _check_layout(graph, instruction.value, instruction.source, axes, where)
    _check_layout(graph, instruction.value, instruction.target, axes, where)
    if not 0 <= instruction.axis < len(axes):
        raise ProgramError(f"{where}: the mesh has no axis {instruction.axis}")
    if axis_between(instruction.source, instruction.target) != instruction.axis:
        raise ProgramError(f"{where}: no single step turns {instruction.source} into {instruction.target}")
    try:
        _ = instruction.collective
    except ProgramError as error:
        raise ProgramError(f"{where}: {error}") from None
