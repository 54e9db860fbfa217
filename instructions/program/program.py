"""The distributed program: a list of instructions with deterministic text and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hapsynth.graph.ir import Graph
from hapsynth.instructions.collectives import Collective, Hosts, Traffic, steps_between
from hapsynth.instructions.factors import Triple, Triples
from hapsynth.instructions.layout import Layout, format_layout, parse_layout, parse_placement


class ProgramError(ValueError):
    """A program, or a file that holds one, is not a valid program of its graph."""


class Compute(NamedTuple):
    """{operands | layouts} op {results | layouts}; one triple of the op per mesh axis."""

    op: int
    triples: Triples

    def operand_layout(self, position: int) -> Layout:
        return tuple([t.operands[position] for t in self.triples])

    def result_layout(self, position: int) -> Layout:
        return tuple([t.results[position] for t in self.triples])


class Convert(NamedTuple):
    """{value | source} step {value | target}: the placement along one mesh axis changes, in a region.

    `by`: the name of the step, where it is not the usual one of those that do the same. `bundle`: collectives of one
    number go as one, where they run beside computing; 0: alone.
    """

    value: int
    axis: int
    source: Layout
    target: Layout
    region: int = 0
    by: str = ""
    bundle: int = 0

    @property
    def collective(self) -> Collective:
        """The step's entry in the table; ProgramError where there is none."""
        found = steps_between(self.source[self.axis], self.target[self.axis])
        if found and not self.by:
            return found[0]
        source, target = format_layout(self.source), format_layout(self.target)
        if not found:
            raise ProgramError(f"no single step turns {source} into {target}")
        step = next((step for step in found if step.name == self.by), None)
        if step is None:
            raise ProgramError(f"{self.by} does not turn {source} into {target}")
        return step

    @property
    def step(self) -> str:
        """Its name."""
        return self.collective.name

    @property
    def is_collective(self) -> bool:
        """Whether it communicates."""
        return self.collective.communicates

    @property
    def traffic(self) -> Traffic:
        """What it sends."""
        return self.collective.traffic(self.source, self.target, self.axis)

    def with_step(self, step: Collective) -> Convert:
        """The same by a step that is known to do it."""
        usual = steps_between(self.source[self.axis], self.target[self.axis])[0]
        return self._replace(by="" if step is usual else step.name)


Instruction = Compute | Convert
Property = tuple[int, Layout]
"""`value | layout`: a fact that holds of the distributed state."""
Access = tuple[tuple[Property, ...], tuple[Property, ...]]
"""What an instruction reads and what it writes."""


def reads(graph: Graph, instruction: Instruction) -> tuple[Property, ...]:
    """The properties that an instruction needs."""
    if isinstance(instruction, Convert):
        return ((instruction.value, instruction.source),)
    operands = graph.ops[instruction.op].value_operands
    if len(instruction.triples) == 1:
        (along,) = instruction.triples
        return tuple([(v, (along.operands[i],)) for i, v in operands])
    layouts = tuple(zip(*[t.operands for t in instruction.triples]))
    return tuple([(v, layouts[i]) for i, v in operands])


def writes(graph: Graph, instruction: Instruction) -> tuple[Property, ...]:
    """The properties that hold after an instruction."""
    if isinstance(instruction, Convert):
        return ((instruction.value, instruction.target),)
    if len(instruction.triples) == 1:
        (along,) = instruction.triples
        return tuple([(v, (p,)) for v, p in zip(graph.ops[instruction.op].results, along.results)])
    return tuple(zip(graph.ops[instruction.op].results, zip(*[t.results for t in instruction.triples])))


def region_of(graph: Graph, instruction: Instruction) -> int:
    """The region in which an instruction stands."""
    return instruction.region if isinstance(instruction, Convert) else graph.ops[instruction.op].region


@dataclass(frozen=True, eq=False)
class Block:
    """The instructions of one region, in order, those of regions inside it in blocks of their own."""

    region: int
    items: tuple[Instruction | Block, ...]

    def flat(self) -> Iterator[Instruction]:
        for item in self.items:
            if isinstance(item, Block):
                yield from item.flat()
            else:
                yield item

    def inner(self, region: int) -> Block:
        """The block of a region inside; an empty one where nothing happens there."""
        found = (b for b in self.items if isinstance(b, Block) and b.region == region)
        return next(found, Block(region, ()))


def nested(graph: Graph, instructions: Sequence[Instruction]) -> Block:
    """A list of instructions as blocks; ProgramError where those of one region do not stand together."""
    opened: list[tuple[int, list[Instruction | Block]]] = [(0, [])]
    closed: set[int] = set()

    def close() -> None:
        region, items = opened.pop()
        closed.add(region)
        opened[-1][1].append(Block(region, tuple(items)))

    for i in instructions:
        if isinstance(i, Compute) and not 0 <= i.op < len(graph.ops):
            raise ProgramError(f"the function has no op {i.op}")
        region = region_of(graph, i)
        if not 0 <= region < len(graph.regions):
            raise ProgramError(f"the function has no region {region}")
        if region == opened[-1][0]:
            opened[-1][1].append(i)
            continue
        around = graph.around(region)
        while opened[-1][0] not in around:
            close()
        for r in reversed(around[: around.index(opened[-1][0])]):
            if r in closed:
                raise ProgramError(f"the instructions of region {r} do not stand together")
            opened.append((r, []))
        opened[-1][1].append(i)
    while len(opened) > 1:
        close()
    return Block(0, tuple(opened[0][1]))


