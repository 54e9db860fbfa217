"""Tables and groups of devices as a person reads them; single quantities are in `hapsynth/_quantities.py`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import IO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from hapsynth._files import discard
from hapsynth.cluster.cluster import Cluster

WIDE = 10_000
"""Columns of a report that is not written to a terminal: whatever reads it gets every column, in whole lines."""
_GAP = 2
"""Spaces between two columns."""

Group = tuple[str, range]
"""A heading and the devices under it: a run of equal kinds in mesh order."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """The reader has gone, as `| head` does: the rest of the report is for nobody, but there are files to write and
        an exit status to give."""
        self.quiet = True
        discard(self.file)


def console(file: IO[str] | None = None) -> Console:
    """A console for reports: as wide as the terminal, if it is one."""
    out = file or sys.stdout
    width = shutil.get_terminal_size((WIDE, 24)).columns if out.isatty() else WIDE
    return _Console(file=out, width=width, highlight=False, markup=False, emoji=False, soft_wrap=True)


@dataclass(frozen=True)
class Table:
    """A borderless table; the first `left` columns are names, the others figures.

    On a console that is too narrow it leaves out columns and says which, rather than break a word: those of `minor`
    first, then the last ones. The first column stays, whole.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    minor: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [max(map(cell_len, cells)) for cells in zip(self.headers, *self.rows, strict=True)]
        width = lambda kept: sum(widths[i] + _GAP for i in kept) - _GAP
        kept = list(range(len(widths)))
        last = kept[:0:-1]
        for i in (*sorted((i for i in last if self.headers[i] in self.minor), reverse=True), *last):
            if width(kept) <= options.max_width:
                break
            if i in kept:
                kept.remove(i)
        columns = RichTable(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", show_edge=False)
        for i in kept:
            columns.add_column(self.headers[i], justify="left" if i < self.left else "right", no_wrap=True)
        for row in self.rows:
            columns.add_row(*(Text(row[i]) for i in kept))
        yield from console.render(columns, options.update(width=max(options.max_width, width(kept))))
        if left_out := [header for i, header in enumerate(self.headers) if header and i not in kept]:
            yield Text(f"(not in {options.max_width} columns: {', '.join(left_out)})", style="dim")


def heading(title: str) -> Text:
    """A title line with an empty line before it."""
    return Text(f"\n{title}", style="bold")


def device_groups(cluster: Cluster) -> list[Group]:
    """Runs of equal devices in mesh order, each with a heading such as `0-3 V100-16GB`."""
    groups: list[Group] = []
    for kind, run in groupby(range(cluster.n), key=lambda i: cluster.devices[i]):
        indices = list(run)
        first, last = indices[0], indices[-1]
        span = f"{first}" if first == last else f"{first}-{last}"
        groups.append((f"{span} {kind.name}", range(first, last + 1)))
    return groups


def span(values: Sequence[int]) -> str:
    """`36`, or `36..37` where the devices of a group hold unequal shares."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}..{high}"
