"""Functions of an exported program besides its own text. All below the line is copied into it: it uses JAX alone.

The program defines the names in capitals; the values below are those of a program that does nothing.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES: dict[str, int] = {}
DEVICES: tuple[int, ...] = ()
ALL_DEVICES = 0
ARGUMENTS: tuple[Array, ...] = ()
RESULTS: tuple[Array, ...] = ()
STATIC: dict[str, Any] = {}
CONSTANTS: tuple[Array, ...] = ()
CONSTANT_VALUES: tuple[Any, ...] = ()
X64 = False
PARTITIONABLE: bool | None = None


def body(*shards: Any) -> tuple[Any, ...]:
    return shards


def results(structure: Any, leaves: Sequence[Any], made: Sequence[Any]) -> Any:
    return made


# ---- copied from here on


@dataclass(frozen=True)
class Array:
    """How an array is stored: `cuts` holds the length of each shard of the dimensions that are cut unevenly.

    There all shards are as long as the longest; what is beyond a shard's own length is of no account.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    cuts: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    donated: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        cut = {d: max(lengths) * len(lengths) for d, lengths in self.cuts.items()}
        return tuple(cut.get(d, n) for d, n in enumerate(self.shape))

    def pad(self, x: Any, mesh: Mesh) -> jax.Array:
        """A whole array, stored; the result shares no memory with it, as `step` may consume it."""
        sharding = NamedSharding(mesh, self.spec)
        if self.dtype.startswith("key<"):
            data = np.array(jax.random.key_data(x))
            stored = jax.make_array_from_callback(data.shape, sharding, lambda index: data[index])
            return jax.random.wrap_key_data(stored, impl=jax.random.key_impl(x))
        host = np.array(x, jax.numpy.dtype(self.dtype))
        for dim, lengths in self.cuts.items():
            zero = np.zeros_like(host, shape=(*host.shape[:dim], 1, *host.shape[dim + 1 :]))
            host = np.take(np.concatenate([host, zero], dim), _padded(lengths), dim)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def unpad(self, x: Any) -> Any:
        """A stored array, whole: in NumPy, or a typed key."""
        if self.dtype.startswith("key<"):
            data = jax.numpy.asarray(np.asarray(jax.random.key_data(x)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        host = np.asarray(x)
        if host.shape != self.stored_shape:
            raise ValueError(
                f"result {self.path} has shape {host.shape}; give what `step` returned, {self.stored_shape}"
            )
        for dim, lengths in self.cuts.items():
            where = _padded(lengths)
            host = np.take(host, np.flatnonzero(where < sum(lengths)), dim)
        return host


def _padded(lengths: Sequence[int]) -> np.ndarray:
    """Of each place in a stored dimension, where it is in the whole one; one past the end of it for padding."""
    starts = np.cumsum([0, *lengths])
    inside = np.arange(max(lengths))
    return np.concatenate([np.where(inside < n, start + inside, starts[-1]) for start, n in zip(starts, lengths)])


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that the program is for. `devices`: either all ALL_DEVICES devices of the cluster, in the order of the
    plan (those at positions DEVICES are used), or only the ones to use. Default: the first ALL_DEVICES of
    `jax.devices()`, or where there are exactly len(DEVICES), these as the ones to use. ValueError for other numbers."""
    n = len(DEVICES)
    devices = (jax.devices() if devices is None else devices)[:ALL_DEVICES]
    if len(devices) not in (n, ALL_DEVICES):
        of = "" if n == ALL_DEVICES else f" of the {ALL_DEVICES} that it was planned for, which are {DEVICES}"
        raise ValueError(f"the program is for {n} devices{of}, and there are {len(devices)}")
    taking_part = [devices[i] for i in DEVICES] if len(devices) == ALL_DEVICES else devices
    grid = np.array(taking_part).reshape(list(AXES.values()))
    return Mesh(grid, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


def _check_settings() -> None:
    if X64 and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise TypeError("the program computes in 64 bits: set jax_enable_x64, as it was when it was planned")
    if PARTITIONABLE not in (None, jax.threefry_partitionable.value):
        raise TypeError(f"the program draws random numbers with jax_threefry_partitionable={PARTITIONABLE}: set it so")


def shard(mesh: Mesh, *args: Any, **kwargs: Any) -> Any:
    """The first arguments of the function, stored as `step` takes them. One gives just that, several a tuple, with a
    dict of the keyword arguments last where there are any."""
    _check_settings()
    known = {a.path: a for a in ARGUMENTS}

    def stored(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path[1:])
        if name in STATIC:
            return leaf
        if name not in known:
            raise ValueError(f"argument {name} is none that the program takes: {', '.join(known)}")
        a = known[name]
        if np.shape(leaf) != a.shape:
            raise ValueError(f"argument {name} has shape {np.shape(leaf)}, and the program is for {a.shape}")
        # As JAX takes it.
        dtype = jax.numpy.result_type(leaf if hasattr(leaf, "dtype") else np.asarray(leaf))
        if str(dtype) != a.dtype:
            raise TypeError(f"argument {name} is {dtype}, and the program is for {a.dtype}")
        return a.pad(leaf, mesh)

    given, named = jax.tree_util.tree_map_with_path(stored, (args, kwargs))
    out = (*given, named) if named else given
    return out[0] if len(out) == 1 else out


def make_step(mesh: Mesh) -> Callable[..., Any]:
    """The function on the devices of a mesh: what `shard` gave, or an earlier call, to stored results.

    It consumes the arguments that are marked as donated, whose place the results take.
    """
    _check_settings()
    stored = (*ARGUMENTS, *CONSTANTS)
    on_mesh = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=tuple(a.spec for a in stored),
        out_specs=tuple(a.spec for a in RESULTS),
        check_vma=False,
    )
    compiled = jax.jit(
        on_mesh,
        in_shardings=tuple(NamedSharding(mesh, a.spec) for a in stored),
        out_shardings=tuple(NamedSharding(mesh, a.spec) for a in RESULTS),
        donate_argnums=tuple(i for i, a in enumerate(stored) if a.donated),
        keep_unused=True,
    )
    constants = [a.pad(x, mesh) for a, x in zip(CONSTANTS, CONSTANT_VALUES)]

    def step(*args: Any, **kwargs: Any) -> Any:
        _check_settings()
        named, structure = jax.tree_util.tree_flatten_with_path((args, kwargs))
        given = {jax.tree_util.keystr(path[1:]): x for path, x in named}
        missing = [a.path for a in ARGUMENTS if a.path not in given]
        extra = [path for path in given if path not in STATIC and path not in {a.path for a in ARGUMENTS}]
        if missing or extra:
            raise TypeError(f"the arguments lack {missing} and have {extra} besides")
        for path, planned in STATIC.items():
            if planned is not ... and given[path] != planned:
                raise ValueError(f"argument {path} is {given[path]!r}, and the program is for {planned!r} only")
        for a in ARGUMENTS:
            if np.shape(given[a.path]) != a.stored_shape:
                raise ValueError(f"argument {a.path} has shape {np.shape(given[a.path])}; give what `shard` returned")
        made = compiled(*(given[a.path] for a in ARGUMENTS), *constants)
        return results(structure, [x for _, x in named], made)

    return step


def unshard(tree: Any, at: str = "") -> Any:
    """Results whole, as NumPy arrays: all that a call returned, or what lies `at` a path of it, like `"[0]"`."""
    known = {a.path: a for a in RESULTS}

    def whole(path: Any, leaf: Any) -> Any:
        found = known.get(at + jax.tree_util.keystr(path))
        return leaf if found is None else found.unpad(leaf)

    return jax.tree_util.tree_map_with_path(whole, tree)


def like(structure: Any, place: Sequence[int], leaves: Sequence[Any]) -> Any:
    """Leaves in the structure of a part of the arguments."""
    for child in place:
        structure = jax.tree_util.treedef_children(structure)[child]
    return jax.tree_util.tree_unflatten(structure, leaves)


def array(shape: tuple[int, ...], dtype: str, data: str) -> np.ndarray:
    """An array from its bytes, compressed and in base 64."""
    return np.frombuffer(zlib.decompress(base64.b64decode(data)), jax.numpy.dtype(dtype)).reshape(shape)
