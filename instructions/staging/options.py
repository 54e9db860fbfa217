"""The thresholds by which a program is staged and lowered: of which sizes collectives are bundled, gathered or cut, and
stages padded.

They are a plan's, not a device's: every device of a mesh takes part in a collective and runs the same switch, so
devices of two kinds could not go by two values. A plan is priced, counted and lowered by one set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class LoweringOptions:
    """Defaults were chosen on CPUs: docs/design/lowering.md and processes.md tell by which measurements."""

    # Bundles of collectives (`program/bundles.py`)
    bundled_bytes: int = 1 << 20
    """Largest collective, in bytes sent per device, that is bundled with others of its kind and with the same
    dependencies, as XLA's GPU compilers and the lowering for CPUs do. On GPUs, parts of a bundle's result up to this
    size, of unlike blocks, are cut out once."""
    bundle_bytes: int = 16 << 20
    """Largest bundle, in bytes sent per device."""

    # What arrives (`lower/_bundles.py`)
    indexed_bytes: int = 1 << 17
    """Bytes that arrive, up to which a gather of single elements joins uneven parts: XLA's CPU backend compiles it in
    half the time of a concatenation of slices, or less, but the elements' numbers are a constant of the same size."""

    # Padded shards (`padded.py`)
    small_stage_elements: int = 1 << 19
    """Elements that a stage may touch on the largest shards, and still be computed on these by all devices."""
    small_op_elements: int = 1 << 12
    """Elements that it may touch besides for each of its instructions, as a switch has each compiled in every
    branch."""
    products_per_element: int = 16
    """Multiplications and additions that a contraction does in the time of an elementwise op on one element."""

    # Devices of one process (`gathered.py`)
    gathered_bytes: int = 5 << 15
    """Bytes of an uneven tensor, on all devices together, up to which it is gathered where no network lies between."""

    # CPUs of several processes (`lower/_gloo.py`)
    gloo_gathered_bytes: int = 1 << 15
    """Bytes of all devices together up to which an all-reduce gathers them."""
    gloo_at_once_bytes: int = 1 << 17
    """Bytes of a block up to which a reduce-scatter, and among more than two devices any collective, goes to all at
    once: one latency. Larger ones go around a ring: as many latencies as devices, but no device is sent to by several
    at once. Two devices swap larger ones by their sum."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 1 if field.name in _DIVISORS else 0
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{field.name} of the lowering options is {value!r}; give an integer")
            if value < least:
                raise ValueError(f"{field.name} of the lowering options is {value}; give at least {least}")

    def to_dict(self) -> dict[str, int]:
        """What differs from the defaults, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LoweringOptions:
        """Of what `to_dict` gave; ValueError names an option that is none."""
        unknown = sorted(set(data) - {f.name for f in fields(LoweringOptions)})
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no lowering option")
        return LoweringOptions(**data)


_DIVISORS = ("products_per_element",)

DEFAULT = LoweringOptions()
