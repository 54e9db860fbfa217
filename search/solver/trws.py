"""Sequential tree-reweighted message passing: a lower bound that only rises, and reduced costs per state.

Kolmogorov, "Convergent tree-reweighted message passing" (2006), in the form of his "A new look at
reweighted message passing" (2015): the problem is reparametrised,

    theta_i(x_i) = unary_i(x_i) - sum_{e at i} b_{e,i}(x_i)
    theta_e(x_u, x_v) = b_{e,u}(x_u) + table[gu[x_u], gv[x_v]] + b_{e,v}(x_v)

which leaves every assignment's cost as it is, and bound = sum_i min theta_i + sum_e min theta_e. Messages are
vectors over states, minima go through groups: a pass costs O(states + table entries) per edge. Each node in
turn collects the minima of its edges and spreads what it then has over the edges to nodes still to come, so
every step keeps or raises the bound.

Lemma (reduced costs). At any moment let theta be any reparametrisation in which all theta_j, j != i, and all
theta_e have minimum >= 0 after their minima are moved into a constant c. An assignment with x_i = s costs at
least c + theta_i(s), as all other terms are >= 0. After node i has collected, theta_i(s) holds the star of s:
its own cost plus the least cost of each of its edges given s. `floor` is the largest such value seen for each
state, so a state whose floor exceeds the cost of a known assignment is in no better one and may be dropped.

The bound rises in whatever order the nodes are visited. Here the order is cut into stretches that are walked side by
side, in array operations: news travels along a stretch in one sweep and between stretches in the next ones, so
stretches of about a layer cost few more sweeps than one long walk (BERT-base: 30 and 20), and each is 10 times as fast.
"""

from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from hapsynth.search.solver.interning import Id
from hapsynth.search.solver.options import SolverOptions
from hapsynth.search.solver.problem import Floats, Ints
from hapsynth.search.solver.reduction import ReducedProblem

_CHUNK = 200_000
_TIE = 1e-12  # of the bound: states so close to the cheapest are as good, and the first is taken


@dataclass(slots=True)
class _HalfEdges:
    """Link ends on one side, concatenated; within an end, states are sorted by group."""

    pairs: list[tuple[int, int]]  # (node, its neighbour) of each end
    message: Floats
    least: Floats
    levels: list["_LevelSlice"]


