"""The problem in which every instruction is at the best of several ratios for it: the bound of plans with reshares."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce

import numpy as np

from hapsynth.instructions.layout import Layout
from hapsynth.search.costs import CostModel, Floats
from hapsynth.search.formulate import Formulator
from hapsynth.search.ratios import Ratios
from hapsynth.search.structure import Structure


class SeveralRatios(Formulator):
    """As a `Formulator`, but each instruction costs the least that it does at any of `every` ratios, and nothing is
    paid for changing from one to another: no program whose instructions are each at one of them is cheaper."""

    def __init__(self, structure: Structure, costs: CostModel, every: Sequence[Ratios]) -> None:
        super().__init__(structure, costs, every[0])
        self._each = [Formulator(structure, costs, ratios) for ratios in every]

    @cached_property
    def _roles(self) -> Sequence[int]:
        number: dict[object, int] = {}
        every = zip(*(f._roles for f in self._each), strict=True)
        return [number.setdefault(roles, len(number)) for roles in every]

    def _profile(self, value: int) -> object:
        return tuple(f._profile(value) for f in self._each)

    def step_time(self, value: int, source: Layout, target: Layout, axis: int) -> float:
        return min(f.step_time(value, source, target, axis) for f in self._each)

    def held(self, value: int, dim: int, axes: tuple[int, ...], way: int = 0) -> float | Floats:
        return reduce(np.minimum, (f.held(value, dim, axes, way) for f in self._each))

    def feed_time(self, value: int, layout: Layout) -> float:
        return min(f.feed_time(value, layout) for f in self._each)

    def op_times(self, ops: Sequence[int]) -> list[Floats]:
        found = zip(*(f.op_times(ops) for f in self._each), strict=True)
        return [self.once(("least", *map(id, times)), lambda t=times: np.minimum.reduce(t)) for times in found]
