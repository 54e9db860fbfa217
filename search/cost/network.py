"""What communication along each mesh axis goes over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import pairwise, product
from math import fsum, prod
from typing import ClassVar, NamedTuple

import numpy as np
from scipy.sparse import coo_array, csr_array

from hapsynth.cluster.cluster import DEFAULT_AXIS, Cluster, ClusterError
from hapsynth.cluster.curves import Curve, Lines
from hapsynth.cluster.links import HostLinks, Link
from hapsynth.instructions.collectives import (
    EVEN,
    STEPS,
    Block,
    Collective,
    Exchanged,
    Hosts,
    Moved,
    Over,
    Traffic,
    are_equal,
    groups_between,
    hosts_along,
    lines_along,
    over_parts,
    tree_rounds,
)
from hapsynth.instructions.layout import MOST_AXES
from hapsynth.instructions.staging import gloo
from hapsynth.instructions.staging.moved_rows import even_rows, moved, rounds
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.search.cost.device_speed import Floats, Ints
from hapsynth.search.cost.least_rounds import least_rounds, least_rounds_of_each
from hapsynth.search.cost.share_range import Mask, ShareRange

Largest = Callable[[int, tuple[int, ...], int], float]
"""(dimension, the axes that cut it, which way) -> the fraction that its largest shard holds."""


def mesh_axes(cluster: Cluster) -> tuple[tuple[str, int], ...]:
    """(name, size) of the mesh axes that are planned for: those longer than 1, or where that leaves at most one a
    single one over all devices. ClusterError where there are more than a layout may have."""
    axes = tuple((name, size) for name, size in cluster.axes if size > 1)
    if len(axes) > MOST_AXES:
        raise ClusterError(
            f"cluster {cluster.name!r}: {len(axes)} mesh axes are longer than 1 ({dict(axes)}), and plans are made "
            f"along {MOST_AXES} at most; make one of those that you would cut alike, e.g. "
            f"{{{axes[0][0]!r}: {axes[0][1] * axes[1][1]}, ...}}, or give a mesh of one axis"
        )
    return axes if len(axes) > 1 else ((DEFAULT_AXIS, cluster.n),)


@dataclass(frozen=True)
class AxisLink:
    """One mesh axis of `n` positions. Every device is in one group of them, and all groups communicate at once.

    `latency`: seconds of a message over the slowest link. `beta`: seconds per byte that a ring of each group passes on,
    where groups share a host's link that of all of them. `swapped`: how many blocks of an all-to-all cross the slowest
    link, in units of what `beta` counts; `swap_part`: what they take over what `beta` would give them, less than 1
    where a ring's slowest link is inside hosts. `ring_s`: seconds of a message around a ring, from one device through
    all others; `tree_s`: up a tree, a chain inside hosts and binary between them; `direct_s`: of messages from one
    device to each other, one after the other. `slowest`: the link with the most to send for its bandwidth. `curves`:
    seconds by wire bytes of the collectives that were measured, which go before these. `levels`: of its hosts, where it
    goes over several, by what goes over them. `shifts`: seconds per byte of a permute in which every device sends to
    the one that is 1, 2, ... n - 1 places further on, around the axis: of a host several may cross its link at once.
    `loads`: what permutes of some of the devices go through.
    """

    n: int
    latency: float
    beta: float
    swapped: float
    ring_s: float
    tree_s: float
    direct_s: float
    slowest: str = "[network]"
    swap_part: float = 1.0
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    levels: Mapping[Over, Levels] = field(default_factory=dict[Over, "Levels"])
    shifts: tuple[float, ...] = ()
    loads: PairLoads | None = field(default=None, compare=False, repr=False)
    _paces: dict[str, Curve | Lines] = field(
        init=False, default_factory=dict[str, "Curve | Lines"], compare=False, repr=False
    )

    @property
    def hosts(self) -> Hosts:
        """Those that it goes over."""
        return self.levels["hosts"].hosts if self.levels else ()

    def offers(self, step: Collective) -> bool:
        """Whether a step that is not the usual one can be run along it. Where collectives were measured, what it is
        priced by has to be, too: no measured time is compared with a modelled one."""
        needed = {name for part in step.parts for name in PRICES[part].measured_as or (part,)}
        measured = not self.curves or self.curves.keys() >= needed
        return measured and step.goes_over(self.hosts)

    @property
    def permute(self) -> tuple[float, float]:
        """Seconds of a permute however little it sends, and of each byte; where it was measured, by the straight line
        from none to the most."""
        if (curve := self.curves.get("reshare")) is None:
            return self.latency, self.beta
        start, (most, end) = float(curve.seconds(0.0)), curve.points[-1]
        return start, (end - start) / most

    @property
    def rounds(self) -> tuple[float, Floats]:
        """Seconds of each permute of `shifts` however little it sends, and of each byte [n - 1]. All devices take part
        in each, so that it begins with a latency in which they come to it, as a collective does; as they did where it
        was measured."""
        per_byte = np.array(self.shifts)
        if "reshare" not in self.curves:
            return 2.0 * self.latency, per_byte
        start, slope = self.permute
        return start, per_byte * (slope / per_byte[0])

    def permuted(self, sends: Mask) -> Floats:
        """Seconds per byte of a permute at each distance, as of `moved_rows.moved`, in which these positions send to
        these [..., n, n]; where it was measured, as of all devices at that distance around the axis."""
        if "reshare" not in self.curves:
            assert self.loads is not None
            return self.loads.per_byte(sends)
        return self.rounds[1][np.delete(np.arange(1 - self.n, self.n), self.n - 1) % self.n - 1]

    @property
    def least_permuted(self) -> float:
        """The least of them, whoever sends."""
        if "reshare" not in self.curves:
            assert self.loads is not None
            return self.loads.least
        return float(self.rounds[1].min())

    def pace(self, step: str) -> Curve | Lines:
        """Seconds of one collective by the bytes that `wire_bytes` says."""
        if step not in self._paces:
            self._paces[step] = self.curves.get(step) or PRICES[step].lines(self)
        return self._paces[step]

    def seconds(self, step: str, wire: float) -> float:
        """Of one collective that sends `wire` bytes; never falls as they grow."""
        return float(self.pace(step).seconds(wire))

    def least_per_byte(self, step: str, most: float) -> float:
        """The least seconds per byte of one that sends up to `most`: at a measured point, or at that many."""
        curve = self.curves.get(step)
        amounts = [] if curve is None else [amount for amount, _ in curve.points if 0 < amount < most]
        return min(self.seconds(step, amount) / amount for amount in (*amounts, most))

    def wire_bytes(self, step: str, block: float) -> float:
        """Bytes that one group sends over its slowest link, padding included, by the algorithm that sends the fewest.
        `block`: of what a device sends at once (`instructions.collectives.Block`), or of all rows that may move."""
        return PRICES[step].blocks(self) * block


class PairLoads:
    """Seconds per byte that each pair of positions along an axis adds to all that it goes through, in a permute of all
    groups at once.

    `lines`: the host of each position, for every group."""

    def __init__(self, cluster: Cluster, lines: Sequence[Sequence[int]]) -> None:
        line = np.array(lines)
        n = line.shape[1]
        i, j = np.nonzero(~np.eye(n, dtype=bool))
        medium, pair, seconds = _gone_through(cluster, line[:, i].ravel(), line[:, j].ravel())
        pair %= max(i.size, 1)
        # By distance, and by what is gone through.
        distance, width = (j - i)[pair], int(medium.max(initial=0)) + 1
        keys, row = np.unique((distance + n) * width + medium, return_inverse=True)
        at = row, (i * n + j)[pair]
        self._loads: csr_array = coo_array((seconds, at), shape=(keys.size, n * n)).tocsr()
        self._first = np.flatnonzero(np.diff(keys // width, prepend=-1))

    def per_byte(self, sends: Mask) -> Floats:
        """Of the permutes at each distance, as of `moved_rows.moved`, in which these positions send to these [..., n,
        n]."""
        every = self._loads @ sends.reshape(-1, sends.shape[-1] ** 2).T.astype(np.float64)
        found = np.maximum.reduceat(every, self._first, axis=0).T
        return found.reshape(*sends.shape[:-2], self._first.size)

    @cached_property
    def least(self) -> float:
        """Of a permute of any one pair at least."""
        each = self._loads.max(axis=0).toarray()
        return float(each[each > 0].min())


class Levels(NamedTuple):
    """The hosts along an axis, or their parts. `inside`: the link of the devices of each, all hosts at once. `between`:
    of those at one place in their hosts, where hosts have equally many all such groups at once; else of the first of
    each host."""

    hosts: Hosts
    inside: AxisLink
    between: AxisLink


class Sent(NamedTuple):
    """What one collective comes to along an axis.

    `wire_bytes`: what one group sends over its slowest link, padding included, in `moving_s` seconds; `latency_s`:
    those that it takes however little it sends; `turned_s`: those of what reads it, as `CostModel.turning` says.
    """

    wire_bytes: float = 0.0
    latency_s: float = 0.0
    moving_s: float = 0.0
    turned_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.moving_s + self.latency_s + self.turned_s

    def then(self, other: Sent) -> Sent:
        """Both, one after the other."""
        return Sent(*(mine + its for mine, its in zip(self, other, strict=True)))


def _unknown(dim: int, axes: tuple[int, ...], way: int) -> Floats:
    raise AssertionError(f"what all positions hold of dimension {dim} is not known")


@dataclass(frozen=True)
class Shares:
    """How dimensions are cut: the largest share, and the fraction that each position along the axes holds."""

    largest: Largest
    each: Callable[[int, tuple[int, ...], int], Floats] = _unknown

    def evened(self, rows: Sequence[int], lengths: Sequence[int]) -> Shares:
        """With those of even cuts too, of a value of these `rows` by dimension; `lengths`: of the mesh axes."""

        def evenly(dim: int, axes: tuple[int, ...]) -> Floats:
            return even_fractions(rows[dim], prod(lengths[a] for a in axes))

        return Shares(
            lambda dim, axes, way: float(evenly(dim, axes)[0]) if way == EVEN else self.largest(dim, axes, way),
            lambda dim, axes, way: evenly(dim, axes) if way == EVEN else self.each(dim, axes, way),
        )


@cache
def even_fractions(rows: int, n: int) -> Floats:
    """The fraction of a dimension that each of `n` shards has that are as even as can be."""
    return np.array(even_rows(rows, n), dtype=np.float64) / max(rows, 1)


@dataclass(frozen=True)
class Even:
    """A dimension of some rows in as many shards as there are positions, as even as can be."""

    rows: int
    positions: int

    @staticmethod
    def of(rows: int, positions: int) -> Even:
        """One for all whose shards are the same fractions."""
        return Even(rows if rows % positions else positions, positions)

    @property
    def shares(self) -> Floats:
        return even_fractions(self.rows, self.positions)


@dataclass(frozen=True)
class Algorithm:
    """One way to run a collective, alpha-beta: `latency`, seconds of the messages that wait for one another, however
    little they hold; `sent`, bytes over the slowest link for each byte of the algorithm that sends the fewest."""

    latency: Callable[[AxisLink], float]
    sent: Callable[[AxisLink], float] = lambda link: 1.0


@dataclass(frozen=True)
class Price:
    """What a collective costs along an axis, in proportion to the largest block that a device sends.

    `blocks`: how many of these one group sends over its slowest link, by the first of the `algorithms`. Of these the
    one that takes the least is run.
    """

    blocks: Callable[[AxisLink], float]
    algorithms: tuple[Algorithm, ...]

    measured_as: ClassVar[tuple[str, ...]] = ()
    """What says how long it takes where collectives were measured; () for itself."""

    def lines(self, link: AxisLink) -> Lines:
        """Seconds by the bytes that one group sends over its slowest link by the first algorithm."""
        return Lines.least((a.latency(link), a.sent(link) * link.beta) for a in self.algorithms)

    def sent(self, link: AxisLink, step: str, nbytes: float, traffic: Traffic, shares: Shares) -> Sent:
        """Of a value of `nbytes`."""
        assert isinstance(traffic, Block)
        wire = self.blocks(link) * traffic.nbytes(nbytes, shares.largest)
        latency = link.seconds(step, 0.0)
        return Sent(wire, latency, link.seconds(step, wire) - latency)

    def exchanges(
        self, link: AxisLink, step: str, nbytes: float, traffic: Traffic, shares: Shares, options: LoweringOptions
    ) -> int:
        """Those that wait for one another where gloo sends a value of `nbytes`."""
        assert isinstance(traffic, Block)
        sent = traffic.nbytes(nbytes, shares.largest) * (link.n if STEPS[step].splits else 1)
        return gloo.exchanges(step, sent, link.n, link.hosts, options)


class PriceOfMoves(Price):
    """In proportion to the rows that change their owner: a permute for each distance that some move, padded to the
    longest piece, at the pace of what the most for its bandwidth of these rows go through."""

    def between(self, link: AxisLink, old: Floats, new: Floats, nbytes: Floats | float) -> tuple[Floats, Floats]:
        """(seconds of latency, of sending) between shards of these fractions [..., positions] of what is `nbytes` all
        together."""
        longest, sends = moved(old, new)
        latency = link.permute[0] * (longest > 0).sum(axis=-1)
        return latency, (longest * link.permuted(sends)).sum(axis=-1) * nbytes

    def least(self, link: AxisLink, nbytes: float, part: float) -> float:
        """Seconds, at least, where some position's share of `nbytes` becomes the greater or smaller by a part: it has
        that to send or to receive."""
        return link.permute[0] + nbytes * part * link.least_permuted

    def sent(self, link: AxisLink, step: str, nbytes: float, traffic: Traffic, shares: Shares) -> Sent:
        assert isinstance(traffic, Moved)
        whole = nbytes * prod(shares.largest(*cut) for cut in traffic.around)
        latency, moving = map(float, self.between(link, shares.each(*traffic.old), shares.each(*traffic.new), whole))
        # In bytes of the slowest link, as of what was measured around the axis.
        return Sent(moving * link.shifts[0] / (link.rounds[1][0] * link.beta), latency, moving)

    def exchanges(
        self, link: AxisLink, step: str, nbytes: float, traffic: Traffic, shares: Shares, options: LoweringOptions
    ) -> int:
        assert isinstance(traffic, Moved)
        longest, _ = moved(shares.each(*traffic.old), shares.each(*traffic.new))
        return int((longest > 0).sum())


class PriceOfRounds(Price):
    """Of each round a permute, in proportion to its largest piece.

    In all it counts no less than the collective of even blocks would take. Less is sent only where one device has more
    than all but an even share of both dimensions; without that floor, nothing would be known of what an all-to-all
    takes at least, whatever the ratios."""

    measured_as: ClassVar[tuple[str, ...]] = ("reshare", "all_to_all")

    def between(
        self, link: AxisLink, old: Floats, new: Floats, nbytes: Floats | float
    ) -> tuple[Floats, Floats, Floats]:
        """(bytes of all rounds in those of the slowest link, seconds of latency, of sending) of `nbytes` with the two
        dimensions whole, cut in these fractions [..., positions]."""
        start, per_byte = link.rounds
        pieces = rounds(old, new, link.n)[..., 1:]
        pieces = np.where(pieces > _NOTHING, pieces, 0.0)
        latency = start * (pieces > 0).sum(axis=-1)
        seconds = (pieces @ per_byte) * nbytes
        least = self.evenly(link, nbytes, old.shape[-1] * new.shape[-1])
        return (pieces @ np.array(link.shifts)) / link.beta * nbytes, latency, np.maximum(seconds, least - latency)

    def evenly(self, link: AxisLink, nbytes: Floats | float, blocks: int) -> Floats:
        """Seconds of as many even blocks, padded or not."""
        return np.asarray(link.pace(_USUAL).seconds(PRICES[_USUAL].blocks(link) * np.asarray(nbytes) / blocks))

    def least(self, link: AxisLink, nbytes: float, old: ShareRange, new: ShareRange, fast: Mask) -> float:
        """Seconds, at least, where the shares of the two dimensions are in these ranges. `fast`: which positions are
        the fastest."""
        return float(self._seconds(link, nbytes, *least_rounds(old, new, fast, link.rounds[1].tolist())))

    def least_of_each(
        self,
        link: AxisLink,
        nbytes: float,
        varied: Sequence[ShareRange],
        others: Sequence[ShareRange],
        fast: Mask,
        *,
        backward: bool,
    ) -> Floats:
        """As `least`, of each of some ranges of one dimension, the one whose shards are sent or, `backward`, the other,
        beside each of some of the other [others, ranges]; of the other's shares each is taken at its least."""
        weights = link.rounds[1].tolist()
        return self._seconds(link, nbytes, *least_rounds_of_each(varied, others, fast, weights, backward=backward))

    def _seconds(self, link: AxisLink, nbytes: float, number: Ints | int, sent: Floats | float) -> Floats:
        return np.maximum(link.rounds[0] * number + nbytes * sent, self.evenly(link, nbytes, link.n**2))

    def sent(self, link: AxisLink, step: str, nbytes: float, traffic: Traffic, shares: Shares) -> Sent:
        assert isinstance(traffic, Exchanged)
        whole = nbytes * prod(shares.largest(*cut) for cut in traffic.around)
        return Sent(*map(float, self.between(link, shares.each(*traffic.old), shares.each(*traffic.new), whole)))

    def exchanges(
        self, link: AxisLink, step: str, nbytes: float, traffic: Traffic, shares: Shares, options: LoweringOptions
    ) -> int:
        assert isinstance(traffic, Exchanged)
        pieces = rounds(shares.each(*traffic.old), shares.each(*traffic.new), link.n)[1:]
        return int((pieces > _NOTHING).sum())


