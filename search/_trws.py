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
"""

from dataclasses import dataclass

import numpy as np

from hapsynth.search._pairwise import Floats, Ints
from hapsynth.search._reduce import Link, Network


@dataclass(slots=True)
class _End:
    """Link ends on one side, concatenated; within an end, states are sorted by group."""

    links: list[tuple[Link, int, Ints, slice]]
    message: Floats
    least: Floats
    levels: list["_Level"]


@dataclass(slots=True)
class _Level:
    """One level's share of an `_End`. A level is a set of nodes with no edge between them."""

    entries: slice  # of message
    groups: slice  # of least
    group_starts: Ints  # within entries
    state: Ints  # which of the level's states an entry is
    table: Floats  # rows own groups, columns the other ends' groups; all rows of the level concatenated
    row_starts: Ints
    source: Ints  # for each entry of table: which of the other side's `least` it meets
    row_of_entry: Ints


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

    order: its active variables as the forward pass takes them. extra: float64 [states] per variable, added to
    the unary costs (Lagrange multipliers times usage); constant is added to the offset.
    """

    def __init__(self, network: Network, order: list[int], extra: dict[int, Floats], constant: float = 0.0):
        self.network = network
        self.bound = network.offset + constant
        self.sweeps = 0
        position = {i: k for k, i in enumerate(order)}
        level: dict[int, int] = {}
        for i in order:
            before = [level[j] for j in network.links[i] if position[j] < position[i]]
            level[i] = 1 + max(before, default=-1)
        self.nodes = sorted(order, key=lambda i: (level[i], position[i]))
        sizes = [network.unary[i].size for i in self.nodes]
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        start_of = {i: int(s) for i, s in zip(self.nodes, self.starts[:-1], strict=True)}
        rank = {i: k for k, i in enumerate(self.nodes)}
        members: list[list[int]] = [[] for _ in range(max(level.values(), default=-1) + 1)]
        for i in self.nodes:
            members[level[i]].append(i)

        def ends(early: bool) -> list[list[tuple[int, int]]]:
            return [
                [(i, j) for i in group for j in sorted(network.links[i], key=rank.__getitem__)
                 if (rank[i] < rank[j]) == early]
                for group in members
            ]  # fmt: skip

        early, late = ends(True), ends(False)
        group_at = (_group_offsets(network, early), _group_offsets(network, late))
        first = [start_of[group[0]] for group in members]
        self._early = _build_end(network, early, start_of, first, group_at[1])
        self._late = _build_end(network, late, start_of, first, group_at[0])
        self._levels = [_build_nodes(network, group, start_of, rank) for group in members]
        self.theta = np.concatenate([network.unary[i] + extra.get(i, 0.0) for i in self.nodes] or [np.zeros(0)])
        for end in (self._early, self._late):
            for nodes, part in zip(self._levels, end.levels, strict=True):
                theta = self.theta[nodes.states]
                theta -= np.bincount(part.state, weights=end.message[part.entries], minlength=theta.size)
        # The forward pass expects that each edge's minimum given its earlier end's state is 0.
        for nodes, part in zip(self._levels, self._early.levels, strict=True):
            self.theta[nodes.states] += self._collect(part, self._early, self._late, self.theta[nodes.states].size)
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

    def store(self) -> None:
        """Writes the messages back to the network's links, where reductions keep them and searches read them."""
        for end in (self._early, self._late):
            for link, i, order, entries in end.links:
                message = np.empty(order.size)
                message[order] = end.message[entries]
                if i == link.u:
                    link.bu = message
                else:
                    link.bv = message

    def _collect(self, part: _Level, end: _End, far: _End, size: int) -> Floats:
        if not part.source.size:
            return np.zeros(size)
        rows = np.minimum.reduceat(far.least[part.source] + part.table, part.row_starts)[part.row_of_entry]
        gained = rows + end.message[part.entries]
        end.message[part.entries] = -rows
        return np.bincount(part.state, weights=gained, minlength=size).astype(np.float64)

    def _visit(self, k: int, near: _End, far: _End, forward: bool) -> None:
        nodes = self._levels[k]
        theta = self.theta[nodes.states]
        total = theta + self._collect(near.levels[k], near, far, theta.size)
        least = np.minimum.reduceat(total, nodes.starts)
        total -= least[nodes.node_of_state]
        self.bound += float(least.sum())
        floor = self.floor[nodes.states]
        np.maximum(floor, total + self.bound, out=floor)
        part = far.levels[k]
        if not part.source.size:
            theta[:] = total
            return
        np.multiply(total, nodes.kept[forward], out=theta)
        message = far.message[part.entries]
        message += (total * nodes.share[forward])[part.state]
        far.least[part.groups] = np.minimum.reduceat(message, part.group_starts)


