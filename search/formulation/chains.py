"""Lower bounds on the makespan of every program of a choice space, each linear in the costs of its choices.

A chain is a sequence of sets of instructions, each on one resource: the compute stream of a device, or the link. Every
instruction of a set waits for all of the set before it, so the seconds of all sets add up, in whatever order a program
runs. The sets are told by ops of the source graph that lie between them (`cuts`): what these depend on comes before,
what depends on them comes after. A chain of one set holds all that its resource ever does, and what loops and branches
take, beside which nothing runs.

A device computes more slowly while a collective runs. So everything sent counts: in a set on the link if it is of
that, else by the part by which it slows computing down, as it is sent while some set on the stream runs, which takes
that much longer, or beside a set on the link, after one another.

A conversion that several uses share need not precede each of them. It counts in a set that some of these uses lie
outside of only as far as one use of the set takes what comes out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hapsynth.search.analysis.reachability import Mask, Reachability
from hapsynth.search.cost.model import Floats
from hapsynth.search.formulation.choice_space import ChoiceSpace
from hapsynth.search.formulation.deferral import Deferral
from hapsynth.search.solver import Ints

Columns = npt.NDArray[np.integer]
"""One per row of a field of `Occupancy`, or -1."""
_NOWHERE = -1
SENT = 0
"""The column of seconds on the link; columns 1.. are the kinds' compute streams, as in `Resources.counted`."""
_LINK, _STREAM, _LAST_ON_STREAM, _BEFORE_JOIN = range(4)
_LONGEST = 32
"""The number of a program's longest ops, and of its longest conversions, by whose order ops are put into classes with
one possible cut each. Two or eight times as many make no chain of BERT with 12 layers longer."""


@dataclass(frozen=True, eq=False)
class Resources:
    """`slowdowns`: per kind of device, the factor by which a concurrent collective lengthens computing. Resource k is
    the compute stream of one device of kind k; the last resource is the link."""

    slowdowns: tuple[float, ...]

    @property
    def kinds(self) -> int:
        return len(self.slowdowns)

    @property
    def link(self) -> int:
        return self.kinds

    @cached_property
    def counted(self) -> Floats:
        """The seconds for which one second on the link counts: on the link itself, then, as it slows computing down, on
        each kind's stream [1 + kinds]."""
        return np.array([1.0, *(1 - 1 / slowdown for slowdown in self.slowdowns)])


@dataclass(frozen=True, eq=False)
class Chain:
    """`places`: the indices into `Occupancy.flat` whose seconds add up to its length. `alone`: the resource of a chain
    of one set."""

    key: tuple[object, ...]
    places: Ints
    alone: int | None = None

    def length(self, taken: Occupancy) -> float:
        """A lower bound on a program's seconds: the length of this chain in it."""
        return float(taken.flat[self.places].sum())


@dataclass(frozen=True, eq=False)
class Occupancy:
    """Seconds for which one program occupies each resource.

    `ops` [ops, kinds + 1]: computing on each kind of device and, last, on the slowest.
    `deferred` [ops, 2 kinds]: the lesser of an op's computing and what it sends after itself, per kind; then the same
    with only what it sends before `Deferral.join`.
    `uses`, `shared` [uses, columns]: of a use's own conversion, and of the shared conversions up to the layout that it
    takes. `values`, `ends` [values, columns]: of a value's shared conversions, and of those to an output's layout. The
    columns of these four are those of `Resources.counted`.
    `fed` [1, kinds + 1]: putting new arguments into memory.
    """

    ops: Floats
    deferred: Floats
    uses: Floats
    shared: Floats
    values: Floats
    ends: Floats
    fed: Floats

    @classmethod
    def mean(cls, taken: Sequence[tuple[Occupancy, float]]) -> Occupancy:
        """The mean over several programs, weighted; the weights sum to 1."""
        each = ([share * getattr(one, f.name) for one, share in taken] for f in fields(cls))
        return cls(*(np.sum(x, axis=0) for x in each))

    @cached_property
    def flat(self) -> Floats:
        """All fields, one after the other."""
        return np.concatenate([getattr(self, f.name).ravel() for f in fields(self)])


