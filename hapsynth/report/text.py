"""Quantities, tables and groups of devices as a person reads them."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hapsynth.cluster import Cluster

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
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for i, header in enumerate(headers):
        name = i < left
        made.add_column(header, justify="left" if name else "right", overflow="fold", no_wrap=not name)
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def heading(title: str) -> Text:
    """A title line with an empty line before it."""
    return Text(f"\n{title}", style="bold")


def seconds(value: float) -> str:
    """`17.475 ms`: four significant digits or so, in the unit that fits."""
    if not math.isfinite(value):
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= scale or unit == "us":
            return f"{value / scale:.3f} {unit}"
    raise AssertionError


def nbytes(value: float) -> str:
    """`1.5 MiB`: whole bytes below one KiB, then one decimal."""
    if abs(value) < 1024:
        return f"{value:.0f} B"
    for unit, exponent in (("KiB", 10), ("MiB", 20), ("GiB", 30)):
        if abs(value) < 2.0 ** (exponent + 10) or unit == "GiB":
            return f"{value / 2.0**exponent:.1f} {unit}"
    raise AssertionError


def si(value: float, unit: str) -> str:
    """`1.074 GFLOP`: four significant digits, in the decimal multiple of the unit that fits."""
    power = next((p for p in (15, 12, 9, 6, 3) if abs(value) >= 10.0**p), 0)
    return f"{value / 10**power:.4g} {'kMGTP'[power // 3 - 1] if power else ''}{unit}"


def percent(fraction: float) -> str:
    """`4.56 %`; a gap that is zero but for rounding is `0.00 %`."""
    return f"{100 * fraction + 0.0:.2f} %" if abs(fraction) >= 5e-5 else "0.00 %"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def counted(counts: dict[str, int]) -> str:
    """`all_gather x3, all_reduce x6`, or `none`."""
    return ", ".join(f"{name} x{count}" for name, count in counts.items()) or "none"


def device_groups(cluster: Cluster) -> list[Group]:
    """Runs of equal devices in mesh order, each with a heading such as `0-3 V100-16GB`."""
    groups: list[Group] = []
    for kind, run in groupby(range(cluster.n), key=lambda i: cluster.devices[i]):
        indices = list(run)
        first, last = indices[0], indices[-1]
        span = f"{first}" if first == last else f"{first}-{last}"
        groups.append((f"{span} {kind.name}", range(first, last + 1)))
    return groups


def indices(devices: Sequence[int]) -> str:
    """`0-3, 6`: rising numbers, runs of them as one."""
    runs = [[d for _, d in run] for _, run in groupby(enumerate(devices), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def span(values: Sequence[int]) -> str:
    """`36`, or `36..37` where the devices of a group hold unequal shares."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}..{high}"
