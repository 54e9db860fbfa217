"""Tables and groups of devices as a person reads them; single quantities are in `hapsynth/_quantities.py`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hapsynth.cluster.cluster import Cluster

WIDTH = 120
"""Columns of a report that is not written to a terminal: fixed, so that the text is the same everywhere."""

Group = tuple[str, range]
"""A heading and the devices under it: a run of equal kinds in mesh order."""


def console(file: IO[str] | None = None) -> Console:
    """A console for reports: as wide as the terminal, or WIDTH where there is none."""
    out = file or sys.stdout
    width = shutil.get_terminal_size((WIDTH, 24)).columns if out.isatty() else WIDTH
    return Console(file=out, width=width, highlight=False, markup=False, emoji=False, soft_wrap=True)


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Table:
    """A borderless table; the first `left` columns are names, the others figures."""
    columns = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for i, header in enumerate(headers):
        name = i < left
        columns.add_column(header, justify="left" if name else "right", overflow="fold", no_wrap=not name)
    for row in rows:
        columns.add_row(*map(Text, row))
    return columns


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
