"""Conversions between placements along one mesh axis: the collectives, and the two local steps.

all_reduce      {x | P(op)} -> {x | R}
reduce_scatter  {x | P(sum)} -> {x | S(d)}
all_gather      {x | S(d)} -> {x | R}
all_to_all      {x | S(d)} -> {x | S(e)}
reshare         {x | S(d)} -> {x | S(d)~1}     to shards of other sizes: rows that change owner move
slice           {x | R} -> {x | S(d)}          local, no communication
partial         {x | R} -> {x | P(sum)}        local: the first device keeps the value, the others hold zero

Where several mesh axes cut one dimension, a step adds or removes its minor axis only: what other axes hold stays
where it is. Only what one axis alone cuts is reshared.
"""

from __future__ import annotations

from typing import Literal as OneOf

from hapsynth.instructions.layout import Layout, Placement, cut_axes, is_consistent

Step = OneOf["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reshare", "slice", "partial"]
STEPS: tuple[Step, ...] = (
    *("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reshare"),
    *("slice", "partial"),
)

BUNDLED = 1 << 20
"""Bytes on the wire, per device, up to which a collective goes together with others of its kind that wait for the same:
as XLA's compilers for GPUs join them, and the lowering for CPUs."""
BUNDLE = 16 * BUNDLED
"""Bytes that go together at most, per device."""


def step_between(source: Placement, target: Placement) -> Step | None:
    """The single step that turns one placement into another, or None where it takes more or cannot be done."""
    match source.kind, target.kind:
        case "P", "R":
            return "all_reduce"
        case "P", "S":
            return "reduce_scatter" if source.reduction == "sum" else None
        case "S", "R":
            return "all_gather"
        case "S", "S":
            if source.dim != target.dim:
                return "all_to_all"
            return "reshare" if source.minor == target.minor and source.way != target.way else None
        case "R", "S":
            return "slice"
        case "R", "P":
            return "partial" if target.reduction == "sum" else None
        case _:
            return None


def axis_between(source: Layout, target: Layout) -> int | None:
    """The mesh axis along which a single step turns one layout into another, or None where it takes more or cannot be
    done."""
    changed = [a for a, (p, q) in enumerate(zip(source, target, strict=True)) if p != q]
    if len(changed) != 1 or not (is_consistent(source) and is_consistent(target)):
        return None
    axis = changed[0]
    for layout in (source, target):
        if layout[axis].is_sharded and cut_axes(layout, layout[axis].dim)[-1] != axis:
            return None
    return axis if step_between(source[axis], target[axis]) is not None else None


def is_collective(step: Step) -> bool:
    return step not in ("slice", "partial")