_USUAL = "all_to_all"
_NOTHING = 1e-9
"""The fraction of a tensor that is rounding, and no piece."""

Stage = tuple[str, AxisLink, float]
"""(collective, what it goes over, the part of what a device has that it counts as a block)"""


@dataclass(frozen=True)
class PriceOfLevels(Price):
    """One within hosts and one between them, after one another: what these cost, each by its own links. Its bytes are
    those that leave a host."""

    over: Over = "hosts"
    stages: Callable[[Levels], Sequence[Stage]] = lambda levels: ()

    def lines(self, link: AxisLink) -> Lines:
        blocks, ways = self.blocks(link), list[list[tuple[float, float]]]()
        for step, over, part in self.stages(link.levels[self.over]):
            price = PRICES[step]
            times = price.blocks(over) * part / blocks
            ways.append([(start, slope * times) for start, slope in price.lines(over).lines])
        return Lines.least((fsum(s for s, _ in way), fsum(k for _, k in way)) for way in product(*ways))


def _reduced(levels: Levels) -> Sequence[Stage]:
    """Where hosts have equally many devices, each has its part between them; else the first of each has all."""
    inside, between = levels.inside, levels.between
    if are_equal(levels.hosts):
        part = 1.0 / inside.n
        return ("reduce_scatter", inside, part), ("all_reduce", between, part), ("all_gather", inside, part)
    return ("all_reduce", inside, 1.0), ("all_reduce", between, 1.0), ("all_reduce", inside, 1.0)


