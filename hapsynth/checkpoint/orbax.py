"""Saves `ShardedArray`s with orbax, as plain arrays of their logical shape: `pip install '.[orbax]'` in a clone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import gcd
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from orbax.checkpoint import future, type_handlers

from hapsynth.checkpoint.manifest import Box
from hapsynth.checkpoint.state import holders_of, local_shards
from hapsynth.lower import Storage
from hapsynth.running.sharded_array import ShardedArray


class Handler(type_handlers.NumpyHandler):
    """Saves `ShardedArray`s as orbax's handler of NumPy arrays would have written them whole.

    Each process writes its devices' shards, of those that several hold the first. Shards end where chunks do, so
    chunks are small where the shards' lengths have no common divisor. Restored are NumPy arrays, or jax.Arrays
    where orbax is asked for them.
    """

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        # The state may be consumed by a call as soon as this returns.
        each = zip(values, infos, args or [type_handlers.SaveArgs()] * len(values), strict=True)
        leaves = [(x.storage, _held(x), info, arg) for x, info, arg in each]
        return [future.CommitFutureAwaitingContractedSignals(_write(leaves), name="hapsynth")]


def registry() -> Any:
    """For `ocp.PyTreeCheckpointHandler(type_handler_registry=...)`, to save state as a plan stores it.

    Nothing of hapsynth is needed to restore it.
    """
    # Ours goes first: where both write the same, the last one restores.
    others = (jax.Array, np.ndarray, np.number, int, float, str)
    handlers = [(kind, type_handlers.get_type_handler(kind)) for kind in others]
    return type_handlers.create_type_handler_registry((ShardedArray, Handler()), *handlers)


def _held(x: ShardedArray) -> list[tuple[Box, np.ndarray]]:
    """The boxes that this process writes."""
    holders = holders_of(x.storage, ())
    shards = local_shards(x.storage, x.data).items()
    return [(box, np.array(data)) for box, data in shards if holders[box][0] == jax.process_index()]


def _chunk(storage: Storage) -> tuple[int, ...]:
    chunk = list(storage.shape)
    for dim, (_, lengths) in storage.cuts.items():
        chunk[dim] = gcd(*accumulate(lengths))
    return tuple(chunk)


async def _write(leaves: Sequence[tuple[Storage, list[tuple[Box, np.ndarray]], Any, Any]]) -> None:
    for storage, boxes, info, arg in leaves:
        await info.await_path_creation()
        spec = type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=info.is_ocdbt_checkpoint,
            global_shape=storage.shape,
            local_shape=_chunk(storage),
            dtype=storage.dtype,
            process_index=jax.process_index() if info.is_ocdbt_checkpoint else None,
            arg=arg,
        )
        if jax.process_index() == 0:
            await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
        # The others need not wait until it is there.
        store = await ts.open(ts.Spec(spec), open=True, assume_metadata=True, context=info.ts_context)
        for box, data in boxes:
            await store[tuple(slice(*pair) for pair in box)].write(data)