class ChainSpace:
    """The chains of a choice space's graph on some resources."""

    def __init__(self, structure: ChoiceSpace, resources: Resources, seconds: Floats) -> None:
        """`seconds` [ops]: roughly the seconds of each op."""
        graph = self.graph = structure.graph
        self._seconds = seconds
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
    def deferral(self) -> Deferral:
        return Deferral(self.structure, self.reach, self.in_block, self._seconds)

    @cached_property
    def alone(self) -> tuple[Chain, ...]:
        """Per resource, the chain of the one set of all that it does."""
        return tuple(self._alone(r) for r in range(self.resources.kinds + 1))

    def _alone(self, resource: int) -> Chain:
        """Loops, branches and fed arguments count only here."""
        kinds = self.resources.kinds
        kind = resource if resource < kinds else _NOWHERE
        column = self._column(resource)
        uses, values = np.where(self.uses_in_block, _NOWHERE, column), np.where(self.values_in_block, _NOWHERE, column)
        places = [
            self.places("ops", np.where(self.in_block, kinds, kind)),
            *(self.places(name, at) for name, at in (("uses", uses), ("values", values), ("ends", values))),
            self.places("fed", np.array([kind])),
            self.places("uses", np.where(self.uses_in_block, SENT, _NOWHERE)),
            self.places("values", np.where(self.values_in_block, SENT, _NOWHERE)),
        ]
        return Chain((resource,), np.concatenate(places), resource)

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of each field of `Occupancy`."""
        ops, uses, values = self.in_block.size, self.use_value.size, self.made_by.size
        kinds, columns = self.resources.kinds, self.resources.counted.size
        counted = {"uses": uses, "shared": uses, "values": values, "ends": values}
        conversions = {name: (rows, columns) for name, rows in counted.items()}
        return {"ops": (ops, kinds + 1), "deferred": (ops, 2 * kinds), **conversions, "fed": (1, kinds + 1)}

    @cached_property
    def place_count(self) -> int:
        """The length of `Occupancy.flat`."""
        return sum(rows * width for rows, width in self._shapes.values())

    def places(self, field: str, columns: Columns) -> Ints:
        """The indices in `Occupancy.flat` of one column of each row of a field; rows with column -1 are left out."""
        begin = 0
        for name, (rows, width) in self._shapes.items():
            if name == field:
                here = np.flatnonzero(columns >= 0)
                return begin + here * width + columns[here]
            begin += rows * width
        raise KeyError(field)

    def by_field(self, flat: Floats) -> dict[str, Floats]:
        """The fields of an array that is laid out as `Occupancy.flat`."""
        ends = np.cumsum([rows * width for rows, width in self._shapes.values()])
        each = np.split(flat, ends[:-1])
        return {name: x.reshape(shape) for (name, shape), x in zip(self._shapes.items(), each, strict=True)}

    def in_each_place(self, ops: Ints, uses: Ints, values: Ints, fed: int) -> Ints:
        """For each entry of `Occupancy.flat`, the given number of its op, use or value, or `fed`."""
        of = {"ops": ops, "deferred": ops, "uses": uses, "shared": uses, "values": values, "ends": values}
        of["fed"] = np.array([fed])
        return np.concatenate([np.repeat(of[name], width) for name, (_, width) in self._shapes.items()])

    def _column(self, resource: int) -> int:
        """The column in which conversions count on a resource."""
        return SENT if resource == self.resources.link else 1 + resource

    def chain(self, cuts: Sequence[int], resources: Sequence[int], taken: Occupancy | None = None) -> Chain:
        """The chain with ops as cuts between its sets, in turn on one kind's stream and on the link. A cut is
        the last op of the set before it, or the first of the set after it: of the one that is on the stream. Of the
        uses of a set that may take what a shared conversion makes, the one that counts is the one for which that takes
        the longest in a program."""
        kinds, count = self.resources.kinds, len(self.graph.ops)
        ops = np.full(count, _NOWHERE, np.int32)
        uses, values, ends = (np.full(n, _NOWHERE, np.int32) for n in (self.use_maker.size, *[self.made_by.size] * 2))
        shared = uses.copy()
        slowing = self._slowing(resources)
        if slowing is not None:
            uses[~self.uses_in_block] = slowing
            values[self.used & ~self.values_in_block] = slowing
            ends[~self.values_in_block] = slowing
        for n, resource in enumerate(resources):
            low = self.reach.descendants(cuts[n - 1]) if n else None
            high = self.reach.ancestors(cuts[n]) if n < len(cuts) else None
            if resource < kinds:
                inside = ~self.in_block
                for mask in (low, high):
                    inside = inside if mask is None else inside & mask
                ops[inside] = resource
            column = self._column(resource)
            if column == slowing:
                continue
            made, until = self._reached(low, self.made_by), self._reached(high, self.use_reader)
            mine = self._reached(low, self.use_maker) & until & ~self.uses_in_block
            uses[mine] = column
            # Shared conversions go before all their uses, where all of them lie inside.
            inside = self.used & ~self.values_in_block & made
            inside[self.use_value[~until]] = False
            if high is None:
                ends[made & ~self.values_in_block] = column
            else:
                inside[self._outputs] = False
            values[inside] = column
            partly = np.flatnonzero(mine & ~inside[self.use_value] & ~self.values_in_block[self.use_value])
            if taken is not None:
                partly = partly[np.argsort(-taken.shared[partly, column], kind="stable")]
            _, one = np.unique(self.use_value[partly], return_index=True)
            shared[partly[one]] = column
            if slowing is not None:
                # No conversion counts twice.
                values[[v for v in self.use_value[partly] if values[v] == slowing]] = _NOWHERE
        deferred = np.full_like(ops, _NOWHERE)
        for n, (resource, then) in enumerate(pairwise(resources) if slowing is not None else ()):
            last = n + 2 == len(resources)
            if resource < kinds <= then and (last or cuts[n + 1] == self.deferral.join):
                deferred[self.deferred(cuts[: n + 1], joined=not last)] = resource if last else kinds + resource
        key = (*cuts, *resources, shared.tobytes())
        return self.chain_of(key, ops=ops, deferred=deferred, uses=uses, shared=shared, values=values, ends=ends)

    def chain_of(self, key: tuple[object, ...], **columns: Columns) -> Chain:
        """The chain of some columns of fields of `Occupancy`, which are named."""
        return Chain(key, np.concatenate([self.places(name, at) for name, at in columns.items()]))

    def deferred(self, cuts: Sequence[int], *, joined: bool) -> list[int]:
        """The deferrable ops that the last of `cuts` leaves unordered, so that they may run before or after it, and
        that depend on the cut before it, if any. `joined`: only those that `Deferral.join` waits for."""
        last, reach, ops = cuts[-1], self.reach, np.array(self.deferral.op_indices, dtype=np.int64)
        related = (reach.ancestors(last) | reach.descendants(last))[ops]
        (possible,) = self.deferral.beside([last], related[None], joined=joined)
        if len(cuts) > 1:
            possible &= reach.descendants(cuts[-2])[ops]
        return ops[possible].tolist()

    def _slowing(self, resources: Sequence[int]) -> int | None:
        """The column of the one compute stream among `resources`, in which conversions outside of sets on the link
        count; None if there is no or more than one stream."""
        streams = {*resources} - {self.resources.link}
        return self._column(*streams) if len(streams) == 1 else None

    @cached_property
    def _outputs(self) -> list[int]:
        return sorted({v for v in self.graph.outputs if isinstance(v, int)})

    @staticmethod
    def _reached(mask: Mask | None, ops: npt.NDArray[np.int64]) -> Mask:
        """Whether `mask` has each of `ops`; true for all without a mask, and else false for `_NOWHERE`."""
        if mask is None:
            return np.ones(ops.shape, bool)
        return (ops >= 0) & mask[ops]

    def sent_of_each(self, taken: Occupancy) -> Floats:
        """Seconds on the link for each value [values]."""
        by_use = np.bincount(self.use_value, taken.uses[:, SENT], minlength=self.made_by.size)
        return by_use + (taken.values + taken.ends)[:, SENT]

    def _representatives(self, taken: Occupancy, hops: _Traffic) -> list[int]:
        """One op of each class outside of loops and branches, the one with the most work among its ancestors and
        descendants. Of a class are ops with the same ancestors and descendants among a program's longest ops and those
        that make and read its longest conversions."""
        seconds = np.where(self.in_block, 0.0, taken.ops[:, -1])
        ends = {*np.argsort(-seconds, kind="stable")[:_LONGEST].tolist(), *hops.next_to_longest()}
        if self.deferral.join is not None:
            # As each of these it is alone in its class.
            ends.add(self.deferral.join)
        ends = [op for op in ends if not self.in_block[op]]
        if not ends:
            return []
        of_each = np.packbits([f(op) for op in ends for f in (self.reach.ancestors, self.reach.descendants)], axis=0).T
        mine = np.flatnonzero(~self.in_block & of_each.any(axis=1))
        mine = mine[np.argsort(-self._related[mine], kind="stable")]
        _, first = np.unique(of_each[mine], axis=0, return_index=True)
        return sorted(mine[first].tolist())

    @cached_property
    def _related(self) -> Floats:
        """Per op, about the seconds of its ancestors and descendants [ops]."""
        return self.reach.related(np.where(self.in_block, 0.0, self._seconds))

    def longest(self, taken: Occupancy, cuts: Sequence[int] | None = None) -> list[Chain]:
        """Per kind of device, the longest chain of a program, by dynamic programming, with cuts among some ops, by
        default one of each class (`_representatives`)."""
        hops = _Traffic(self, taken)
        among = self._representatives(taken, hops) if cuts is None else [op for op in cuts if not self.in_block[op]]
        if not among:
            return []
        every = _CutMasks.of(among, self.reach, hops)
        return [self._longest(taken, every, kind, hops.seconds) for kind in range(self.resources.kinds)]

    def _longest(self, taken: Occupancy, cuts: _CutMasks, kind: int, hops: Floats) -> Chain:
        """`hops`: the seconds of each [hops, columns]."""
        among, before, after, since, until = cuts
        link, kinds = self.resources.link, self.resources.kinds
        compute = np.where(self.in_block, 0.0, taken.ops[:, kind])
        # Whatever is sent slows computing down: a set on the link counts the rest of it.
        seconds = hops[:, SENT] - hops[:, self._column(kind)]
        # Seconds between cut a and cut b, from the beginning to a cut, and from one to the end: of the stream, with
        # those of the cuts themselves, and of the link.
        stream = (after * compute) @ before.T
        first, last = before @ compute, after @ compute
        sent, sent_first, sent_last = (since * seconds) @ until.T, until @ seconds, since @ seconds
        ordered = after[:, among] > 0
        np.fill_diagonal(ordered, False)
        # The longest to each cut by its last set: on the link, on the stream, and on the stream with the deferred ops,
        # which count there if the chain's last set follows on the link, or one that ends at the join. Its seconds, and
        # the cut before it.
        count = len(among)
        best, cut_before = (np.full((4, count), x) for x in (0.0, _NOWHERE))
        join, ops = self.deferral.join, self.deferral.op_indices

        def put_off(joined: bool) -> None:
            """The longest to each cut on the stream with the deferred ops."""
            beside = self.deferral.beside(among, before[:, ops] + after[:, ops] > 0, joined=joined)
            deferred = beside * taken.deferred[ops, joined * kinds + kind]
            # It counts if it comes after the cut before.
            seconds = best[_LINK][:, None] + stream + after[:, ops] @ deferred.T
            begun = first + deferred.sum(axis=1)
            seconds[~(ordered | np.eye(count, dtype=bool))] = -np.inf
            end = _BEFORE_JOIN if joined else _LAST_ON_STREAM
            best[end] = np.maximum(begun, seconds.max(axis=0))
            cut_before[end] = np.where(seconds.max(axis=0) > begun, seconds.argmax(axis=0), _NOWHERE)

        for b in range(count):
            best[_LINK, b] = sent_first[b]
            before_b = np.flatnonzero(ordered[:, b])
            if before_b.size:
                if among[b] == join:
                    put_off(joined=True)
                seconds_to_b = best[_BEFORE_JOIN if among[b] == join else _STREAM, before_b] + sent[before_b, b]
                a = int(seconds_to_b.argmax())
                if seconds_to_b[a] > best[_LINK, b]:
                    best[_LINK, b], cut_before[_LINK, b] = seconds_to_b[a], before_b[a]
            # One op may begin a set on the stream and end it.
            before_b = np.append(before_b, b)
            seconds_to_b = best[_LINK, before_b] + stream[before_b, b]
            a = int(seconds_to_b.argmax())
            best[_STREAM, b] = first[b]
            if seconds_to_b[a] > first[b]:
                best[_STREAM, b], cut_before[_STREAM, b] = seconds_to_b[a], before_b[a]
        put_off(joined=False)
        whole = np.stack([best[_LINK] + last, best[_LAST_ON_STREAM] + sent_last])
        end, at = (int(x) for x in np.unravel_index(int(whole.argmax()), whole.shape))
        end = _LAST_ON_STREAM if end else _LINK
        ops_between, resources = list[int](), [kind if end == _LINK else link]
        while at != _NOWHERE:
            ops_between.append(among[at])
            resources.append(link if end == _LINK else kind)
            on_stream = _BEFORE_JOIN if among[at] == join else _STREAM
            end, at = on_stream if end == _LINK else _LINK, int(cut_before[end, at])
        return self.chain(ops_between[::-1], resources[::-1], taken)


class _CutMasks(NamedTuple):
    """Ops in order. 1 or 0 [cuts, ops]: which each depends on, and which depend on it, both with itself; [cuts, hops]:
    which wait for it, and which it waits for. Floats, as sums over them are products of matrices."""

    ops: list[int]
    before: Floats
    after: Floats
    since: Floats
    until: Floats

    @classmethod
    def of(cls, ops: list[int], reach: Reachability, hops: _Traffic) -> _CutMasks:
        before, after = ([f(op) for op in ops] for f in (reach.ancestors, reach.descendants))
        masks = before, after, map(hops.since, after), map(hops.until, before)
        return cls(ops, *(np.array([*each], dtype=np.float64) for each in masks))


class _Traffic:
    """A program's conversions outside loops and branches as hops: from the op that makes a value to those that read it.

    `seconds`: float64 [hops, columns]. Of shared conversions there is a hop per use that takes what they make, of what
    they take longer than for the uses before: what precedes some uses is the hops up to the last of these.
    """

    def __init__(self, space: ChainSpace, taken: Occupancy) -> None:
        uses = np.flatnonzero((taken.uses > 0).any(axis=1) & ~space.uses_in_block)
        ends = np.flatnonzero((taken.ends > 0).any(axis=1) & ~space.values_in_block)
        takers = np.flatnonzero((taken.shared > 0).any(axis=1) & ~space.values_in_block[space.use_value])
        takers = takers[np.lexsort((taken.shared[takers].sum(axis=1), space.use_value[takers]))]
        values, shared = space.use_value[takers], taken.shared[takers]
        again = np.flatnonzero(values[1:] == values[:-1]) + 1
        more = shared.copy()
        more[again] = np.maximum(shared[again] - shared[again - 1], 0.0)
        self.seconds = np.concatenate([taken.uses[uses], more, taken.ends[ends]])
        self._makers = np.concatenate([space.use_maker[uses], space.made_by[values], space.made_by[ends]])
        self._space, self._uses, self._takers, self._ends = space, uses, takers, ends
        self._first, self._of_value = np.unique(values, return_index=True, return_inverse=True)[1:]

    def next_to_longest(self) -> set[int]:
        """The ops that make and read what takes the longest to convert."""
        longest = np.argsort(-self.seconds[:, SENT], kind="stable")[:_LONGEST]
        own, taken = (self._space.use_reader[x] for x in (self._uses, self._takers))
        readers = np.concatenate([own, taken, np.full(self._ends.size, _NOWHERE)])
        return {*self._makers[longest].tolist(), *readers[longest].tolist()} - {_NOWHERE}

    def since(self, mask: Mask) -> Mask:
        """Which wait for some ops."""
        return ChainSpace._reached(mask, self._makers)

    def until(self, mask: Mask) -> Mask:
        """Which some ops wait for."""
        own, taken = (ChainSpace._reached(mask, self._space.use_reader[x]) for x in (self._uses, self._takers))
        place = np.arange(taken.size)
        last = np.maximum.reduceat(np.where(taken, place, _NOWHERE), self._first) if taken.size else place
        return np.concatenate([own, place <= last[self._of_value], np.zeros(self._ends.size, bool)])
