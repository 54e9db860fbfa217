"""Collectives of a program that go as one (`lower/_bundles.py`), and how much they send and give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hapsynth._jax import is_extended
from hapsynth.graph import Graph
from hapsynth.instructions.bundles import TOGETHER, family, filled
from hapsynth.instructions.collectives import BUNDLED
from hapsynth.instructions.layout import Layout
from hapsynth.instructions.program import Convert, Program

NBytes = Callable[[int, Layout], float]


class Bundle(NamedTuple):
    """Collectives that go as one, and the bytes of the arrays that they take and give."""

    steps: tuple[Convert, ...]
    sent: float
    given: float


def bundles(graph: Graph, program: Program, run: Sequence[Convert], nbytes: NBytes) -> Iterator[Bundle]:
    """Those of a run of collectives that need nothing of one another. `nbytes`: of a tensor on a device, as it is
    stored."""
    sent = [_sent(graph, program, step, nbytes) for step in run]
    dtypes = [graph.values[step.value].dtype for step in run]
    families = [
        family(step, str(dtype)) if size <= BUNDLED and step.step in TOGETHER and not is_extended(dtype) else None
        for step, size, dtype in zip(run, sent, dtypes, strict=True)
    ]
    for group in filled(families, sent):
        given = sum(nbytes(run[n].value, run[n].target) for n in group)
        yield Bundle(tuple(run[n] for n in group), sum(sent[n] for n in group), given)


def _sent(graph: Graph, program: Program, step: Convert, nbytes: NBytes) -> float:
    """Bytes of the array that a collective takes: whole blocks of the largest shard."""
    n, source = program.axes[step.axis][1], nbytes(step.value, step.source)
    match step.step:
        case "reduce_scatter":
            return n * nbytes(step.value, step.target)
        case "all_to_all":
            return n * source * nbytes(step.value, step.target) / graph.values[step.value].nbytes
        case _:
            return source
