"""The times of a program's ops and collectives as functions of the sizes of its dimension classes, as arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum
from typing import NamedTuple

import numpy as np

from hapsynth.cluster.curves import Curve, Lines
from hapsynth.instructions.collectives import EVEN, Block, Exchanged, Moved
from hapsynth.instructions.layout import cuts_of
from hapsynth.instructions.program.program import Convert, Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.search.cost.model import CostModel, Floats, distinct
from hapsynth.search.cost.network import PRICES, AxisLink, Even, PriceOfMoves, PriceOfRounds, even_fractions
from hapsynth.search.cost.program_index import Cut, Load, ProgramIndex
from hapsynth.search.cost.roofline import Roofline
from hapsynth.search.cost.work import Work
from hapsynth.search.memory.profile import joined_shares, largest_of
from hapsynth.search.solver import Ints

LargestOf = Callable[[Cut], float | Floats]
"""Cut -> its largest share, or one per trial [trials]."""


@dataclass(eq=False)
class CommTerm:
    """The cost of conversions whose bytes are a product of largest shares. `times`, `over`: the cuts whose largest
    shares are multiplied, and divided by. `seconds`: of costs proportional to the product, at product 1. `curved`, for
    measured costs and those by one of several algorithms: curve -> {bytes at product 1: runs}."""

    times: tuple[Cut, ...]
    over: tuple[Cut, ...]
    seconds: float = 0.0
    curved: dict[Curve | Lines, dict[float, float]] = field(default_factory=dict)

    def at(self, largest: LargestOf) -> Floats:
        """Seconds, without the latencies of the proportional costs."""
        share = self.share(largest)
        seconds = self.seconds * share
        for curve, runs in self.curved.items():
            nbytes, counts = np.array(list(runs)), np.array(list(runs.values()))
            seconds = seconds + curve.seconds(np.multiply.outer(share, nbytes)) @ counts
        return seconds

    def slope(self, largest: LargestOf) -> float:
        """Seconds per unit of the product, at the present largest shares."""
        share = float(self.share(largest))
        curved = (curve.slope(b * share) * b * n for curve, runs in self.curved.items() for b, n in runs.items())
        return self.seconds + fsum(curved)

    def share(self, largest: LargestOf) -> Floats:
        """The product of largest shares."""
        product = np.ones(())
        for cut in self.times:
            product = product * largest(cut)
        for cut in self.over:
            product = product / np.maximum(largest(cut), 1e-300)
        return product

    @property
    def cuts(self) -> tuple[Cut, ...]:
        return (*self.times, *self.over)

    @property
    def load(self) -> object:
        """A key that distinguishes terms with the same cuts."""
        return self.seconds, tuple((curve, tuple(runs.items())) for curve, runs in self.curved.items())


@dataclass(eq=False)
class BoundaryTerm:
    """Conversions between the same two cuts that send the rows which change owner: as many as the boundaries between
    shards move by. `new`: of a class, or the shares that each position has whatever the sizes; `over`: cuts that the
    rest of the value is held by; `nbytes`: of all runs, with everything whole; `runs`: of all of them."""

    price: PriceOfMoves
    link: AxisLink
    old: Cut
    new: Cut | Even
    over: tuple[Cut, ...]
    nbytes: float = 0.0
    runs: float = 0.0

    def at(self, old: Floats, new: Floats, largest: LargestOf) -> Floats:
        """Seconds, from each position's share of both cuts [..., positions]."""
        whole: float | Floats = self.nbytes
        for cut in self.over:
            whole = whole * largest(cut)
        latency, moving = self.price.between(self.link, old, new, whole)
        return self.runs * latency + moving

    @property
    def cuts(self) -> tuple[Cut, ...]:
        return (self.old, *(() if isinstance(self.new, Even) else (self.new,)), *self.over)

    @property
    def load(self) -> object:
        """A key that distinguishes terms with the same cuts."""
        return self.new if isinstance(self.new, Even) else None, self.nbytes, self.runs


