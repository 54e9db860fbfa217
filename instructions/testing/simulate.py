"""Running triples on simulated devices: what a rule claims, tried out.

The full operands are split as the triples' precondition says, every device runs the op on its own exact shards, and
the results, combined as the postcondition says, must equal the plain op's. The tests try every triple of every
registered primitive this way; a user's own rule can be tried the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hapsynth import _jax
from hapsynth.graph.ir import Literal, Op
from hapsynth.instructions.factors import Cut, Dim, Factors, Local, Triples, cutting
from hapsynth.instructions.layout import Layout, Reduction, reduction_of
from hapsynth.instructions.rules.registry import bind, execute, identity

Array = Any


class Unsound(AssertionError):
    """A triple whose postcondition does not follow from its precondition."""


class NotFinite(Unsound):
    """One that does not follow where operands are NaN, infinite, or zero beside such."""


def share_patterns(size: int) -> tuple[tuple[int, ...], ...]:
    """Ways to deal `size` units: equal, skewed with an idle device, all on one; few to more devices than units."""
    if size == 2:
        return ((1, 0, 1), (0, 2))
    equal = (1, 1, 1, 0) if size == 3 else (size - size // 2, size // 2)
    return (equal, (size - 1, 0, 1), (0, size))


def random_shares(rng: np.random.Generator, size: int, positions: int) -> tuple[int, ...]:
    """`size` units over that many positions: as equal as they go, skewed, or skewed with idle ones."""
    kind = rng.integers(3)
    if kind == 0:
        return tuple(size // positions + (i < size % positions) for i in range(positions))
    weights = rng.random(positions) + 0.1
    if kind == 2 and positions > 1:
        weights[rng.permutation(positions)[: rng.integers(1, positions)]] = 0
    return tuple(map(int, rng.multinomial(size, weights / weights.sum())))


def parts(rng: np.random.Generator, full: Array, reduction: Reduction, n: int) -> list[np.ndarray]:
    """What each of n devices holds of a partial value: random arrays that combine to it."""
    x = np.asarray(full)
    if reduction == "sum":
        if jnp.issubdtype(x.dtype, jnp.inexact):
            # Small integers or quarters, so that float sums are exact wherever the type has room for them.
            unit = 4 if jnp.finfo(x.dtype).nmant >= 7 else 1
            made = [(rng.integers(-2 * unit, 2 * unit, x.shape) / unit).astype(x.dtype) for _ in range(n - 1)]
        else:
            # The least and the most of the type, so that sums wrap.
            info = jnp.iinfo(x.dtype)
            ends = np.array([max(info.min, 1 - info.max), info.max]).astype(x.dtype)
            made = [ends[rng.integers(0, 2, x.shape)] for _ in range(n - 1)]
        made = [np.where(rng.random(x.shape) < 0.3, np.zeros_like(m), m) for m in made]
        with np.errstate(all="ignore"):
            rest = x - sum(made[1:], start=made[0]) if made else x
        made.append(rest.astype(x.dtype))
        order = rng.permutation(n)
        return [made[i] for i in order]
    holder = rng.integers(0, n, x.shape)
    return [np.where(holder == i, x, _beyond(rng, x, reduction)).astype(x.dtype) for i in range(n)]


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


def combine(held: np.ndarray, layout: Layout) -> list[np.ndarray]:
    """What the devices' tensors stand for: one value for each place along the replicated axes.

    `held`: an array of arrays, one dimension per mesh axis.
    """
    by_minor = sorted(range(len(layout)), key=lambda a: -layout[a].minor)
    for axis in by_minor:
        p = layout[axis]
        if p.is_sharded:
            held = _along(held, axis, lambda x, y, d=p.dim: np.concatenate([x, y], d))
        elif p.is_partial:
            held = _along(held, axis, _COMBINE[p.reduction])
    return list(held.flat)


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: (x + y).astype(x.dtype),
    "max": np.maximum,
    "min": np.minimum,
}


def _along(held: np.ndarray, axis: int, join: Callable[[Any, Any], Any]) -> np.ndarray:
    """The arrays along one axis of the mesh joined, first to last; the axis is left with one place."""
    rows = np.moveaxis(held, axis, 0)
    made = np.empty(rows.shape[1:], object)
    # Infinities of two signs are NaN, as on devices.
    with np.errstate(invalid="ignore", over="ignore"):
        for where in np.ndindex(made.shape):
            made[where] = reduce(join, (row[where] for row in rows))
    return np.expand_dims(made, axis)


@dataclass(frozen=True, eq=False)
class Trial:
    """One triple per axis of a mesh of `lengths`.

    `shares` holds, for every factor that is cut, the units of each position along the axes that cut it, row-major in
    them from major to minor. `operands` are the full values.
    """

    op: Op
    factors: Factors
    triples: Triples
    lengths: tuple[int, ...]
    shares: Mapping[int, tuple[int, ...]]
    operands: Sequence[Array]
    seed: int = 0

    @cached_property
    def devices(self) -> list[tuple[int, ...]]:
        """The devices' places in the mesh, row-major."""
        return list(np.ndindex(*self.lengths))

    @cached_property
    def axes(self) -> dict[int, tuple[int, ...]]:
        return cutting(self.triples)

    @cached_property
    def deals(self) -> bool:
        """Whether there is more than one way to meet the precondition: parts of a partial operand may be any."""
        return any(p.is_partial for t in self.triples for p in t.operands)

    @cached_property
    def has_floats(self) -> bool:
        """Whether some operand can be other than finite."""
        return any(isinstance(o, int) and _jax.is_inexact(d) for o, d in zip(self.op.operands, self.op.dtypes))

    @cached_property
    def result_shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        """Of each device's results."""
        return [self.local(device).result_shapes for device in range(len(self.devices))]

    def held(self, sample: int = 0) -> list[list[Any]]:
        """Per device, its shards of the operands that are values: one way to meet the precondition."""
        rng = np.random.default_rng([self.seed, sample])
        out: list[list[Any]] = [[] for _ in self.devices]
        for n, (o, x) in enumerate(zip(self.op.operands, self.operands)):
            if isinstance(o, Literal):
                continue
            layout = tuple(t.operands[n] for t in self.triples)
            partial = [a for a, p in enumerate(layout) if p.is_partial]
            whole = x if _jax.is_extended(x.dtype) else np.asarray(x)
            dealt = [whole]
            if partial:
                dealt = parts(rng, whole, reduction_of(layout), prod(self.lengths[a] for a in partial))
            for mine, coords in zip(out, self.devices):
                part = dealt[self._position(partial, coords)]
                for d, (start, length) in self._bounds(self.factors.operands[n], layout, coords).items():
                    if start + length > whole.shape[d]:
                        raise Unsound(f"dimension {d} of {whole.shape} is not that of {self.factors}")
                    part = np.take(part, np.arange(start, start + length), axis=d)
                mine.append(part)
        return out

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

    def _position(self, axes: Sequence[int], coords: Sequence[int]) -> int:
        at = 0
        for axis in axes:
            at = at * self.lengths[axis] + coords[axis]
        return at

    def _part(self, factor: int, coords: Sequence[int]) -> tuple[int, int]:
        """(first unit, units) of a factor that the device at `coords` has."""
        shares, at = self.shares[factor], self._position(self.axes[factor], coords)
        if sum(shares) != self.factors.sizes[factor]:
            raise Unsound(f"{self.factors.sizes[factor]} units of factor {factor} are not cut into {shares}")
        return sum(shares[:at]), shares[at]

    def _bounds(self, dims: Sequence[Dim], layout: Layout, coords: Sequence[int]) -> dict[int, tuple[int, int]]:
        """Cut dimension -> (first element, elements) that the device at `coords` has."""
        found: dict[int, tuple[int, int]] = {}
        for placement, triple in zip(layout, self.triples):
            if placement.is_sharded and triple.factor is not None:
                dim = dims[placement.dim]
                owned = self.factors.is_whole(triple)
                granule = prod(self.factors.sizes[f] for f in dim) if owned else self.factors.granule(dim)
                start, units = self._part(triple.factor, coords)
                found[placement.dim] = start * granule, units * granule
        return found

    def local(self, device: int) -> Local:
        """What the device knows; its place among the others is a value at run time."""
        op, f, coords = self.op, self.factors, self.devices[device]

        def here(
            shapes: Sequence[tuple[int, ...]], tensors: Sequence[tuple[Dim, ...]], placed: Iterable[Layout]
        ) -> tuple[tuple[int, ...], ...]:
            bounds = [self._bounds(dims, layout, coords) for dims, layout in zip(tensors, placed)]
            return tuple(
                tuple(cut[d][1] if d in cut else size for d, size in enumerate(shape))
                for shape, cut in zip(shapes, bounds)
            )

        found = {factor: self._part(factor, coords) for factor in self.axes}
        return Local(
            op,
            f,
            self.triples,
            here(op.shapes, f.operands, zip(*(t.operands for t in self.triples))),
            here(op.result_shapes, f.results, zip(*(t.results for t in self.triples))),
            {factor: Cut(units, lambda start=start: jnp.int32(start)) for factor, (start, units) in found.items()},
            lambda axis: jnp.int32(coords[axis]),
        )

    def judge(self, results: Sequence[Sequence[Array]], expected: Sequence[Array]) -> None:
        """Unsound unless the results, combined as the postcondition says, are the plain op's."""
        triples = " x ".join(map(str, self.triples))
        what = f"{self.op.name} {triples} with shares {dict(self.shares)}, {self.factors}"
        for device, (out, shapes) in enumerate(zip(results, self.result_shapes)):
            for x, shape, dtype in zip(out, shapes, self.op.result_dtypes):
                if x.shape != shape or x.dtype != dtype:
                    raise Unsound(f"{what}: device {device} made {x.dtype}{x.shape}, not {dtype}{shape}")
        for r, want in enumerate(expected):
            held = np.empty(self.lengths, object)
            for coords, out in zip(self.devices, results):
                held[coords] = _words(out[r])
            for value in combine(held, tuple(t.results[r] for t in self.triples)):
                if problem := _difference(value, _words(want)):
                    raise Unsound(f"{what}: result {r} {problem}")


