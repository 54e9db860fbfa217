"""Which collectives can go as one, which of a program do, and which a lowering joins (GradientFlow's fusion, arXiv
1902.06855)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, TypeVar

from hapsynth._jax import is_extended
from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.program import Convert, Instruction

S = TypeVar("S")


def family(step: Convert, dtype: Any) -> Hashable | None:
    """What collectives that go as one have in common; None for one that always goes alone."""
    collective = step.collective
    if not (collective.communicates and collective.bundled) or is_extended(dtype):
        return None
    source, target = step.source[step.axis], step.target[step.axis]
    # What comes from a device that owns it, or goes there, goes with what has the same owner.
    return collective.name, step.axis, source.reduction, source.owner, target.owner, str(dtype)


def independent(run: Iterable[Convert], step: Convert) -> bool:
    """Whether a collective needs nothing that others make, and makes nothing else."""
    made = {(s.value, s.target) for s in run}
    return made.isdisjoint(((step.value, step.source), (step.value, step.target)))


def bundles_of(instructions: Sequence[Instruction]) -> dict[int, list[int]]:
    """Bundle -> the places of its collectives."""
    found: dict[int, list[int]] = {}
    for at, i in enumerate(instructions):
        if isinstance(i, Convert) and i.bundle:
            found.setdefault(i.bundle, []).append(at)
    return found


def filled(families: Sequence[Hashable | None], nbytes: Sequence[float], most: int) -> list[list[int]]:
    """Collectives that wait for the same, by number, as they go: those of one family together until a bundle is full,
    those of none alone. `nbytes`: what each sends; `most`: what a bundle does."""
    groups: list[list[int]] = []
    held: dict[Hashable, tuple[list[int], float]] = {}
    for i, (name, size) in enumerate(zip(families, nbytes, strict=True)):
        if name is None:
            groups.append([i])
            continue
        group, full = held.get(name, ([], most))
        if full + size > most:
            group, full = [], 0.0
            groups.append(group)
        group.append(i)
        held[name] = group, full + size
    return groups


def as_planned(steps: Sequence[Convert]) -> list[list[int]]:
    """Collectives that wait for the same, by number, those of a bundle of the program together."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, step in enumerate(steps):
        groups.setdefault((step.bundle, 0 if step.bundle else i), []).append(i)
    return [*groups.values()]


def is_empty(graph: Graph, step: Convert) -> bool:
    """Whether there is nothing to exchange."""
    return prod(graph.values[step.value].shape) == 0


def joined(graph: Graph, steps: Iterable[Convert | S]) -> Iterator[Convert | S | list[Convert]]:
    """The steps of a region (`staging.stages.Step`), where collectives that follow one another and don't depend on one
    another are a list."""
    run: list[Convert] = []
    for step in steps:
        sent = step if isinstance(step, Convert) and not is_empty(graph, step) else None
        if run and (sent is None or not independent(run, sent)):
            yield run
            run = []
        if sent is None:
            yield step
        else:
            run.append(sent)
    if run:
        yield run
