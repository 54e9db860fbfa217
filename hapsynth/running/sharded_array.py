"""`ShardedArray`: a value whose shards are of unlike length, as user code sees it."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from hapsynth.instructions.layout import format_layout
from hapsynth.lower import Shards, Storage, host_array


class ShardedArrayError(Exception):
    """An unevenly sharded value was used as if it were an array."""


class ShardedArrayTypeError(ShardedArrayError, TypeError):
    """An operator, or NumPy, was applied to a `ShardedArray`."""


class ShardedArrayTraceError(ShardedArrayError, ValueError):
    """A JAX function was applied to a `ShardedArray`. A ValueError because `jax.jit` hides the text of a TypeError."""


class ShardedArray:
    """One value cut into shards of unlike length, one per device: a single pytree leaf.

    It has the value's logical `shape` and `dtype`, but no arithmetic: no JAX sharding describes unequal shards. A plan
    takes it and returns it; `plan.unshard` gives the whole array, as do `np.asarray` and `jax.device_get` within one
    process, `plan.map` applies a function to it, and what is to be computed with it goes into the function given to
    `synthesize`. Everything else raises `ShardedArrayError`.
    """

    __slots__ = ("__weakref__", "_data", "_storage")

    def __init__(self, storage: Storage, data: jax.Array | Shards) -> None:
        """`data`: as `storage` says; one array with every shard padded to the largest, or `Shards` of exact size."""
        assert storage.accepts(data), (data, storage)
        self._storage = storage
        self._data = data

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""
        return self._storage.shape

    @property
    def ndim(self) -> int:
        """Of the logical shape."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Elements of the logical value."""
        size = 1
        for d in self.shape:
            size *= d
        return size

    @property
    def dtype(self) -> Any:
        """Of every shard; of typed keys the extended dtype."""
        return self._storage.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the logical value."""
        return self.size * self.itemsize

    @property
    def weak_type(self) -> bool:
        """Whether JAX's promotion takes the dtype for weak."""
        return self._storage.weak_type

    @property
    def sizes(self) -> tuple[int, ...]:
        """Length of each shard along the sharded dimension, in mesh order (of two axes: those of the major one's first
        shard first). ShardedArrayError where several dimensions are sharded: `shard_shapes` says it of any."""
        cuts = list(self._storage.cuts.values())
        if len(cuts) > 1:
            raise ShardedArrayError(f"{self!r} is sharded along several dimensions: use its shard_shapes")
        return cuts[0][1]

    @property
    def shard_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The exact shape of each device's shard, devices in mesh order (row-major)."""
        return tuple(map(self._storage.shard_shape, np.ndindex(*self._storage.mesh.devices.shape)))

    @property
    def layout(self) -> str:
        """E.g. `S(0)`: sharded along the first dimension. One placement per mesh axis; `S(0)/1` cuts the shards that
        another axis with `S(0)` leaves."""
        return format_layout(self._storage.layout)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of `data`, were its shards alike."""
        return self._storage.sharding

    @property
    def is_fully_addressable(self) -> bool:
        """Whether all its devices are of this process."""
        return self.sharding.is_fully_addressable

    @property
    def data(self) -> jax.Array | Shards:
        """The stored arrays. In switch form one, every shard padded to the largest, what is beyond its own length
        being undefined; in staged form `Shards`: one array of exact shape for each device of this process."""
        return self._data

    @property
    def storage(self) -> Storage:
        """How the shards are stored."""
        return self._storage

    def is_deleted(self) -> bool:
        """Whether the value was donated to a call of a plan."""
        return self._data.is_deleted()

    def delete(self) -> None:
        """Free the memory now."""
        self._data.delete()

    def block_until_ready(self) -> ShardedArray:
        """This array, once all shards here are computed."""
        self._data.block_until_ready()
        return self

    def __repr__(self) -> str:
        sizes = " x ".join("/".join(map(str, lengths)) for _, lengths in self._storage.cuts.values())
        where = f"{self.layout} as {sizes} on {', '.join(map(repr, self.sharding.mesh.axis_names))}"
        return f"ShardedArray({self.dtype}{list(self.shape)}, {where}{', deleted' if self.is_deleted() else ''})"

    def __str__(self) -> str:
        # Where others put it into their messages, too.
        return f"{self!r}, whole as plan.unshard(x)"

    def __format__(self, spec: str) -> str:
        if spec:
            raise ShardedArrayTypeError(self._explain(f"the format {spec!r} of"))
        return str(self)

    def __copy__(self) -> ShardedArray:
        """In memory of its own, as of any array."""
        return ShardedArray(self._storage, self._storage.duplicate(alive(self)._data))

    def __deepcopy__(self, memo: object) -> ShardedArray:
        return copy(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise ShardedArrayTypeError(
            f"{self!r} can't be pickled, as it lies on devices: write the state with plan.save_state(path, state), or "
            "pickle plan.unshard(x)"
        )

    def _explain(self, what: str) -> str:
        return (
            f"{what} {self!r} is not possible: its shards are of unlike length, which no JAX array can be. "
            "Use plan.unshard(x) for the whole array, plan.map(fn, x) to apply a function and keep it sharded, or "
            "compute inside the function given to hapsynth.synthesize; plan.save_state saves it, and so does orbax "
            "with hapsynth.checkpoint.orbax.registry()"
        )

    @property
    def __jax_array__(self) -> NoReturn:
        raise ShardedArrayTraceError(self._explain("a JAX function of"))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> NoReturn:
        raise ShardedArrayTypeError(self._explain(f"numpy.{ufunc.__name__} of"))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole array. ShardedArrayTypeError among several processes, all of which must call `plan.unshard`."""
        if not self.is_fully_addressable:
            raise ShardedArrayTypeError(self._explain("a NumPy array, in one process, of"))
        if copy is False:
            raise ValueError(f"{self!r} is put together from its shards: there is no NumPy array of it without a copy")
        return np.asarray(whole(self), dtype)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(self._explain(f".{name} of"))


