"""Running one triple on simulated devices: what a rule claims, tried out.

The full operands are split as the triple's precondition says, every device runs the op on its own exact shards, and
the results, combined as the postcondition says, must equal the plain op's. The tests try every triple of every
registered primitive this way; a user's own rule can be tried the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hapsynth import _jax
from hapsynth.graph import Literal, Op
from hapsynth.instructions.factors import Dim, Factors, Local, Triple
from hapsynth.instructions.layout import Placement
from hapsynth.instructions.rules.registry import bind, execute, identity

Array = Any


class Unsound(AssertionError):
    """A triple whose postcondition does not follow from its precondition."""


def share_patterns(size: int) -> tuple[tuple[int, ...], ...]:
    """Ways to deal `size` units: equal, skewed with an idle device, all on one; few to more devices than units."""
    if size == 2:
        return ((1, 0, 1), (0, 2))
    equal = (1, 1, 1, 0) if size == 3 else (size - size // 2, size // 2)
    return (equal, (size - 1, 0, 1), (0, size))


def split(rng: np.random.Generator, full: Array, placement: Placement, lengths: Sequence[int]) -> list[np.ndarray]:
    """What each device holds of a value: its slice, everything, or a random share of the combination."""
    x, n = full if _jax.is_extended(full.dtype) else np.asarray(full), len(lengths)
    if placement.is_sharded:
        if sum(lengths) != x.shape[placement.dim]:
            raise Unsound(f"{placement} of {x.shape} is not cut into {lengths}")
        ends = list(accumulate(lengths))
        return [np.take(x, np.arange(e - k, e), axis=placement.dim) for e, k in zip(ends, lengths)]
    if not placement.is_partial:
        return [x] * n
    if placement.reduction == "sum":
        # Small integers or quarters, so that float sums are exact wherever the type has room for them.
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        unit = 4 if inexact and jnp.finfo(x.dtype).nmant >= 7 else 1
        low, high = (-2 * unit, 2 * unit) if inexact else (0, 8)
        parts = [(rng.integers(low, high, x.shape) / unit).astype(x.dtype) for _ in range(n - 1)]
        with np.errstate(all="ignore"):
            rest = x - sum(parts[1:], start=parts[0]) if parts else x
        parts.append(rest.astype(x.dtype))
        order = rng.permutation(n)
        return [parts[i] for i in order]
    holder = rng.integers(0, n, x.shape)
    return [np.where(holder == i, x, _beyond(rng, x, placement.reduction)).astype(x.dtype) for i in range(n)]


def _beyond(rng: np.random.Generator, x: np.ndarray, reduction: str) -> np.ndarray:
    """Values that lose against `x`: sometimes by a little, sometimes the identity."""
    least = np.asarray(identity(reduction, x.dtype)).astype(x.dtype)
    if x.dtype == np.bool_:
        return np.full(x.shape, least)
    step = rng.integers(0, 4, x.shape).astype(x.dtype)
    if reduction == "max":
        near = np.where(x >= least + step, x - step, least) if np.issubdtype(x.dtype, np.integer) else x - step
    else:
        near = np.where(x <= least - step, x + step, least) if np.issubdtype(x.dtype, np.integer) else x + step
    return np.where(rng.random(x.shape) < 0.2, least, near)


def combine(parts: Sequence[Array], placement: Placement) -> np.ndarray:
    """The value that the devices' tensors stand for (replicated: the first one's)."""
    arrays = [np.asarray(p) for p in parts]
    if placement.is_sharded:
        return np.concatenate(arrays, axis=placement.dim)
    out = arrays[0]
    for other in arrays[1:]:
        match placement.reduction:
            case "":
                break
            case "max":
                out = np.maximum(out, other)
            case "min":
                out = np.minimum(out, other)
            case _:
                out = (out + other).astype(out.dtype)
    return out


def _lengths(f: Factors, dims: Sequence[Dim], placement: Placement, shares: Sequence[int]) -> list[int]:
    if not placement.is_sharded:
        return [-1] * len(shares)
    return [s * f.granule(dims[placement.dim]) for s in shares]


def _shape(shape: tuple[int, ...], placement: Placement, length: int) -> tuple[int, ...]:
    return tuple(length if placement.is_sharded and d == placement.dim else n for d, n in enumerate(shape))


@dataclass(frozen=True, eq=False)
class Trial:
    """One triple on `len(shares)` devices.

    `shares` are in units of the triple's factor and add up to its size; where no factor is divided only their number
    counts. `operands` are the full values.
    """

    op: Op
    factors: Factors
    triple: Triple
    shares: tuple[int, ...]
    operands: Sequence[Array]
    seed: int = 0

    def held(self, sample: int = 0) -> list[list[Any]]:
        """Per device, its shards of the operands that are values: one way to meet the precondition."""
        rng, t = np.random.default_rng([self.seed, sample]), self.triple
        split_up = [
            split(rng, x, p, _lengths(self.factors, dims, p, self.shares))
            for o, x, p, dims in zip(self.op.operands, self.operands, t.operands, self.factors.operands)
            if not isinstance(o, Literal)
        ]
        return [[parts[i] for parts in split_up] for i in range(len(self.shares))]

    def run(self, held: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Per device, its results; a function of arrays that can be jitted."""
        return [execute(self.local(i), self._with_literals(x)) for i, x in enumerate(held)]

    def plain(self, values: Sequence[Any]) -> list[Any]:
        """The op itself, on the full values."""
        return bind(self.op.primitive, self._with_literals(values), self.op.params)

    @property
    def values(self) -> list[Any]:
        return [x for o, x in zip(self.op.operands, self.operands) if not isinstance(o, Literal)]

    def _with_literals(self, values: Sequence[Any]) -> list[Any]:
        rest = iter(values)
        return [jnp.asarray(o.value, o.dtype) if isinstance(o, Literal) else next(rest) for o in self.op.operands]

    def local(self, device: int) -> Local:
        """What the device knows; its place among the others is a value at run time."""
        op, f, t, share = self.op, self.factors, self.triple, self.shares[device]
        offset = sum(self.shares[:device])

        def here(
            shapes: Sequence[tuple[int, ...]], tensors: Sequence[tuple[Dim, ...]], placed: Sequence[Placement]
        ) -> Any:
            return tuple(_shape(s, p, _lengths(f, dims, p, [share])[0]) for s, dims, p in zip(shapes, tensors, placed))

        return Local(
            op,
            f,
            t,
            here(op.shapes, f.operands, t.operands),
            here(op.result_shapes, f.results, t.results),
            share,
            lambda: jnp.int32(offset),
            lambda: jnp.int32(device),
        )

    def judge(self, results: Sequence[Sequence[Array]], expected: Sequence[Array]) -> None:
        """Unsound unless the results, combined as the postcondition says, are the plain op's."""
        what = f"{self.op.name} {self.triple} with shares {self.shares}, {self.factors}"
        for device, out in enumerate(results):
            for x, shape, dtype in zip(out, self.local(device).result_shapes, self.op.result_dtypes):
                if x.shape != shape or x.dtype != dtype:
                    raise Unsound(f"{what}: device {device} made {x.dtype}{x.shape}, not {dtype}{shape}")
        for r, (placement, want) in enumerate(zip(self.triple.results, expected)):
            parts, whole = [_words(out[r]) for out in results], _words(want)
            if not placement.is_sharded and not placement.is_partial:
                problem = next(filter(None, (_difference(p, whole) for p in parts)), "")
            else:
                problem = _difference(combine(parts, placement), whole)
            if problem:
                raise Unsound(f"{what}: result {r} {problem}")


