"""Which ops of a graph depend on which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hapsynth.graph.ir import Graph

Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
_ROWS = 32


class Reachability:
    """Paths between a graph's ops through the values that one makes and the other takes. What a loop carries from one
    iteration to the next is no path."""

    def __init__(self, graph: Graph) -> None:
        made_by = graph.producer
        self.makers = [
            tuple(dict.fromkeys(made_by[v] for _, v in op.value_operands if v in made_by)) for op in graph.ops
        ]
        """Per op, those whose results it takes; all come before it."""
        self.users: list[list[int]] = [[] for _ in graph.ops]
        for op, makers in enumerate(self.makers):
            for maker in makers:
                self.users[maker].append(op)
        every = range(len(graph.ops))
        self._ancestors = _closed(every, self.makers)
        self._descendants = _closed(every[::-1], self.users)

    def ancestors(self, op: int) -> Mask:
        """bool [ops]: those that an op depends on, itself included."""
        return np.unpackbits(self._ancestors[op], count=len(self.makers)).view(np.bool_)

    def descendants(self, op: int) -> Mask:
        """bool [ops]: those that depend on an op, itself included."""
        return np.unpackbits(self._descendants[op], count=len(self.makers)).view(np.bool_)

    def related(self, of_each: Floats) -> Floats:
        """Per op, the sum over those that it depends on and those that depend on it, itself twice: float64 [ops]."""
        return self.before(of_each) + _summed(self._descendants, of_each)

    def before(self, of_each: Floats) -> Floats:
        """Per op, the sum over those that it depends on, itself included: float64 [ops]."""
        return _summed(self._ancestors, of_each)


def _summed(masks: npt.NDArray[np.uint8], of_each: Floats) -> Floats:
    found = np.zeros(len(masks))
    # A few rows at a time stay in the cache.
    for first in range(0, len(masks), _ROWS):
        rows = slice(first, first + _ROWS)
        found[rows] = np.unpackbits(masks[rows], axis=1, count=len(masks)).astype(np.float64) @ of_each
    return found


def _closed(order: Iterable[int], before: Sequence[Sequence[int]]) -> npt.NDArray[np.uint8]:
    """Per op, as bits, itself and all that are reached by `before`, each of which comes earlier in `order`."""
    count = len(before)
    found = np.zeros((count, (count + 7) // 8), dtype=np.uint8)
    for op in order:
        found[op, op // 8] |= 128 >> op % 8
        for other in before[op]:
            found[op] |= found[other]
    return found
