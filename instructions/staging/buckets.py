"""Which small collectives go as one on CPUs (GradientFlow's fusion, arXiv 1902.06855)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from math import prod

from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.bundles import independent
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.staging.stages import Step


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


def joined(graph: Graph, steps: Iterable[Step]) -> Iterator[Step | list[Convert]]:
    """The steps of a region, where collectives that follow one another and don't depend on one another are a list."""
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
