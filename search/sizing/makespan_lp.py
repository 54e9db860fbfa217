"""The linear program over ratios where computing and sending overlap: the busiest stream and the link."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from hapsynth.search.cost.model import distinct
from hapsynth.search.cost.roofline import Roofline
from hapsynth.search.memory.profile import largest_of
from hapsynth.search.sizing.ratio_lp import RatioLP

_ALL_ELSE = 1e-3
"""Of the objective: what is not the busiest is to be no busier than it must be."""
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

    def _add_wires(self) -> None:
        self._add_largest()
        for wire in self.wires:
            for n, cut in enumerate(wire.times):
                if cut[0] in self.column:
                    rest = wire.slope(lambda c: largest_of(self.sizes, c))
                    rest *= prod(largest_of(self.sizes, other) for m, other in enumerate(wire.times) if m != n)
                    rest /= prod(max(largest_of(self.sizes, other), 1e-300) for other in wire.over)
                    self._add_busy(LINK, self._largest(cut), rest)

    def _add_works(self) -> None:
        kind_of = self.costs.kind_of
        for works in self.works:
            mine = [k for k, cut in enumerate(works.cuts) if cut[0] in self.column]
            if not mine:
                continue
            (k,) = mine
            c = works.cuts[k][0]
            if self.leader[c] != c:
                continue
            place = self.costs.position(self.axes[: works.cuts[k][1]])
            held = self._held(works.cuts[k])
            others = [held if n == k else self.loads.fraction(self.sizes, o) for n, o in enumerate(works.cuts)]
            some = distinct(kind_of, [self._unlike(works.cuts[k][1])[1][place], held, *others])
            lines = self._lines(Roofline(self.costs.figures, list(works.counts)), k, others)
            for count, *line in zip(works.counts.values(), *lines, strict=True):
                seconds: dict[int, tuple[int, float]] = {}
                for device in some.tolist():
                    row = np.array([x[device] for x in line])
                    share, kind = self._share(works.cuts[k], int(place[device])), int(kind_of[device])
                    if not share:
                        continue
                    if kind not in seconds:
                        seconds[kind] = len(self.objective), float(row.max()) or 1.0
                        self.objective.append(0.0)
                        self._add_busy(kind, seconds[kind][0], count * self.times[c] * seconds[kind][1])
                    t, unit = seconds[kind]
                    start, busy, moving, still = (row / unit).tolist()
                    self.rows.add({**{i: x * busy for i, x in share.items()}, t: -1.0}, -start)
                    self.rows.add({**{i: x * moving for i, x in share.items()}, t: -1.0}, -start - still)

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
