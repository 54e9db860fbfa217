"""What a stage makes again rather than takes from an earlier one: what elementwise ops read that is cheap and made of
what is there anyway. XLA does so within a program; what leaves a branch it has to store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from math import prod

from hapsynth.graph.ir import Boundary, Graph
from hapsynth.instructions.program.program import Compute, Instruction, Property, reads, writes
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.registry import is_fusible
from hapsynth.instructions.staging.fusion import SMALL, made_again

Producers = Mapping[Property, tuple[int, Instruction]]
"""Property -> the run that makes it and how."""


def producers(graph: Graph, runs: Sequence[Sequence[Instruction]]) -> dict[Property, tuple[int, Instruction]]:
    found: dict[Property, tuple[int, Instruction]] = {}
    for n, run in enumerate(runs):
        for i in run:
            for p in writes(graph, i):
                found.setdefault(p, (n, i))
    return found


def remade(
    graph: Graph,
    sizes: Sizes,
    producers: Callable[[], Producers],
    run: Sequence[Instruction],
    n: int,
    needed: Set[Property],
) -> list[Instruction]:
    """The instructions of run `n`, after those of earlier runs whose results it makes again. What is `needed` after the
    run is there anyway."""
    if all(sizes.is_even(*p) for i in run for p in (*reads(graph, i), *writes(graph, i))):
        return list(run)
    made = producers()
    mine = {p for i in run for p in writes(graph, i)}
    elementwise = lambda i: isinstance(i, Compute) and is_fusible(graph.ops[i.op])
    outside = dict.fromkeys(p for i in run for p in reads(graph, i) if p not in mine)
    stored = {p for i in run if not elementwise(i) for p in reads(graph, i) if p not in mine} | needed

    def chain(p: Property, found: dict[Property, Instruction]) -> set[Property]:
        """What `p` is made of when it is made again, by the instructions that are added to `found`."""
        leaves, left = set[Property](), [(p, False)]
        while left:
            q, has_operands = left.pop()
            i = made[q][1] if q in made and made[q][0] < n and q not in stored else None
            if q in found:
                continue
            if not isinstance(i, Compute) or not _is_cheap(graph, i):
                leaves |= set() if q in mine else {q}
            elif has_operands:
                found[q] = i
            else:
                left += [(q, True), *((r, False) for r in reversed([*reads(graph, i)]))]
        return leaves

    kept = {p for p in outside if chain(p, {}) == {p}}
    nbytes = lambda p: prod(sizes.padded_shape(*p)) * graph.values[p[0]].dtype.itemsize
    added: dict[Property, Instruction] = {}
    for p in sorted(outside, key=nbytes, reverse=True):
        found = dict(added)
        leaves = chain(p, found) - kept
        if p not in kept and sum(map(nbytes, leaves)) <= nbytes(p) * (1 + 1 / SMALL):
            kept |= leaves
            added = found
    return [*dict.fromkeys(added.values()), *run]


def _is_cheap(graph: Graph, i: Compute) -> bool:
    op = graph.ops[i.op]
    single = len(op.results) == 1 and not isinstance(op.primitive, Boundary)
    return single and is_fusible(op) and made_again(graph, op, op.results[0])


def needed_of(graph: Graph, run: Sequence[Instruction], needed: Set[Property]) -> list[Instruction]:
    """The instructions of a run that make something which is needed after it, or by another of them that does."""
    wanted, found = set(needed), list[Instruction]()
    for i in reversed(run):
        if not wanted.isdisjoint(writes(graph, i)):
            found.append(i)
            wanted.update(reads(graph, i))
    return found[::-1]
