"""A program to a function of stored arrays (DESIGN D1, D2): in switch form or in staged form."""

from hapsynth.lower._alone import Alone, ones, waits
from hapsynth.lower._exact import ExactStorage, Shards, local_positions, parts
from hapsynth.lower._execute import Interpreter
from hapsynth.lower._staged import Staged, lower_staged
from hapsynth.lower._storage import Storage, host_array, own_mesh, with_weak_type
from hapsynth.lower._switch import Lowered, lower
from hapsynth.lower._unsupported import UnsupportedError, unsupported
from hapsynth.lower._where import Where

__all__ = [
    "Alone",
    "ExactStorage",
    "Interpreter",
    "Lowered",
    "Shards",
    "Staged",
    "Storage",
    "UnsupportedError",
    "Where",
    "host_array",
    "local_positions",
    "lower",
    "lower_staged",
    "ones",
    "own_mesh",
    "parts",
    "unsupported",
    "waits",
    "with_weak_type",
]
