"""Saves a plan's state and restores it: each process writes and reads only its own devices' shards."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path

from hapsynth import _jax
from hapsynth._pytrees import skeleton
from hapsynth._version import __version__
from hapsynth.checkpoint.manifest import Box, CheckpointError, Leaf, Manifest, Static, common, size_of, within
from hapsynth.checkpoint.reader import Reader
from hapsynth.checkpoint.writer import CHUNK_BYTES, Holders, save
from hapsynth.lower import Lowered, Shards, Staged, Storage, local_positions, parts
from hapsynth.running.allgather import allgather_json
from hapsynth.running.arguments import Arguments
from hapsynth.running.process_local_data import ProcessLocalLoader, Slices


class _Place(NamedTuple):
    """A leaf of an argument: its path in the state, its path in the call, and its storage or its value."""

    path: str
    full: str
    storage: Storage | None
    position: int
    static: Any


def save_state(
    path: str | os.PathLike[str],
    arguments: Arguments,
    lowered: Lowered | Staged,
    state: Any,
    arg: int | str,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Write an argument as its plan keeps it; see `Plan.save_state`. `chunk_bytes`: the most of a piece."""
    if not os.fspath(path):
        raise CheckpointError("the path of the state is empty; give a folder")
    held = {position: stored for position, _, _, stored in arguments.held(lowered, state, arg)}
    leaves: list[Leaf | Static] = []
    holders: list[Holders] = []
    sources: list[tuple[Storage, jax.Array | Shards]] = []
    for place in _places(arguments, lowered, arg):
        if place.storage is None:
            leaves.append(Static.of(place.path, place.static))
            continue
        stored = held[place.position]
        leaves.append(leaf := _described(place, place.storage, stored))
        holders.append(holders_of(place.storage, leaf.words))
        sources.append((place.storage, stored))

    shards: dict[int, dict[Box, np.ndarray]] = {}

    def fetch(number: int, box: Box) -> np.ndarray:
        if number not in shards:
            # Those of one leaf at a time.
            shards.clear()
            shards[number] = local_shards(*sources[number])
        found = [(held, x, part) for held, x in shards[number].items() if (part := common(box, held)) is not None]
        if len(found) == 1:
            return found[0][1][within(box, found[0][0])]
        out = np.empty([stop - start for start, stop in box], found[0][1].dtype)
        for held, x, part in found:
            out[within(part, box)] = x[within(part, held)]
        return out

    folder = Path(path)
    agreed = partial(_agreed, lowered.mesh, f"{folder}: cannot be written")
    manifest = Manifest(__version__, "", tuple(leaves))
    save(folder, manifest, holders, fetch, jax.process_index(), agreed, chunk_bytes)


def restore_state(path: str | os.PathLike[str], arguments: Arguments, lowered: Lowered | Staged, arg: int | str) -> Any:
    """Read an argument as its plan keeps it; see `Plan.restore_state`."""
    feeder, restored = ProcessLocalLoader(arguments, lowered, arg), list[Any]()

    def work() -> str:
        reader = Reader(path)
        places = list(_places(arguments, lowered, arg))
        _compare(reader, places)
        numbers = {place.full: i for i, place in enumerate(places)}

        def read(full: str, slices: Slices) -> Any:
            leaf = reader.leaves[numbers[full]]
            assert isinstance(leaf, Leaf)
            data = reader.read(numbers[full], (*_box(slices), *((0, n) for n in leaf.words)))
            if not leaf.impl:
                return data
            with _jax.no_mesh():
                return jax.random.wrap_key_data(jax.numpy.asarray(data), impl=leaf.impl)

        restored.append(feeder.from_callback(read))
        return reader.manifest.folder

    found = _agreed(lowered.mesh, f"{path}: cannot be read", work)
    if len(set(found)) > 1:
        raise CheckpointError(f"{path}: another save came in between, and processes read different ones: restore again")
    return restored[0]


def _places(arguments: Arguments, lowered: Lowered | Staged, arg: int | str) -> Iterator[_Place]:
    tree, first = arguments.tree_of(arg)
    for i, (path, _) in enumerate(tree_flatten_with_path(skeleton(tree))[0], first):
        position = arguments.input_of.get(i)
        if position is None:
            yield _Place(keystr(path), arguments.paths[i], None, -1, arguments.traced.static_leaves[i])
        else:
            yield _Place(keystr(path), arguments.paths[i], lowered.inputs[position], position, None)


