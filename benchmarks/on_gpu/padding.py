"""The work around a collective of uneven shards: padding, cutting, laying out in blocks. Its bytes beside the floor,
one read of the operand and one write of the result; its time beside a plain copy of as many bytes; its kernels.

Four devices hold shares in the ratio 5 : 3 : 2 : 1; where the share matters, the smallest is taken. In `fused` rows an
elementwise op makes the operand of the sending step, or takes the result of the receiving one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from bench_bytes import hlo_bytes
from harness.timing import burst, interleaved

from hapsynth.hlo.text import parse
from hapsynth.hlo.work import FREE
from hapsynth.lower._collectives import from_blocks, to_blocks
from hapsynth.lower._storage import cut_to, pad_to
from on_gpu.settings import Row, Settings

VARIANTS = {"": ""}
PARTS = (5, 3, 2, 1)
_BURST = 16


class Case(NamedTuple):
    """One step: `fn` of an array of `shape`, before a collective (`sends`) or after it."""

    name: str
    shape: tuple[int, ...]
    fn: Callable[[jax.Array], jax.Array]
    sends: bool


def cases(unit: int, width: int) -> Iterator[Case]:
    """`unit` rows, or columns, are one part."""
    lengths, n = [p * unit for p in PARTS], len(PARTS)
    largest, least, whole = max(lengths), min(lengths), sum(lengths)
    blocks = n * largest
    for dim, kind in ((0, "rows"), (1, "columns")):
        shape = lambda k, dim=dim: (k, width) if dim == 0 else (width, k)
        split = lambda x, dim=dim: to_blocks(x, dim, lengths, largest)
        join = lambda x, dim=dim: from_blocks(x, dim, lengths, largest, whole)
        pad, cut = partial(pad_to, shape=shape(largest)), partial(cut_to, shape=shape(least))
        yield Case(f"all_gather sends {kind}", shape(least), pad, True)
        yield Case(f"all_gather receives {kind}", shape(blocks), join, False)
        yield Case(f"reduce_scatter sends {kind}", shape(whole), split, True)
        yield Case(f"reduce_scatter receives {kind}", shape(largest), cut, False)
    # From rows to columns: the operand is padded along its rows already.
    columns = [p * width for p in PARTS]
    split = lambda x: to_blocks(x, 1, columns, max(columns))
    join = lambda x: from_blocks(x, 0, lengths, largest, whole)
    yield Case("all_to_all sends", (largest, sum(columns)), split, True)
    yield Case("all_to_all receives", (blocks, max(columns)), join, False)


def rows(settings: Settings, variant: str) -> Iterator[Row]:
    unit, width = (4, 8) if settings.is_tiny else (4096, 2048)
    speed = copy_speed(settings, 1 << 10 if settings.is_tiny else 1 << 27)
    yield {"what": "copy", "bytes_per_s": speed}
    for dtype in ("bfloat16",) if settings.is_tiny else ("float32", "bfloat16"):
        for case in cases(unit, width):
            for fused in (False, True):
                yield one(settings, case, dtype, fused, speed)


def copy_speed(settings: Settings, elements: int) -> float:
    """Bytes per second, read and written, of an elementwise op on a large array."""
    x = jnp.ones(elements, jnp.float32)
    scaled = jax.jit(lambda x: x * 1.5)
    jax.block_until_ready(scaled(x))
    return 8 * elements / seconds_of(settings, lambda: scaled(x))


def seconds_of(settings: Settings, run: Callable[[], Any]) -> float:
    """Seconds per call, of calls that are queued one right after another."""
    (times,) = interleaved({"": burst(run, _BURST)}, settings.rounds).values()
    return statistics.median(times) / _BURST


def one(settings: Settings, case: Case, dtype: str, fused: bool, speed: float) -> Row:
    worked = lambda x: jnp.tanh(x) * 1.5

    def fn(x: jax.Array) -> jax.Array:
        if not fused:
            return case.fn(x)
        return case.fn(worked(x)) if case.sends else worked(case.fn(x))

    x = jnp.ones(case.shape, dtype)
    compiled = jax.jit(fn).lower(x).compile()
    made = compiled(x)
    # The padding of received blocks need not be read.
    floor = (x.nbytes if case.sends else made.nbytes) + made.nbytes
    text = compiled.as_text() or ""
    moved, kernels = sum(hlo_bytes(text).values()), opcodes(text)
    analysis: Any = compiled.cost_analysis() or {}
    counted = analysis.get("bytes accessed")
    return {
        "what": case.name,
        "dtype": dtype,
        "fused": fused,
        "floor_bytes": floor,
        "hlo_bytes": moved,
        "analysis_bytes": counted,
        "bytes_ratio": (counted or moved) / floor,
        "kernels": kernels,
        "one_kernel": len(kernels) == 1,
        "step_s": seconds_of(settings, lambda: compiled(x)),
        "copy_s": floor / speed,
    }


def opcodes(text: str) -> list[str]:
    """The opcodes of the entry computation but for those that do nothing; a fusion is one."""
    module = parse(text)
    return [i.opcode for i in module.computations[module.entry] if i.opcode not in FREE]