def _scattered(levels: Levels) -> Sequence[Stage]:
    return ("reduce_scatter", levels.inside, len(levels.hosts)), ("reduce_scatter", levels.between, 1.0)


def _gathered(levels: Levels) -> Sequence[Stage]:
    return ("all_gather", levels.between, 1.0), ("all_gather", levels.inside, len(levels.hosts))


def _leaving(link: AxisLink) -> float:
    """How many blocks of all devices of a host, or part of one, those of others are sent, around a ring of these."""
    levels = link.levels["equal hosts"]
    return (len(levels.hosts) - 1) * levels.inside.n


# Each begins with a message's latency, in which all devices come to it: in NCCL's model 6.6 to 14 us, where a hop takes
# up to 14. So an all-reduce takes less than its halves.
ROUND = Algorithm(lambda link: link.latency + link.ring_s)
"""Once around a ring."""
TWICE_ROUND = Algorithm(lambda link: link.latency + 2.0 * link.ring_s)
UP_AND_DOWN = Algorithm(lambda link: link.latency + 2.0 * link.tree_s, lambda link: link.n / max(link.n - 1, 1))
"""Up a tree and down again, all of it. Two trees, of which each has the other's leaves inside, take half each."""
ONE_WAY = Algorithm(lambda link: (1 + tree_rounds(link.n)) * link.latency)
"""Up a binary tree of devices or down it, whole messages one after the other."""
TO_EACH = Algorithm(lambda link: link.latency + link.direct_s, lambda link: link.swap_part)
MOVES = PriceOfMoves(lambda link: 1.0, (Algorithm(lambda link: link.latency),))

