"""Lower bounds on the makespan of every program that a choice space has, each linear in what its choices cost.

A chain is a sequence of sets of instructions, each on one resource: the compute stream of a device, or a link. Every
instruction of a set waits for all of the set before it, so the seconds of all sets add up, in whatever order a program
runs. The sets are told by ops of the source graph that lie between them (`cuts`): what these depend on comes before,
what depends on them comes after. A chain of one set holds all that its resource ever does, and what loops and branches
take, beside which nothing runs.

A conversion that several uses share need not precede each of them. It counts in a set that some of these uses lie
outside of only as far as one use of the set, the first, takes what comes out of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hapsynth.search.analysis.reachability import Mask, Reachability
from hapsynth.search.cost.model import Floats
from hapsynth.search.formulation.choice_space import ChoiceSpace

Places = npt.NDArray[np.int8]
_NOWHERE = -1


@dataclass(frozen=True, eq=False)
class Resources:
    """`kinds`: of devices, each with a compute stream, that of its first device; `links`: per link the mesh axes whose
    collectives go over it. A resource's number is a kind's, then a link's."""

    kinds: int
    links: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Chain:
    """Where instructions count: per op the kind of device, or -1; per use, for its own conversion (`uses`) and for the
    shared one that it takes (`shared`), per value for its shared conversions (`values`) and those to where it ends
    (`ends`), the link, or -1. `alone`: the resource of a chain of one set, in which loops and branches count, and
    arguments that are fed."""

    key: tuple[object, ...]
    ops: Places
    uses: Places
    shared: Places
    values: Places
    ends: Places
    alone: int | None


@dataclass(frozen=True, eq=False)
class Occupancy:
    """What one program takes. Seconds of each op on each kind of device and, last, of the slowest [ops, kinds + 1]; on
    each link those of each use's own conversion and of the shared one up to what it takes [uses, links], of each
    value's shared conversions and of those to where it ends [values, links]. `fed`: to put new arguments into memory
    [kinds + 1]."""

    ops: Floats
    uses: Floats
    shared: Floats
    values: Floats
    ends: Floats
    fed: Floats


