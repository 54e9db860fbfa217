"""The linear program over the ratios of all classes along the same mesh axes; the model is in `sizer.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array

from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import Floats, distinct
from hapsynth.search.cost.network import Even
from hapsynth.search.cost.program_index import Cut
from hapsynth.search.cost.roofline import Roofline
from hapsynth.search.memory.profile import MemoryProfile, joined_shares, largest_of
from hapsynth.search.sizing.class_costs import ClassCosts, CommTerm, ComputeTerm, RoundsTerm
from hapsynth.search.solver import Ints

_WorkRow = tuple[tuple[tuple[int, float], ...], tuple[float, ...]]
"""A share as (column, coefficient) pairs, and the seconds that a work takes a device: fixed, of computing and moving at
a share of 1, and of moving besides."""
_SOLVED, _INFEASIBLE = 0, 2
"""`scipy.optimize.linprog`'s status."""


class RatioLP:
    """One linear program: classes cut along `axes`, all others and those of `pinned` at `sizes`. `active`: devices that
    may hold anything. `apart`: classes that cost alike may have unlike ratios, as where memory is full they may hold
    unlike bytes, and where it is exact it fills devices with some of one and some of another."""

    def __init__(
        self,
        class_costs: ClassCosts,
        memory: MemoryProfile,
        axes: tuple[int, ...],
        kind_of: npt.NDArray[np.int64],
        active: np.ndarray,
        sizes: Sizes,
        pinned: Container[int] = (),
        *,
        apart: bool = False,
    ) -> None:
        self.class_costs, self.memory, self.sizes, self.costs = class_costs, memory, sizes, class_costs.costs
        self.axes, self.kind_of = axes, kind_of
        self.classes = [c.index for c in class_costs.classes.all if c.axes == axes and c.index not in pinned]
        self.compute_terms, self.comm_terms = self._counted()
        place = self.costs.position(axes)
        idle = np.bincount(place, active, minlength=kind_of.size) == 0
        self.kinds = [k for k in range(int(kind_of.max()) + 1) if not idle[kind_of == k].all()]
        self.counts = [int((kind_of == k).sum()) for k in self.kinds]
        first: dict[object, int] = {}
        # By convexity some optimum gives classes that are alike the same ratios.
        self.leader = {c: c if apart else first.setdefault(self._alike(c), c) for c in self.classes}
        self.times = Counter(self.leader.values())
        leaders = list(dict.fromkeys(self.leader.values()))
        self.column = {c: leaders.index(lead) * len(self.kinds) for c, lead in self.leader.items()}
        self.kind_at = {int(p): self.kinds.index(int(k)) for p, k in enumerate(kind_of) if int(k) in self.kinds}
        self.objective: list[float] = [0.0] * (len(leaders) * len(self.kinds))
        self.largest: dict[Cut, int] = {}
        self.rows, self.equal = _Rows(), _Rows()
        self._positions: dict[int, tuple[Ints, Ints]] = {}

    def _counted(self) -> tuple[Sequence[ComputeTerm], Sequence[CommTerm]]:
        """The terms of the objective."""
        return self.class_costs.compute_terms, self.class_costs.comm_terms

    def _alike(self, c: int) -> object:
        """A key that is equal for classes with equal costs, all others being at `sizes`."""
        return self.class_costs.alike(c, self.sizes.shares)

    def solve(self, points: Sequence[int], limit: float, left: float = np.inf) -> dict[int, Floats] | None:
        """Class -> fraction per position, or None where it has no solution, or the solver finds none within the `left`
        seconds.

        `points` of the program at which the bytes alive must stay within `limit`.
        """
        x, _ = self._optimum(points, limit, left) if left > 0 else (None, np.inf)
        if x is None:
            return None
        fractions: dict[int, Floats] = {}
        active, kinds = np.array([*self.kind_at], dtype=np.int64), np.array([*self.kind_at.values()], dtype=np.int64)
        for c in self.classes:
            if self.leader[c] not in fractions:
                row = np.zeros(self.kind_of.size)
                row[active] = x[self.column[c] + kinds]
                fractions[self.leader[c]] = row / row.sum()
            fractions[c] = fractions[self.leader[c]]
        return fractions

    def least(self, points: Sequence[int], limit: float, left: float = np.inf) -> float:
        """The optimum in seconds, without `constant`; inf where the problem has no solution. Where the solver comes to
        no end within `left` seconds, -`constant`, so that both add up to 0."""
        if left <= 0:
            return -self.constant
        return self._optimum(points, limit, left)[1]

    constant = 0.0
    """Seconds to add to the optimum."""

    def _optimum(self, points: Sequence[int], limit: float, left: float) -> tuple[Floats | None, float]:
        for c in dict.fromkeys(self.leader.values()):
            self.equal.add({self.column[c] + j: float(n) for j, n in enumerate(self.counts)}, 1.0)
        self._add_comm_terms()
        self._add_compute_terms()
        self._add_boundaries()
        self._add_rounds()
        self._add_objective()
        self._add_memory(points, limit)
        # The solver's tolerances are absolute.
        unit = max(self.objective, default=0.0) or 1.0
        found = linprog(
            np.array(self.objective) / unit,
            A_ub=self.rows.matrix(len(self.objective)),
            b_ub=np.array(self.rows.bounds),
            A_eq=self.equal.matrix(len(self.objective)),
            b_eq=np.array(self.equal.bounds),
            bounds=[(0.0, None)] * len(self.objective),
            method="highs",
            options={} if np.isinf(left) else {"time_limit": left},
        )
        if found.status == _INFEASIBLE:
            return None, np.inf
        return (found.x, float(found.fun) * unit) if found.status == _SOLVED else (None, -self.constant)

    @property
    def _streams(self) -> Ints:
        """int [devices]: of devices with one number a work takes as long as the slowest."""
        return np.zeros(self.costs.n, dtype=np.int64)

    def _add_computed(self, stream: int, column: int, seconds: float) -> None:
        """A stream computes so many seconds for each unit of a variable."""
        self.objective[column] += seconds

    def _add_sent(self, column: int, seconds: float) -> None:
        """Collectives take so many seconds for each unit of a variable."""
        self.objective[column] += seconds

    def _add_objective(self) -> None:
        """Add the rest of the objective, if there is any."""

    def _unlike(self, depth: int) -> tuple[Ints, Ints]:
        """Positions along the first `depth` axes grouped by equal kinds: the first position of each group [groups], and
        the group of each position [positions]."""
        if depth not in self._positions:
            inner = prod(self.class_costs.classes.lengths[a] for a in self.axes[depth:])
            number: dict[bytes, int] = {}
            rows = self.kind_of.reshape(-1, inner)
            which = np.array([number.setdefault(row.tobytes(), len(number)) for row in rows], dtype=np.int64)
            self._positions[depth] = np.unique(which, return_index=True)[1], which
        return self._positions[depth]

    def _share(self, cut: Cut, position: int) -> dict[int, float]:
        """A cut's share at one position along its own axes, as a row: a sum where the class has minor axes besides."""
        c, depth = self.leader[cut[0]], cut[1]
        inner = self.kind_of.size // int(np.prod([self.class_costs.classes.lengths[a] for a in self.axes[:depth]]))
        row: dict[int, float] = {}
        for p in range(position * inner, (position + 1) * inner):
            if p in self.kind_at:
                column = self.column[c] + self.kind_at[p]
                row[column] = row.get(column, 0.0) + 1.0
        return row

    def _largest(self, cut: Cut) -> int:
        """The variable of a cut's largest share."""
        cut = self.leader[cut[0]], cut[1]
        if cut not in self.largest:
            self.largest[cut] = column = len(self.objective)
            self.objective.append(0.0)
            for share in {tuple(sorted(self._share(cut, int(p)).items())) for p in self._unlike(cut[1])[0]}:
                if share:
                    self.rows.add({**dict(share), column: -1.0}, 0.0)
        return self.largest[cut]

    def _add_largest(self) -> None:
        for c in self.classes:
            self._largest((c, len(self.axes)))

    def _add_comm_terms(self) -> None:
        self._add_largest()
        for term in self.comm_terms:
            for n, cut in enumerate(term.times):
                if cut[0] not in self.column:
                    continue
                rest = term.slope(lambda c: largest_of(self.sizes, c))
                for m, other in enumerate(term.times):
                    rest *= largest_of(self.sizes, other) if m != n else 1.0
                for other in term.over:
                    rest /= max(largest_of(self.sizes, other), 1e-300)
                self._add_sent(self._largest(cut), rest)

    def _add_compute_terms(self) -> None:
        for term in self.compute_terms:
            free = [k for k, cut in enumerate(term.cuts) if cut[0] in self.column]
            if not free:
                continue
            (k,) = free
            c = term.cuts[k][0]
            if self.leader[c] != c:
                continue
            place = self.costs.position(self.axes[: term.cuts[k][1]])
            which = self._unlike(term.cuts[k][1])[1][place]
            held = self._held(term.cuts[k])
            others = [held if n == k else self.class_costs.fraction(self.sizes, o) for n, o in enumerate(term.cuts)]
            some = distinct(self.costs.kind_of, [which, held, *others])
            shares = [self._share(term.cuts[k], int(p)) for p in place[some]]
            streams = self._streams[some].tolist()
            roofline = Roofline(self.costs.figures, list(term.counts))
            lines = zip(*self._lines(roofline, k, others), strict=True)
            for count, line in zip(term.counts.values(), lines, strict=True):
                rows = np.stack(line).T
                unit = float(rows.max()) or 1.0
                rows = (rows[some] / unit).tolist()
                of_streams: dict[int, dict[_WorkRow, None]] = {}
                for stream, share, row in zip(streams, shares, rows, strict=True):
                    known = of_streams.setdefault(stream, {})
                    known.update({(tuple(share.items()), tuple(row)): None} if share else {})
                for stream, known in of_streams.items():
                    t = len(self.objective)
                    self.objective.append(0.0)
                    self._add_computed(stream, t, count * self.times[c] * unit)
                    for share, (start, busy, moving, still) in known:
                        self.rows.add({**{i: x * busy for i, x in share}, t: -1.0}, -start)
                        self.rows.add({**{i: x * moving for i, x in share}, t: -1.0}, -start - still)

    def _add_boundaries(self) -> None:
        """Linear in how far each boundary between shards moves: the most that rows go up, and down, past one. The
        latencies are there or not, which no linear program can tell."""

        def alike(cut: Cut | Even) -> Cut | Even:
            return cut if isinstance(cut, Even) else (self.leader.get(cut[0], cut[0]), cut[1])

        together: dict[tuple[Cut | Even, Cut | Even], float] = {}
        for b in self.class_costs.boundaries:
            decided = {cut[0] for cut in (b.old, b.new) if not isinstance(cut, Even)}
            if not decided & self.column.keys():
                continue
            seconds = b.nbytes * b.link.permute[1]
            for cut in b.over:
                seconds *= largest_of(self.sizes, cut)
            key = alike(b.old), alike(b.new)
            together[key] = together.get(key, 0.0) + seconds
        for (old, new), seconds in together.items():
            before, after = self._ends(old), self._ends(new)
            for sign in (1.0, -1.0):
                longest = len(self.objective)
                self.objective.append(0.0)
                self._add_sent(longest, seconds)
                for (low, least), (high, most) in zip(before, after, strict=True):
                    row = {column: -sign * x for column, x in low.items()}
                    for column, x in high.items():
                        row[column] = row.get(column, 0.0) + sign * x
                    self.rows.add({**row, longest: -1.0}, -sign * (most - least))

    def _add_rounds(self) -> None:
        """Of what is exchanged in rounds, with one cut free and the other as it is: each round's largest piece, and
        that all take no less than even ones. The latencies are there or not, which no linear program can tell."""
        together: dict[tuple[object, ...], float] = {}
        shown: dict[tuple[object, ...], tuple[RoundsTerm, Cut, Floats, bool]] = {}
        for term in self.class_costs.rounds:
            nbytes = float(term.held(lambda c: largest_of(self.sizes, c)))
            for cut, other, sends in ((term.old, term.new, True), (term.new, term.old, False)):
                if cut[0] in self.column:
                    given, mine = joined_shares(self.sizes, other), (self.leader[cut[0]], cut[1])
                    given = given.reshape(-1, term.link.n).max(axis=0)
                    key = mine, term.axis, nbytes, sends, given.tobytes()
                    together[key] = together.get(key, 0.0) + term.runs
                    shown[key] = term, mine, given, sends
        for key, runs in together.items():
            term, cut, given, sends = shown[key]
            nbytes, n = key[2], term.link.n
            assert isinstance(nbytes, float)
            start, per_byte = term.link.rounds
            # The solver's tolerances are absolute: variables are shares of what the whole would take.
            whole = float(per_byte.max()) * nbytes
            seconds = len(self.objective)
            self.objective.append(0.0)
            self._add_sent(seconds, runs * whole)
            total: dict[int, float] = {}
            shares = [(p % n, self._share(cut, p)) for p in range(self.class_costs.classes.along(self.axes[: cut[1]]))]
            for away in range(1, n):
                of_other = np.roll(given, -away if sends else away)
                rows = {
                    tuple(sorted((column, x * float(of_other[at])) for column, x in share.items()))
                    for at, share in shares
                    if of_other[at] > 0 and share
                }
                if rows:
                    total[len(self.objective)] = float(per_byte[away - 1]) * nbytes / whole
                    for row in rows:
                        self.rows.add({**dict(row), len(self.objective): -1.0}, 0.0)
                    self.objective.append(0.0)
            self.rows.add({**total, seconds: -1.0}, 0.0)
            self.rows.add({seconds: -1.0}, -max(term.evenly(nbytes) - (n - 1) * start, 0.0) / whole)

    def _ends(self, cut: Cut | Even) -> list[tuple[dict[int, float], float]]:
        """Where each shard of a cut ends but the last, as a row and a constant: that of a class that is given."""
        if isinstance(cut, Even) or cut[0] not in self.column:
            given = cut.shares if isinstance(cut, Even) else joined_shares(self.sizes, cut)
            return [({}, float(x)) for x in np.cumsum(given)[:-1]]
        positions = self.class_costs.classes.along(self.axes[: cut[1]])
        found: list[tuple[dict[int, float], float]] = []
        row: dict[int, float] = {}
        for p in range(positions - 1):
            for column, x in self._share(cut, p).items():
                row[column] = row.get(column, 0.0) + x
            found.append((dict(row), 0.0))
        return found

    def _lines(self, roofline: Roofline, k: int, fractions: Sequence[Floats]) -> tuple[Floats, ...]:
        """Per work and device, seconds that are fixed, those of computing and moving at a share of 1 of cut `k`, and of
        moving besides; of computing by what it takes over the share that it holds."""
        return roofline.line(self.costs.kind_of, k, fractions, fractions[k])

    def _held(self, cut: Cut) -> Floats:
        """The shares at which measured times are evaluated [devices]: those of the last sizes, or even where a device
        has none."""
        held = self.class_costs.fraction(self.sizes, cut)
        return np.where(held > 0, held, 1.0 / (int(self.costs.position(self.axes[: cut[1]]).max()) + 1))

    def _add_memory(self, points: Sequence[int], limit: float) -> None:
        if not points:
            return
        cuts = [(c, depth) for c in self.classes for depth in range(1, len(self.axes) + 1)]
        whole, divided = self.memory.by_cut(self.sizes, cuts, points=np.array(points))
        known = set[object]()
        # Devices of a kind have the same.
        alike = np.zeros(len(whole), dtype=np.int64)
        vectors = [whole, *divided.values()]
        if len(whole) > 1:
            alike = self.costs.kind_of
            vectors += [
                self._unlike(d)[1][self.costs.position(self.axes[:d]), None] for d in range(1, 1 + len(self.axes))
            ]
        some = distinct(alike, [column for vector in vectors for column in vector.T])
        for p, device in product(range(len(points)), some.tolist()):
            held: dict[int, float] = {}
            for (cut, padded), nbytes in divided.items():
                share = {self._largest(cut): 1.0} if padded else self._share_of(cut, device)
                for column, count in share.items():
                    held[column] = held.get(column, 0.0) + count * float(nbytes[device, p])
            left = limit - float(whole[device, p])
            if (key := (tuple(held.items()), left)) not in known:
                known.add(key)
                self.rows.add(held, left)

    def _share_of(self, cut: Cut, device: int) -> dict[int, float]:
        """A device's share of a cut, as a row."""
        return self._share(cut, int(self.costs.position(self.axes[: cut[1]])[device]))


class _Rows:
    """Sparse rows `coefficients . x <= bound`, or `=`."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, float]] = []
        self.bounds: list[float] = []

    def add(self, coefficients: dict[int, float], bound: float) -> None:
        self.entries += [(len(self.bounds), column, value) for column, value in coefficients.items()]
        self.bounds.append(bound)

    def matrix(self, columns: int) -> coo_array:
        rows, cols, values = zip(*self.entries, strict=True) if self.entries else ((), (), ())
        return coo_array((values, (rows, cols)), shape=(len(self.bounds), columns))