def trials(op: Op, f: Factors, operands: Sequence[Array], *, owned: bool = False) -> list[Trial]:
    """Every triple of an op with every pattern of shares (two devices where nothing is cut). `owned`: and with each of
    three devices as the owner of the whole, which no rule has a say in."""
    found: list[Trial] = []
    for seed, (t,) in enumerate(f.joint(1, owned)):
        patterns = ((1, 1),) if any(p.is_partial for p in t.results) else ((1,),)
        if f.is_whole(t):
            patterns = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
        elif t.factor is not None:
            patterns = share_patterns(f.sizes[t.factor])
        for n in patterns:
            cut = {} if t.factor is None else {t.factor: n}
            found.append(Trial(op, f, (t,), (len(n),), cut, operands, seed))
    return found


MESHES = ((2, 2), (2, 3))


def joint_trials(
    op: Op, f: Factors, operands: Sequence[Array], most: int, seed: int = 0, *, owned: bool = False
) -> list[Trial]:
    """At most `most` of the op's triples on two mesh axes, chosen at random, each on one mesh with random shares.
    `owned`: as for `trials`."""
    rng = np.random.default_rng([seed, len(f.triples)])
    joint = f.joint(2, owned)[1:]
    chosen = rng.permutation(len(joint))[:most]
    found: list[Trial] = []
    for n in sorted(chosen):
        triples, mesh = joint[n], MESHES[rng.integers(len(MESHES))]
        shares = {
            factor: random_shares(rng, f.sizes[factor], prod(mesh[a] for a in axes))
            for factor, axes in cutting(triples).items()
        }
        found.append(Trial(op, f, triples, mesh, shares, operands, int(rng.integers(1 << 31))))
    return found


