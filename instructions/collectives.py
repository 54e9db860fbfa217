"""Conversions between placements along one mesh axis: the collectives, and the two local steps.

all_reduce      {x | P(op)} -> {x | R}
reduce_scatter  {x | P(sum)} -> {x | S(d)}
all_gather      {x | S(d)} -> {x | R}
all_to_all      {x | S(d)} -> {x | S(e)}
pairwise_all_to_all     the same in rounds: in each a device sends one other its piece, as wide as the round's largest
reshare         {x | S(d)} -> {x | S(d)~1}     to shards of other sizes: rows that change owner move
balanced_reduce_scatter, balanced_all_gather   the same by way of even shards: no device sends blocks of the largest
hierarchical_all_reduce, hierarchical_reduce_scatter, hierarchical_all_gather   the same within hosts and between them
reduce          {x | P(sum)} -> {x | O(i)}     the sum on one device: up a tree
broadcast       {x | O(i)} -> {x | R}          from one device to all: down a tree
slice           {x | R} -> {x | S(d), O(i)}    local, no communication
partial         {x | R} -> {x | P(sum)}        local: the first device keeps the value, the others hold zero

Where several mesh axes cut one dimension, a step adds or removes its minor axis only: what other axes hold stays
where it is. Only what one axis alone cuts is reshared.

`STEPS` is the one table of them. What a step costs along a link stands under its name in `search.cost.network`, what it
is lowered to in `hapsynth.lower._collectives`; all else that is known of a step is told by its entry here. Several may
do the same: the first is what a conversion is by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, prod
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from hapsynth.instructions.layout import Layout, P, Placement, R, cut_axes, cuts_of, is_consistent, way_of

Over = Literal["positions", "hosts", "equal hosts"]
"""What a collective goes over: all positions alike; hosts, within them and between them; or hosts in parts of equally
many positions each, as XLA takes groups."""
Cut = tuple[int, tuple[int, ...], int]
"""(dimension, the mesh axes that cut it, which way) of a layout, as in `cuts_of`."""
EVEN = -1
"""In place of the way that a dimension is cut: in shards that are as even as its rows allow, whatever the sizes are."""

Hosts = tuple[tuple[int, ...], ...]
"""The positions along a mesh axis on each host that it goes over, in order; () where it is one host, or each position
is another, or they are grouped otherwise elsewhere in the mesh: what goes over hosts is nothing of its own there."""


def lines_along(hosts: Sequence[int], lengths: Sequence[int], axis: int) -> list[list[int]]:
    """The host of each position along a mesh axis, for every line of devices along it. `hosts`: of all devices,
    row-major over axes of these `lengths`."""
    return np.moveaxis(np.reshape(hosts, lengths), axis, -1).reshape(-1, lengths[axis]).tolist()


def hosts_along(lines: Sequence[Sequence[int]]) -> Hosts:
    """`lines`: the host of each position, for every line of devices along an axis."""
    found: set[Hosts] = set()
    for line in lines:
        members: dict[int, list[int]] = {}
        for position, host in enumerate(line):
            members.setdefault(host, []).append(position)
        found.add(tuple(map(tuple, members.values())))
    hosts = found.pop()
    return hosts if not found and 1 < len(hosts) < sum(map(len, hosts)) else ()


def are_equal(groups: Sequence[Sequence[int]]) -> bool:
    """Whether all groups, as of the positions of each host, have equally many members."""
    return len(set(map(len, groups))) == 1


def over_parts(hosts: Hosts, over: Over) -> Hosts:
    """Hosts as what goes over them takes them. Parts of equally many are as large as can be: of 8, 8 and 4 of 4."""
    if over == "hosts":
        return hosts
    size = gcd(*map(len, hosts))
    return tuple(host[at : at + size] for host in hosts for at in range(0, len(host), size))


def groups_between(hosts: Hosts) -> tuple[tuple[int, ...], ...]:
    """One position of each host: where these have equally many, those at each place; else the first."""
    places = len(hosts[0]) if are_equal(hosts) else 1
    return tuple(tuple(host[place] for host in hosts) for place in range(places))


def tree_rounds(n: int) -> int:
    """Levels of a binary tree of `n` devices: in each, every other one that has something sends it on."""
    return (n - 1).bit_length()


class Block(NamedTuple):
    """What a device sends at once: the largest shard under a layout, or the largest part of it that the cut `part`
    makes. `of`: the cut of the same dimension that the layout has, of whose shards those parts are."""

    layout: Layout
    part: Cut | None = None
    of: Cut | None = None

    def nbytes(self, whole: float, share: Callable[[int, tuple[int, ...], int], float]) -> float:
        """Of a value of `whole` bytes, by the share of each cut that a block holds."""
        held = whole * prod(share(*cut) for cut in cuts_of(self.layout))
        return held if self.part is None else held * (share(*self.part) / (share(*self.of) if self.of else 1.0))

    @property
    def times(self) -> tuple[Cut, ...]:
        """The cuts whose shares its bytes are multiplied by."""
        return (*cuts_of(self.layout), *((self.part,) if self.part else ()))

    @property
    def over(self) -> tuple[Cut, ...]:
        """The cuts whose shares its bytes are divided by."""
        return (self.of,) if self.of else ()

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """How a block is cut: each dimension once."""
        if self.part is None:
            return cuts_of(self.layout)
        return (*(cut for cut in cuts_of(self.layout) if cut[0] != self.part[0]), self.part)


class Moved(NamedTuple):
    """The rows of a dimension that change their owner between two cuts of it, of what the cuts `around` leave."""

    old: Cut
    new: Cut
    around: tuple[Cut, ...]


class Exchanged(NamedTuple):
    """The pieces that a cut of one dimension makes of the shards of another, of what the cuts `around` leave: from each
    position to each, those that are equally far apart at once."""

    old: Cut
    new: Cut
    around: tuple[Cut, ...]


Traffic = Block | Moved | Exchanged


class Wired(NamedTuple):
    """An array that a collective takes and gives, padded to the largest block: how a block is cut, how many a device
    sends, and how many it then has. `moved`: two cuts of another dimension, of which it has the rows that change owner,
    the longest piece at each distance; or of two others, of which it has the pieces, the largest at each distance."""

    cuts: tuple[Cut, ...]
    sent: int
    given: int
    moved: tuple[Cut, Cut] | None = None


@dataclass(frozen=True, eq=False)
class Collective:
    """A step that turns one placement along a mesh axis into another. Local ones communicate nothing."""

    name: str
    turns: Callable[[Placement, Placement], bool]
    """Whether it turns one placement into another."""
    communicates: bool = True
    splits: bool = False
    """Whether a device sends each other one a block of its own: what it sends is cut along the target's dimension."""
    joins: bool = False
    """Whether a device has a block of each other one then: what it receives is joined along the source's dimension."""
    in_place: bool = False
    """Whether what it gives takes the memory of what it takes."""
    bundled: bool = True
    """Whether small ones that wait for the same go as one: what each sends is laid out flat, whatever its shape."""
    over: Over = "positions"

    recuts: ClassVar[bool] = False
    """Whether it is between two cuts of one dimension; what it sends is then `Moved`."""
    balances: ClassVar[bool] = False
    """Whether it goes by way of even shards."""
    in_rounds: ClassVar[bool] = False
    """Whether it sends each piece by itself; what it sends is then `Exchanged`."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the collectives that it is priced as, as `sends` has them; none of a local step."""
        return (self.name,) if self.communicates else ()

    def goes_over(self, hosts: Hosts) -> bool:
        """Whether it can be run along an axis over these hosts."""
        if self.over == "positions":
            return True
        return len(over_parts(hosts, self.over)) < sum(map(len, hosts))

    def traffic(self, source: Layout, target: Layout, axis: int) -> Traffic:
        """What is sent, in the units that its costs count."""
        if not self.splits:
            return Block(source)
        if not self.joins:
            return Block(target)
        dim = target[axis].dim
        axes, way = cut_axes(target, dim), way_of(target, dim)
        return Block(source, (dim, axes, way), (dim, axes[:-1], way) if len(axes) > 1 else None)

    def sends(self, source: Layout, target: Layout, axis: int) -> tuple[tuple[str, Traffic], ...]:
        """What is sent, part by part, each at the price of the collective that it is named after."""
        return ((self.name, self.traffic(source, target, axis)),)

    def wired(self, source: Layout, target: Layout, axis: int, n: int) -> tuple[Wired, ...]:
        """The arrays on the wire along an axis of `n` devices."""
        block = self.traffic(source, target, axis)
        assert isinstance(block, Block)
        return (Wired(block.cuts, n if self.splits else 1, n if self.joins else 1),)