@dataclass(eq=False)
class RoundsTerm:
    """Conversions of as many bytes in rounds, between two cuts of unlike dimensions along one link. `over`: cuts that
    the rest of the value is held by; `blocks`: how many the two cuts make of it; `runs`: of all of them."""

    price: PriceOfRounds
    link: AxisLink
    old: Cut
    new: Cut
    over: tuple[Cut, ...]
    nbytes: float
    axis: int
    blocks: int
    runs: float = 0.0

    def at(self, old: Floats, new: Floats, largest: LargestOf) -> Floats:
        """Seconds, from each position's share of both cuts [..., positions]."""
        _, latency, moving = self.price.between(self.link, old, new, self.held(largest))
        return self.runs * (latency + moving)

    def held(self, largest: LargestOf) -> float | Floats:
        """Bytes of the value on a device, as cut along its other dimensions."""
        whole: float | Floats = self.nbytes
        for cut in self.over:
            whole = whole * largest(cut)
        return whole

    def evenly(self, nbytes: float) -> float:
        """Seconds of one conversion, at least, of so many held bytes."""
        return float(self.price.evenly(self.link, nbytes, self.blocks))

    @property
    def cuts(self) -> tuple[Cut, ...]:
        return self.old, self.new, *self.over

    @property
    def load(self) -> object:
        """A key that distinguishes terms with the same cuts."""
        return self.axis, self.nbytes, self.runs


MoveTerm = BoundaryTerm | RoundsTerm


@dataclass(eq=False)
class ComputeTerm:
    """All works that the same cuts divide, with how often each runs."""

    cuts: tuple[Cut, ...]
    counts: dict[Work, float] = field(default_factory=dict)


class ClassTerms(NamedTuple):
    """The terms that one class's sizes decide, alone or with others."""

    compute_terms: list[ComputeTerm]
    comm_terms: list[CommTerm]
    move_terms: list[MoveTerm]


