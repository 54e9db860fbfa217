"""Exact reduction of a pairwise problem, with back-tracking.

A `ReducedProblem` starts as a copy of a Problem and shrinks: states that no optimum needs are dropped, variables that
hang on at most two others are minimised out, groups that an edge cannot tell apart are merged. `lift` turns an
assignment of what is left into one of all variables.

Costs are rounded down to multiples of a power of two (2^-50 of the expected total). Sums, differences and minima
of such numbers are exact in float64, so that equal costs stay equal through hundreds of eliminations, rows can be
compared by their bytes, and bounds computed from the network never exceed those of the problem.

Everything is kept by id (see `interning.py`): a step that some layer has been through is a look-up for the next one.

Every link may also carry a message vector per end, over states (see `trws.py`). Any values are valid; the
reductions move them along so that a dual bound once reached is not lost.

Sources: Goldstein, "Efficient rotamer elimination applied to protein side-chains" (1994) for the dominance test;
Dechter, "Bucket elimination" (1999); Cooper et al., "Soft arc consistency revisited" (2010) for moving costs.
"""

import copy
import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hapsynth.search.solver.interning import NONE, Id, InternedTables, Link, NormalForm
from hapsynth.search.solver.options import DEFAULT, SolverOptions
from hapsynth.search.solver.problem import Floats, Ints, Problem, padded_limits


class _Eliminated(NamedTuple):
    """How to choose a variable's state once its neighbours' are known; `links` as (other, its states, link)."""

    variable: int
    states: Id
    unary: Id
    links: tuple[tuple[int, Id, Link], ...]