@dataclass(frozen=True, eq=False)
class Reshare(Collective):
    """From shards of some sizes to others: each row goes straight to its new owner."""

    recuts: ClassVar[bool] = True

    def traffic(self, source: Layout, target: Layout, axis: int) -> Moved:
        return _moved(source, target, axis)

    def wired(self, source: Layout, target: Layout, axis: int, n: int) -> tuple[Wired, ...]:
        moved = self.traffic(source, target, axis)
        # The shard, which stays, and the pieces of it that go elsewhere.
        return Wired(cuts_of(source), 1, 1), Wired(moved.around, 1, 1, (moved.old, moved.new))


@dataclass(frozen=True, eq=False)
class Pairwise(Collective):
    """An all-to-all in rounds of permutes, round k between devices that are k places apart (MPI's pairwise exchange): a
    round is as wide as its own largest piece, where all blocks are as wide as the largest of all otherwise."""

    in_rounds: ClassVar[bool] = True
    splits: bool = True
    joins: bool = True
    in_place: bool = True
    bundled: bool = False

    def traffic(self, source: Layout, target: Layout, axis: int) -> Exchanged:
        old, new = (next(cut for cut in cuts_of(layout) if cut[0] == layout[axis].dim) for layout in (source, target))
        return Exchanged(old, new, tuple(cut for cut in cuts_of(source) if cut[0] not in (old[0], new[0])))

    def wired(self, source: Layout, target: Layout, axis: int, n: int) -> tuple[Wired, ...]:
        pieces = self.traffic(source, target, axis)
        return (Wired(pieces.around, 1, 1, (pieces.old, pieces.new)),)


