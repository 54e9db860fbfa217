"""The sharding rules, one file per family of primitives; importing this package fills the registry."""

from hapsynth.instructions.rules import contract, index, order, pointwise, random, reduce, shape, slice, window
from hapsynth.instructions.rules.registry import REGISTRY, Entry, entry_of, execute, factors_of, register

__all__ = [
    "REGISTRY",
    "Entry",
    "contract",
    "entry_of",
    "execute",
    "factors_of",
    "index",
    "order",
    "pointwise",
    "random",
    "reduce",
    "register",
    "shape",
    "slice",
    "window",
]
