"""Random numbers: every device draws its own shard from the counters of the whole draw, bit for bit.

Element i of a threefry draw is the hash of the key and of i, its row-major index in 64 bits, as long as
`jax_threefry_partitionable` is on (JAX's default). So a shard needs the key, which every device holds whole, and its
offset: nothing is sent. A draw with a batch of keys is one draw per key and can be cut along the batch as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from hapsynth._jax import partitionable
from hapsynth.graph.ir import Op
from hapsynth.instructions.factors import Factors, Local
from hapsynth.instructions.rules.elementwise import pointwise
from hapsynth.instructions.rules.registry import KEYS_ARE_WHOLE, bind, elements, no_flops, register, replicated

THREEFRY = "threefry2x32"

BLOCK = 1 << 16
"""Elements of a draw that XLA's CPU backend hashes at a time, in about four times their memory.

Drawn whole, large arrays also take longer: they leave the caches.
"""

_HASH = 120
"""Integer operations of one threefry hash: 20 rounds of add, rotate and xor, and the key five times."""


def _hashes(op: Op) -> float:
    return _HASH * elements(op)


def _is_threefry(dtype: Any) -> bool:
    return dtype == jax.random.key_dtype(THREEFRY)


@register("threefry2x32", flops=_hashes, fusible=True)
def _threefry(f: Factors) -> None:
    """The hash itself: of two words of the key and two of the counter, each a scalar or of the result's shape."""
    pointwise(f)


@register("random_split", flops=_hashes, typed_keys=True)
@register("random_fold_in", "random_seed", flops=elements, typed_keys=True)
@register("random_clone", "random_unwrap", "random_wrap", flops=no_flops, typed_keys=True)
def _keys(f: Factors) -> None:
    """Keys from keys: a few words, made on every device rather than sent."""
    replicated(f, KEYS_ARE_WHOLE)


def _batch_on_shard(local: Local, keys: Any) -> Any:
    """This device's part of a batch of threefry keys, which it holds whole."""
    cuts = [(d, cut) for d, dim in enumerate(local.factors.results[0][: keys.ndim]) if (cut := local.cut(dim))]
    if not cuts:
        return keys
    data = jax.random.key_data(keys)
    for d, cut in cuts:
        data = lax.dynamic_slice_in_dim(data, cut.offset(), cut.share, d)
    return jax.random.wrap_key_data(data, impl=THREEFRY)


def _counters(shape: Sequence[int], here: Sequence[int], offsets: Mapping[int, Any]) -> tuple[Any, Any]:
    """The row-major index in `shape` of each element of a shard of the shape `here`, as high and low 32-bit words.

    The shard starts at `offsets` along the dimensions that are cut. 64-bit integers would need `jax_enable_x64`.
    """
    high = low = jnp.zeros(here, np.uint32)
    long = prod(shape) > 1 << 32
    for d in range(len(shape)):
        index = lax.broadcasted_iota(np.uint32, here, d)
        if d in offsets:
            index += offsets[d].astype(np.uint32)
        stride_high, stride_low = map(np.uint32, divmod(prod(shape[d + 1 :]), 1 << 32))
        step = index * stride_low
        low += step
        if long:
            # The sum wrapped where it is less than what was added.
            high += lax.mulhi(index, jnp.full_like(index, stride_low)) + index * stride_high
            high += (low < step).astype(np.uint32)
    return high, low


