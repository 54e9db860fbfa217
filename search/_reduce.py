"""Exact reduction of a pairwise problem, with back-tracking.

A `Network` starts as a copy of a Problem and shrinks: states that no optimum needs are dropped, variables that
hang on at most two others are minimised out, groups that an edge cannot tell apart are merged. `lift` turns an
assignment of what is left into one of all variables.

Costs are rounded down to multiples of a power of two (2^-50 of the expected total). Sums, differences and minima
of such numbers are exact in float64, so that equal costs stay equal through hundreds of eliminations, rows can be
compared by their bytes, and bounds computed from the network never exceed those of the problem.

Every link also carries a message vector per end, over states (see `_trws.py`). Any values are valid; the
reductions move them along so that a dual bound once reached is not lost.

Sources: Goldstein, "Efficient rotamer elimination applied to protein side-chains" (1994) for the dominance test;
Dechter, "Bucket elimination" (1999); Cooper et al., "Soft arc consistency revisited" (2010) for moving costs.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from hapsynth.search._pairwise import Floats, Ints, Problem, padded_limits
from hapsynth.search._tables import Tables, cheapest_of_each, groups_lost, paired

_TABLE_LIMIT = 300_000  # entries of the table that eliminating one variable may create
_CHEAP_WORK = 50_000  # of an elimination that is not worth a look for dominated states first
_WORK_LIMIT = 40_000_000  # additions that one elimination may cost
_RIVALS = 128  # states are tried for dominance only against this many of the cheapest


@dataclass(slots=True)
class Link:
    """The one edge between two variables: cost table[gu[x_u], gv[x_v]] and messages bu [states_u], bv [states_v].

    Normal form: every group is used, rows differ, columns differ, each finite row and column has minimum 0.
    Arrays are replaced, never written to, so that copies and the trail may share them.
    """

    u: int
    v: int
    gu: Ints
    gv: Ints
    table: Floats
    bu: Floats
    bv: Floats

    def other(self, i: int) -> int:
        return self.v if i == self.u else self.u

    def seen_from(self, i: int) -> tuple[Ints, Floats, Ints]:
        """(groups of i, table [groups of i, groups of the other], groups of the other)."""
        return (self.gu, self.table, self.gv) if i == self.u else (self.gv, self.table.T, self.gu)

    def message_to(self, i: int) -> Floats:
        return self.bu if i == self.u else self.bv


@dataclass(slots=True)
class _Eliminated:
    """How to choose a variable's state once its neighbours' are known; `links` as (other, its states, tables)."""

    variable: int
    states: Ints
    unary: Floats
    links: list[tuple[int, Ints, Ints, Floats, Ints]]


class Network:
    """A shrinking pairwise problem. links[i][j] is links[j][i]; `active` variables are those not yet eliminated.

    unary[i]: float64 [states of i now]; states[i]: int64, their numbers in the problem, ascending;
    usage[i]: float64 [resources, states of i now], each row's minimum 0 (moved into `limits`).
    """

    def __init__(self, problem: Problem, scale: float | None = None):
        quantum = _quantum(problem, scale)
        ends = np.cumsum([row.size for row in problem.unary], dtype=np.int64).tolist()
        rounded = _rounded(np.concatenate([np.zeros(0), *problem.unary]), quantum)
        self.unary: list[Floats] = [rounded[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=False)]
        self.states: list[Ints] = [np.arange(row.size) for row in problem.unary]
        self.links: list[dict[int, Link]] = [{} for _ in problem.unary]
        self.offset = float(np.floor(problem.offset / quantum) * quantum)
        self.limits: Floats = padded_limits(problem)
        self.usage: list[Floats] = [
            np.stack([r.usage[i].astype(np.float64) for r in problem.resources])
            if problem.resources
            else np.zeros((0, row.size))
            for i, row in enumerate(problem.unary)
        ]
        self.alive = [True] * len(problem.unary)
        self.infeasible = False
        self._trail: list[_Eliminated] = []
        self._dirty = list(range(len(problem.unary)))
        self._queued = [True] * len(problem.unary)
        self._thin: list[tuple[int, int]] = []
        self.quantum = quantum
        self._tables = Tables()
        for i in range(len(problem.unary)):
            self._rebase_usage(i)
        tables: dict[int, Floats] = {}  # by identity: edges share them
        for edge in problem.edges:
            gu, gv = (np.asarray(g, dtype=np.int64) for g in (edge.gu, edge.gv))
            if (table := tables.get(id(edge.table))) is None:
                table = tables[id(edge.table)] = _rounded(edge.table, quantum)
            self._add_link(edge.u, edge.v, gu, gv, table)

    def relaxed(self, multipliers: Floats) -> "Network":
        """A copy without resources whose cost is cost + multipliers . (usage - limits): its optimum is a bound."""
        copy = object.__new__(Network)
        q = self.quantum
        # Rounded like all other costs, so that the copy's reductions are exact too.
        copy.unary = [
            row + _rounded(multipliers @ use, q) if use.any() else row
            for row, use in zip(self.unary, self.usage, strict=True)
        ]
        copy.states = list(self.states)
        copy.links = [{} for _ in self.unary]
        for i in self.active():
            for j, link in self.links[i].items():
                if i == link.u:
                    twin = Link(link.u, link.v, link.gu, link.gv, link.table, link.bu, link.bv)
                    copy.links[i][j] = copy.links[j][i] = twin
        copy.offset = self.offset + float(np.floor(-(multipliers @ self.limits) / q) * q)
        copy.limits = np.zeros(0)
        copy.usage = [np.zeros((0, row.size)) for row in self.unary]
        copy.alive = list(self.alive)
        copy.infeasible = self.infeasible
        copy._trail = list(self._trail)
        copy._dirty = self.active()
        copy._queued = list(self.alive)
        copy._thin = []
        copy.quantum = q
        copy._tables = self._tables
        return copy

    def active(self) -> list[int]:
        return [i for i, alive in enumerate(self.alive) if alive]

    def size(self) -> int:
        """The number of states left, over all variables left."""
        return sum(self.unary[i].size for i in self.active())

    def restrict(self, i: int, keep: np.ndarray) -> None:
        """Drops the states of variable i where `keep` (bool [states]) is false."""
        if keep.all():
            return
        if not keep.any():
            self.infeasible = True
            return
        self.unary[i] = self.unary[i][keep]
        self.states[i] = self.states[i][keep]
        self.usage[i] = self.usage[i][:, keep]
        self._rebase_usage(i)
        for link in list(self.links[i].values()):
            if i == link.u:
                link.gu, link.bu = link.gu[keep], link.bu[keep]
                lost = groups_lost(link.gu, link.table.shape[0])
            else:
                link.gv, link.bv = link.gv[keep], link.bv[keep]
                lost = groups_lost(link.gv, link.table.shape[1])
            if lost:
                self._normalise(link)
        self._touch(i)

    def lift(self, chosen: dict[int, int]) -> Ints:
        """The cheapest assignment of the whole problem that agrees with `chosen`: active variable -> state now."""
        full = np.full(len(self.unary), -1, dtype=np.int64)
        for i, s in chosen.items():
            full[i] = self.states[i][s]
        for step in reversed(self._trail):
            cost = step.unary
            for j, states, own, table, others in step.links:
                cost = cost + table[own, others[np.searchsorted(states, full[j])]]
            full[step.variable] = step.states[int(np.argmin(cost))]
        return full

    def reduce(self) -> None:
        """Drops, merges and eliminates until nothing more is exact and cheap. Sets `infeasible` if so proved."""
        while not self.infeasible:
            if self._dirty:
                i = heapq.heappop(self._dirty)
                self._queued[i] = False
                if self.alive[i]:
                    self._tidy(i)
            elif self._thin:
                degree, i = heapq.heappop(self._thin)
                if self.alive[i] and degree == len(self.links[i]) and not self.usage[i].any():
                    self._eliminate(i)
            else:
                return

    def _tidy(self, i: int) -> None:
        finite = np.isfinite(self.unary[i])
        if self.limits.size:
            finite &= np.all(self.usage[i] <= self.limits[:, None], axis=0)
        self.restrict(i, finite)
        if self.infeasible:
            return
        if self.unary[i].size > 1 and self._cheap_to_eliminate(i):
            # Dominated states make no difference to the minimum over all of them.
            self._eliminate(i)
            return
        if self.unary[i].size > 1:
            self._drop_dominated(i)
        if self.unary[i].size == 1:
            self._fix(i)
        elif len(self.links[i]) <= 2:
            heapq.heappush(self._thin, (len(self.links[i]), i))

    def _cheap_to_eliminate(self, i: int) -> bool:
        if len(self.links[i]) > 2 or (self.limits.size and self.usage[i].any()):
            return False
        work = self.unary[i].size
        for link in self.links[i].values():
            work *= link.seen_from(i)[1].shape[1]
        return work <= _CHEAP_WORK

    def _touch(self, i: int) -> None:
        if not self._queued[i]:
            self._queued[i] = True
            heapq.heappush(self._dirty, i)

    def _rebase_usage(self, i: int) -> None:
        use = self.usage[i]
        if use.size and use.any():
            least = use.min(axis=1)
            self.usage[i] = use - least[:, None]
            self.limits = self.limits - least
            if (self.limits < 0).any():
                self.infeasible = True

    def _drop_dominated(self, i: int) -> None:
        """Drops states that cost no less than some kept state, whatever the neighbours choose."""
        if self.unary[i].size > _RIVALS and not self.limits.size:
            groupings = [link.seen_from(i)[0] for link in self.links[i].values()]
            self.restrict(i, cheapest_of_each(groupings, self.unary[i]))
        sides = [link.seen_from(i)[:2] for link in self.links[i].values()]
        self.restrict(i, self._tables.undominated(self.unary[i], sides, self.usage[i], _RIVALS))

    def _fix(self, i: int) -> None:
        step = self._step(i)
        self.offset += float(self.unary[i][0])
        for j, link in list(self.links[i].items()):
            own, table, others = link.seen_from(i)
            self.unary[j] = self.unary[j] + table[own[0], others]
            self._unlink(link)
        self._retire(i, step)

    def _eliminate(self, i: int) -> None:
        step = self._step(i)
        links = list(self.links[i].values())
        least = float(self.unary[i].min())
        if not links:
            self.offset += least
        elif len(links) == 1:
            own, table, others = links[0].seen_from(i)
            j = links[0].other(i)
            self.unary[j] = self.unary[j] + np.min(self.unary[i][:, None] + table[own], axis=0)[others]
            self._unlink(links[0])
        else:
            joined = self._joined_table(i, links[0], links[1])
            if joined is None:
                return
            self.offset += least
            j, k = links[0].other(i), links[1].other(i)
            gj, gk = links[0].seen_from(i)[2], links[1].seen_from(i)[2]
            bj, bk = links[0].message_to(j), links[1].message_to(k)
            self._unlink(links[0])
            self._unlink(links[1])
            self._add_link(j, k, gj, gk, joined, bj, bk)
        self._retire(i, step)

    def _joined_table(self, i: int, first: Link, second: Link) -> Floats | None:
        """min over i's states, [groups of first's other end, groups of second's]; None where that is too big.

        Without i's least unary cost, so that equal layers give equal tables whatever they cost besides.
        """
        g1, t1, _ = first.seen_from(i)
        g2, t2, _ = second.seen_from(i)
        entries = t1.shape[1] * t2.shape[1]
        if entries > _TABLE_LIMIT or entries * min(self.unary[i].size, t1.shape[0] * t2.shape[0]) > _WORK_LIMIT:
            return None
        return self._tables.joined(self.unary[i] - self.unary[i].min(), (g1, t1), (g2, t2))

    def _step(self, i: int) -> _Eliminated:
        links = [(link.other(i), self.states[link.other(i)], *link.seen_from(i)) for link in self.links[i].values()]
        return _Eliminated(i, self.states[i], self.unary[i], links)

    def _retire(self, i: int, step: _Eliminated) -> None:
        self._trail.append(step)
        self.alive[i] = False

    def _unlink(self, link: Link) -> None:
        del self.links[link.u][link.v], self.links[link.v][link.u]
        self._touch(link.u)
        self._touch(link.v)

    def _add_link(
        self,
        u: int,
        v: int,
        gu: Ints,
        gv: Ints,
        table: Floats,
        bu: Floats | None = None,
        bv: Floats | None = None,
    ) -> None:
        bu = np.zeros(self.unary[u].size) if bu is None else bu
        bv = np.zeros(self.unary[v].size) if bv is None else bv
        old = self.links[u].get(v)
        if old is None:
            old = self.links[u][v] = self.links[v][u] = Link(u, v, gu, gv, table, bu, bv)
        else:
            if old.u != u:
                u, v, gu, gv, table, bu, bv = v, u, gv, gu, table.T, bv, bu
            old.gu, first_u, second_u = paired(old.gu, gu)
            old.gv, first_v, second_v = paired(old.gv, gv)
            old.table = old.table[first_u[:, None], first_v[None, :]] + table[second_u[:, None], second_v[None, :]]
            old.bu, old.bv = old.bu + bu, old.bv + bv
        self._normalise(old)

    def _normalise(self, link: Link) -> None:
        form = self._tables.normal_form(link.gu, link.gv, link.table)
        if form.cost_u is not None:
            self.unary[link.u] = self.unary[link.u] + form.cost_u
            link.bu = link.bu + np.where(np.isfinite(form.cost_u), form.cost_u, 0.0)
        if form.cost_v is not None:
            self.unary[link.v] = self.unary[link.v] + form.cost_v
            link.bv = link.bv + np.where(np.isfinite(form.cost_v), form.cost_v, 0.0)
        if form.table is None:
            self._unlink(link)
            return
        link.gu, link.gv, link.table = form.gu, form.gv, form.table
        self._touch(link.u)
        self._touch(link.v)


def _quantum(problem: Problem, scale: float | None) -> float:
    if scale is None:
        rows = [*problem.unary, *(e.table.ravel() for e in problem.edges)]
        costs = np.abs(np.concatenate([[0.0], *rows]))
        costs = costs[np.isfinite(costs) & (costs > 0)]
        # The median, so that a few huge costs that nobody will pay do not spoil the resolution.
        scale = abs(problem.offset) + (float(np.median(costs)) * len(rows) if costs.size else 0.0)
    return float(2.0 ** (np.floor(np.log2(scale)) - 50)) if scale > 1e-280 else 2.0**-1000


def _rounded(costs: Floats, quantum: float) -> Floats:
    # Adding 0.0 turns -0.0 into 0.0: rows are compared by their bytes.
    return np.floor(costs / quantum) * quantum + 0.0