class ReducedProblem:
    """A shrinking pairwise problem. links[i][j] is links[j][i] seen from i; `active` variables are not yet eliminated.

    messages[i, j]: float64 [states of i now], of the end at i of link (i, j); zero where there is none.
    """

    def __init__(
        self,
        problem: Problem,
        scale: float | None = None,
        table_bytes: float = np.inf,
        options: SolverOptions = DEFAULT,
    ):
        """scale: about what the optimum costs. table_bytes: no more tables are joined when all take so much."""
        self.options = options
        self.tables = InternedTables(options.compared_entries)
        self.quantum = _quantum(problem, scale)
        self.table_bytes = table_bytes
        count = len(problem.unary)
        shared = problem.shared
        known: dict[int, Id] = {}  # by the numbers of the problem's arrays
        raw: dict[tuple[tuple[int, ...], bytes], Id] = {}

        def rounded(costs: Floats, number: int) -> Id:
            found = known.get(number)
            if found is None:
                key = (costs.shape, costs.tobytes())
                found = raw.get(key)
                if found is None:
                    found = raw[key] = self.tables.id(_rounded(costs, self.quantum))
                known[number] = found
            return found

        def grouping(groups: Ints, number: int) -> Id:
            found = known.get(number)
            if found is None:
                found = known[number] = self.tables.id(groups.astype(np.int64, copy=False))
            return found

        self._unary = [rounded(row, n) for row, n in zip(problem.unary, shared.unary, strict=True)]
        numbers = {n: self.tables.id(np.arange(n)) for n in {row.size for row in problem.unary}}
        self._states = [numbers[row.size] for row in problem.unary]
        self.links: list[dict[int, Link]] = [{} for _ in problem.unary]
        self.messages: dict[tuple[int, int], Floats] = {}
        self.offset = float(np.floor(problem.offset / self.quantum) * self.quantum)
        self.limits: Floats = padded_limits(problem)
        unused = {n: self.tables.id(np.zeros((0, n))) for n in numbers}
        self._usage = [
            self.tables.id(np.stack([r.usage[i].astype(np.float64) for r in problem.resources]))
            if problem.resources
            else unused[row.size]
            for i, row in enumerate(problem.unary)
        ]
        self.alive = [True] * count
        self.infeasible = False
        self._trail: list[_Eliminated] = []
        self._dirty = list(range(count))
        self._queued = [True] * count
        self._doubtful: list[int] = []
        self._doubted = [False] * count
        self._thin: list[tuple[int, int]] = []
        if problem.resources:
            for i in range(count):
                self._rebase_usage(i)
        links: dict[tuple[int, int, int], tuple[Link, NormalForm]] = {}
        for (u, v, gu, gv, table), numbers in zip(problem.edges, shared.edges, strict=True):
            found = links.get(numbers)
            if found is None:
                of_u, of_v, of_table = numbers
                link = Link(grouping(gu, of_u), rounded(table, of_table), grouping(gv, of_v))
                found = links[numbers] = link, self.tables.normal_form(link)
            if v in self.links[u]:
                self._add_link(u, v, found[0])
            else:
                self._set_link(u, v, found[1])

    def relaxed(self, multipliers: Floats) -> "ReducedProblem":
        """A copy without resources whose cost is cost + multipliers . (usage - limits): its optimum is a bound."""
        other = self.copy()
        q = self.quantum
        # Rounded like all other costs, so that the copy's reductions are exact too.
        for i in self.active():
            if self._limited(i):
                other._unary[i] = self.tables.sum(
                    self._unary[i], self.tables.id(_rounded(multipliers @ self.usage(i), q))
                )
            other._usage[i] = self.tables.id(np.zeros((0, self.count(i))))
        other.offset = self.offset + float(np.floor(-(multipliers @ self.limits) / q) * q)
        other.limits = np.zeros(0)
        return other

    def copy(self) -> "ReducedProblem":
        """A copy that can be reduced by itself; it shares the tables."""
        other = copy.copy(self)
        other._unary, other._states, other._usage = list(self._unary), list(self._states), list(self._usage)
        other.links = [dict(links) for links in self.links]
        other.messages = dict(self.messages)
        other.alive = list(self.alive)
        other._trail = list(self._trail)
        other._dirty = self.active()
        other._queued = list(self.alive)
        other._doubtful = []
        other._doubted = [False] * len(self.alive)
        other._thin = []
        return other

    def active(self) -> list[int]:
        return [i for i, alive in enumerate(self.alive) if alive]

    def size(self) -> int:
        """The number of states left, over all variables left."""
        return sum(self.count(i) for i in self.active())

    def count(self, i: int) -> int:
        return self.tables.arrays[self._unary[i]].size

    def kind(self, i: int) -> tuple[Id, Id, Id]:
        """Equal for variables that have the same states left, at the same costs and usage."""
        return self._unary[i], self._states[i], self._usage[i]

    def unary(self, i: int) -> Floats:
        """float64 [states of i now]"""
        return self.tables.arrays[self._unary[i]]

    def states(self, i: int) -> Ints:
        """int64 [states of i now]: their numbers in the problem, ascending."""
        return self.tables.arrays[self._states[i]]

    def usage(self, i: int) -> Floats:
        """float64 [resources, states of i now], each row's minimum 0 (moved into `limits`)."""
        return self.tables.arrays[self._usage[i]]

    def seen_from(self, i: int, j: int) -> tuple[Ints, Floats, Ints]:
        """(groups of i, table [groups of i, groups of j], groups of j)."""
        own, table, other = self.links[i][j]
        return self.tables.arrays[own], self.tables.arrays[table], self.tables.arrays[other]

    def message(self, i: int, j: int) -> Floats:
        """Of the end at i of link (i, j): float64 [states of i now]."""
        found = self.messages.get((i, j))
        return np.zeros(self.count(i)) if found is None else found

    def restrict(self, i: int, keep: np.ndarray) -> None:
        """Drops the states of variable i where `keep` (bool [states]) is false."""
        self._restrict(i, self.tables.mask(keep))

    def lift(self, chosen: dict[int, int]) -> Ints:
        """The cheapest assignment of the whole problem that agrees with `chosen`: active variable -> state now."""
        tables = self.tables
        full = [-1] * len(self._unary)
        for i, s in chosen.items():
            full[i] = tables.numbers(self._states[i])[s]
        for step in reversed(self._trail):
            given = tuple(
                (link.own, link.table, tables.group_of_number(states, link.other)[full[j]])
                for j, states, link in step.links
            )
            full[step.variable] = tables.numbers(step.states)[tables.cheapest(step.unary, given)]
        return np.array(full, dtype=np.int64)

    def reduce(self, late: Callable[[], bool] = lambda: False) -> None:
        """Drops, merges and eliminates until nothing more is exact and cheap, or it is late: what is left then is an
        equal problem all the same. Sets `infeasible` if so proved."""
        while not (self.infeasible or late()):
            if self._dirty:
                i = heapq.heappop(self._dirty)
                self._queued[i] = False
                if self.alive[i]:
                    self._tidy(i)
            elif self._doubtful:
                i = heapq.heappop(self._doubtful)
                self._doubted[i] = False
                if self.alive[i]:
                    self._drop_dominated(i)
                    if not self._queued[i] and len(self.links[i]) <= 2:
                        heapq.heappush(self._thin, (len(self.links[i]), i))
            elif self._thin:
                degree, i = heapq.heappop(self._thin)
                if self.alive[i] and degree == len(self.links[i]) and not self._limited(i):
                    self._eliminate(i)
            else:
                return

    def _restrict(self, i: int, keep: Id) -> None:
        if keep == NONE:
            return
        tables = self.tables
        if not tables.arrays[keep].any():
            self.infeasible = True
            return
        self._unary[i] = tables.taken(self._unary[i], keep)
        self._states[i] = tables.taken(self._states[i], keep)
        self._usage[i] = tables.taken(self._usage[i], keep)
        if self.limits.size:
            self._rebase_usage(i)
        for j, link in list(self.links[i].items()):
            if self.messages and (message := self.messages.get((i, j))) is not None:
                self.messages[i, j] = message[tables.arrays[keep]]
            self._set_link(i, j, tables.restricted(link, keep))
        self._touch(i)

    def _tidy(self, i: int) -> None:
        if (finite := self.tables.finite(self._unary[i])) != NONE:
            self._restrict(i, finite)
        if self.limits.size and self._limited(i):
            self.restrict(i, np.all(self.usage(i) <= self.limits[:, None], axis=0))
        if self.infeasible:
            return
        if self.count(i) > 1 and self._cheap_to_eliminate(i):
            # Dominated states make no difference to the minimum over all of them.
            self._eliminate(i)
            return
        if self.count(i) == 1:
            self._fix(i)
        elif not self._doubted[i]:
            # What is cheap goes first: a test for dominated states is of use until the next change nearby.
            self._doubted[i] = True
            heapq.heappush(self._doubtful, i)

    def _limited(self, i: int) -> bool:
        return bool(self.limits.size and self.usage(i).any())

    def _cheap_to_eliminate(self, i: int) -> bool:
        if len(self.links[i]) > 2 or self._limited(i):
            return False
        work = self.count(i)
        for link in self.links[i].values():
            work *= self.tables.arrays[link.table].shape[1]
        return work <= self.options.cheap_work

    def _touch(self, i: int) -> None:
        if not self._queued[i]:
            self._queued[i] = True
            heapq.heappush(self._dirty, i)

    def _rebase_usage(self, i: int) -> None:
        use = self.usage(i)
        if use.any():
            least = use.min(axis=1)
            self._usage[i] = self.tables.id(use - least[:, None])
            self.limits = self.limits - least
            if (self.limits < 0).any():
                self.infeasible = True

    def _drop_dominated(self, i: int) -> None:
        """Drops states that cost no less than some kept state, whatever the neighbours choose."""
        unary, _ = self.tables.shifted(self._unary[i])
        sides = tuple(sorted((link.own, link.table) for link in self.links[i].values()))
        self._restrict(i, self.tables.undominated(unary, sides, self._usage[i], self.options.rivals))

    def _fix(self, i: int) -> None:
        step = self._step(i)
        unary, least = self.tables.shifted(self._unary[i])
        for j, link in list(self.links[i].items()):
            self._unary[j] = self.tables.sum(self._unary[j], self.tables.least(unary, link))
            self._unlink(i, j)
        self.offset += least
        self._retire(i, step)

    def _eliminate(self, i: int) -> None:
        step = self._step(i)
        # Without the least cost, so that equal layers give equal tables whatever they cost besides.
        unary, least = self.tables.shifted(self._unary[i])
        links = list(self.links[i].items())
        if len(links) == 1:
            (j, link), = links  # fmt: skip
            self._unary[j] = self.tables.sum(self._unary[j], self.tables.least(unary, link))
            self._unlink(i, j)
        elif links:
            (j, first), (k, second) = links
            if not self._worth_joining(i, first, second):
                return
            bj, bk = self.messages.get((j, i)), self.messages.get((k, i))
            self._unlink(i, j)
            self._unlink(i, k)
            self._add_link(j, k, self.tables.joined(unary, first, second), bj, bk)
        self.offset += least
        self._retire(i, step)

    def _worth_joining(self, i: int, first: Link, second: Link) -> bool:
        """Whether the table is small enough that eliminating variable i would create between its neighbours."""
        (r1, c1), (r2, c2) = (self.tables.arrays[link.table].shape for link in (first, second))
        if self.tables.nbytes + 8 * c1 * c2 > self.table_bytes:
            return False
        work = c1 * c2 * min(self.count(i), r1 * r2)
        return c1 * c2 <= self.options.joined_entries and work <= self.options.joining_work

    def _step(self, i: int) -> _Eliminated:
        links = tuple((j, self._states[j], link) for j, link in self.links[i].items())
        return _Eliminated(i, self._states[i], self._unary[i], links)

    def _retire(self, i: int, step: _Eliminated) -> None:
        self._trail.append(step)
        self.alive[i] = False

    def _unlink(self, i: int, j: int) -> None:
        del self.links[i][j], self.links[j][i]
        self.messages.pop((i, j), None)
        self.messages.pop((j, i), None)
        self._touch(i)
        self._touch(j)

    def _add_link(self, i: int, j: int, link: Link, bi: Floats | None = None, bj: Floats | None = None) -> None:
        for a, b, message in ((i, j, bi), (j, i, bj)):
            if message is not None:
                self.messages[a, b] = self.messages.get((a, b), 0.0) + message
        old = self.links[i].get(j)
        self._set_link(i, j, self.tables.normal_form(link) if old is None else self.tables.merged(old, link))

    def _set_link(self, i: int, j: int, form: NormalForm) -> None:
        """Puts a link in the place of the one there was; adds what its form takes out of it to its ends' costs."""
        cost_i, cost_j, link, mirror = form
        if cost_i != NONE:
            self._charge(i, j, cost_i)
        if cost_j != NONE:
            self._charge(j, i, cost_j)
        mine, theirs = self.links[i], self.links[j]
        if link is None or mirror is None:
            if j in mine:
                self._unlink(i, j)
            # A link that came to nothing before it was one has messages all the same.
            self.messages.pop((i, j), None)
            self.messages.pop((j, i), None)
            return
        old = mine.get(j)
        if old is None or old.table != link.table or old.own != link.own:
            self._touch(i)
        if old is None or old.table != link.table or old.other != link.other:
            self._touch(j)
        mine[j], theirs[i] = link, mirror

    def _charge(self, i: int, j: int, cost: Id) -> None:
        """Moves a cost of link (i, j) to variable i."""
        self._unary[i] = self.tables.sum(self._unary[i], cost)
        if self.messages:
            moved = self.tables.arrays[cost]
            self.messages[i, j] = self.message(i, j) + np.where(np.isfinite(moved), moved, 0.0)
        self._touch(i)


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
