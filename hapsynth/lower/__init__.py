"""A program to a function of stored arrays (DESIGN D1, D2): in switch form or in staged form."""

from hapsynth.lower._exact import ExactStorage, Shards, parts
from hapsynth.lower._staged import Staged, lower_staged
from hapsynth.lower._storage import Storage, host_array, own_mesh, with_weak_type
from hapsynth.lower._switch import Lowered, lower
from hapsynth.lower._unsupported import UnsupportedError, unsupported

__all__ = [
    "ExactStorage",
    "Lowered",
    "Shards",
    "Staged",
    "Storage",
    "UnsupportedError",
    "host_array",
    "lower",
    "lower_staged",
    "own_mesh",
    "parts",
    "unsupported",
    "with_weak_type",
]