@dataclass(frozen=True, eq=False)
class Balanced(Collective):
    """A collective of even shards, and before or after it rows that change their owner: what it takes grows with the
    largest shard once, where each device sends blocks of that size otherwise. `even`: the name of that collective."""

    balances: ClassVar[bool] = True
    even: str = ""
    bundled: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        return RESHARE, self.even

    def sends(self, source: Layout, target: Layout, axis: int) -> tuple[tuple[str, Traffic], ...]:
        evenly = _evenly(source if source[axis].is_sharded else target, axis)
        ends = (evenly, target) if source[axis].is_sharded else (source, evenly)
        return (RESHARE, self._moved(source, target, axis)), (self.even, STEPS[self.even].traffic(*ends, axis))

    def wired(self, source: Layout, target: Layout, axis: int, n: int) -> tuple[Wired, ...]:
        moved = self._moved(source, target, axis)
        # As of a reshare, and on the other side all even shards.
        if source[axis].is_sharded:
            pieces = Wired(moved.around, 1, 0, (moved.old, moved.new))
            return Wired(cuts_of(source), 1, 0), pieces, Wired(cuts_of(_evenly(source, axis)), 0, n)
        evenly = cuts_of(_evenly(target, axis))
        return Wired(evenly, n, 0), Wired(evenly, 0, 1), Wired(moved.around, 0, 1, (moved.old, moved.new))

    def _moved(self, source: Layout, target: Layout, axis: int) -> Moved:
        if source[axis].is_sharded:
            return _moved(source, _evenly(source, axis), axis)
        return _moved(_evenly(target, axis), target, axis)