def _refuse(name: str) -> Any:
    def method(self: ShardedArray, *args: Any, **kwargs: Any) -> NoReturn:
        raise ShardedArrayTypeError(self._explain(f"{name} of"))

    method.__name__ = name
    return method


# fmt: off
_BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor", "lshift",
    "rshift",
)
_OTHER = (
    "eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "round", "getitem", "setitem", "len", "iter",
    "contains", "bool", "int", "float", "complex", "index",
)
# fmt: on
for _name in (*(p + n for n in _BINARY for p in ("", "r", "i")), *_OTHER):
    setattr(ShardedArray, f"__{_name}__", _refuse(f"__{_name}__"))
# `__eq__` raises, so that only identity is left to hash by.
ShardedArray.__hash__ = object.__hash__


def plain(leaf: Any) -> Any:
    """A leaf whole where it is a `ShardedArray`; any other as it is."""
    return whole(leaf) if isinstance(leaf, ShardedArray) else leaf


def alive(leaf: Any) -> Any:
    """The leaf itself; RuntimeError for one that was consumed."""
    if isinstance(leaf, (ShardedArray, jax.Array)) and leaf.is_deleted():
        what = f"{leaf.dtype}{list(leaf.shape)}"
        raise RuntimeError(f"{what} has been deleted: a plan consumed it and returned its successor; use that")
    return leaf


def whole(leaf: Any) -> Any:
    """A leaf as a NumPy array (a typed key: an unsharded key array) of its logical shape; other leaves as they are.

    RuntimeError for one that was consumed. In a run of several processes all must call.
    """
    leaf = alive(leaf)
    if isinstance(leaf, ShardedArray):
        return leaf.storage.fetch(leaf.data)
    return host_array(leaf) if isinstance(leaf, jax.Array) else leaf


def mapped(fn: Callable[[Any], Any], leaf: Any) -> Any:
    """`Plan.map` of one leaf."""
    if not isinstance(leaf, (ShardedArray, jax.Array)):
        return leaf
    mapped_leaf = fn(jnp.asarray(whole(leaf)) if isinstance(leaf, ShardedArray) else alive(leaf))
    if not isinstance(mapped_leaf, jax.Array):
        mapped_leaf = np.asarray(mapped_leaf)
        # As JAX takes it: NumPy makes float64 of float32 and its own scalars.
        mapped_leaf = mapped_leaf.astype(jax.dtypes.canonicalize_dtype(mapped_leaf.dtype), copy=False)
    if mapped_leaf.shape != leaf.shape:
        what = f"{leaf.dtype}{list(leaf.shape)}"
        raise ValueError(f"plan.map: the function made shape {mapped_leaf.shape} of {what}; it must keep the shape")
    if not isinstance(leaf, ShardedArray):
        return jax.device_put(mapped_leaf, leaf.sharding)
    storage = leaf.storage.with_dtype(mapped_leaf.dtype)
    return ShardedArray(storage, storage.put(mapped_leaf, copy=True))
