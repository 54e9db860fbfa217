"""Two labels for atoms, exactly: what each atom costs under either, and what it costs where the maker of a tensor and
some taker have unlike ones. Such a sum is a cut of a graph, and the cheapest one a maximum flow finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

Floats = npt.NDArray[np.float64]
Labels = npt.NDArray[np.int64]

_WHOLE = 1 << 28
"""Capacities are whole numbers of 32 bits."""


def cheapest_labels(first: Floats, second: Floats, flows: Sequence[Hyperedge], across: tuple[Floats, Floats]) -> Labels:
    """Labels 0 or 1 of least cost, but for what rounding to parts of 2^-28 hides: int [atoms].

    `first`, `second`: an atom's seconds under label 0 and 1. `across`: those of each flow where its maker has label 0
    and some taker 1, and the other way around; once for all takers.
    """
    atoms = first.size
    source, sink = atoms, atoms + 1
    gain = np.abs(first - second)
    unit = _WHOLE / max(float(gain.sum()), 1e-300)
    never = 2 * _WHOLE
    rows, columns, capacities = list[int](), list[int](), list[int]()

    def arc(tail: int, head: int, capacity: float) -> None:
        rows.append(tail)
        columns.append(head)
        capacities.append(int(min(capacity, never)))

    for atom, difference in enumerate(((first - second) * unit).round().tolist()):
        # On the source's side it has label 0, and pays for that to the sink.
        if difference > 0:
            arc(atom, sink, difference)
        else:
            arc(source, atom, -difference)
    nodes = atoms + 2
    for flow, up, down in zip(flows, *((seconds * unit).round().tolist() for seconds in across), strict=True):
        if len(flow.takers) == 1:
            arc(flow.maker, flow.takers[0], up)
            arc(flow.takers[0], flow.maker, down)
            continue
        # One node stands for the tensor as takers of label 1 need it, one as those of label 0 do.
        arc(flow.maker, nodes, up)
        arc(nodes + 1, flow.maker, down)
        for taker in flow.takers:
            arc(nodes, taker, never)
            arc(taker, nodes + 1, never)
        nodes += 2
    graph = coo_array((np.array(capacities, dtype=np.int64), (rows, columns)), shape=(nodes, nodes)).tocsr()
    graph.data = np.minimum(graph.data, never).astype(np.int32)
    left = graph - maximum_flow(graph, source, sink).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = breadth_first_order(left, source, return_predecessors=False)
    labels = np.ones(nodes, dtype=np.int64)
    labels[reached] = 0
    return labels[:atoms]


@dataclass(frozen=True, eq=False)
class Hyperedge:
    """A tensor that a class cuts: the atom that makes it, and others that take it. `nbytes`: of what other classes
    leave of it."""

    maker: int
    takers: tuple[int, ...]
    nbytes: float
