"""The sharding rules, one file per family of primitives; importing this package fills the registry."""

from hapsynth.instructions.rules import (
    contract,
    extension,
    index,
    order,
    pointwise,
    random,
    reduce,
    region,
    shape,
    show,
    slice,
    window,
)
from hapsynth.instructions.rules.registry import REGISTRY, Entry, entry_of, execute, factors_of, register

__all__ = [
    "REGISTRY",
    "Entry",
    "contract",
    "entry_of",
    "execute",
    "extension",
    "factors_of",
    "index",
    "order",
    "pointwise",
    "random",
    "reduce",
    "region",
    "register",
    "shape",
    "show",
    "slice",
    "window",
]
