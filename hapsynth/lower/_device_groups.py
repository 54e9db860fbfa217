"""Devices of one process that run the same program on the same exact shapes; which results of a stage may take the
memory of its operands (donation), and which must have their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from hapsynth import _jax
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.lower._exact_storage import parts
from hapsynth.lower._mesh_position import MeshPosition
from hapsynth.lower._storage import local_positions


@dataclass(frozen=True, eq=False)
class Group:
    """Devices of this process whose shards of every class are alike.

    `numbers` are their places among the process's devices, `positions` those in the mesh. What they hold of a value is
    one array: on one device just that, on several the shards joined along the first dimension.
    """

    numbers: tuple[int, ...]
    positions: tuple[tuple[int, ...], ...]
    devices: tuple[Any, ...]
    lengths: tuple[int, ...]

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), ("group",), axis_types=(AxisType.Auto,))

    def _spec(self, shape: Sequence[int]) -> PartitionSpec:
        return PartitionSpec("group") if shape else PartitionSpec()

    def _sharding(self, shape: Sequence[int]) -> Any:
        if len(self.devices) == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, self._spec(shape))

    def _joined(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self.devices) * shape[0], *shape[1:]) if shape else shape

    def join(self, arrays: Sequence[Any]) -> Any:
        """One array of each device's own."""
        if len(arrays) == 1:
            return arrays[0]
        shape = arrays[0].shape
        return jax.make_array_from_single_device_arrays(self._joined(shape), self._sharding(shape), list(arrays))

    def split(self, x: Any) -> list[Any]:
        """The inverse of `join`."""
        return [x] if len(self.devices) == 1 else parts(x)

    def lower(
        self,
        fn: Callable[[MeshPosition, Sequence[Any]], list[Any]],
        given: Sequence[jax.ShapeDtypeStruct],
        made: Sequence[jax.ShapeDtypeStruct],
        donated: Sequence[int],
        compiler_options: dict[str, str],
    ) -> Any:
        """JAX's lowered `fn(where, arrays)`, of and to one device's shapes; arguments `donated` are consumed."""
        struct = lambda s: jax.ShapeDtypeStruct(self._joined(s.shape), s.dtype, sharding=self._sharding(s.shape))

        def hapsynth_local(*arrays: Any) -> list[Any]:
            if len(self.devices) == 1:
                return fn(MeshPosition(self.lengths, self.positions, tuple(map(jnp.int32, self.positions[0]))), arrays)
            at = lax.axis_index("group")
            columns = np.array(self.positions, np.int32).T
            index = tuple(lax.dynamic_index_in_dim(c, at, keepdims=False) for c in columns)
            return fn(MeshPosition(self.lengths, self.positions, index), arrays)

        if len(self.devices) > 1:
            hapsynth_local = jax.shard_map(
                hapsynth_local,
                mesh=self.mesh,
                in_specs=tuple(self._spec(s.shape) for s in given),
                out_specs=[self._spec(s.shape) for s in made],
                check_vma=False,
            )
        # Without arguments it would run on the first device of all.
        made_on = [self._sharding(s.shape) for s in made]
        jitted = jax.jit(
            hapsynth_local,
            out_shardings=made_on,
            donate_argnums=tuple(donated),
            keep_unused=True,
            compiler_options=compiler_options,
        )
        return jitted.lower(*map(struct, given))


Positions = tuple[tuple[int, ...], ...]
"""Places of devices in a mesh."""


def alike(sizes: Sizes, positions: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Numbers of `positions`, those together whose shards are alike, and the blocks of what they take part in."""
    found: dict[Any, list[int]] = {}
    for number, at in enumerate(positions):
        found.setdefault(tuple(_lengths(sizes, c, at) for c in range(len(sizes.shares))), []).append(number)
    return [*found.values()]


def unlike_in_process(sizes: Sizes, mesh: Mesh) -> int | None:
    """The first process that holds devices of a mesh whose shares are not alike; None where there is none."""
    places: dict[int, list[tuple[int, ...]]] = {}
    for at, device in zip(np.ndindex(*mesh.devices.shape), mesh.devices.flat, strict=True):
        places.setdefault(device.process_index, []).append(at)
    return next((number for number in sorted(places) if len(alike(sizes, places[number])) > 1), None)


def groups_of(sizes: Sizes, mesh: Mesh) -> list[Group]:
    """This process's devices, those together whose shards are alike."""
    positions = local_positions(mesh)
    return [
        Group(
            tuple(numbers),
            tuple(positions[n] for n in numbers),
            tuple(mesh.devices[positions[n]] for n in numbers),
            mesh.devices.shape,
        )
        for numbers in alike(sizes, positions)
    ]


def _lengths(sizes: Sizes, c: int, at: Sequence[int]) -> tuple[Any, ...]:
    """What a device has of a class along each of the axes that cut it, and those along the axis beside it."""
    axes = sizes.classes.all[c].axes
    units = np.reshape(sizes.shares[c], [sizes.classes.lengths[a] for a in axes])
    found: list[Any] = []
    for k, axis in enumerate(axes):
        row = units[tuple(at[a] for a in axes[:k])].reshape(units.shape[k], -1).sum(1)
        found.append((tuple(row.tolist()), int(row[at[axis]])))
    return tuple(found)


def reused(given: Sequence[Any], made: Sequence[Any], over: set[int]) -> list[int]:
    """Which of the arguments that nobody needs afterwards a result can take the memory of."""
    kind = lambda s: (s.shape, str(s.dtype))
    free = Counter(map(kind, made))
    found: list[int] = []
    for i, s in enumerate(given):
        if i in over and not _jax.is_extended(s.dtype) and free[kind(s)] > 0:
            free[kind(s)] -= 1
            found.append(i)
    return found


def in_memory_of_their_own(given: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    """JAX hands an argument that is returned, or a result that is returned twice, out as the same array."""
    seen = set(map(id, given))
    out: list[Any] = []
    for x in made:
        held = id(x) in seen
        seen.add(id(x))
        if held:
            # Of nothing XLA's CPU compiler of JAX 0.11.2 dies at a barrier.
            nothing = x.size == 0 and not _jax.is_extended(x.dtype)
            x = jnp.zeros(x.shape, x.dtype) if nothing else lax.optimization_barrier(x)
        out.append(x)
    return out
