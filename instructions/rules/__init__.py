"""The sharding rules, one file per family of primitives; importing this package fills the registry."""

from hapsynth.instructions.rules import (
    contract,
    index,
    linalg,
    order,
    pointwise,
    ragged,
    reduce,
    shape,
    slice,
    whole,
    window,
)
from hapsynth.instructions.rules.registry import (
    REGISTRY,
    Entry,
    entry_of,
    execute,
    factors_of,
    register,
    replicate,
    why_replicated,
)

__all__ = [
    "REGISTRY",
    "Entry",
    "contract",
    "entry_of",
    "execute",
    "factors_of",
    "index",
    "linalg",
    "order",
    "pointwise",
    "ragged",
    "reduce",
    "register",
    "replicate",
    "shape",
    "slice",
    "whole",
    "why_replicated",
    "window",
]
