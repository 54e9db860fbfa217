"""The time budget of a planning task, and the effort spent so far."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

import numpy as np

LAST_S = 1.0
"""Seconds for the bound that is sought even when no time is left."""
_LEAST_S = 0.05
"""The least seconds for anything that is started."""


@dataclass
class Clock:
    """The time budget of a task: `budget_s` seconds from the creation of the clock, None for no limit; and whether
    Ctrl-C ended the task (`interrupted`)."""

    budget_s: float | None = None
    began: float = field(init=False)
    interrupted: bool = field(init=False, default=False)
    _deadline: float | None = field(init=False)
    _build_s: float = field(init=False, default=0.0)
    """The build time of the slowest problem so far: with fewer seconds left, no problem is started."""

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self._deadline = None if self.budget_s is None else self.began + self.budget_s

    def elapsed(self, since: float | None = None) -> float:
        return time.perf_counter() - (self.began if since is None else since)

    def left(self) -> float:
        """Seconds of the budget; inf without one."""
        return np.inf if self._deadline is None else self._deadline - time.perf_counter()

    def allotted(self, part: float = 1.0) -> float | None:
        """Seconds for a step that starts now: a `part` of the remaining budget; None without a budget."""
        return None if self._deadline is None else max(_LEAST_S, self.left()) * part

    def share(self, part: float) -> float | None:
        """As `allotted`, for solving a problem; at least the seconds that building it took, where as many are left."""
        share = self.allotted(part)
        return None if share is None else max(share, min(self.left(), self._build_s))

    def late(self) -> bool:
        """Whether no new step is to be started."""
        return self.interrupted or self.no_time()

    def no_time(self) -> bool:
        """Whether the budget leaves less than a problem takes to build."""
        return self._deadline is not None and self.left() <= self._build_s

    def built(self, began: float) -> None:
        """Record the build time of a problem whose building started at `began`."""
        self._build_s = max(self._build_s, self.elapsed(began))

    def allow(self, seconds: float) -> None:
        """Set the remaining budget, if there is a budget, to `seconds`."""
        if self._deadline is not None:
            self._deadline = time.perf_counter() + max(_LEAST_S, seconds)

    @contextmanager
    def within(self, part: float) -> Generator[None]:
        """Within this context the budget is only the first `part` of the whole."""
        end = self._deadline
        if end is not None:
            self._deadline = self.began + part * (end - self.began)
        try:
            yield
        finally:
            self._deadline = end


@dataclass
class Effort:
    """What a task has taken so far. Of the solver: `expanded` nodes, `sweeps` of the dual, `states` of the largest
    problem. `choices_s`: seconds to find what may be chosen; `problems_s`: to build and solve problems, `solver_s` of
    them in the solver, `bound_s` of these for the joint bound; `ratio_s`: for sizes."""

    expanded: int = 0
    sweeps: int = 0
    states: int = 0
    choices_s: float = 0.0
    problems_s: float = 0.0
    solver_s: float = 0.0
    bound_s: float = 0.0
    ratio_s: float = 0.0

    @staticmethod
    def together(efforts: Sequence[Effort]) -> Effort:
        """The total effort of several tasks."""
        merge = lambda name: (max if name == "states" else sum)([getattr(e, name) for e in efforts])
        return Effort(**{f.name: merge(f.name) for f in fields(Effort)})

    def timings_s(self) -> dict[str, float]:
        """As in `Result.timings_s`."""
        return {
            "build_s": self.choices_s + self.problems_s - self.solver_s,
            "search_s": self.solver_s - self.bound_s,
            "ratio_s": self.ratio_s,
            "bound_s": self.bound_s,
        }
