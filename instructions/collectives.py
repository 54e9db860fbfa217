"""Conversions between placements along one mesh axis: the collectives, and the two local steps.

all_reduce      {x | P(op)} -> {x | R}
reduce_scatter  {x | P(sum)} -> {x | S(d)}
all_gather      {x | S(d)} -> {x | R}
all_to_all      {x | S(d)} -> {x | S(e)}
slice           {x | R} -> {x | S(d)}          local, no communication
"""

from __future__ import annotations

from typing import Literal as OneOf

from hapsynth.instructions.layout import Placement

Step = OneOf["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "partial"]
STEPS: tuple[Step, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "partial")


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
            return "all_to_all" if source != target else None
        case "R", "S":
            return "slice"
        case "R", "P":
            return "partial" if target.reduction == "sum" else None
        case _:
            return None


def is_collective(step: Step) -> bool:
    return step not in ("slice", "partial")
