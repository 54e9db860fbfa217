"""Planning by a clock that counts how often it is looked at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Has the planner's clock go on by a second each time it is looked at; the time, in a list of one."""
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    for module in ("effort", "resharding.search", "search_at_ratios"):
        monkeypatch.setattr(f"hapsynth.search.planning.{module}.time", SimpleNamespace(perf_counter=clock))
    return now
