"""When every tensor of a program is made and last read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hapsynth.graph.ir import LOOP_CARRY, SCAN_STACK, Boundary, Graph
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program.program import Access, Compute, Program, Property, region_of, writes
from hapsynth.search.analysis.liveness import spans_of


class Tensor(NamedTuple):
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
    spans = spans_of(graph, (region_of(graph, i) for i in program.instructions)) if len(graph.regions) > 1 else {}
    region = dict.fromkeys(born, 0)

    def read(need: Property, at: int, place: int) -> None:
        """A value from around a loop or branch is held until that ends."""
        around = graph.around(place)
        depth = around.index(region[need]) if region[need] in around else 0
        last[need] = max(last[need], spans[around[depth - 1]][1] if depth else at)

    accesses = program.accesses(graph)
    for i, (instruction, (needs, results)) in enumerate(zip(program.instructions, accesses, strict=True)):
        place = region_of(graph, instruction) if spans else 0
        for need in needs:
            if spans:
                read(need, i, place)
            elif last[need] < i:
                last[need] = i
        for made in results:
            if made in born:
                done.append(Tensor(*made, born[made], last[made]))
            born[made], last[made] = i, i
            if spans:
                region[made] = graph.home[made[0]] if isinstance(instruction, Compute) else place
        if spans and isinstance(instruction, Compute) and isinstance(graph.ops[instruction.op].primitive, Boundary):
            _boundary(graph, instruction, spans, born, last)
    for instruction in program.instructions if graph.ties else ():
        if isinstance(instruction, Compute) and instruction.op in graph.ties:
            carried_on = (graph.ties[instruction.op], instruction.result_layout(0))
            last[carried_on] = max(last[carried_on], spans[graph.ops[instruction.op].region][1])
    for value, layout in zip(graph.outputs, program.outputs, strict=True):
        if isinstance(value, int) and layout is not None:
            last[(value, layout)] = end
    return done + [Tensor(*p, start, last[p]) for p, start in born.items()]


def _boundary(
    graph: Graph,
    instruction: Compute,
    spans: dict[int, tuple[int, int]],
    born: dict[Property, int],
    last: dict[Property, int],
) -> None:
    """What a loop carries is held throughout, and its final value takes its place; what it stacks is there from the
    beginning."""
    op = graph.ops[instruction.op]
    start, stop = spans[op.region]
    if op.primitive == LOOP_CARRY:
        carried, final, *_ = writes(graph, instruction)
        last[carried] = stop
        born[final] = last[final] = stop + 1
    elif op.primitive == SCAN_STACK:
        (stacked,) = writes(graph, instruction)
        born[stacked], last[stacked] = start, stop


def stored_tensors(
    tensors: Sequence[Tensor], accesses: Sequence[Access], is_stored: Callable[[int], bool]
) -> list[Tensor]:
    """The tensors that lie in memory, as values that are stored do. What a fused chain reads lives until the chain
    runs, in whatever op stores its end."""
    made: dict[Property, list[int]] = {}
    start, stop = [t.start for t in tensors], [t.stop for t in tensors]
    for n in sorted(range(len(tensors)), key=start.__getitem__):
        value, layout, *_ = tensors[n]
        made.setdefault((value, layout), []).append(n)
    for i in range(len(accesses) - 1, -1, -1):
        needs, results = accesses[i]
        for value, _ in results:
            if is_stored(value):
                break
        else:
            if not results:
                continue
            last = max([stop[n] for r in results for n in made[r] if start[n] >= i])
            for need in needs:
                every = made[need]
                # What a loop leaves is born at the instruction after it.
                n = every[0] if len(every) == 1 else [n for n in every if start[n] <= i][-1]
                if stop[n] < last:
                    stop[n] = last
    return [
        t if t.stop == last else t._replace(stop=last)
        for t, last in zip(tensors, stop, strict=True)
        if is_stored(t.value)
    ]
