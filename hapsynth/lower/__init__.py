"""A program to a function of stored arrays (DESIGN D1, D2). The switch form, which runs on any mesh, is here."""

from hapsynth.lower._storage import Storage, host_array, own_mesh, with_weak_type
from hapsynth.lower._switch import Lowered, lower
from hapsynth.lower._unsupported import UnsupportedError, unsupported

__all__ = [
    "Lowered",
    "Storage",
    "UnsupportedError",
    "host_array",
    "lower",
    "own_mesh",
    "unsupported",
    "with_weak_type",
]