PRICES: dict[str, Price] = {
    # As NCCL has them (src/graph/tuning.cc): rings, and for all-reduce trees; in an all-to-all the devices of a host
    # share its link.
    "all_reduce": Price(lambda link: 2.0 * (link.n - 1) / link.n, (TWICE_ROUND, UP_AND_DOWN)),
    "reduce_scatter": Price(lambda link: link.n - 1, (ROUND,)),
    "all_gather": Price(lambda link: link.n - 1, (ROUND,)),
    "all_to_all": Price(lambda link: link.swapped, (TO_EACH,)),
    "pairwise_all_to_all": PriceOfRounds(lambda link: 1.0, ()),
    "reduce": Price(lambda link: tree_rounds(link.n), (ONE_WAY,)),
    "broadcast": Price(lambda link: tree_rounds(link.n), (ONE_WAY,)),
    "reshare": MOVES,
    "hierarchical_all_reduce": PriceOfLevels(
        lambda link: 2.0 * (len(link.hosts) - 1) / len(link.hosts), (), stages=_reduced
    ),
    "hierarchical_reduce_scatter": PriceOfLevels(_leaving, (), "equal hosts", _scattered),
    "hierarchical_all_gather": PriceOfLevels(_leaving, (), "equal hosts", _gathered),
}
"""Of every collective in `instructions.collectives.STEPS` that is not made of others."""


