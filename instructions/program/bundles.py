"""Which collectives can go as one, and which of a program do."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from hapsynth._jax import is_extended
from hapsynth.instructions.program.program import Convert, Instruction


def family(step: Convert, dtype: Any) -> Hashable | None:
    """What collectives that go as one have in common; None for one that always goes alone."""
    collective = step.collective
    if not (collective.communicates and collective.bundled) or is_extended(dtype):
        return None
    source, target = step.source[step.axis], step.target[step.axis]
    # What comes from a device that owns it, or goes there, goes with what has the same owner.
    return collective.name, step.axis, source.reduction, source.owner, target.owner, str(dtype)


def independent(run: Iterable[Convert], step: Convert) -> bool:
    """Whether a collective needs nothing that others make, and makes nothing else."""
    made = {(s.value, s.target) for s in run}
    return made.isdisjoint(((step.value, step.source), (step.value, step.target)))


def bundles_of(instructions: Sequence[Instruction]) -> dict[int, list[int]]:
    """Bundle -> the places of its collectives."""
    found: dict[int, list[int]] = {}
    for at, i in enumerate(instructions):
        if isinstance(i, Convert) and i.bundle:
            found.setdefault(i.bundle, []).append(at)
    return found
