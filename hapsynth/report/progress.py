"""Progress of a search: one live line on a terminal, nothing elsewhere unless asked for."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console

from hapsynth._quantities import percent, plural, seconds
from hapsynth.search.result import Progress


@contextmanager
def progress(wanted: bool | None) -> Generator[Callable[[Progress], None] | None]:
    """The callback for the search; None where nothing is to be shown.

    `wanted` None: shown where standard error is a terminal. True on anything else: a line for every new best cost.
    """
    terminal = sys.stderr.isatty()
    if not (terminal if wanted is None else wanted):
        yield None
    elif terminal:
        console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
        with console.status("tracing") as status:
            yield lambda p: status.update(line(p))
    else:
        yield _Lines().show


@contextmanager
def activity() -> Generator[Callable[[str], None]]:
    """Shows the current activity, as one line on a terminal; does nothing where standard error is none."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    console = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
    with console.status("working") as status:
        yield status.update


class _Lines:
    """Plain lines for a log: only when the best cost has changed."""

    def __init__(self) -> None:
        self.best = math.nan

    def show(self, p: Progress) -> None:
        if p.cost_s != self.best:
            self.best = p.cost_s
            print(line(p), file=sys.stderr, flush=True)


def line(p: Progress) -> str:
    """`astar: best 17.475 ms, bound 17.470 ms, gap 0.03 %, 1203 nodes, 4.2 s`"""
    gap = percent(p.gap) if math.isfinite(p.gap) else "-"
    best, bound = seconds(p.cost_s), seconds(p.lower_bound_s)
    return f"{p.stage}: best {best}, bound {bound}, gap {gap}, {plural(p.expanded, 'node')}, {p.seconds:.1f} s"
