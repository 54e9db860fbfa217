"""A program to a function of stored arrays (decisions.md D1, D2): in switch form, in staged form or in fused form."""

from hapsynth.lower._collective_order import Each
from hapsynth.lower._device_groups import Positions, alike, unlike_in_process
from hapsynth.lower._exact_storage import ExactStorage, Shards, local_numbers, parts
from hapsynth.lower._fused_form import Fused
from hapsynth.lower._interpreter import Interpreter
from hapsynth.lower._isolated import isolated_runs, ones, waits
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._pinned import Latencies, compile_with, each_of, is_pinned, options_of
from hapsynth.lower._recorded_call import RecordedCall
from hapsynth.lower._staged_form import Staged
from hapsynth.lower._storage import (
    Storage,
    host_array,
    local_positions,
    off_wire,
    on_wire,
    own_mesh,
    with_weak_type,
)
from hapsynth.lower._switch_form import Lowered
from hapsynth.lower._unsupported import UnsupportedError, unsupported

__all__ = [
    "Each",
    "ExactStorage",
    "Fused",
    "Interpreter",
    "Latencies",
    "Lowered",
    "MeshPosition",
    "Positions",
    "RecordedCall",
    "Shards",
    "Staged",
    "Storage",
    "UnsupportedError",
    "alike",
    "compile_with",
    "each_of",
    "host_array",
    "is_pinned",
    "isolated_runs",
    "local_numbers",
    "local_positions",
    "off_wire",
    "on_wire",
    "ones",
    "options_of",
    "own_mesh",
    "parts",
    "unlike_in_process",
    "unsupported",
    "waits",
    "with_weak_type",
]
