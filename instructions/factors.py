"""Op sharding rules: the factors of one op, and the triples that follow from them.

A factor is an index of the op in einsum notation (`m k, k n -> m n`), as in Shardy's op sharding rules. A
dimension is a product of factors, major to minor; it can be cut along its major factor. Sharding a factor along a
mesh axis gives one triple: every operand and result that has the factor is cut, the others are replicated, and a
result that lost the factor by a reduction is partial.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from hapsynth._jax import is_extended, is_inexact
from hapsynth.graph.ir import Boundary, Literal, Op
from hapsynth.instructions.layout import Layout, O, P, Placement, R, Reduction, S, is_consistent, minors, plain

_HOST_CALLBACKS = ("debug_print", "debug_callback", "pure_callback", "io_callback")
"""Ops that call a function on the host, which sees how often they run."""
Dim = tuple[int, ...]
"""The factors of one dimension, major to minor; a dimension of size 1 has none."""


class Triple(NamedTuple):
    """{operands | placements} op {results | placements} along one mesh axis.

    `factor` is the factor whose work is divided, or None where every device does the whole op.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factor: int | None = None

    @property
    def minor(self) -> int:
        """How many other mesh axes cut the same factor before this one."""
        return max((p.minor for p in (*self.operands, *self.results)), default=0)

    def at(self, minor: int) -> Triple:
        """The triple of an axis that cuts the factor after `minor` others."""
        move = lambda ps: tuple(S(p.dim, minor) if p.is_sharded else p for p in ps)
        return Triple(move(self.operands), move(self.results), self.factor) if minor else self

    def along(self, way: int) -> Triple:
        """The triple that cuts the factor another way."""
        move = lambda ps: tuple(p._replace(way=way) if p.is_sharded else p for p in ps)
        return Triple(move(self.operands), move(self.results), self.factor)

    def __str__(self) -> str:
        return f"{{{', '.join(map(str, self.operands))}}} -> {{{', '.join(map(str, self.results))}}}"


Cuts = tuple[tuple[int, tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, ...]], ...]
Triples = tuple[Triple, ...]
"""What an op does on a mesh: one triple per axis, each applied to what the others leave of the op."""


def ruled(triples: Triples) -> Triples:
    """The triples as the op's rules have them: whichever way what they cut is cut."""
    if not any(p.way for t in triples for p in (*t.operands, *t.results)):
        return triples
    bare = lambda ps: tuple(map(plain, ps))
    return tuple(Triple(bare(t.operands), bare(t.results), t.factor) for t in triples)


