"""All-gathers between processes, of JSON messages and a few numbers; and the sizes that all processes agree on."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hapsynth.instructions.program.sizes import Sizes
from hapsynth.lower import host_array
from hapsynth.rendezvous.meeting import exchanged, ranks_of
from hapsynth.search.cost.model import Floats


def agreed(mesh: Mesh | None, sizes: Sizes) -> Sizes:
    """The sizes that the process of the mesh's first device found: unlike sizes would be unlike programs."""
    rows = of_first_process(mesh, np.array([s for row in sizes.shares for s in row], np.float64))
    lengths = [len(row) for row in sizes.shares]
    split = np.split(rows.astype(np.int64), np.cumsum(lengths)[:-1]) if lengths else []
    return Sizes(sizes.graph, sizes.classes, tuple(tuple(row.tolist()) for row in split))


def of_first_process(mesh: Mesh | None, row: Floats) -> Floats:
    """`row` of the process that has the mesh's first device, in all processes of the mesh."""
    return row if mesh is None else gathered(mesh, row)[0]


def gathered(mesh: Mesh, own_row: Floats) -> Floats:
    """The numbers of each device's process: float64 [devices of the mesh, numbers]. All processes of the mesh must
    call, and wait for one another as long as they live."""
    ranks = ranks_of(mesh)
    if len(ranks) == 1 or jax.process_index() not in ranks or not own_row.size:
        return np.tile(own_row, (mesh.size, 1))
    rows = dict(zip(ranks, allgather_json(mesh, own_row.tolist(), "comparing numbers"), strict=True))
    return np.array([rows[d.process_index] for d in mesh.devices.flat], np.float64)


def allgather_json(mesh: Mesh, message: Any, doing: str) -> list[Any]:
    """The message of each process of the mesh, by rising process number, after a round trip through JSON. All must
    call, and wait for one another as long as they live. `doing`: this process's activity, for the others' error
    messages."""
    messages = exchanged(mesh, message, doing)
    if messages is not None:
        return messages
    # Without a meeting point: two collectives, which wait for 30 s, of the lengths, then of the texts.
    text = json.dumps(message).encode()
    longest = int(_collected(mesh, np.array([len(text)], np.uint32)).max())
    rows = _collected(mesh, np.frombuffer(text.ljust(longest), np.uint8))
    first = {d.process_index: row for d, row in zip(mesh.devices.flat, rows)}
    return [json.loads(first[rank].tobytes()) for rank in sorted(first)]


def _collected(mesh: Mesh, row: np.ndarray) -> np.ndarray:
    """The row of each device's process."""
    sharding = NamedSharding(Mesh(mesh.devices.ravel(), ("all",)), PartitionSpec("all"))
    return host_array(jax.make_array_from_callback((mesh.size, row.size), sharding, lambda _: row[None]))