def axis_links(cluster: Cluster, axes: Sequence[tuple[str, int]]) -> tuple[AxisLink, ...]:
    """The link of each axis (name, size) of a mesh, devices row-major."""
    lengths = [n for _, n in axes]
    found: list[AxisLink] = []
    for a, (name, n) in enumerate(axes):
        lines = lines_along(cluster.hosts, lengths, a)
        curves, levels = cluster.collectives_along(name, n), _levels(cluster, lines)
        shifts, loads = _shifts(cluster, lines), PairLoads(cluster, lines)
        found.append(replace(_link(cluster, lines), curves=curves, levels=levels, shifts=shifts, loads=loads))
    return tuple(found)


def _shifts(cluster: Cluster, lines: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """As of `AxisLink`. `lines`: the host of each position along an axis, for each of its groups."""
    line = np.array(lines)
    return tuple(permute_per_byte(cluster, line, np.roll(line, -away, axis=1)) for away in range(1, line.shape[1]))


def permute_per_byte(cluster: Cluster, senders: np.ndarray, receivers: np.ndarray) -> float:
    """Seconds per byte of a permute, in which these hosts send to these as much each [pairs], all at once."""
    medium, _, seconds = _gone_through(cluster, senders.ravel(), receivers.ravel())
    return float(np.bincount(medium, seconds).max(initial=0.0))


def _gone_through(cluster: Cluster, senders: Ints, receivers: Ints) -> tuple[Ints, Ints, Floats]:
    """(a number of it, which pair, seconds per byte) of each way out of a host, way into one and link of two hosts that
    each pair of hosts [pairs] goes through; a pair inside a host has what it goes through for itself."""
    hosts, numbers = np.unique(np.array([senders, receivers]), return_inverse=True)
    a, b = numbers.reshape(2, -1)
    n, way = hosts.size, a * hosts.size + b
    inside = np.array([1.0 / cluster.inside(host).bandwidth for host in hosts.tolist()])
    out = np.array([1.0 / cluster.nic(host).bandwidth for host in hosts.tolist()])
    between = np.zeros(n * n)
    for one in np.unique(way[a != b]).tolist() if cluster.pairs else ():
        if pair := _pair(cluster, *hosts[[*divmod(one, n)]].tolist()):
            between[one] = 1.0 / pair.link.bandwidth
    within, own = np.flatnonzero(a == b), np.flatnonzero(between[way] > 0)
    shared = np.flatnonzero((a != b) & (between[way] == 0))
    return (
        np.concatenate([a[shared], n + b[shared], 2 * n + way[own], 2 * n + n * n + within]),
        np.concatenate([shared, shared, own, within]),
        np.concatenate([out[a[shared]], out[b[shared]], between[way[own]], inside[a[within]]]),
    )


def _levels(cluster: Cluster, lines: Sequence[Sequence[int]]) -> dict[Over, Levels]:
    """`lines`: the host of each position along an axis, for each of its groups."""
    if not (hosts := hosts_along(lines)):
        return {}
    link = lambda groups: _link(cluster, [[line[p] for p in group] for line in lines for group in groups])
    found: dict[Over, Levels] = {}
    for over in ("hosts", "equal hosts"):
        parts = over_parts(hosts, over)
        if len(parts) < sum(map(len, hosts)):
            found[over] = Levels(parts, link(parts), link(groups_between(parts)))
    return found


def link_between(cluster: Cluster, groups: Sequence[Sequence[int]]) -> AxisLink:
    """What groups of devices go over, all of which communicate at once."""
    return _link(cluster, [[cluster.hosts[device] for device in group] for group in groups])


def _link(cluster: Cluster, groups: Sequence[Sequence[int]]) -> AxisLink:
    """`groups`: the host of each member, of all that communicate at once."""
    n = max(map(len, groups))
    paths = [_Paths(cluster, group) for group in groups]
    rings, swaps = Counter[_Medium](), Counter[_Medium]()
    for path in paths:
        rings.update(path.ring)
        swaps.update(path.swaps)
    bandwidth = {medium: medium.link.bandwidth for medium in rings}
    slowest = min(bandwidth.values(), default=1.0)
    # In units of the slowest of these: exact where all are alike.
    load = {medium: count * (slowest / bandwidth[medium]) for medium, count in rings.items()}
    share = max(load.values(), default=1.0)
    inside = {host for path in paths for host in path.inside} if rings else {h for group in groups for h in group}
    between = max(load, key=lambda medium: load[medium], default=None)
    within = min((_Medium(host, host, cluster.inside(host)) for host in inside), key=_speed, default=None)
    over_network = share / slowest if between else 0.0
    inside_host = 1.0 / within.link.bandwidth if within else 0.0
    most = within if within and inside_host >= over_network else between
    assert most is not None
    used = [x / share for x in (count * (slowest / medium.link.bandwidth) for medium, count in swaps.items())]
    beta, swapped = max(over_network, inside_host), max(used) if rings else n - 1
    swap_s = max(swapped * over_network, *(path.swap_inside_s for path in paths))
    return AxisLink(
        n,
        max(path.message_s for path in paths),
        beta,
        swapped,
        max(path.ring_s for path in paths),
        max(path.tree_s for path in paths),
        max(path.direct_s for path in paths),
        most.told(cluster, rings[most]),
        swap_s / (swapped * beta) if swapped else 1.0,
    )


class _Medium(NamedTuple):
    """What bytes go through: what joins the devices of a host (a, a), a host's way out (a, -1), or the link of a pair
    of hosts."""

    a: int
    b: int
    link: Link

    def told(self, cluster: Cluster, groups: int) -> str:
        """As reports say it."""
        own = cluster.host_links.get(self.a, HostLinks())
        sharing = f", shared by {groups} groups" if groups > 1 else ""
        if self.b not in (self.a, _OUT):
            return f"[[links]] between hosts {self.a} and {self.b} of the cluster file{sharing}"
        if self.b == _OUT:
            of = f"network of host {self.a}" if own.network else "[network]"
        elif own.intra or (own.network and not cluster.intra):
            of = f"intra of host {self.a}"
        else:
            of = "[intra]" if cluster.intra else "[network]"
        return f"{of} of the cluster file{sharing}"


_OUT = -1


def _speed(medium: _Medium) -> float:
    return medium.link.bandwidth


class _Paths:
    """What one group passes in its collectives. `ring`, `swaps`: how often a block of a ring, and how many blocks of an
    all-to-all, go through each way out of a host; `inside`: the hosts with several of its members; `swap_inside_s`:
    seconds per byte of the blocks of an all-to-all that a device gets inside its host. A ring enters each host once, in
    the order in which the mesh has them."""

    def __init__(self, cluster: Cluster, group: Sequence[int]) -> None:
        n, members = len(group), Counter[int](group)
        hosts = list(members)
        self.inside = [host for host, count in members.items() if count > 1]
        within = {host: cluster.inside(host).latency for host in hosts}
        inside = {host: 1.0 / cluster.inside(host).bandwidth for host in hosts}
        self.swap_inside_s = max((count - 1) * inside[host] for host, count in members.items())
        hops, ways = Counter[float](), set[_Medium]()
        for host, count in members.items():
            hops[within[host]] += count - 1
        for a, b in zip(hosts, [*hosts[1:], hosts[0]], strict=True) if len(hosts) > 1 else ():
            hops[cluster.between(a, b).latency] += 1
            ways.update(_ways(cluster, a, b))
        crossed = max((cluster.between(a, b).latency for a, b in pairwise(hosts)), default=0.0)
        if len(hosts) == 1:
            hops[within[hosts[0]]] += 1
        self.ring = Counter(ways)
        # Through all hops but one, the least.
        least = min((seconds for seconds, count in hops.items() if count), default=0.0)
        self.ring_s = sum((count - (seconds == least)) * seconds for seconds, count in hops.items())
        chain = max((count - 1) * within[host] for host, count in members.items())
        self.tree_s = chain + (len(hosts) - 1).bit_length() * crossed
        self._all_to_all(cluster, members, n, within)

    def _all_to_all(self, cluster: Cluster, members: Counter[int], n: int, within: Mapping[int, float]) -> None:
        """Hosts that are like others stand for them."""
        paired = {host for pair in cluster.pairs for host in pair}
        kind = {host: host if host in paired else cluster.host_links.get(host) for host in members}
        alike: dict[object, list[int]] = {}
        for host in members:
            alike.setdefault(kind[host], []).append(host)
        there = {key: (like[0], sum(members[host] for host in like)) for key, like in alike.items()}
        self.swaps = Counter[_Medium]()
        self.direct_s, self.message_s = 0.0, max((within[host] for host in self.inside), default=0.0)
        for host, count in members.items():
            seconds = (count - 1) * within[host]
            out = n - count
            for key, (like, together) in there.items():
                others = together - (count if key == kind[host] else 0)
                if not others:
                    continue
                latency = cluster.between(host, like).latency
                seconds += others * latency
                self.message_s = max(self.message_s, latency)
                if way := _pair(cluster, host, like):
                    self.swaps[way] += count * others
                    out -= others
            self.direct_s = max(self.direct_s, seconds)
            if out:
                self.swaps[_Medium(host, _OUT, cluster.nic(host))] += count * out
        if len(members) == 1:
            (only,) = members
            self.message_s = within[only]


def _pair(cluster: Cluster, a: int, b: int) -> _Medium | None:
    """The link of two hosts that are a pair, in the direction from one to the other."""
    link = cluster.pairs.get((min(a, b), max(a, b)))
    return _Medium(a, b, link) if link else None


def _ways(cluster: Cluster, a: int, b: int) -> list[_Medium]:
    """What a block from one host to another goes through."""
    pair = _pair(cluster, a, b)
    return [pair] if pair else [_Medium(host, _OUT, cluster.nic(host)) for host in (a, b)]


def devices_of(lengths: Sequence[int], axes: Sequence[int]) -> np.ndarray:
    """int [devices]: each device's position along some axes, row-major in their order."""
    coords = np.indices(lengths).reshape(len(lengths), prod(lengths))
    at = np.zeros(prod(lengths), dtype=np.int64)
    for axis in axes:
        at = at * lengths[axis] + coords[axis]
    return at
