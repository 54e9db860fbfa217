"""The linear program over ratios where computing and sending overlap: the busiest stream and the link."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hapsynth.search.sizing.ratio_lp import RatioLP
from hapsynth.search.solver import Ints

_ALL_ELSE = 1e-3
"""The weight in the objective of streams other than the busiest, so that they are no busier than necessary."""
LINK = -1
"""In place of a kind of device."""


class MakespanLP(RatioLP):
    """As `RatioLP`, with two times to minimize: the longest that a kind of device computes, and that of all collectives
    together. `besides`: seconds of each kind and of `LINK` that sizes do not decide; `exposed`: which part of the
    critical path of the program is computing, and so the weight of the first."""

    def __init__(self, *given: Any, besides: Mapping[int, float], exposed: float, **named: Any) -> None:
        super().__init__(*given, **named)
        self._busy: dict[int, dict[int, float]] = {k: {} for k in besides}
        self._besides, self._exposed = besides, exposed

    @property
    def _streams(self) -> Ints:
        return self.costs.kind_of

    def _add_computed(self, stream: int, column: int, seconds: float) -> None:
        self._add_busy(stream, column, seconds)

    def _add_sent(self, column: int, seconds: float) -> None:
        self._add_busy(LINK, column, seconds)

    def _add_busy(self, resource: int, column: int, seconds: float) -> None:
        of = self._busy.setdefault(resource, {})
        of[column] = of.get(column, 0.0) + seconds

    def _add_objective(self) -> None:
        coefficients = [max(busy.values()) for busy in self._busy.values() if busy]
        unit = max([*self._besides.values(), *coefficients], default=0.0) or 1.0
        computing, sending = range(len(self.objective), len(self.objective) + 2)
        self.objective += [self._exposed * unit, (1.0 - self._exposed) * unit]
        for resource, busy in self._busy.items():
            row = {column: seconds / unit for column, seconds in busy.items()}
            longest = sending if resource == LINK else computing
            self.rows.add({**row, longest: -1.0}, -self._besides.get(resource, 0.0) / unit)
            for column, seconds in busy.items():
                self.objective[column] += _ALL_ELSE * seconds
