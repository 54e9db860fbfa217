"""Which device holds which part of an array, as text: `jax.debug.visualize_array_sharding` for shards of any sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import numpy as np

from hapsynth.running.sharded_array import ShardedArray

_HIGH, _NARROWEST = 16, 40
"""Lines that the longest picture takes, unless the labels need more; columns that the narrowest has."""

Slices = tuple[slice, ...]
Span = tuple[int, int]


def visualize_sharding(array: ShardedArray | jax.Array, *, width: int = 80) -> None:
    """Print which device holds which part of an array: boxes as large as the shards, in at most `width` columns (40 if
    that is less), or as many as the names of the devices take.

    Drawn are the one or two dimensions that are cut. Raises ValueError for an array that is cut along more, TypeError
    for what is no array on devices.
    """
    print(sharding_picture(array, width))


def sharding_picture(array: Any, width: int) -> str:
    """What `visualize_sharding` prints."""
    held = _held(array)
    shape = tuple(array.shape)
    spans = [
        sorted({(s[d].start, s[d].stop) for s in held.values() if s[d].stop > s[d].start}) for d in range(len(shape))
    ]
    cut = [d for d in range(len(shape)) if len(spans[d]) > 1 or (shape[d] and spans[d] != [(0, shape[d])])]
    if len(cut) > 2:
        raise ValueError(f"{array.dtype}{list(shape)} is cut along dimensions {cut}; a picture has two")
    # One that is cut alone is drawn as it lies: the last of several along the line.
    one = _drawn(cut, len(shape))
    ways = [(cut[0], cut[1]), (cut[1], cut[0])] if len(cut) == 2 else [one, one[::-1]]
    available = max(_NARROWEST, width)
    tables = [_Table.of(held, spans, rows, columns) for rows, columns in ways]
    # The first, but where its labels need more than there is and the other's less.
    table = min(tables, key=lambda table: max(table.narrowest, available))
    rows, columns, cells = table.rows, table.columns, table.cells
    heights = _scaled(_lengths(spans, rows), [max(len(cell) for cell in line) for line in cells], _HIGH)
    widths = _scaled(_lengths(spans, columns), table.needed, available - len(table.needed) - 1)
    along = ", ".join(f"dimension {d} {way}" for d, way in ((rows, "downwards"), (columns, "along")) if d is not None)
    nothing = _names([device for device, s in held.items() if any(p.stop <= p.start for p in s)]) if array.size else []
    return "\n".join(
        [
            f"{array.dtype}{list(shape)}{f', {along}' if along else ''}",
            *_grid(cells, heights, widths),
            *([f"nothing on {', '.join(nothing)}"] if nothing else []),
        ]
    )


@dataclass(frozen=True)
class _Table:
    """The texts of each box, of the boxes in a line, of all lines. `rows`, `columns`: the dimensions downwards and
    along, None for one box."""

    rows: int | None
    columns: int | None
    cells: list[list[list[str]]]

    @classmethod
    def of(
        cls, held: Mapping[Any, Slices], spans: Sequence[Sequence[Span]], rows: int | None, columns: int | None
    ) -> _Table:
        """`spans`: the parts of each dimension."""

        def texts(*cut: tuple[int | None, Span]) -> list[str]:
            parts = sorted((d, part) for d, part in cut if d is not None)
            here = [device for device, s in held.items() if all(_is(s[d], part) for d, part in parts)]
            return [*_names(here), " x ".join(str(stop - start) for _, (start, stop) in parts)]

        high, wide = ([(0, 1)] if d is None else spans[d] for d in (rows, columns))
        return cls(rows, columns, [[texts((rows, row), (columns, column)) for column in wide] for row in high])

    @property
    def needed(self) -> list[int]:
        """The width of each column."""
        return [max(len(text) for cell in column for text in cell) + 2 for column in zip(*self.cells, strict=True)]

    @property
    def narrowest(self) -> int:
        return sum(self.needed) + len(self.needed) + 1


def _held(array: Any) -> dict[Any, Slices]:
    """What each device holds of the logical array, in mesh order."""
    if isinstance(array, ShardedArray):
        devices = array.storage.mesh.devices
        return {devices[at]: array.storage.slices(at) for at in np.ndindex(*devices.shape)}
    if not isinstance(array, jax.Array):
        raise TypeError(f"{type(array).__name__} lies on no devices: give a hapsynth.ShardedArray or a jax.Array")
    indices = array.sharding.devices_indices_map(array.shape)
    whole = lambda s, n: slice(*s.indices(n)[:2])
    return {d: tuple(whole(s, n) for s, n in zip(index or (), array.shape)) for d, index in indices.items()}


def _drawn(cut: Sequence[int], ndim: int) -> tuple[int | None, int | None]:
    """The dimensions downwards and along of a picture of at most one that is cut."""
    if not cut:
        return None, None
    return (None, cut[0]) if cut[0] == ndim - 1 else (cut[0], None)


def _is(part: slice, span: tuple[int, int]) -> bool:
    return (part.start, part.stop) == span


def _names(devices: Sequence[Any]) -> list[str]:
    """`CPU 0-3`, a line for each platform."""
    lines: list[str] = []
    for platform, some in groupby(devices, key=lambda d: d.platform.upper()):
        ids = sorted(d.id for d in some)
        runs = [list(run) for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0])]
        spans = [f"{run[0][1]}" if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs]
        lines.append(f"{platform} {','.join(spans)}")
    return lines


def _lengths(spans: Sequence[Sequence[Span]], dim: int | None) -> list[int]:
    return [1] if dim is None else [stop - start for start, stop in spans[dim]]


def _scaled(lengths: Sequence[int], least: Sequence[int], total: int) -> list[int]:
    """Sizes in proportion to the lengths, together `total` if each can have its `least`, which the shorter ones get."""
    sizes = list(least)
    left, free = total, set(range(len(lengths)))
    in_proportion = lambda i: left * lengths[i] / sum(lengths[j] for j in free)
    while short := {i for i in free if in_proportion(i) < least[i]}:
        free -= short
        left -= sum(least[i] for i in short)
    # By what is left each time, so that rounding adds up.
    for i in sorted(free):
        sizes[i] = round(in_proportion(i))
        free.remove(i)
        left -= sizes[i]
    return sizes


def _grid(cells: Sequence[Sequence[Sequence[str]]], heights: Sequence[int], widths: Sequence[int]) -> list[str]:
    border = lambda left, between, right: left + between.join("─" * w for w in widths) + right
    lines = [border("┌", "┬", "┐")]
    for r, (row, height) in enumerate(zip(cells, heights, strict=True)):
        for line in range(height):
            texts = [cell[at] if 0 <= (at := line - (height - len(cell)) // 2) < len(cell) else "" for cell in row]
            lines.append("│" + "│".join(text.center(w) for text, w in zip(texts, widths, strict=True)) + "│")
        last = r == len(cells) - 1
        lines.append(border(*("└┴┘" if last else "├┼┤")))
    return lines