@dataclass(eq=False)
class Factors:
    """Builds and holds the factors of one op."""

    op: Op
    sizes: list[int] = field(default_factory=list)
    operands: list[tuple[Dim, ...]] = field(default_factory=list)
    results: list[tuple[Dim, ...]] = field(default_factory=list)
    reductions: dict[int, Reduction] = field(default_factory=dict)
    blocked: dict[int, str] = field(default_factory=dict)
    """Factor -> why it needs replication."""
    accumulators: dict[int, int] = field(default_factory=dict)
    """Reduced factor -> the operand that the result accumulates into: it must be partial too."""
    linear: tuple[tuple[int, ...], ...] = ()
    """Groups of operands in which the op is linear jointly: a partial sum in all of them passes through."""
    passes: tuple[tuple[int, ...], ...] = ()
    """Groups of operands through which a partial max or min passes unchanged (reorderings)."""
    extra: list[Triple] = field(default_factory=list)
    finite_only: str = ""
    """Why the rule holds only of finite operands; empty where it holds of all."""
    alone: set[int] = field(default_factory=set)
    """Factors of which only one can be cut at a time: their shards have to know where they are."""
    whole: int | None = None
    """The last factor, of one unit, which all of the op is: cut, one device runs the op, the owner of what it takes and
    makes."""

    def new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def dims(self, shape: Sequence[int], named: Iterable[int | None] | None = None) -> tuple[Dim, ...]:
        """A dimension per size: the given factors, or new ones for None; size 1 has no factor."""
        given = list(named) if named is not None else [None] * len(shape)
        out: list[Dim] = []
        for size, factor in zip(shape, given, strict=True):
            if size == 1:
                out.append(())
            else:
                out.append((self.new(size) if factor is None else factor,))
        return tuple(out)

    def operand(self, position: int) -> tuple[Dim, ...]:
        """Give an operand fresh factors, one per dimension, and record them."""
        dims = self.dims(self.op.shapes[position])
        assert len(self.operands) == position
        self.operands.append(dims)
        return dims

    def block(self, dims: Iterable[Dim], reason: str) -> None:
        for dim in dims:
            for factor in dim:
                self.blocked[factor] = reason

    def reduce(self, dims: Iterable[Dim], reduction: Reduction) -> None:
        for dim in dims:
            for factor in dim:
                self.reductions[factor] = reduction

    def multiplies(self, *groups: tuple[int, ...]) -> None:
        """The op is linear in each group of operands, by factors that the others make. A partial sum passes only where
        these are known to be finite: 0 x inf is NaN, and a device's part may be zero, or of another sign, where the sum
        is not. (A part that is no partial sum is of terms that are nobody else's: that is sound.) And not into a wider
        type where it wraps: a sum of integers must wrap in the same one."""
        op = self.op
        others = lambda group: (i for i in range(len(op.operands)) if i not in group)
        wraps_alike = lambda i: is_inexact(op.dtypes[i]) or op.dtypes[i] == op.result_dtypes[0]
        self.linear = tuple(
            g for g in groups if all(is_known(op, i, np.isfinite) for i in others(g)) and all(map(wraps_alike, g))
        )

    def position(self, dims: tuple[Dim, ...], factor: int) -> int | None:
        """The dimension that is cut when `factor` is; None where the tensor does not have it."""
        if factor == self.whole:
            return 0 if dims else None
        for d, dim in enumerate(dims):
            if factor in dim:
                return d if dim[0] == factor else -1
        return None

    @cached_property
    def shardable(self) -> tuple[int, ...]:
        """Factors that are major wherever they occur, longer than 1 and not blocked."""
        found: list[int] = []
        for factor, size in enumerate(self.sizes):
            if size <= 1 or factor in self.blocked:
                continue
            places = [self.position(t, factor) for t in (*self.operands, *self.results)]
            if -1 not in places and any(p is not None for p in places):
                found.append(factor)
        return tuple(found)

    @cached_property
    def owned(self) -> Triple | None:
        """The triple that cuts `whole`, whoever the owner is: scalars are taken whole, and what is made of them is
        partial, as the owner alone has them. None where there is none: every device has scalars, typed keys and calls
        the host, nothing empty can be cut, and what is carried around loops and branches is what its body says."""
        op = self.op
        if self.one_to_all is None:
            return None
        given = (shape for o, shape in zip(op.operands, op.shapes) if isinstance(o, int))
        cut = [*filter(None, (*op.result_shapes, *given))]
        if not cut or any(shape[0] == 0 for shape in cut):
            return None
        held = (R if isinstance(o, Literal) or not shape else S(0) for o, shape in zip(op.operands, op.shapes))
        made = (S(0) if shape else p for shape, p in zip(op.result_shapes, self.one_to_all.results))
        return Triple(tuple(held), tuple(made), self.whole)

    @cached_property
    def one_to_all(self) -> Triple | None:
        """The triple of which the first device's result is everyone's: all run the op, what the others make counts as
        nothing. None of what carries values around loops and branches, of calls of the host and of typed keys."""
        op = self.op
        if isinstance(op.primitive, Boundary) or op.name in _HOST_CALLBACKS:
            return None
        if any(map(is_extended, (*op.dtypes, *op.result_dtypes))):
            return None
        results = tuple(P("max" if dtype == np.bool_ else "sum") for dtype in op.result_dtypes)
        return Triple((R,) * len(op.operands), results) if all(map(can_be, results, op.result_dtypes)) else None

    @cached_property
    def unruled(self) -> tuple[Triple, ...]:
        """The triples that no rule has a say in: with an owner, whoever it is, and with one device's result."""
        return tuple(t for t in (self.owned, self.one_to_all) if t is not None)

    def agreed(self, triples: Triples, axes: Collection[int]) -> Triples | None:
        """The triples with none along `axes` by which each device runs the op for itself: `one_to_all` instead. None
        where that does not go with the others."""
        once, each = self.one_to_all, (R,) * len(self.op.result_shapes)
        if once is None or not any(triples[a].results == each for a in axes):
            return triples
        found = tuple(once if a in axes and t.results == each else t for a, t in enumerate(triples))
        return found if self._agree(found) else None

    def triple(self, factor: int) -> Triple:
        ins = [_cut(self.position(t, factor)) for t in self.operands]
        if factor in self.reductions:
            partial = P(self.reductions[factor])
            if factor in self.accumulators:
                ins[self.accumulators[factor]] = partial
            outs = [partial if (p := self.position(t, factor)) is None else S(p) for t in self.results]
        else:
            outs = [_cut(self.position(t, factor)) for t in self.results]
        return Triple(tuple(ins), tuple(outs), factor)

    @cached_property
    def triples(self) -> tuple[Triple, ...]:
        """Every triple of the op along one mesh axis, without repeats; the replicated one first."""
        op = self.op
        n_in, n_out = len(op.operands), len(op.results)
        found = [Triple((R,) * n_in, (R,) * n_out)]
        found += [t for t in map(self.triple, self.shardable) if self._literals_fit(t)]
        kinds_of: tuple[tuple[tuple[tuple[int, ...], ...], tuple[Reduction, ...]], ...] = (
            (self.linear, ("sum",)),
            (self.passes, ("max", "min")),
        )
        for groups, kinds in kinds_of:
            for group in groups:
                for kind in kinds:
                    partial = P(kind)
                    ins = tuple(partial if i in group else R for i in range(n_in))
                    t = Triple(ins, (partial,) * n_out)
                    if self._literals_fit(t) and any(isinstance(op.operands[i], int) for i in group):
                        found.append(t)
        found += filter(self._literals_fit, self.extra)
        return tuple(dict.fromkeys(filter(self._dtypes_fit, found)))

    def joint(self, axes: int, owned: bool = False) -> tuple[Triples, ...]:
        """Every way of running the op that is searched on a mesh of that many axes: a triple per axis, a factor that
        several axes cut in each of their `orders`. The replicated one first. `owned`: those too in which it has an
        owner along one, or one device's result is everyone's."""
        key = axes, owned
        if key not in self._joint:
            also = self.unruled if owned else ()
            found = (p for chosen in product((*self.triples, *also), repeat=axes) for p in _orders(chosen))
            self._joint[key] = tuple(dict.fromkeys(filter(self._agree, found)))
        return self._joint[key]

    def cuts(self, triples: Triples) -> Cuts:
        """Every factor that is cut, the mesh axes that cut it, (place among operands and results, dimension) of each
        tensor that has it, and which way each of these is cut."""
        # By identity, as hashing triples costs more than all else; the entry keeps them from being another's.
        if id(triples) not in self._cuts:
            tensors = (*self.operands, *self.results)
            found: list[tuple[int, tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, ...]]] = []
            for factor, axes in sorted(cutting(triples).items()):
                held = ((n, self.position(dims, factor)) for n, dims in enumerate(tensors))
                places = tuple([(n, d) for n, d in held if d is not None])
                placements = (*triples[axes[0]].operands, *triples[axes[0]].results)
                found.append((factor, axes, places, tuple([placements[n].way for n, _ in places])))
            self._cuts[id(triples)] = triples, tuple(found)
        return self._cuts[id(triples)][1]

    @cached_property
    def together(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(place among operands and results, dimension) of all that some triple cuts alike."""
        return tuple(dict.fromkeys(places for t in self.triples for _, _, places, _ in self.cuts((t,))))

    @cached_property
    def _cuts(self) -> dict[int, tuple[Triples, Cuts]]:
        return {}

    def allows(self, triples: Triples) -> bool:
        """Whether the op can be run so, whichever way what its triples cut is cut, as a whole by an owner alone: as if
        they were looked for in `joint`, which has very many for several axes."""
        owners = {p.owner for t in triples if self.is_whole(t) for p in (*t.operands, *t.results) if p.is_sharded}
        if any(map(self.is_whole, triples)) and (len(owners) != 1 or None in owners):
            return False
        bare = ruled(triples)
        minor = {axis: k for axes in cutting(bare).values() for k, axis in enumerate(axes)}
        for axis, t in enumerate(bare):
            alone = t if not t.minor else Triple(_major(t.operands), _major(t.results), t.factor)
            if alone not in self._alone or t != alone.at(minor.get(axis, 0)):
                return False
        return self._agree(bare)

    def is_whole(self, triple: Triple) -> bool:
        """Whether a triple has an owner run the op as a whole."""
        return triple.factor is not None and triple.factor == self.whole

    def owned_by(self, triples: Triples, owner: int) -> Triples:
        """The triples with a position along its axis as the owner, which `owned` leaves open."""
        return tuple(t.along(O(owner).way) if self.is_whole(t) else t for t in triples)

    @cached_property
    def _alone(self) -> frozenset[Triple]:
        return frozenset((*self.triples, *self.unruled))

    @cached_property
    def _joint(self) -> dict[tuple[int, bool], tuple[Triples, ...]]:
        return {}

    def _agree(self, triples: Triples) -> bool:
        """Whether the triples can hold together: placements that fit, an owner along one axis only, and no two factors
        that must be cut alone."""
        tensors = (*zip(*(t.operands for t in triples)), *zip(*(t.results for t in triples)))
        if sum(map(self.is_whole, triples)) > 1 or not all(map(is_consistent, tensors)):
            return False
        return len({t.factor for t in triples} & self.alone) <= 1

    def _literals_fit(self, t: Triple) -> bool:
        """A literal is the same on all devices; only zero is a partial sum of itself."""
        for operand, placement in zip(self.op.operands, t.operands):
            zero = isinstance(operand, Literal) and operand.is_zero
            if isinstance(operand, Literal) and placement not in ((R, P("sum")) if zero else (R,)):
                return False
        return True

    def _dtypes_fit(self, t: Triple) -> bool:
        op = self.op
        return all(map(can_be, (*t.operands, *t.results), (*op.dtypes, *op.result_dtypes)))

    @property
    def lost(self) -> tuple[int, ...]:
        """Factors that could be cut and are in no result, yet leave no partial: always a mistake of the rule."""
        held = {f for t in self.results for dim in t for f in dim}
        return tuple(f for f in self.shardable if f not in held and f not in self.reductions)

    def granule(self, dim: Dim) -> int:
        """Elements of the dimension per unit of its major factor."""
        return prod(self.sizes[f] for f in dim[1:])

    def __str__(self) -> str:
        """Shardy's notation, e.g. `([i, k], [k, j])->([i, j]) {i=8, j=16, k=32} reduction={k}`."""
        names = "ijklmnopqrstuvwxyzabcdefgh"
        name = lambda f: names[f] if f < len(names) else f"z{f}"
        tensor = lambda t: "[" + ", ".join("".join(map(name, d)) or "_" for d in t) + "]"
        side = lambda ts: "(" + ", ".join(map(tensor, ts)) + ")"
        used = sorted({f for t in (*self.operands, *self.results) for d in t for f in d})
        text = (
            f"{side(self.operands)}->{side(self.results)} {{{', '.join(f'{name(f)}={self.sizes[f]}' for f in used)}}}"
        )
        if self.reductions:
            text += f" reduction={{{', '.join(f'{name(f)}:{k}' for f, k in sorted(self.reductions.items()))}}}"
        if self.blocked:
            text += f" need_replication={{{', '.join(map(name, sorted(self.blocked)))}}}"
        return text


def is_known(op: Op, position: int, test: Callable[[Any], Any]) -> bool:
    """Whether an operand is known before the run to pass a test of NumPy's floats: integers do, literals that do."""
    operand = op.operands[position]
    if not is_inexact(op.dtypes[position]):
        return True
    if not isinstance(operand, Literal):
        return False
    value = np.asarray(operand.value)
    return bool(np.all(test(value if np.iscomplexobj(value) else value.astype(np.float64))))


def cutting(triples: Triples) -> dict[int, tuple[int, ...]]:
    """The factors that are cut, each with the mesh axes that cut it, major to minor."""
    found: dict[int, tuple[int, ...]] = {}
    for axis, t in sorted(enumerate(triples), key=lambda t: t[1].minor):
        if t.factor is not None:
            found[t.factor] = (*found.get(t.factor, ()), axis)
    return found


def _orders(triples: Triples) -> Iterable[Triples]:
    """The triples with each factor's axes in each of their `orders`."""
    for minor in minors(cutting(triples).values(), len(triples)):
        yield tuple(t.at(minor.get(axis, 0)) for axis, t in enumerate(triples))


def can_be(placement: Placement, dtype: Any) -> bool:
    """Booleans have no sum, complex numbers no order, typed keys neither. Floats without a zero and a sign have no sum,
    and their smallest is lost where floats are sent as integers (`lower/_ordered_floats.py`)."""
    if not placement.is_partial:
        return True
    if is_extended(dtype) or dtype == jnp.float8_e8m0fnu:
        return False
    if placement == P("sum"):
        return dtype != np.bool_
    return not np.issubdtype(dtype, np.complexfloating)


def _major(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    return tuple([p._replace(minor=0) if p.minor else p for p in placements])


def _cut(position: int | None) -> Placement:
    return R if position is None else S(position)


class Cut(NamedTuple):
    """What one device has of a factor that is cut, in units of the factor: how many, and the first (traced).

    On padded shards `share` is the largest, and `held` how many are the device's own (traced); otherwise None.
    """

    share: int
    offset: Callable[[], Any]
    held: Callable[[], Any] | None = None

    @property
    def end(self) -> Any:
        """Of what is the device's own."""
        return self.share if self.held is None else self.held()


@dataclass(frozen=True)
class Local:
    """What one device knows when it runs an op under one triple per mesh axis: exact local shapes.

    `cuts`: the device's part of every factor that is cut, in shards of shards where several axes cut it.
    `axis_index(axis)` is its position along a mesh axis (traced). `platform`: of the devices, as JAX names it, "" where
    that does not matter.
    """

    op: Op
    factors: Factors
    triples: Triples
    shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    cuts: Mapping[int, Cut]
    axis_index: Callable[[int], Any]
    platform: str = ""

    @property
    def factor(self) -> int | None:
        """The factor that is cut, or None. Here and below: ValueError where several are."""
        if len(self.cuts) > 1:
            raise ValueError(
                f"the factors {sorted(self.cuts)} of {self.factors} are cut, along different mesh axes: look each up "
                "in local.cuts, or name them in `alone`, and only one is cut at a time"
            )
        return next(iter(self.cuts), None)

    @property
    def share(self) -> int:
        """The length of the local shard, in units of the factor that is cut; 0 where none is."""
        factor = self.factor
        return 0 if factor is None else self.cuts[factor].share

    def offset(self) -> Any:
        """The first index of this device's shard, in units of the factor that is cut (an integer, traced)."""
        factor = self.factor
        return jnp.int32(0) if factor is None else self.cuts[factor].offset()

    def result_layout(self, position: int) -> Layout:
        """How a result is left."""
        return tuple(t.results[position] for t in self.triples)

    def cut(self, dim: Dim) -> Cut | None:
        """What the device has of a dimension that is cut, in units of its major factor."""
        return self.cuts.get(dim[0]) if dim else None