def _in_blocks(
    shape: tuple[int, ...], dtype: Any, most: int, draw: Callable[[tuple[int, ...], Mapping[int, Any]], Any]
) -> Any:
    """`draw(shape, starts)` of a large shape, in blocks of at most `most` elements, one after the other.

    A block has all of the last dimensions and a run of the one before. The last run begins early rather than be short:
    some elements are drawn twice, alike.
    """
    cut = next(d for d in range(len(shape)) if prod(shape[d + 1 :]) <= most)
    run = most // prod(shape[cut + 1 :])
    runs = -(-shape[cut] // run)
    block = (*(1 for _ in shape[:cut]), run, *shape[cut + 1 :])

    def add(i: Any, whole: Any) -> Any:
        i = lax.convert_element_type(i, np.int32)
        i, number = lax.div(i, np.int32(runs)), lax.rem(i, np.int32(runs))
        starts = {cut: lax.min(number * np.int32(run), np.int32(shape[cut] - run))}
        for d in reversed(range(cut)):
            i, starts[d] = lax.div(i, np.int32(shape[d])), lax.rem(i, np.int32(shape[d]))
        at = [starts.get(d, np.int32(0)) for d in range(len(shape))]
        return lax.dynamic_update_slice(whole, draw(block, starts), at)

    count = prod(shape[:cut]) * runs
    return lax.fori_loop(np.int32(0), np.int32(count), add, jnp.zeros(shape, dtype))


def bits_on_shard(local: Local, operands: Sequence[Any], block: int = BLOCK) -> list[Any]:
    """The device's own of a draw; a large one on a CPU in parts of `block` elements."""
    op, (keys,) = local.op, operands
    batch, here = len(op.shapes[0]), local.result_shapes[0]
    keys = _batch_on_shard(local, keys)
    cuts = [local.cut(dim) for dim in local.factors.results[0][batch:]]
    offsets = {d: cut.offset() for d, cut in enumerate(cuts) if cut is not None}
    in_blocks = local.platform == "cpu" and not batch and prod(here) > 2 * block and max(here) < 1 << 31
    if not offsets and not (in_blocks and _is_threefry(op.dtypes[0]) and partitionable()):
        return bind(op.primitive, [keys], op.params)
    # Else no plan cuts it, and a call of one that was made with another setting is refused.
    assert partitionable()
    full, dtype = op.result_shapes[0][batch:], op.result_dtypes[0]
    words = jnp.moveaxis(jax.random.key_data(keys), -1, 0)
    if batch:
        words = [lax.broadcast_in_dim(w, here, tuple(range(batch))) for w in words]

    def draw(shape: tuple[int, ...], starts: Mapping[int, Any]) -> Any:
        froms = {d: sum(s[d] for s in (offsets, starts) if d in s) for d in {*offsets, *starts}}
        counters = _counters(full, shape, froms)
        if batch:
            counters = [jnp.broadcast_to(c, here) for c in counters]
        a, b = threefry2x32_p.bind(*words, *counters)
        if op.params["bit_width"] == 64:
            return (a.astype(dtype) << dtype.type(32)) | b.astype(dtype)
        return (a ^ b).astype(dtype)

    return [_in_blocks(here, dtype, block, draw) if in_blocks else draw(here[batch:], {})]


@register("random_bits", local=bits_on_shard, flops=_hashes, fusible=True, typed_keys=True, cost="costly")
def _random_bits(f: Factors) -> None:
    """`k -> k i j`: the draw has the batch of keys, then dimensions of its own; the keys are held whole."""
    op = f.op
    f.block(f.operand(0), KEYS_ARE_WHOLE)
    bits = f.dims(op.result_shapes[0])
    f.results.append(bits)
    batch, keys = len(op.shapes[0]), op.dtypes[0]
    if not _is_threefry(keys):
        f.block(bits, f"bits from {keys} are drawn whole; those from {THREEFRY} keys can be cut")
    elif not partitionable():
        f.block(bits[batch:], "each bit depends on the whole shape while jax_threefry_partitionable is off")
    f.block((d for d, n in zip(bits, op.result_shapes[0]) if n >= 1 << 31), "too long for 32-bit offsets")


def _gamma_on_shard(local: Local, operands: Sequence[Any]) -> list[Any]:
    keys, alpha = operands
    return bind(local.op.primitive, [_batch_on_shard(local, keys), alpha], local.op.params)


@register("random_gamma", local=_gamma_on_shard, flops=lambda op: 10 * _hashes(op), typed_keys=True)
def _random_gamma(f: Factors) -> None:
    """`k, k i -> k i`: each key is split inside the primitive into one per element, from the first element on."""
    op = f.op
    f.block(f.operand(0), KEYS_ARE_WHOLE)
    alpha = f.operand(1)
    f.results.append(alpha)
    if _is_threefry(op.dtypes[0]):
        f.block(alpha[len(op.shapes[0]) :], "random_gamma splits its key for all elements at once")
    else:
        f.block(alpha, f"samples from {op.dtypes[0]} are drawn whole; those from {THREEFRY} keys can be cut")
