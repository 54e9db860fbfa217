"""Progress of a search: one live line on a terminal, nothing elsewhere unless asked for."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from hapsynth._files import say
from hapsynth._quantities import percent, plural, seconds
from hapsynth.search.result import Progress

_SPINNER = 2
"""Columns before the line."""


@contextmanager
def progress(wanted: bool | None) -> Generator[Callable[[Progress], None] | None]:
    """The callback for the search; None where nothing is to be shown.

    `wanted` None: shown where standard error is a terminal. True on anything else: a line for every new best cost.
    """
    if not _shown(wanted):
        yield None
    elif sys.stderr.isatty():
        best = Best()
        with _live("tracing") as update:
            yield lambda p: update(best.line(p))
    else:
        yield _Lines().show


@contextmanager
def activity(wanted: bool | None = None) -> Generator[Callable[[str], None]]:
    """Shows the current activity, where `progress` would show anything: as one line on a terminal, else a line each."""
    if not _shown(wanted):
        yield lambda _: None
    elif sys.stderr.isatty():
        with _live("working") as update:
            yield update
    else:
        yield say


def _shown(wanted: bool | None) -> bool:
    return sys.stderr.isatty() if wanted is None else wanted


@contextmanager
def _live(first: str) -> Generator[Callable[[str | Sequence[str]], None]]:
    """Shows one line, the latest: a text, cut off where it is too long, or the first of several that is not."""
    console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)

    def update(text: str | Sequence[str]) -> None:
        room = console.width - _SPINNER
        if not isinstance(text, str):
            text = next((t for t in text if len(t) <= room), text[-1])
        status.update(Text(text, no_wrap=True, overflow="ellipsis"))

    with console.status(first) as status:
        yield update


class _Lines:
    """Plain lines for a log: only when there is a new best."""

    def __init__(self) -> None:
        self.best = Best()

    def show(self, p: Progress) -> None:
        before = self.best.cost_s
        line = self.best.line(p)[0]
        if self.best.cost_s != before:
            say(line)


class Best:
    """What a search is told to have found so far. It goes on with other shard sizes and other sets of devices, and
    tells of the best program for these."""

    def __init__(self) -> None:
        self.cost_s = math.inf

    def line(self, p: Progress) -> list[str]:
        """`astar: best 17.475 ms, gap 0.03 %, 4.2 s, bound 17.470 ms, 1203 nodes`, and shorter ones.

        The gap is that of the best program: it is left out while the bound is about others.
        """
        self.cost_s = min(self.cost_s, p.cost_s)
        said = [f"{p.stage}: best {seconds(self.cost_s)}", f"{p.seconds:.1f} s"]
        if p.cost_s <= self.cost_s and math.isfinite(p.gap):
            said = [said[0], f"gap {percent(p.gap)}", said[1], f"bound {seconds(p.lower_bound_s)}"]
        said.append(plural(p.expanded, "node"))
        return [", ".join(said[:count]) for count in range(len(said), 0, -1)]