def trials(op: Op, f: Factors, operands: Sequence[Array]) -> list[Trial]:
    """Every triple of an op with every pattern of shares (two devices where nothing is cut)."""
    return [
        Trial(op, f, triple, shares, operands, seed)
        for seed, triple in enumerate(f.triples)
        for shares in _patterns(f, triple)
    ]


def _patterns(f: Factors, triple: Triple) -> tuple[tuple[int, ...], ...]:
    if triple.factor is not None:
        return share_patterns(f.sizes[triple.factor])
    return ((1, 1),) if any(p.is_partial for p in triple.results) else ((1,),)


def check(tried: Sequence[Trial], samples: int = 4) -> int:
    """Run trials in one compiled function, with `samples` ways to deal partials, and judge each; the number of trials.

    Raises Unsound for the first that does not hold, or what its local execution raised.
    """
    firsts = list({id(t.op): t for t in tried}.values())
    run = jax.jit(
        lambda held, values: (
            [t.run(h) for t, h in zip(tried, held)],
            {id(t.op): t.plain(v) for t, v in zip(firsts, values)},
        )
    )
    values = [t.values for t in firsts]
    for sample in range(samples):
        results, expected = jax.device_get(run([t.held(sample) for t in tried], values))
        for t, result in zip(tried, results):
            t.judge(result, expected[id(t.op)])
    return len(tried)


def _words(x: Array) -> np.ndarray:
    """An array's elements; those of typed keys as integers, in a dimension at the end."""
    return np.asarray(jax.random.key_data(x) if _jax.is_extended(x.dtype) else x)


def _difference(got: np.ndarray, want: np.ndarray) -> str:
    """Why two arrays are not the same value, up to rounding; empty where they are."""
    if got.shape != want.shape:
        return f"has shape {got.shape}, not {want.shape}"
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return "" if np.array_equal(got, want) else f"is\n{got}\nnot\n{want}"
    wide = np.complex128 if np.issubdtype(want.dtype, np.complexfloating) else np.float64
    a, b = got.astype(wide), want.astype(wide)
    finite = np.abs(b[np.isfinite(b)])
    eps = float(jnp.finfo(want.dtype).eps)
    tolerance = (64 if eps < 1e-6 else 4) * eps
    close = np.isclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, finite.max(initial=0.0)), equal_nan=True)
    return "" if close.all() else f"is\n{got}\nnot\n{want}"
