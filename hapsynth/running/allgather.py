"""A few numbers of every process, in every process; sizes that all agree on."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hapsynth.instructions.program.sizes import Sizes
from hapsynth.lower import host_array
from hapsynth.search.cost.model import Floats


def agreed(mesh: Mesh | None, sizes: Sizes) -> Sizes:
    """The sizes that the process of the mesh's first device found: unlike sizes would be unlike programs."""
    rows = _first(mesh, np.array([s for row in sizes.shares for s in row], np.float64))
    lengths = [len(row) for row in sizes.shares]
    split = np.split(rows.astype(np.int64), np.cumsum(lengths)[:-1]) if lengths else []
    return Sizes(sizes.graph, sizes.classes, tuple(tuple(row.tolist()) for row in split))


def _first(mesh: Mesh | None, row: Floats) -> Floats:
    """The numbers of the process that has the mesh's first device, in all processes of the mesh."""
    return row if mesh is None else gathered(mesh, row)[0]


def gathered(mesh: Mesh, own_row: Floats) -> Floats:
    """Each process's numbers: float64 [devices of the mesh, numbers]. All processes must call."""
    if len({d.process_index for d in mesh.devices.flat}) == 1 or not own_row.size:
        return np.tile(own_row, (mesh.size, 1))
    row = own_row.view(np.uint32)[None]
    sharding = NamedSharding(Mesh(mesh.devices.ravel(), ("all",)), PartitionSpec("all"))
    rows: Any = host_array(jax.make_array_from_callback((mesh.size, row.size), sharding, lambda _: row))
    return np.ascontiguousarray(rows).view(np.float64)