class ClassCosts:
    """The works and collectives of a program, by the cuts that divide them."""

    def __init__(self, program: Program, classes: Classes, costs: CostModel) -> None:
        self.classes, self.costs = classes, costs
        self.index = index = ProgramIndex.of(program, classes, costs)
        self.cut = index.cut
        self._compute_terms: dict[tuple[Cut, ...], ComputeTerm] = {}
        self._comm_terms: dict[tuple[tuple[Cut, ...], tuple[Cut, ...]], CommTerm] = {}
        self._boundaries: dict[tuple[Cut | Even, ...], BoundaryTerm] = {}
        self._rounds: dict[tuple[object, ...], RoundsTerm] = {}
        for load in index.feeds.values():
            self._add_work(load, 1.0)
        for i, load, runs in zip(program.instructions, index.load_of, index.runs, strict=True):
            if isinstance(i, Convert):
                self._add_conversion(i, runs)
            else:
                self._add_work(index.loads[load], runs)

    def _add_work(self, load: Load, count: float) -> None:
        if load.work.divided:
            counts = self._compute_terms.setdefault(load.cuts, ComputeTerm(load.cuts)).counts
            counts[load.work] = counts.get(load.work, 0.0) + count

    def _add_conversion(self, i: Convert, runs: float) -> None:
        """What a collective sends with every largest share 1, and the shares that it is proportional to."""
        link = self.costs.links[i.axis]
        if not i.is_collective or link.n == 1 or not self.costs.graph.values[i.value].nbytes:
            return
        for step, traffic in i.collective.sends(i.source, i.target, i.axis):
            if isinstance(traffic, Moved):
                self._add_moved(i, step, traffic, runs)
            elif isinstance(traffic, Exchanged):
                self._add_rounds(i, step, traffic, runs)
            else:
                self._add_block(i, step, traffic, runs)
        # By what it comes to hold, whatever is sent on the way.
        turned = tuple(sorted(self.cut((i.value, *cut)) for cut in cuts_of(i.target)))
        if turned and (turning := self.costs.turning(i.value, i.source, i.axis)):
            self._comm_terms.setdefault((turned, ()), CommTerm(turned, ())).seconds += runs * turning

    def _add_moved(self, i: Convert, step: str, traffic: Moved, runs: float) -> None:
        link, price, value = self.costs.links[i.axis], PRICES[step], self.costs.graph.values[i.value]
        assert isinstance(price, PriceOfMoves)
        # As many rows move from even shards as to them.
        dim, axes, way = traffic.old
        first, second = (traffic.new, traffic.old) if way == EVEN else (traffic.old, traffic.new)
        old, *over = (self.cut((i.value, *cut)) for cut in (first, *traffic.around))
        is_even = second[2] == EVEN
        new = Even.of(value.shape[dim], self.classes.along(axes)) if is_even else self.cut((i.value, *second))
        known = self._boundaries.setdefault((old, new, *over), BoundaryTerm(price, link, old, new, tuple(over)))
        known.nbytes += runs * float(value.nbytes)
        known.runs += runs

    def _add_rounds(self, i: Convert, step: str, traffic: Exchanged, runs: float) -> None:
        link, price, nbytes = self.costs.links[i.axis], PRICES[step], float(self.costs.graph.values[i.value].nbytes)
        assert isinstance(price, PriceOfRounds)
        old, new, *over = (self.cut((i.value, *cut)) for cut in (traffic.old, traffic.new, *traffic.around))
        key = old, new, *sorted(over), i.axis, nbytes
        blocks = self.classes.along(traffic.old[1]) * self.classes.along(traffic.new[1])
        term = RoundsTerm(price, link, old, new, tuple(sorted(over)), nbytes, i.axis, blocks)
        self._rounds.setdefault(key, term).runs += runs

    def _add_block(self, i: Convert, step: str, traffic: Block, runs: float) -> None:
        link, value = self.costs.links[i.axis], self.costs.graph.values[i.value]
        wire = link.wire_bytes(step, float(value.nbytes))
        for dim, axes, way in traffic.times:
            if way == EVEN:
                wire *= float(even_fractions(value.shape[dim], self.classes.along(axes))[0])
        decided = lambda cuts: [self.cut((i.value, *cut)) for cut in cuts if cut[2] != EVEN]
        times, over = decided(traffic.times), decided(traffic.over)
        key = tuple(sorted(times)), tuple(sorted(over))
        if not key[0]:
            return
        known = self._comm_terms.setdefault(key, CommTerm(*key))
        pace = link.pace(step)
        per_byte, curve = pace.parted() if isinstance(pace, Lines) else (0.0, pace)
        known.seconds += runs * wire * per_byte
        if curve is not None:
            counts = known.curved.setdefault(curve, {})
            counts[wire] = counts.get(wire, 0.0) + runs

    @property
    def compute_terms(self) -> list[ComputeTerm]:
        return list(self._compute_terms.values())

    @property
    def comm_terms(self) -> list[CommTerm]:
        return list(self._comm_terms.values())

    @property
    def boundaries(self) -> list[BoundaryTerm]:
        return list(self._boundaries.values())

    @property
    def rounds(self) -> list[RoundsTerm]:
        return list(self._rounds.values())

    @property
    def move_terms(self) -> list[MoveTerm]:
        return [*self.boundaries, *self.rounds]

    @cached_property
    def has_products(self) -> bool:
        """Whether some cost is a product of two classes' sizes, so that one linear program is not the last word."""
        return (
            any(len(term.cuts) > 1 for term in self.compute_terms)
            or any(len(term.times) > 1 for term in self.comm_terms)
            or any(term.over for term in self.boundaries)
            or bool(self.rounds)
        )

    @cached_property
    def has_curves(self) -> bool:
        """Whether some cost is measured by size: a linear program sees it as it is around the last sizes."""
        curved = (
            not self.costs.speeds(w.op_class, w.dtype, ordinary=w.ordinary).linear
            for term in self.compute_terms
            for w in term.counts
        )
        return any(curved) or any(term.curved for term in self.comm_terms)

    def table(self, term: ComputeTerm) -> WorkTable:
        """The works of a term as arrays."""
        return self._tables[term.cuts]

    @cached_property
    def _tables(self) -> dict[tuple[Cut, ...], WorkTable]:
        """Layers have works that are alike, and share a table."""
        known: dict[object, WorkTable] = {}
        found: dict[tuple[Cut, ...], WorkTable] = {}
        for cuts, term in self._compute_terms.items():
            key = (len(cuts), tuple(term.counts.items()))
            if key not in known:
                known[key] = WorkTable(term, self.costs)
            found[cuts] = known[key]
        return found

    def fraction(self, sizes: Sizes, cut: Cut) -> Floats:
        """Each device's share of a cut: float64 [devices]."""
        c = cut[0]
        fractions = np.array(sizes.shares[c], dtype=np.float64) / max(self.classes.all[c].units, 1)
        axes = self.classes.all[c].axes[: cut[1]]
        return fractions.reshape(self.classes.along(axes), -1).sum(axis=1)[self.costs.position(axes)]

    def cost(self, sizes: Sizes) -> float:
        """Seconds of all that is cut."""
        # `sum` rounds otherwise from Python 3.12 on, and sizes are chosen by these.
        known: dict[object, float] = {}

        def seconds(cuts: tuple[Cut, ...], table: WorkTable) -> float:
            key = (table, *[(self.classes.all[c].axes, depth, sizes.shares[c]) for c, depth in cuts])
            if key not in known:
                known[key] = table.cost([self.fraction(sizes, cut) for cut in cuts])
            return known[key]

        worked = fsum(seconds(cuts, table) for cuts, table in self._tables.items())
        return worked + self.sent_seconds(sizes)

    def sent_seconds(self, sizes: Sizes) -> float:
        """The part of `cost` that is due to collectives, in seconds."""
        largest = lambda cut: largest_of(sizes, cut)
        held = lambda cut: cut.shares if isinstance(cut, Even) else joined_shares(sizes, cut)
        moving = fsum(float(term.at(held(term.old), held(term.new), largest)) for term in self.move_terms)
        return fsum(float(term.at(largest)) for term in self.comm_terms) + moving

    @cached_property
    def by_class(self) -> list[ClassTerms]:
        """The terms that depend on each class."""
        found = [ClassTerms([], [], []) for _ in self.classes.all]
        for term in self.compute_terms:
            for c in dict.fromkeys(cut[0] for cut in term.cuts):
                found[c].compute_terms.append(term)
        for term in self.comm_terms:
            for c in dict.fromkeys(cut[0] for cut in term.cuts):
                found[c].comm_terms.append(term)
        for term in self.move_terms:
            for c in dict.fromkeys(cut[0] for cut in term.cuts):
                found[c].move_terms.append(term)
        return found

    def alike(self, c: int, shares: Sequence[object]) -> object:
        """A key that determines the best sizes of class `c`. `shares`: of each class, or numbers of them. Equal layers
        have classes with equal keys."""
        number, others = self._roles[c]
        return number, *[shares[other] for other in others]

    def alone(self, c: int) -> bool:
        """Whether a class's best sizes depend on no other's."""
        return not self._roles[c][1]

    @cached_property
    def numbers(self) -> dict[object, int]:
        """Numbers of the costs that a class divides; programs with one cost model may share them."""
        return {}

    @cached_property
    def _roles(self) -> list[tuple[int, tuple[int, ...]]]:
        """Per class, the number of what it divides, and the other classes that its costs depend on, as they come in
        that."""
        numbers = self.numbers
        found: list[tuple[int, tuple[int, ...]]] = []
        for cls, terms in zip(self.classes.all, self.by_class, strict=True):
            place = {cls.index: 0}
            parts = lambda cuts, place=place: tuple([(place.setdefault(c, len(place)), depth) for c, depth in cuts])
            loads = tuple([(parts(term.cuts), tuple(term.counts.items())) for term in terms.compute_terms])
            sent = tuple([(parts(term.times), parts(term.over), term.load) for term in terms.comm_terms])
            moved = tuple([(parts(term.cuts), term.load) for term in terms.move_terms])
            kinds = tuple([(self.classes.all[c].axes, self.classes.all[c].units) for c in place])
            number = numbers.setdefault((kinds, loads, sent, moved), len(numbers))
            found.append((number, tuple(place)[1:]))
        return found

    def lanes(self, c: int) -> set[int]:
        """The lanes over which contractions that a class divides extend."""
        found: set[int] = set()
        for term in self.by_class[c].compute_terms:
            for k, cut in enumerate(term.cuts):
                found |= {w.lanes[k] for w in term.counts if cut[0] == c}
        return found - {0}

    def tiles(self, c: int) -> set[tuple[int, ...]]:
        """The units of a class that fill a tile of some contraction that it divides, on each kind of position along its
        axes; 1 where none do."""
        cls = self.classes.all[c]
        of_kinds = self.costs.tiles_along(cls.axes).tolist()
        units = lambda tile, n: tile * cls.units // n if n >= tile and tile * cls.units % n == 0 else 1
        found = {tuple(units(tile, n) for tile in of_kinds) for n in self.lanes(c)}
        return {tiles for tiles in found if max(tiles) > 1}


class WorkTable:
    """The works of a ComputeTerm as arrays [works, kinds of devices]."""

    def __init__(self, term: ComputeTerm, costs: CostModel) -> None:
        self.kind_of = costs.kind_of
        self.counts = np.array(list(term.counts.values()), dtype=np.float64)
        self.roofline = Roofline(costs.figures, list(term.counts), scaled=True)

    def busy(self, kinds: Ints, fractions: Sequence[Floats], *, whole_tiles: bool = True) -> Floats:
        """Seconds [works, devices], as `Roofline.seconds`."""
        return self.roofline.seconds(kinds, fractions, whole_tiles=whole_tiles)

    def cost(self, fractions: Sequence[Floats]) -> float:
        """Seconds, from each cut's share per device [devices]."""
        some = distinct(self.kind_of, fractions)
        busy = self.busy(self.kind_of[some], [fraction[some] for fraction in fractions])
        return float((busy.max(axis=-1, initial=0.0) * self.counts).sum(axis=-1))