@dataclass(slots=True)
class _LevelSlice:
    """One level's share of an `_HalfEdges`. A level is a set of nodes with no edge between them."""

    entries: slice  # of message
    groups: slice  # of least
    group_starts: Ints  # within entries
    state: Ints  # which of the level's states an entry is
    group_of_entry: Ints  # within groups
    small: "_SmallTables"
    large: list["_LargeTable"]

    def given_own(self, least: Floats) -> Floats:
        """[groups]: the least of table + the other end's costs by group, `least`."""
        small = self.small
        rows = np.empty(0)
        if small.cells.size:
            rows = np.minimum.reduceat(least[small.source] + small.cells, small.row_starts)
        if not self.large:
            return rows
        out = np.empty(self.groups.stop - self.groups.start)
        out[small.rows] = rows
        for part in self.large:
            width, height = part.columns.shape
            step = max(1, _CHUNK // part.columns.size)
            for at in range(0, part.source.size, step):
                costs = least[part.source[at : at + step, None] + np.arange(width)]
                rows = (costs[:, :, None] + part.columns).min(axis=1)
                out[part.target[at : at + step, None] + np.arange(height)] = rows
        return out


@dataclass(slots=True)
class _SmallTables:
    """The small tables of a level, row by row, rows own groups, columns the other ends' groups."""

    cells: Floats
    row_starts: Ints
    source: Ints  # for each cell: which of the other side's `least` it meets
    rows: Ints  # which of the level's groups each row is


@dataclass(slots=True)
class _LargeTable:
    """A large table and the ends of a level that share it: where the other end's groups and their own start."""

    columns: Floats  # [the other end's groups, own groups]
    source: Ints
    target: Ints


@dataclass(slots=True)
class _Nodes:
    """One level's nodes. states: slice of theta."""

    states: slice
    starts: Ints
    node_of_state: Ints
    share: dict[bool, Floats]  # weight per state of each edge to come, by direction (True: forward)
    kept: dict[bool, Floats]  # weight that stays with the node


class Dual:
    """The dual of a reduced network (not empty, no forbidden states).

    extra: float64 [states] per variable, added to the unary costs (Lagrange multipliers times usage); constant is added
    to the offset. order: the active variables as the forward pass takes them; by default in `stretches`.
    """

    def __init__(
        self, network: ReducedProblem, extra: dict[int, Floats], constant: float = 0.0, order: list[int] | None = None
    ):
        options = network.options
        self.network = network
        self.bound = network.offset + constant
        self.sweeps, self._stored = 0, -1
        order = stretches(network, options) if order is None else order
        members = _levels(network, order)
        self.nodes = list(chain.from_iterable(members))
        rank = {i: k for k, i in enumerate(self.nodes)}
        sizes = [network.count(i) for i in self.nodes]
        self.starts = _offsets(sizes)
        start_of = dict(zip(self.nodes, self.starts.tolist(), strict=False))
        early: list[list[tuple[int, int]]] = []
        late: list[list[tuple[int, int]]] = []
        for group in members:
            pairs = [(i, j) for i in group for j in sorted(network.links[i], key=rank.__getitem__)]
            early.append([(i, j) for i, j in pairs if rank[i] < rank[j]])
            late.append([(i, j) for i, j in pairs if rank[i] > rank[j]])
        first = [start_of[group[0]] for group in members]
        self._early = _build_end(network, early, late, start_of, first, options.large_table)
        self._late = _build_end(network, late, early, start_of, first, options.large_table)
        self._levels = [_build_nodes(network, group, start_of, rank) for group in members]
        self.theta = np.concatenate(
            [network.unary(i) + extra[i] if i in extra else network.unary(i) for i in self.nodes]
        )
        for end in (self._early, self._late):
            for nodes, part in zip(self._levels, end.levels, strict=True):
                theta = self.theta[nodes.states]
                theta -= np.bincount(part.state, weights=end.message[part.entries], minlength=theta.size)
        # The forward pass expects that each edge's minimum given its earlier end's state is 0, and each node's minimum
        # too: a node still to come that could cost less than nothing would make the floors of those before it too high.
        for nodes, part in zip(self._levels, self._early.levels, strict=True):
            theta = self.theta[nodes.states]
            theta += self._collect(part, self._early, self._late, theta.size)
            least = np.minimum.reduceat(theta, nodes.starts)
            theta -= least[nodes.node_of_state]
            self.bound += float(least.sum())
        self.floor = np.full(self.theta.size, -np.inf)

    def sweep(self) -> float:
        """A forward and a backward pass; returns the bound. O(total states + total table entries)."""
        for k in range(len(self._levels)):
            self._visit(k, self._late, self._early, True)
        for k in reversed(range(len(self._levels))):
            self._visit(k, self._early, self._late, False)
        self.sweeps += 1
        return self.bound

    def floors(self) -> dict[int, Floats]:
        """Per variable, float64 [states]: a lower bound on the cost of any assignment that takes the state."""
        return {i: self.floor[a:b] for i, a, b in zip(self.nodes, self.starts[:-1], self.starts[1:], strict=True)}

    def decoded(self) -> tuple[float, dict[int, int] | None]:
        """After a sweep: each node in turn takes its cheapest state given those of its earlier neighbours.

        Returns the assignment and its cost; where the bound is tight it is mostly an optimum. (inf, None) where it runs
        into forbidden pairs.
        """
        near = self._late
        # What a group of an earlier end costs: the chosen state's message for its group, inf for the others.
        costs = np.full(self._early.least.size, np.inf)
        chosen: dict[int, int] = {}
        slack = _TIE * abs(self.bound)
        cost = self.bound
        at = 0
        for nodes, part, far in zip(self._levels, near.levels, self._early.levels, strict=True):
            total = self.theta[nodes.states]
            if part.state.size:
                rows = part.given_own(costs)[part.group_of_entry]
                rows += near.message[part.entries]
                total = total + np.bincount(part.state, weights=rows, minlength=total.size)
            least = np.minimum.reduceat(total, nodes.starts)
            if not np.isfinite(least).all():
                return np.inf, None
            good = np.flatnonzero(total <= least[nodes.node_of_state] + slack)
            states = good[np.unique(nodes.node_of_state[good], return_index=True)[1]]
            for i, s in zip(self.nodes[at : at + states.size], (states - nodes.starts).tolist(), strict=True):
                chosen[i] = s
            at += states.size
            cost += float(total[states].sum())
            taken = np.zeros(total.size, dtype=bool)
            taken[states] = True
            entries = np.flatnonzero(taken[far.state])
            costs[far.groups.start + far.group_of_entry[entries]] = self._early.message[far.entries][entries]
        return cost, chosen

    def store(self) -> None:
        """Writes the messages back to the network, where reductions keep them and searches read them."""
        if self._stored == self.sweeps:
            return
        self._stored = self.sweeps
        tables, links = self.network.tables, self.network.links
        for end in (self._early, self._late):
            at = 0
            for i, j in end.pairs:
                order = tables.by_group(links[i][j].own)[0]
                message = np.empty(order.size)
                message[order] = end.message[at : at + order.size]
                self.network.messages[i, j] = message
                at += order.size

    def _collect(self, part: _LevelSlice, end: _HalfEdges, far: _HalfEdges, size: int) -> Floats:
        if not part.state.size:
            return np.zeros(size)
        rows = part.given_own(far.least)[part.group_of_entry]
        message = end.message[part.entries]
        gained = rows + message
        np.negative(rows, out=message)
        return np.asarray(np.bincount(part.state, weights=gained, minlength=size), dtype=np.float64)

    def _visit(self, k: int, near: _HalfEdges, far: _HalfEdges, forward: bool) -> None:
        nodes = self._levels[k]
        theta = self.theta[nodes.states]
        total = theta + self._collect(near.levels[k], near, far, theta.size)
        least = np.minimum.reduceat(total, nodes.starts)
        total -= least[nodes.node_of_state]
        self.bound += float(least.sum())
        floor = self.floor[nodes.states]
        np.maximum(floor, total + self.bound, out=floor)
        part = far.levels[k]
        if not part.state.size:
            theta[:] = total
            return
        np.multiply(total, nodes.kept[forward], out=theta)
        message = far.message[part.entries]
        message += (total * nodes.share[forward])[part.state]
        far.least[part.groups] = np.minimum.reduceat(message, part.group_starts)


def stretches(network: ReducedProblem, options: SolverOptions) -> list[int]:
    """The active variables, by number, as they come when stretches of them are walked side by side."""
    active = network.active()
    entries = sum(network.count(i) * len(network.links[i]) for i in active)
    length = max(options.stretch, entries // options.entries_per_level)
    count = -(-len(active) // length)
    length = -(-len(active) // count)
    return [active[at] for first in range(length) for at in range(first, len(active), length)]


def _levels(network: ReducedProblem, order: list[int]) -> list[list[int]]:
    """The longest chain of earlier neighbours is a node's level: no two nodes of a level are neighbours."""
    level: dict[int, int] = {}
    members: list[list[int]] = []
    for i in order:
        k = 1 + max([level[j] for j in network.links[i] if j in level], default=-1)
        level[i] = k
        if k == len(members):
            members.append([])
        members[k].append(i)
    return members


def _build_end(
    network: ReducedProblem,
    ends: list[list[tuple[int, int]]],
    far: list[list[tuple[int, int]]],
    start_of: dict[int, int],
    first: list[int],
    large_table: int,
) -> _HalfEdges:
    """first: per level, where its states start; large_table: entries beyond which one isn't copied.
    Everything but the messages comes from arrays built once per kind."""
    tables, links = network.tables, network.links
    pairs = list(chain.from_iterable(ends))
    far_pairs = list(chain.from_iterable(far))
    widths = [tables.arrays[links[i][j].table].shape[0] for i, j in far_pairs]
    far_at = dict(zip(far_pairs, accumulate(widths, initial=0), strict=False))
    far_starts = np.array([far_at[j, i] for i, j in pairs], dtype=np.int64)
    sorted_groups = [tables.by_group(links[i][j].own) for i, j in pairs]
    table_of = [links[i][j].table for i, j in pairs]
    small = [k for k, t in enumerate(table_of) if tables.arrays[t].size <= large_table]
    cells = [tables.cells(table_of[k]) for k in small]
    # Where each end's states and groups start, each small end's cells and rows, and each level's first of them.
    ends_at = _offsets([len(level) for level in ends])
    small_at = np.searchsorted(small, ends_at)
    level_of = np.repeat(np.arange(len(ends)), np.diff(ends_at))
    state_at, group_at = (_offsets([part[k].size for part in sorted_groups]) for k in (0, 1))
    cell_at, row_at = (_offsets([part[k].size for part in cells]) for k in (0, 2))
    level_states, level_groups, level_cells = state_at[ends_at], group_at[ends_at], cell_at[small_at]
    local = np.array([start_of[i] for i, _ in pairs], dtype=np.int64) - np.array(first)[level_of]
    state = _shifted([part[0] for part in sorted_groups], local)
    starts = _shifted([part[1] for part in sorted_groups], state_at[:-1])
    local_group = group_at[:-1] - level_groups[level_of]
    group_of_entry = _shifted([part[2] for part in sorted_groups], local_group)
    message = np.zeros(state.size)
    if network.messages:
        stored = [network.message(i, j)[part[0]] for (i, j), part in zip(pairs, sorted_groups, strict=True)]
        message = np.concatenate([message[:0], *stored])
    least = np.minimum.reduceat(message, starts) if message.size else np.zeros(0)
    table = np.concatenate([np.zeros(0), *(part[0] for part in cells)])
    source = _shifted([part[1] for part in cells], far_starts[small])
    row_starts = _shifted([part[2] for part in cells], cell_at[:-1] - level_cells[level_of[small]])
    rows = _shifted([np.arange(part[2].size) for part in cells], local_group[small])
    levels: list[_LevelSlice] = []
    for k in range(len(ends)):
        a, b, c, d = (
            slice(int(at[k]), int(at[k + 1])) for at in (level_states, level_groups, level_cells, row_at[small_at])
        )
        large: dict[Id, list[int]] = {}
        for e in range(int(ends_at[k]), int(ends_at[k + 1])):
            if tables.arrays[table_of[e]].size > large_table:
                large.setdefault(table_of[e], []).append(e)
        levels.append(
            _LevelSlice(
                a, b, starts[b] - level_states[k], state[a], group_of_entry[a],
                _SmallTables(table[c], row_starts[d], source[c], rows[d]),
                [_LargeTable(tables.columns(t), far_starts[e], local_group[e]) for t, e in large.items()],
            )
        )  # fmt: skip
    return _HalfEdges(pairs, message, least, levels)


def _build_nodes(network: ReducedProblem, group: list[int], start_of: dict[int, int], rank: dict[int, int]) -> _Nodes:
    sizes = [network.count(i) for i in group]
    starts = _offsets(sizes)
    share: dict[bool, Floats] = {}
    kept: dict[bool, Floats] = {}
    later = np.array([sum(rank[j] > rank[i] for j in network.links[i]) for i in group])
    degree = np.array([len(network.links[i]) for i in group])
    for forward in (True, False):
        out = later if forward else degree - later
        weight = 1.0 / np.maximum(np.maximum(out, degree - out), 1)
        share[forward] = np.repeat(weight, sizes)
        kept[forward] = np.repeat(np.where(out < degree - out, 1.0 - weight * out, out == 0), sizes)
    at = start_of[group[0]]
    return _Nodes(slice(at, at + int(starts[-1])), starts[:-1], np.repeat(np.arange(len(group)), sizes), share, kept)


def _offsets(sizes: list[int]) -> Ints:
    """Where each part starts in a concatenation, and its length."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _shifted(parts: list[Ints], by: Ints) -> Ints:
    """The parts in a row, each with its number added."""
    joined = np.concatenate([np.zeros(0, dtype=np.int64), *parts])
    return joined + np.repeat(by, [part.size for part in parts])