def _group_offsets(network: Network, ends: list[list[tuple[int, int]]]) -> dict[tuple[int, int], int]:
    """Where each end's groups start in its side's `least`."""
    at: dict[tuple[int, int], int] = {}
    total = 0
    for i, j in (pair for level in ends for pair in level):
        at[i, j] = total
        total += network.links[i][j].seen_from(i)[1].shape[0]
    return at


def _build_end(
    network: Network,
    ends: list[list[tuple[int, int]]],
    start_of: dict[int, int],
    first: list[int],
    far_groups: dict[tuple[int, int], int],
) -> _End:
    links: list[tuple[Link, int, Ints, slice]] = []
    messages: list[Floats] = []
    levels: list[_Level] = []
    entries = groups = 0
    minima: list[Floats] = []
    for pairs, base in zip(ends, first, strict=True):
        entry0, group0 = entries, groups
        state: list[Ints] = []
        starts: list[Ints] = []
        tables: list[Floats] = []
        sources: list[Ints] = []
        rows: list[Ints] = []
        owners: list[Ints] = []
        filled = 0
        for i, j in pairs:
            link = network.links[i][j]
            own, table, _ = link.seen_from(i)
            order = np.argsort(own, kind="stable")
            message = link.message_to(i)[order]
            within = np.searchsorted(own[order], np.arange(table.shape[0]))
            links.append((link, i, order, slice(entries, entries + order.size)))
            messages.append(message)
            minima.append(np.minimum.reduceat(message, within))
            state.append(order + (start_of[i] - base))
            starts.append(within + (entries - entry0))
            tables.append(table.ravel())
            far = far_groups[j, i] + np.arange(table.shape[1])
            sources.append(np.broadcast_to(far, table.shape).ravel())
            rows.append(filled + table.shape[1] * np.arange(table.shape[0]))
            owners.append(own[order] + (groups - group0))
            filled += table.size
            entries += order.size
            groups += table.shape[0]
        levels.append(
            _Level(
                slice(entry0, entries), slice(group0, groups), _joined(starts), _joined(state),
                np.concatenate([np.zeros(0), *tables]), _joined(rows), _joined(sources), _joined(owners),
            )
        )  # fmt: skip
    return _End(links, np.concatenate([np.zeros(0), *messages]), np.concatenate([np.zeros(0), *minima]), levels)


def _build_nodes(network: Network, group: list[int], start_of: dict[int, int], rank: dict[int, int]) -> _Nodes:
    sizes = [network.unary[i].size for i in group]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    share: dict[bool, Floats] = {}
    kept: dict[bool, Floats] = {}
    for forward in (True, False):
        out = np.array([sum((rank[j] > rank[i]) == forward for j in network.links[i]) for i in group])
        degree = np.array([len(network.links[i]) for i in group])
        weight = 1.0 / np.maximum(np.maximum(out, degree - out), 1)
        share[forward] = np.repeat(weight, sizes)
        kept[forward] = np.repeat(np.where(out < degree - out, 1.0 - weight * out, out == 0), sizes)
    at = start_of[group[0]]
    return _Nodes(slice(at, at + int(starts[-1])), starts[:-1], np.repeat(np.arange(len(group)), sizes), share, kept)


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)