def _described(place: _Place, storage: Storage, stored: Any) -> Leaf:
    """A leaf without its pieces."""
    if not _jax.is_extended(storage.dtype):
        return Leaf(place.path, storage.shape, str(storage.dtype))
    impl = jax.random.key_impl(parts(stored)[0])
    if not isinstance(impl, str):
        raise CheckpointError(
            f"{place.full} is a key of {impl}, which has no name: save its jax.random.key_data instead"
        )
    words = _words(parts(stored)[0]).shape[len(storage.shape) :]
    return Leaf(place.path, storage.shape, str(storage.dtype), impl, words)


def _words(keys: jax.Array) -> Any:
    with _jax.no_mesh():
        return jax.random.key_data(keys)


def holders_of(storage: Storage, words: tuple[int, ...]) -> Holders:
    holders: dict[Box, set[int]] = {}
    for at, device in np.ndenumerate(storage.mesh.devices):
        box = (*_box(storage.slices(at)), *((0, n) for n in words))
        if size_of(box):
            holders.setdefault(box, set()).add(device.process_index)
    return {box: sorted(ranks) for box, ranks in holders.items()}


def local_shards(storage: Storage, stored: Any) -> dict[Box, np.ndarray]:
    """The shards of a value on this process's devices, in host memory, without padding: each different one once."""
    out: dict[Box, np.ndarray] = {}
    for at, x in zip(local_positions(storage.mesh), parts(stored), strict=True):
        words = _words(x) if _jax.is_extended(storage.dtype) else x
        box = (*_box(storage.slices(at)), *((0, n) for n in words.shape[len(storage.shape) :]))
        if size_of(box) and box not in out:
            # As another object: an array keeps the copy on the host that is made of it.
            again = jax.make_array_from_single_device_arrays(words.shape, words.sharding, [words])
            out[box] = np.asarray(again)[tuple(slice(0, stop - start) for start, stop in box)]
    return out


def _box(slices: Slices) -> Box:
    return tuple((int(s.start), int(s.stop)) for s in slices)


def _compare(reader: Reader, places: list[_Place]) -> None:
    """CheckpointError names the first leaf of the checkpoint that is not the plan's."""
    for saved, place in zip_longest(reader.leaves, places):
        if place is None:
            raise CheckpointError(f"{reader.path}: {saved.path!r} of {saved} is not in the plan's state; {_OTHER}")
        if place.storage is None:
            due: Leaf | Static = Static.of(place.path, place.static)
        else:
            due = Leaf(place.path, place.storage.shape, str(place.storage.dtype))
        if saved is None:
            raise CheckpointError(f"{reader.path}: {place.full}, {due}, which the plan has, is missing; {_OTHER}")
        if saved.path != due.path:
            raise CheckpointError(
                f"{reader.path}: its leaf {saved.path!r} is {saved}, and the plan has {due.path!r}, {due}, in that "
                f"place; {_OTHER}"
            )
        if str(saved) != str(due):
            raise CheckpointError(f"{reader.path}: {place.full} is {saved}, and the plan is for {due}; {_OTHER}")


_OTHER = "this is the checkpoint of another model: restore one of this, or read it with hapsynth.load_state"


def _agreed(mesh: Mesh, what: str, work: Callable[[], Any]) -> list[Any]:
    """The result of `work` in each process, as JSON holds it. Where it fails in any all raise the same."""
    error = None
    try:
        message = {"made": work()}
    except CheckpointError as failed:
        message, error = {"error": str(failed)}, failed
    except OSError as failed:
        at = "" if failed.filename is None else f" ({failed.filename})"
        error = failed
        message = {"error": f"{what}: {failed.strerror}{at}; give a folder that can be, with room enough"}
    except Exception as failed:
        # Whatever it is, such as memory that ran out: the other processes wait until they are told.
        if not mesh.is_multi_process:
            raise
        message, error = {"error": f"{what}: {type(failed).__name__}: {failed}"}, failed
    if mesh.is_multi_process and error is not None:
        message["error"] += f" [process {jax.process_index()} on {socket.gethostname()}]"
    answers = allgather_json(mesh, message, "saving or restoring state")
    wrong = [s["error"] for s in answers if "error" in s]
    if wrong:
        raise CheckpointError(wrong[0]) from error
    return [s["made"] for s in answers]