class ChainSpace:
    """The chains of a choice space's graph on some resources."""

    def __init__(self, structure: ChoiceSpace, resources: Resources) -> None:
        graph = self.graph = structure.graph
        self.structure, self.resources = structure, resources
        made_by = graph.producer
        self.in_block = np.array([op.region > 0 for op in graph.ops], bool)
        """bool [ops]: in a loop or branch."""
        self.uses_in_block = np.array([use.place > 0 for use in structure.uses], bool)
        self.values_in_block = np.array([home > 0 for home in graph.home], bool)
        self.use_maker = np.array([made_by.get(use.value, _NOWHERE) for use in structure.uses], dtype=np.int64)
        self.use_reader = np.array([use.reader for use in structure.uses], dtype=np.int64)
        self.use_value = np.array([use.value for use in structure.uses], dtype=np.int64)
        self.made_by = np.array([made_by.get(v, _NOWHERE) for v in range(len(graph.values))], dtype=np.int64)
        used = np.zeros(len(graph.values), bool)
        used[self.use_value] = True
        self.used = used

    @cached_property
    def reach(self) -> Reachability:
        return Reachability(self.graph)

    @cached_property
    def alone(self) -> tuple[Chain, ...]:
        """The chain of each resource with all that it does."""
        return tuple(self._alone(r) for r in range(self.resources.kinds + len(self.resources.links)))

    def _alone(self, resource: int) -> Chain:
        kinds = self.resources.kinds
        kind, link = (resource, _NOWHERE) if resource < kinds else (_NOWHERE, resource - kinds)
        everywhere = lambda block, at: np.where(block, _NOWHERE, at).astype(np.int8)
        uses, values = everywhere(self.uses_in_block, link), everywhere(self.values_in_block, link)
        shared = np.full(uses.shape, _NOWHERE, np.int8)
        return Chain((resource,), everywhere(self.in_block, kind), uses, shared, values, values, resource)

    def chain(self, cuts: Sequence[int], resources: Sequence[int]) -> Chain:
        """The chain with ops as cuts between its sets, in turn on one kind's stream and on some link. A cut is
        the last op of the set before it, or the first of the set after it: of the one that is on the stream."""
        kinds, count = self.resources.kinds, len(self.graph.ops)
        ops = np.full(count, _NOWHERE, np.int8)
        uses, values, ends = (np.full(n, _NOWHERE, np.int8) for n in (self.use_maker.size, *[self.made_by.size] * 2))
        shared = uses.copy()
        for n, resource in enumerate(resources):
            low = self.reach.descendants(cuts[n - 1]) if n else None
            high = self.reach.ancestors(cuts[n]) if n < len(cuts) else None
            if resource < kinds:
                inside = ~self.in_block
                for mask in (low, high):
                    inside = inside if mask is None else inside & mask
                ops[inside] = resource
                continue
            link = resource - kinds
            made, until = self._reached(low, self.made_by), self._reached(high, self.use_reader)
            mine = self._reached(low, self.use_maker) & until & ~self.uses_in_block
            uses[mine] = link
            # Shared conversions go before all their uses, where all of them lie inside.
            inside = self.used & ~self.values_in_block & made
            inside[self.use_value[~until]] = False
            if high is None:
                ends[made & ~self.values_in_block] = link
            else:
                inside[self._outputs] = False
            values[inside] = link
            partly = np.flatnonzero(mine & ~inside[self.use_value] & ~self.values_in_block[self.use_value])
            _, first = np.unique(self.use_value[partly], return_index=True)
            shared[partly[first]] = link
        return Chain((*cuts, *resources), ops, uses, shared, values, ends, None)

    @cached_property
    def _outputs(self) -> list[int]:
        return sorted({v for v in self.graph.outputs if isinstance(v, int)})

    @staticmethod
    def _reached(mask: Mask | None, ops: npt.NDArray[np.int64]) -> Mask:
        """Whether each of some ops is among those of a mask, all are where there is none; what is no op is not."""
        if mask is None:
            return np.ones(ops.shape, bool)
        return (ops >= 0) & mask[ops]

    def length(self, chain: Chain, taken: Occupancy) -> float:
        """Seconds that a program takes at least: of what is in the chain."""
        found = float(sum(part.sum() for part in self.parts(chain, taken)))
        return found + (0.0 if chain.alone is None else self._alone_too(chain.alone, taken))

    def parts(self, chain: Chain, taken: Occupancy) -> tuple[Floats, Floats, Floats]:
        """A chain's seconds by op, by use and by value; without what is in loops and branches, or is fed."""

        def counted(at: Places, seconds: Floats) -> Floats:
            here = np.flatnonzero(at >= 0)
            found = np.zeros(at.size)
            found[here] = seconds[here, at[here]]
            return found

        uses = counted(chain.uses, taken.uses) + counted(chain.shared, taken.shared)
        values = counted(chain.values, taken.values) + counted(chain.ends, taken.ends)
        return counted(chain.ops, taken.ops), uses, values

    def _alone_too(self, resource: int, taken: Occupancy) -> float:
        """Seconds of loops, branches and fed arguments."""
        return float(
            taken.ops[self.in_block, -1].sum()
            + taken.uses[self.uses_in_block].sum()
            + taken.values[self.values_in_block].sum()
            + (taken.fed[resource] if resource < self.resources.kinds else 0.0)
        )

    def longest(self, taken: Occupancy, among: Collection[int]) -> list[Chain]:
        """Per kind of device, the longest chain of a program with cuts among some ops, by dynamic programming."""
        outside = sorted(op for op in among if not self.in_block[op])
        return [c for kind in range(self.resources.kinds) if (c := self._longest(taken, outside, kind))]

    def _longest(self, taken: Occupancy, among: Sequence[int], kind: int) -> Chain | None:
        if not among:
            return None
        kinds, links = self.resources.kinds, range(len(self.resources.links))
        compute = np.where(self.in_block, 0.0, taken.ops[:, kind])
        before = np.array([self.reach.ancestors(op) for op in among])
        after = np.array([self.reach.descendants(op) for op in among])
        hops = _Traffic(self, taken)
        since = np.array([hops.since(mask) for mask in after])
        until = np.array([hops.until(mask) for mask in before])
        # Seconds between cut a and cut b, from the beginning to a cut, and from one to the end: of the stream, with
        # those of the cuts themselves, and of each link.
        stream = (after * compute) @ before.T.astype(np.float64)
        first, last = before @ compute, after @ compute
        sent = np.stack([(since * hops.seconds[:, k]) @ until.T.astype(np.float64) for k in links])
        sent_first = np.stack([until @ hops.seconds[:, k] for k in links])
        sent_last = np.stack([since @ hops.seconds[:, k] for k in links])
        ordered = after[:, list(among)] & ~np.eye(len(among), dtype=bool)
        # A node is a cut; `ends`: compute, then a link; else a link, then compute.
        best: dict[tuple[int, bool], tuple[float, tuple[int, bool] | None, int]] = {}
        for b in range(len(among)):
            for ends in (False, True):
                if ends:
                    value, how, resource = float(first[b]), None, kind
                else:
                    k = int(sent_first[:, b].argmax())
                    value, how, resource = float(sent_first[k, b]), None, kinds + k
                # One op may begin a set and end it.
                for a in [*np.flatnonzero(ordered[:, b]).tolist(), *([b] if ends else [])]:
                    if ends:
                        # The stream from a, which it begins with, to b, which it ends with.
                        seconds, by = float(stream[a, b]), kind
                    else:
                        k = int(sent[:, a, b].argmax())
                        seconds, by = float(sent[k, a, b]), kinds + k
                    if (total := best[a, not ends][0] + seconds) > value:
                        value, how, resource = total, (a, not ends), by
                best[b, ends] = value, how, resource

        def closed(node: tuple[int, bool]) -> tuple[float, int]:
            b, ends = node
            if not ends:
                return best[node][0] + float(last[b]), kind
            k = int(sent_last[:, b].argmax())
            return best[node][0] + float(sent_last[k, b]), kinds + k

        node: tuple[int, bool] | None = max(best, key=lambda n: closed(n)[0])
        assert node is not None
        cuts, resources = list[int](), [closed(node)[1]]
        while node is not None:
            cuts.append(among[node[0]])
            _, node, resource = best[node]
            resources.append(resource)
        return self.chain(cuts[::-1], resources[::-1])


