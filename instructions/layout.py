"""Placements and layouts: how one value lies on the devices (DESIGN section 2)."""

from __future__ import annotations

import re
from typing import Literal as OneOf
from typing import NamedTuple

Reduction = OneOf["", "sum", "max", "min"]


class Placement(NamedTuple):
    """How a value lies along one mesh axis: `R`, `S(d)` or `P(sum|max|min)`."""

    kind: OneOf["R", "S", "P"]
    dim: int = -1
    reduction: Reduction = ""

    def __str__(self) -> str:
        match self.kind:
            case "R":
                return "R"
            case "S":
                return f"S({self.dim})"
            case "P":
                return f"P({self.reduction})"

    @property
    def is_sharded(self) -> bool:
        return self.kind == "S"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"


R = Placement("R")
_SHARDED = tuple(Placement("S", d) for d in range(32))


def S(dim: int) -> Placement:
    """Sharded along dimension `dim`."""
    return _SHARDED[dim]


def P(reduction: Reduction = "sum") -> Placement:
    """Partial: combining the devices' tensors by `reduction` gives the value."""
    return _PARTIAL[reduction]


_PARTIAL: dict[str, Placement] = {r: Placement("P", -1, r) for r in ("sum", "max", "min")}

Layout = tuple[Placement, ...]
"""One placement per mesh axis."""


def parse_placement(text: str) -> Placement:
    """The inverse of `str(placement)`; ValueError names what is not one."""
    if text == "R":
        return R
    if match := re.fullmatch(r"S\((\d+)\)", text):
        dim = int(match[1])
        if dim < len(_SHARDED):
            return S(dim)
    if (match := re.fullmatch(r"P\((sum|max|min)\)", text)) and match[1] in _PARTIAL:
        return _PARTIAL[match[1]]
    raise ValueError(f"{text!r} is no placement; expected R, S(<dim>) or P(sum|max|min)")


def format_layout(layout: Layout) -> str:
    return ",".join(map(str, layout))


def parse_layout(text: str) -> Layout:
    return tuple(parse_placement(part) for part in text.split(","))
