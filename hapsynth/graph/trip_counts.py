"""How often branches and while loops run: nothing in the program says, so the user may."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from hapsynth.graph.inline import TraceError
from hapsynth.graph.ir import Graph, Region

Expectation = float | Sequence[float]


def expecting(graph: Graph, expect: Mapping[str, Expectation]) -> Graph:
    """The graph with other frequencies.

    `expect`: source line, e.g. `"train.py:40"`, or file, `"train.py"`, of a cond or while loop -> for a while loop its
    trips; for a cond how often each branch is taken, or one number: how often the predicate is true. Of a line with
    both, as a call of a library's solver may have, a sequence is for the conds and a number above 1 for the loops.
    Raises TraceError for a line without control flow and for numbers of no use.
    """
    counts = {r.index: r.count for r in graph.regions}
    for line, value in expect.items():
        matching = [r for r in graph.regions if r.kind in ("while", "cond") and line in _names(r)]
        if not matching:
            listed = ", ".join(dict.fromkeys(f"{r.kind} ({r.source})" for r in graph.regions if r.kind in _ASKED))
            raise TraceError(f"expect names {line!r}; where the function branches or loops: {listed or 'nowhere'}")
        kind = "cond" if not _is_number(value) else "while" if cast(float, value) > 1 else ""
        for r in [r for r in matching if r.kind == kind] or matching:
            if r.kind == "while":
                counts[r.index] = _trips(line, value)
            else:
                branches = graph.branches(r.index)
                counts.update(zip(branches, _shares(line, value, len(branches)), strict=True))
    return with_counts(graph, [counts[r.index] for r in graph.regions])


def with_counts(graph: Graph, counts: Sequence[float]) -> Graph:
    """The graph with these counts of its regions, in order."""
    regions = (dataclasses.replace(r, count=float(c)) for r, c in zip(graph.regions, counts, strict=True))
    return dataclasses.replace(graph, regions=tuple(regions))


_ASKED = ("while", "cond")


def _names(region: Region) -> tuple[str, str]:
    return region.source, region.source.rpartition(":")[0]


def _trips(line: str, value: Any) -> float:
    if not _is_number(value):
        raise TraceError(f"expect gives {value!r} for the while loop at {line}; give its trips, a number")
    return float(value)


def _shares(line: str, value: Any, branches: int) -> Sequence[float]:
    shares: Any = (1.0 - value, value) if _is_number(value) and branches == 2 else value
    usable = isinstance(shares, Sequence) and all(_is_number(x) for x in shares)  # pyright: ignore[reportUnknownVariableType]
    if not usable or len(shares) != branches or abs(sum(shares) - 1.0) > 1e-6:
        raise TraceError(
            f"expect gives {value!r} for the {branches} branches at {line}; give how often each is taken, "
            "numbers that sum to 1 (the first is that of index 0, of a predicate that is false)"
        )
    return tuple(map(float, shares))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