class _Traffic:
    """A program's conversions outside loops and branches as hops: from the op that makes a value to those that read it.

    `seconds`: float64 [hops, links]. A shared conversion is one hop, to all readers of its value.
    """

    def __init__(self, space: ChainSpace, taken: Occupancy) -> None:
        uses = np.flatnonzero((taken.uses > 0).any(axis=1) & ~space.uses_in_block)
        values = np.flatnonzero((taken.values > 0).any(axis=1) & ~space.values_in_block)
        ends = np.flatnonzero((taken.ends > 0).any(axis=1) & ~space.values_in_block)
        self.seconds = np.concatenate([taken.uses[uses], taken.values[values], taken.ends[ends]])
        self._makers = np.concatenate([space.use_maker[uses], space.made_by[values], space.made_by[ends]])
        self._space, self._uses, self._values, self._ends = space, uses, values, ends
        place = np.full(space.made_by.size, -1)
        place[values] = np.arange(values.size)
        takes = np.flatnonzero((taken.shared > 0).any(axis=1))
        self._takers = takes[place[space.use_value[takes]] >= 0]
        self._taken = place[space.use_value[self._takers]]

    def since(self, mask: Mask) -> Mask:
        """Which wait for some ops."""
        return ChainSpace._reached(mask, self._makers)

    def until(self, mask: Mask) -> Mask:
        """Which some ops wait for: of a shared one some reader does."""
        shared = np.zeros(self._values.size, bool)
        shared[self._taken[ChainSpace._reached(mask, self._space.use_reader[self._takers])]] = True
        own = ChainSpace._reached(mask, self._space.use_reader[self._uses])
        return np.concatenate([own, shared, np.zeros(self._ends.size, bool)])