POISONS: dict[str, tuple[tuple[float, ...], float]] = {
    "NaN": ((np.nan,), 0.1),
    "infinities": ((np.inf, -np.inf), 0.15),
    "infinities and zeros": ((np.inf, 0.0, -np.inf, -0.0, 0.0, 0.0), 0.6),
    "all": ((np.nan, np.inf, -np.inf, 0.0, -0.0), 0.5),
}
"""What is strewn over the floats of operands, and over how many of them."""


def poisoned(operands: Sequence[Array], poison: str, seed: int = 0) -> list[Array]:
    """The operands with values strewn in that are not finite, and zeros, which are special beside them."""
    values, share = POISONS[poison]
    rng = np.random.default_rng([seed, len(poison)])
    out: list[Array] = []
    for x in operands:
        if not _jax.is_extended(x.dtype) and _jax.is_inexact(x.dtype):
            strewn = rng.choice(values, np.shape(x)).astype(np.float32)
            x = np.where(rng.random(np.shape(x)) < share, strewn.astype(x.dtype), np.asarray(x))
        out.append(x)
    return out


def check(tried: Sequence[Trial], samples: int = 4) -> int:
    """Run trials in one compiled function, with `samples` ways to deal partials, and judge each; then on operands that
    are not finite, but for ops whose rule is `finite_only`. The number of trials.

    Raises Unsound for the first that does not hold, or what its local execution raised.
    """
    firsts = list({id(t.op): t for t in tried}.values())
    run = jax.jit(
        lambda held, values: (
            [t.run(h) for t, h in zip(tried, held)],
            {id(t.op): t.plain(v) for t, v in zip(firsts, values)},
        )
    )
    values, held = [t.values for t in firsts], [t.held() for t in tried]
    due = range(len(tried))
    for sample in range(samples):
        if sample:
            # What deals nothing would be just the same.
            due = [i for i in due if tried[i].deals]
            held = [t.held(sample) if t.deals else h for t, h in zip(tried, held)]
        if not due:
            break
        results, expected = jax.device_get(run(held, values))
        for i in due:
            tried[i].judge(results[i], expected[id(tried[i].op)])
    due = [i for i, t in enumerate(tried) if t.factors.finite_only == "" and t.has_floats]
    for n, poison in enumerate(POISONS if due else ()):
        strewn = {id(t.op): poisoned(t.operands, poison) for t in firsts}
        those = [replace(t, operands=strewn[id(t.op)]) for t in tried]
        values, held = [replace(t, operands=strewn[id(t.op)]).values for t in firsts], [t.held(n) for t in those]
        results, expected = jax.device_get(run(held, values))
        for i in due:
            try:
                those[i].judge(results[i], expected[id(tried[i].op)])
            except Unsound as error:
                raise NotFinite(f"with {poison} among the operands: {error}") from None
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
