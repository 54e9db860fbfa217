"""This process's part of an argument, and how it feeds just that: from a callback, or from arrays of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hapsynth import _jax
from hapsynth.lower import Lowered, Staged, Storage, local_positions
from hapsynth.running.arguments import Arguments, described, wrap

Slices = tuple[slice, ...]
"""A part of a logical value: start and stop of every dimension, as plain numbers."""


@dataclass(frozen=True)
class LocalSlices:
    """This process's part of one array leaf, as slices of the logical value.

    `path` and `shape`: of the leaf. `devices`: each device of this process that the plan uses -> the slices of its
    shard. Every slice has its start and stop, in the dimensions that are not cut too. Devices that hold the same (a
    replicated leaf, or one that only another mesh axis cuts) have the same slices; an empty shard's start is its stop.
    """

    path: str
    shape: tuple[int, ...]
    devices: Mapping[Any, Slices]

    @property
    def process(self) -> Slices:
        """The one part of the value that the devices hold together, which the process has to load.

        Raises ValueError where there is no one such part, as the process's devices are not neighbours in the mesh.
        """
        parts = list({written(s): s for s in self.devices.values()}.values())
        some = [s for s in parts if prod(shape_of(s))] or parts[:1]
        whole = tuple(slice(min(p.start for p in part), max(p.stop for p in part)) for part in zip(*some))
        if prod(shape_of(whole)) != sum(prod(shape_of(s)) for s in some):
            raise ValueError(
                f"this process's devices hold {', '.join(map(written, some))} of {self.path}, which is no one part of "
                "it: load each of them (`devices`), or give a mesh in which the devices of a process are neighbours"
            )
        return whole


def shape_of(slices: Slices) -> tuple[int, ...]:
    """The shape of the part that some slices cut out."""
    return tuple(s.stop - s.start for s in slices)


def written(slices: Slices) -> str:
    """E.g. `[4:8, 0:16]`."""
    return f"[{', '.join(f'{s.start}:{s.stop}' for s in slices)}]"


def local_slices(path: str, storage: Storage) -> LocalSlices:
    """The parts on this process's devices of a leaf that is stored so."""
    mesh = storage.mesh
    here = {mesh.devices[at]: storage.slices(at) for at in local_positions(mesh)}
    return LocalSlices(path, storage.shape, here)


class ProcessLocalLoader:
    """Puts one argument of a plan onto the devices, each process giving only what its own devices hold."""

    def __init__(self, arguments: Arguments, lowered: Lowered | Staged, arg: int | str) -> None:
        self.arguments, self.lowered, self.arg = arguments, lowered, arg
        self.tree, self.first = arguments.tree_of(arg)

    def slices(self) -> Any:
        """The argument with a `LocalSlices` for every array; other leaves are kept."""
        return self._each(local_slices)

    def from_callback(self, callback: Callable[[str, Slices], Any]) -> Any:
        """The argument, placed, from `callback(path, slices)`."""

        def make(path: str, storage: Storage) -> Any:
            pieces: dict[str, np.ndarray] = {}

            def read(slices: Slices) -> np.ndarray:
                if not prod(shape_of(slices)):
                    return np.zeros(shape_of(slices), storage.dtype)
                # Replicas are read once.
                if written(slices) not in pieces:
                    pieces[written(slices)] = _checked(path, storage, callback(path, slices), slices)
                return pieces[written(slices)]

            if _jax.is_extended(storage.dtype):
                whole = tuple(slice(0, n) for n in storage.shape)
                return storage.put(_checked(path, storage, callback(path, whole), whole), copy=True)
            return wrap(storage, storage.put_shards(read))

        return self._each(make)

    def from_process(self, argument: Any) -> Any:
        """The argument, placed, from its leaves' parts `LocalSlices.process`."""
        leaves, _ = self.arguments.leaves_of(self.arg, argument)
        parts: dict[str, tuple[Slices, Any]] = {}
        for i, leaf in enumerate(leaves):
            position = self.arguments.input_of.get(self.first + i)
            path = self.arguments.paths[self.first + i]
            if position is None:
                self.arguments.check([leaf], self.first + i, lambda _, path=path: path)
            else:
                storage = self.lowered.inputs[position]
                due = local_slices(path, storage).process
                # All leaves are checked before any is placed.
                parts[path] = due, _checked(path, storage, leaf, due)

        def make(path: str, storage: Storage) -> Any:
            due, data = parts[path]
            if not storage.cuts:
                return wrap(storage, storage.put(data, copy=True))

            def read(slices: Slices) -> np.ndarray:
                if not prod(shape_of(slices)):
                    return np.zeros(shape_of(slices), storage.dtype)
                return data[tuple(slice(s.start - d.start, s.stop - d.start) for s, d in zip(slices, due))]

            return wrap(storage, storage.put_shards(read))

        return self._each(make)

    def _each(self, make: Callable[[str, Storage], Any]) -> Any:
        leaves: list[Any] = []
        for i in range(self.first, self.first + self.tree.num_leaves):
            position = self.arguments.input_of.get(i)
            if position is None:
                leaves.append(self.arguments.traced.static_leaves[i])
            else:
                leaves.append(make(self.arguments.paths[i], self.lowered.inputs[position]))
        return self.tree.unflatten(leaves)


def _checked(path: str, storage: Storage, given: Any, slices: Slices) -> Any:
    """The data given for some slices of a leaf, as a host array; ValueError or TypeError where it is something else."""
    shape, dtype = described(given, path)
    due = shape_of(slices)
    part = f"{written(slices)} of {path}, {storage.dtype}{list(storage.shape)}"
    if shape != due:
        raise ValueError(f"shape {shape} was given for {part}, and {due} is due: give just these elements")
    if dtype != storage.dtype:
        raise TypeError(f"{dtype} was given for {part}: convert it, or synthesize again for this dtype")
    return given if _jax.is_extended(dtype) else np.asarray(given, storage.dtype)