@dataclass(frozen=True, eq=False)
class Program:
    """Instructions over a mesh of `axes`; `inputs` holds the layout of every source value, `outputs` of every output.

    An output that is a literal has no layout (None). `hosts`: of each axis; () for none of any.
    """

    axes: tuple[tuple[str, int], ...]
    inputs: Mapping[int, Layout]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Layout | None, ...]
    hosts: tuple[Hosts, ...] = ()
    _accesses: dict[Graph, tuple[Access, ...]] = field(
        init=False, repr=False, default_factory=dict[Graph, "tuple[Access, ...]"]
    )

    def accesses(self, graph: Graph) -> Sequence[Access]:
        """What each instruction reads and writes; found once."""
        if graph not in self._accesses:
            self._accesses[graph] = tuple([(reads(graph, i), writes(graph, i)) for i in self.instructions])
        return self._accesses[graph]

    def know(self, graph: Graph, accesses: tuple[Access, ...]) -> None:
        """As `accesses` are, where whoever makes the program has them."""
        self._accesses[graph] = accesses

    def hosts_along(self, axis: int) -> Hosts:
        """Those that a mesh axis goes over."""
        return self.hosts[axis] if self.hosts else ()

    def collectives(self) -> dict[str, int]:
        """How often each collective occurs."""
        found = Counter(i.step for i in self.instructions if isinstance(i, Convert) and i.is_collective)
        return dict(sorted(found.items()))

    def text(self, graph: Graph) -> str:
        """One line per instruction, as a person reads it."""
        named = lambda v, layout: f"{graph.values[v].name}|{format_layout(layout)}"
        lines = ["inputs"]
        lines += [f"  {graph.values[v]} | {format_layout(layout)}" for v, layout in self.inputs.items()]
        lines.append("program")
        opened = [0]
        for i in self.instructions:
            around = graph.around(region_of(graph, i))
            while opened[-1] not in around:
                opened.pop()
            for r in reversed(around[: around.index(opened[-1])]):
                opened.append(r)
                lines.append(f"{'  ' * (len(opened) - 1)}{graph.regions[r]}:")
            before = ", ".join(named(v, layout) for v, layout in reads(graph, i))
            after = ", ".join(named(v, layout) for v, layout in writes(graph, i))
            name = graph.ops[i.op].name if isinstance(i, Compute) else i.step
            where = f"  # {graph.ops[i.op].source}" if isinstance(i, Compute) and graph.ops[i.op].source else ""
            where = f"  # bundle {i.bundle}" if isinstance(i, Convert) and i.bundle else where
            mark = "*" if isinstance(i, Convert) and i.is_collective else " "
            indent = "  " * (len(opened) - 1)
            lines.append(f" {indent}{mark}{{{before}}} {name} {{{after}}}{where}")
        outs = [named(v, layout) for v, layout in zip(graph.outputs, self.outputs) if isinstance(v, int) and layout]
        lines += ["outputs", *(f"  {o}" for o in outs)]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        steps: list[Any] = []
        for i in self.instructions:
            if isinstance(i, Compute):
                triples = [
                    {"operands": list(map(str, t.operands)), "results": list(map(str, t.results)), "factor": t.factor}
                    for t in i.triples
                ]
                steps.append({"op": i.op, "triples": triples})
            else:
                steps.append(
                    {
                        "value": i.value,
                        "axis": i.axis,
                        "step": i.step,
                        "source": format_layout(i.source),
                        "target": format_layout(i.target),
                        **({"region": i.region} if i.region else {}),
                        **({"bundle": i.bundle} if i.bundle else {}),
                    }
                )
        return {
            "axes": [[name, size] for name, size in self.axes],
            **({"hosts": [[list(host) for host in hosts] for hosts in self.hosts]} if any(self.hosts) else {}),
            "inputs": {str(v): format_layout(layout) for v, layout in self.inputs.items()},
            "instructions": steps,
            "outputs": [None if layout is None else format_layout(layout) for layout in self.outputs],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Program:
        """Read what `to_dict` wrote; ProgramError where it is no program. It must still pass the checker."""
        try:
            instructions: list[Instruction] = []
            # Ops that are alike share their triples, as in a program that was searched for.
            known: dict[Any, Triple] = {}
            shared: dict[tuple[Triple, ...], tuple[Triple, ...]] = {}

            def triple(entry: Mapping[str, Any]) -> Triple:
                operands, results, factor = key = tuple(entry["operands"]), tuple(entry["results"]), entry["factor"]
                if key not in known:
                    parsed = tuple(map(parse_placement, operands)), tuple(map(parse_placement, results))
                    known[key] = Triple(*parsed, None if factor is None else int(factor))
                return known[key]

            for entry in data["instructions"]:
                if "op" in entry:
                    triples = tuple(map(triple, entry["triples"]))
                    instructions.append(Compute(int(entry["op"]), shared.setdefault(triples, triples)))
                else:
                    convert = Convert(
                        int(entry["value"]),
                        int(entry["axis"]),
                        parse_layout(entry["source"]),
                        parse_layout(entry["target"]),
                        int(entry.get("region", 0)),
                        bundle=int(entry.get("bundle", 0)),
                    )
                    if convert.step != entry["step"]:
                        convert = convert._replace(by=str(entry["step"]))
                        _ = convert.collective
                    instructions.append(convert)
            return Program(
                tuple((str(name), int(size)) for name, size in data["axes"]),
                {int(v): parse_layout(layout) for v, layout in data["inputs"].items()},
                tuple(instructions),
                tuple(None if layout is None else parse_layout(layout) for layout in data["outputs"]),
                tuple(tuple(tuple(map(int, host)) for host in hosts) for hosts in data.get("hosts", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ProgramError(f"not a program: {type(error).__name__}: {error}") from error
