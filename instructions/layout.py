"""Placements and layouts: how one value lies on the devices (docs/design/overview.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise, permutations, product
from typing import Literal as OneOf
from typing import NamedTuple

Reduction = OneOf["", "sum", "max", "min"]


class Placement(NamedTuple):
    """How a value lies along one mesh axis: `R`, `S(d)`, `O(i)` or `P(sum|max|min)`.

    `minor`: how many other mesh axes cut the dimension before this one does. 0 is the major axis, whose shards the
    axis with 1 cuts again; written `S(d)` and `S(d)/1`. `way`: which of the value's ways of being cut along the
    dimension, in shards of unlike sizes; 0 mostly is the only one, others are written `S(d)~1`. `O(i)` is a way to cut
    the first dimension: position i, the value's owner, has all of it.
    """

    kind: OneOf["R", "S", "P"]
    dim: int = -1
    reduction: Reduction = ""
    minor: int = 0
    way: int = 0

    def __str__(self) -> str:
        match self.kind:
            case "R":
                return "R"
            case "S":
                if self.owner is not None:
                    return f"O({self.owner})"
                text = f"S({self.dim})/{self.minor}" if self.minor else f"S({self.dim})"
                return f"{text}~{self.way}" if self.way else text
            case "P":
                return f"P({self.reduction})"

    @property
    def is_sharded(self) -> bool:
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"

    @property
    def is_cut(self) -> bool:
        """Whether each position has a part: sharded, and owned by none."""
        return self.is_sharded and self.owner is None

    @property
    def owner(self) -> int | None:
        """The position along the axis that has all of the value; None where there is none."""
        return owner_of(self.way)


_FIRST_OWNER = -2
"""The way in which position 0 has all of a dimension; the next position's is one less."""


def owner_of(way: int) -> int | None:
    """The position that has all of what is cut so; None where that is said elsewhere."""
    return _FIRST_OWNER - way if way <= _FIRST_OWNER else None


R = Placement("R")
MOST_AXES = 4
"""Mesh axes that a layout may have."""
_SHARDED = tuple(tuple(Placement("S", d, "", k) for d in range(32)) for k in range(MOST_AXES))


def S(dim: int, minor: int = 0) -> Placement:
    """Sharded along dimension `dim`, which `minor` other mesh axes cut before."""
    return _SHARDED[minor][dim]


def O(owner: int) -> Placement:  # noqa: E743
    """Whole on the device at one position of the axis, and nowhere else."""
    return Placement("S", 0, way=_FIRST_OWNER - owner)


def P(reduction: Reduction = "sum") -> Placement:
    """Partial: combining the devices' tensors by `reduction` gives the value."""
    return _PARTIAL[reduction]


_PARTIAL: dict[str, Placement] = {r: Placement("P", -1, r) for r in ("sum", "max", "min")}

Layout = tuple[Placement, ...]
"""One placement per mesh axis."""


@cache
def cuts_of(layout: Layout) -> tuple[tuple[int, tuple[int, ...], int], ...]:
    """(dimension, the mesh axes that cut it, which way) for every dimension that a layout cuts."""
    return tuple((dim, cut_axes(layout, dim), way_of(layout, dim)) for dim in cut_dims(layout))


def cut_axes(layout: Layout, dim: int) -> tuple[int, ...]:
    """The mesh axes that cut a dimension, major to minor."""
    return tuple(
        sorted((a for a, p in enumerate(layout) if p.is_sharded and p.dim == dim), key=lambda a: layout[a].minor)
    )


def cut_alone(cut: tuple[int, tuple[int, ...], int], axes: int) -> Layout:
    """The layout over so many axes in which nothing else is cut; `cut`: as in `cuts_of`."""
    dim, by, way = cut
    return tuple(Placement("S", dim, minor=by.index(a), way=way) if a in by else R for a in range(axes))


def way_of(layout: Layout, dim: int) -> int:
    """Which way a dimension is cut; 0 where nothing cuts it."""
    return next((p.way for p in layout if p.is_sharded and p.dim == dim), 0)


@cache
def plain(placement: Placement) -> Placement:
    """The placement without its way, as rules know it."""
    return placement._replace(way=0) if placement.way else placement


def cut_dims(layout: Layout) -> tuple[int, ...]:
    """The dimensions that some axis cuts, ascending."""
    return tuple(sorted({p.dim for p in layout if p.is_sharded}))


@cache
def orders(axes: tuple[int, ...], of: int) -> tuple[tuple[int, ...], ...]:
    """The orders, major to minor, in which programs that are searched for have some of the `of` mesh axes cut one
    dimension: the shards of each axis are cut again by the one before it in the mesh, those of the first by the last.

    So there is one axis that may cut what another one did, and all shards of a class nest. Of two axes both orders.
    """
    return tuple(o for o in permutations(axes) if all((a - b) % of == 1 for a, b in pairwise(o)))


def minors(groups: Iterable[Sequence[int]], of: int) -> Iterator[dict[int, int]]:
    """The mesh axes of each group in each of their `orders`: each time axis -> its place in its group."""
    for chosen in product(*(orders(tuple(axes), of) for axes in groups)):
        yield {axis: k for axes in chosen for k, axis in enumerate(axes)}


def is_partial(layout: Layout) -> bool:
    """Whether some axis leaves the devices' tensors to be combined."""
    return any(p.is_partial for p in layout)


def reduction_of(layout: Layout) -> Reduction:
    """By what the devices' tensors combine; empty where no axis leaves them partial."""
    for placement in layout:
        if placement.is_partial:
            return placement.reduction
    return ""


@cache
def is_consistent(layout: Layout) -> bool:
    """Whether the axes that cut one dimension say in which order and cut it the same way, one alone where it has an
    owner, and all partial ones combine by the same reduction: a sum of maxima is no maximum of sums."""
    for dim in cut_dims(layout):
        if len(cut_axes(layout, dim)) > 1 and any(p.owner is not None for p in layout if p.dim == dim):
            return False
        if len({p.way for p in layout if p.is_sharded and p.dim == dim}) > 1:
            return False
        minors = sorted(p.minor for p in layout if p.is_sharded and p.dim == dim)
        if minors != list(range(len(minors))):
            return False
    return len({p.reduction for p in layout if p.is_partial}) <= 1


@cache
def parse_placement(text: str) -> Placement:
    """The inverse of `str(placement)`; ValueError names what is not one."""
    if text == "R":
        return R
    if match := re.fullmatch(r"S\((\d+)\)(?:/(\d+))?(?:~(\d+))?", text):
        dim, minor, way = int(match[1]), int(match[2] or 0), int(match[3] or 0)
        if minor < MOST_AXES and dim < len(_SHARDED[minor]):
            return S(dim, minor)._replace(way=way) if way else S(dim, minor)
    if match := re.fullmatch(r"O\((\d{1,6})\)", text):
        return O(int(match[1]))
    if (match := re.fullmatch(r"P\((sum|max|min)\)", text)) and match[1] in _PARTIAL:
        return _PARTIAL[match[1]]
    raise ValueError(f"{text!r} is no placement; expected R, S(<dim>)[/<minor>][~<way>], O(<owner>) or P(sum|max|min)")


def format_layout(layout: Layout) -> str:
    return ",".join(map(str, layout))


@cache
def parse_layout(text: str) -> Layout:
    return tuple(parse_placement(part) for part in text.split(","))
