"""A `ShardedArray` is one pytree leaf that knows its shape and refuses to be computed with."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

from hapsynth.instructions.layout import S
from hapsynth.lower import Storage
from hapsynth.running.sharded_array import ShardedArray, ShardedArrayError

VALUE = np.arange(12, dtype=np.float32).reshape(6, 2)


@pytest.fixture
def array() -> ShardedArray:
    mesh = Mesh(np.array(jax.devices()[:4]), ("hap",), axis_types=(AxisType.Auto,))
    storage = Storage((6, 2), np.dtype(np.float32), False, (S(0),), {0: ((0,), (3, 0, 2, 1))}, mesh)
    return ShardedArray(storage, storage.put(VALUE, copy=True))


ROWS = ((2, 1, 0, 3), (np.s_[0:2], np.s_[2:3], np.s_[3:3], np.s_[3:6]))
"""Four shards of six rows, and which they are."""
NESTED: dict[str, Any] = {
    "both axes cut the rows": ((S(0), S(0, 1)), {0: ((0, 1), ROWS[0])}, "2/1/0/3", ROWS[1]),
    "the second axis first": ((S(0, 1), S(0)), {0: ((1, 0), ROWS[0])}, "2/1/0/3", [ROWS[1][i] for i in (0, 2, 1, 3)]),
    "rows and columns": (
        (S(1), S(0)),
        {0: ((1,), (5, 1)), 1: ((0,), (0, 2))},
        "5/1 x 0/2",
        (np.s_[0:5, 0:0], np.s_[5:6, 0:0], np.s_[0:5, 0:2], np.s_[5:6, 0:2]),
    ),
}


@pytest.mark.parametrize(("layout", "cuts", "sizes", "pieces"), NESTED.values(), ids=NESTED)
def test_two_axes(layout: Any, cuts: Any, sizes: str, pieces: Any) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    storage = Storage((6, 2), np.dtype(np.float32), False, layout, cuts, mesh)
    array = ShardedArray(storage, storage.put(VALUE, copy=True))
    np.testing.assert_array_equal(storage.fetch(array.data), VALUE)
    assert repr(array) == f"ShardedArray(float32[6, 2], {array.layout} as {sizes} on 'a', 'b')"
    stored = {s.device: np.asarray(s.data) for s in array.data.addressable_shards}
    for device, shape, piece in zip(mesh.devices.flat, array.shard_shapes, pieces, strict=True):
        np.testing.assert_array_equal(stored[device][: shape[0], : shape[1]], VALUE[piece])
    if len(cuts) > 1:
        with pytest.raises(ShardedArrayError, match="use its shard_shapes"):
            _ = array.sizes


def test_it_shows_the_logical_value(array: ShardedArray) -> None:
    assert (array.shape, array.dtype, array.ndim, array.size) == ((6, 2), np.float32, 2, 12)
    assert (array.itemsize, array.nbytes, array.is_fully_addressable) == (4, 48, True)
    assert array.sizes == (3, 0, 2, 1)
    assert array.layout == "S(0)"
    assert not array.weak_type
    assert repr(array) == "ShardedArray(float32[6, 2], S(0) as 3/0/2/1 on 'hap')"


def test_it_stores_each_shard_padded_to_the_largest(array: ShardedArray) -> None:
    assert array.data.shape == (12, 2)
    assert array.data.sharding == array.sharding
    np.testing.assert_array_equal(array.storage.fetch(array.data), VALUE)
    np.testing.assert_array_equal(np.asarray(array.data)[6:8], VALUE[3:5])


def test_it_is_one_leaf(array: ShardedArray) -> None:
    (leaf,) = jax.tree.leaves({"a": array})
    assert leaf is array
    assert jax.tree.map(lambda x: x.shape, {"a": array}) == {"a": (6, 2)}
    assert jax.block_until_ready(array) is array


def test_it_can_be_deleted(array: ShardedArray) -> None:
    assert not array.is_deleted()
    array.delete()
    assert array.is_deleted()
    assert "deleted" in repr(array)


USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "numpy": lambda x: np.ones(2) * x,
    "numpy's scalar": lambda x: np.float32(2) * x,
    "numpy's sine": np.sin,
    "numpy's sum": np.sum,
    "format": lambda x: f"{x:.3f}",
    "jax": lambda x: jnp.ones(2) * x,
    "iadd": lambda x: operator.iadd(x, 1),
    "matmul": lambda x: x @ x,
    "neg": lambda x: -x,
    "pow": lambda x: x**2,
    "eq": lambda x: x == x,
    "lt": lambda x: x < 1,
    "index": lambda x: x[0],
    "iterate": list,
    "len": len,
    "bool": bool,
    "float": float,
    "int": int,
    "optax": lambda x: optax.tree.norm({"a": x}),
    "jnp.asarray": jnp.asarray,
    "sin": jnp.sin,
    "sum": jnp.sum,
    "jit": jax.jit(lambda x: x),
    "jit of a tree": lambda x: jax.jit(lambda t: t)({"a": x}),
    "grad": jax.grad(lambda x: x),
    "eval_shape": lambda x: jax.eval_shape(lambda y: y, x),
    "device_put": jax.device_put,
    "method": lambda x: x.mean(),
}


@pytest.mark.parametrize("use", USES)
def test_using_it_names_the_ways_out(array: ShardedArray, use: str) -> None:
    with pytest.raises((ShardedArrayError, AttributeError, TypeError, ValueError)) as caught:
        USES[use](array)
    if use in ("grad", "optax"):
        # They say only that it is no array, and which.
        assert use == "grad" or "plan.unshard" in str(caught.value)
        return
    for way in ("plan.unshard", "plan.map", "hapsynth.synthesize", "float32[6, 2]"):
        assert way in str(caught.value)


def test_numpy_and_jax_fetch_it_whole(array: ShardedArray) -> None:
    for fetched in (np.asarray(array), jax.device_get({"a": array})["a"], jax.tree.map(np.asarray, [array])[0]):
        assert type(fetched) is np.ndarray
        np.testing.assert_array_equal(fetched, VALUE)
    assert np.asarray(array, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(array, copy=False)
    array.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(array)


def test_a_message_of_others_names_the_way_out(array: ShardedArray) -> None:
    assert f"got {array}".endswith("whole as plan.unshard(x)")


def test_operators_raise_a_type_error(array: ShardedArray) -> None:
    for use in ("add", "eq", "index", "bool", "len", "numpy", "numpy's scalar", "numpy's sum", "format"):
        with pytest.raises(TypeError, match="unshard"):
            USES[use](array)