def _evenly(layout: Layout, axis: int) -> Layout:
    """With what an axis cuts in even shards."""
    return (*layout[:axis], layout[axis]._replace(way=EVEN), *layout[axis + 1 :])


def _moved(source: Layout, target: Layout, axis: int) -> Moved:
    """Between two layouts that cut a dimension in unlike shards."""
    dim = source[axis].dim
    old, new = (next(cut for cut in cuts_of(layout) if cut[0] == dim) for layout in (source, target))
    return Moved(old, new, tuple(cut for cut in cuts_of(source) if cut != old))


def _is_alone(p: Placement) -> bool:
    """Whether one axis cuts the dimension alone, where a step along that axis is to be done."""
    return p.is_cut and not p.minor


def _of(source: str, target: str) -> Callable[[Placement, Placement], bool]:
    """Whether placements are of these kinds."""
    return lambda p, q: (p.kind, q.kind) == (source, target)


RESHARE = "reshare"
STEPS: dict[str, Collective] = {
    step.name: step
    for step in (
        Collective("all_reduce", _of("P", "R"), in_place=True),
        Collective("reduce_scatter", lambda p, q: p == P("sum") and q.is_cut, splits=True),
        Collective("all_gather", lambda p, q: p.is_cut and q == R, joins=True),
        Collective("all_to_all", lambda p, q: p.is_cut and q.is_cut and p.dim != q.dim, splits=True, joins=True),
        Pairwise("pairwise_all_to_all", lambda p, q: p.is_cut and q.is_cut and p.dim != q.dim),
        Reshare(RESHARE, lambda p, q: p.is_cut and q.is_cut and q == p._replace(way=q.way) != p, bundled=False),
        Balanced(
            "balanced_reduce_scatter",
            lambda p, q: p == P("sum") and _is_alone(q),
            even="reduce_scatter",
        ),
        Balanced("balanced_all_gather", lambda p, q: _is_alone(p) and q.kind == "R", even="all_gather"),
        Collective("hierarchical_all_reduce", lambda p, q: p == P("sum") and q == R, over="hosts"),
        Collective(
            "hierarchical_reduce_scatter", lambda p, q: p == P("sum") and q.is_cut, splits=True, over="equal hosts"
        ),
        Collective("hierarchical_all_gather", lambda p, q: p.is_cut and q == R, joins=True, over="equal hosts"),
        Collective("reduce", lambda p, q: p == P("sum") and q.owner is not None),
        Collective("broadcast", lambda p, q: p.owner is not None and q == R),
        Collective("slice", _of("R", "S"), communicates=False),
        Collective("partial", lambda p, q: _of("R", "P")(p, q) and q.reduction == "sum", communicates=False),
    )
}
"""By name; of those that turn one placement into the same other, the first is the usual one."""


@cache
def steps_between(source: Placement, target: Placement) -> tuple[Collective, ...]:
    """Every single step that turns one placement into another: none where it takes more or cannot be done."""
    return tuple(step for step in STEPS.values() if step.turns(source, target))


def step_between(source: Placement, target: Placement) -> Collective | None:
    """The usual one of them, or None."""
    return next(iter(steps_between(source, target)), None)


def axis_between(source: Layout, target: Layout) -> int | None:
    """The mesh axis along which a single step turns one layout into another, or None where it takes more or cannot be
    done."""
    changed = [a for a, (p, q) in enumerate(zip(source, target, strict=True)) if p != q]
    if len(changed) != 1 or not (is_consistent(source) and is_consistent(target)):
        return None
    axis = changed[0]
    for layout in (source, target):
        if layout[axis].is_sharded and cut_axes(layout, layout[axis].dim)[-1] != axis:
            return None
    return axis if steps_between(source[axis], target[axis]) else None
