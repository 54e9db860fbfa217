"""Limits on what a device holds while an op runs, as resources of a formulated problem: see `liveness.py`.

A value that is live across an op, but not used by it, occupies the layout that its variable chooses. An operand that is
needed in a layout of which there is no tensor is copied for the op, which is known from its choice and the op's
together: a variable of its own, tied to both, counts it. A value used both before and after the op gets such a variable
too: if both uses take one tensor, that is held in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hapsynth.instructions.layout import Layout, is_partial
from hapsynth.instructions.program.program import Compute
from hapsynth.search.analysis.liveness import Liveness, LiveSet
from hapsynth.search.cost.model import Floats, held_fraction
from hapsynth.search.formulation.choice_space import AvailableLayouts, Domain, RequiredLayouts
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.solver import Edge, Ints, Problem, Resource

_Tie: TypeAlias = tuple[Ints, Floats]
"""The columns of a variable's states in a table with those of another, and the table."""
_TAKERS = 2
_MOST_STATES = 1000
"""Of a variable that counts what is held of a value between two uses; with more it is counted by its choice alone."""


class MemoryConstraints:
    """Counts bytes by choice, at a formulator's ratios.

    `at_least`: what any program holds, in whatever order its ops run, so that a bound within limits is one; else what a
    program in source order is likely to hold.
    """

    def __init__(self, builder: ProblemBuilder, *, at_least: bool) -> None:
        self.builder, self.at_least = builder, at_least
        self.graph, self.structure = builder.graph, builder.structure
        self.memory_budget = builder.costs.memory_budget
        self._owners = tuple(sorted({at for positions in self.structure.owners.values() for at in positions}))

    def problem(self, limits: Mapping[int, float]) -> Problem:
        """The formulator's problem with a limit, in bytes, at each of some ops: on each of the sums that are counted
        there (`MemoryBudget.counted`), those of one op together."""
        free, limits = self.builder.problem(), self.limited(limits)
        if not limits:
            return free
        unary, edges, usages = list(free.unary), list(free.edges), list[dict[int, Floats]]()
        for op in limits:
            used = dict[int, Floats]()
            for variable, held, ties in self._found_at(self._alive(op), len(unary)):
                used[variable] = used[variable] + held if variable in used else held
                if variable == len(unary):
                    unary.append(np.zeros(held.shape[1]))
                    edges += ties
            usages.append(used)
        nothing = [self.builder.once(("nothing", u.size), lambda u=u: np.zeros(u.size)) for u in unary]
        rows = lambda used, k: tuple(used[i][k] if i in used else z for i, z in enumerate(nothing))
        resources = [
            Resource(rows(used, k), limit, f"memory at op {op}")
            for (op, limit), used in zip(limits.items(), usages, strict=True)
            for k in range(self.sums)
        ]
        return Problem(tuple(unary), tuple(edges), tuple(resources), free.offset)

    def priced(self, limits: Mapping[int, float], per_byte: float) -> Problem:
        """`problem`, with a price per byte beyond each of its limits in place of these."""
        problem, known = self.problem(limits), dict[tuple[int, ...], Floats]()
        unary: list[Floats] = []
        for i, costs in enumerate(problem.unary):
            used = [r.usage[i] for r in problem.resources]
            key = id(costs), *map(id, used)
            if key not in known:
                known[key] = costs + per_byte * np.sum(used, axis=0)
            unary.append(known[key])
        owed = per_byte * math.fsum(r.limit for r in problem.resources)
        return replace(problem, unary=tuple(unary), resources=(), offset=problem.offset - owed)

    def limited(self, limits: Mapping[int, float]) -> Mapping[int, float]:
        """The ops at which bytes are counted for some limits, and these."""
        return {self.fullest_near(op): limit for op, limit in limits.items()} if self.at_least else limits

    @property
    def liveness(self) -> Liveness:
        return self.builder.costs.liveness

    @property
    def sums(self) -> int:
        """The number of sums of bytes that are limited at each op."""
        return self._counted(1.0).size

    def _counted(self, held: float | Floats) -> Floats:
        return self.memory_budget.counted(held, free=self.builder.ratios is None, alone=self._owners)

    def _alive(self, op: int) -> LiveSet:
        return self.liveness.in_any_order(op) if self.at_least else self.liveness.at(op)

    def _found_at(self, alive: LiveSet, added: int) -> Iterator[tuple[int, Floats, list[Edge]]]:
        """(variable, bytes by its state [sums, states], ties to others) of whatever an op finds or makes; variables of
        its own are numbered from `added`."""
        st = self.structure
        for value in alive.live_through:
            variable = st.value_variable[value]
            around = alive.around.get(value)
            between = self._between(value, *around, added) if around and self.at_least else None
            if between is not None:
                yield added, *between
                added += 1
                continue
            shared = not self.at_least and self.liveness.is_used_around(value, alive.op)
            yield variable, self._held(value, shared)[:, st.choices[variable].option], []
        if alive.op == len(self.graph.ops):
            return
        variable = st.op_variable[alive.op]
        yield variable, self._made_bytes(alive, st.choices[variable]), []
        for value in alive.read:
            if st.value_variable[value] != variable:
                yield added, *self._read_bytes(value, alive, added)
                added += 1

    def least_at(self, op: int) -> float:
        """A lower bound on the bytes that a device holds while an op runs, over all choices."""
        st, alive = self.structure, self._alive(op)
        least = [self._held(v, False).min(axis=1).tolist() for v in (*alive.live_through, *alive.read)]
        if op < len(self.graph.ops):
            least.append(self._made_bytes(alive, st.choices[st.op_variable[op]]).min(axis=1).tolist())
        return max(math.fsum(held[k] for held in least) for k in range(self.sums))

    def fullest_near(self, op: int) -> int:
        """The op with the largest `least_at` among `op` and the next `_TAKERS`, each the first reader of the last one's
        results: an op that waits for little may run at another time."""
        near = [op]
        for _ in range(_TAKERS if self.graph.ops else 0):
            takers = [o for v in self.graph.ops[near[-1]].results for o, _ in self.graph.uses[v]]
            near += [min(takers)] if takers else []
        return max(near, key=self.least_at)

    def extended(self, problem: Problem, choices: Ints) -> Ints:
        """An assignment of the structure's variables as one of the whole problem."""
        full = [*choices.tolist()[: len(self.structure.choices)]]
        allowed = {i: np.ones(u.size, dtype=bool) for i, u in enumerate(problem.unary) if i >= len(full)}
        for e in problem.edges:
            if e.v in allowed:
                allowed[e.v] &= e.table[e.gu[full[e.u]], e.gv] == 0
        full += [int(np.argmax(states)) for states in allowed.values()]
        return np.array(full, dtype=np.int64)

    def _read_bytes(self, value: int, alive: LiveSet, variable: int) -> tuple[Floats, list[Edge]]:
        """Bytes of an operand while an op reads it [sums, kinds of options x required layouts], and the edges that tie
        `variable` to the value's and the op's variables. Options of one kind hold equal bytes for each layout."""
        st = self.structure
        made = st.choices[st.value_variable[value]]
        needs = self._needs(value, alive.op)
        stays = value in alive.kept or (not self.at_least and value not in self.graph.producer)
        held = self._held(value, not self.at_least and self.liveness.is_used_around(value, alive.op))
        copies = np.stack([self.tensor_bytes(value, layout) for layout in needs.layouts], axis=1)
        kinds: dict[tuple[float, ...], int] = {}
        of: list[int] = []
        for i, option in enumerate(made.options):
            tensors = self._tensors(value, option)
            there = np.array([layout in tensors for layout in needs.layouts])
            own = held[:, i : i + 1]
            nbytes = np.where(there, np.maximum(own, copies), copies + (own if stays else 0.0))
            of.append(kinds.setdefault(tuple(nbytes.ravel().tolist()), len(kinds)))
        every = np.array([*kinds]).reshape(len(kinds), -1, len(needs.layouts))
        kind = self.builder.once(("read", made, *of), lambda: np.array(of)[made.option])
        ends = [(st.value_variable[value], kind, len(kinds))]
        ends.append((st.op_variable[alive.op], needs.groups, len(needs.layouts)))
        return every.transpose(1, 0, 2).reshape(every.shape[1], -1), self._ties(ends, variable)

    def _between(self, value: int, before: int | None, after: int, variable: int) -> tuple[Floats, list[Edge]] | None:
        """Bytes of a value that an op takes later, by its choice and what that needs; between two ops that take it, by
        whether both need one large tensor of it, which is held then. And what ties them. None where they are those of
        its choice, or too many to count."""
        st = self.structure
        made = st.choices[st.value_variable[value]]
        first, second = None if before is None else self._needs(value, before), self._needs(value, after)
        key = ("between", self.builder.conversions(value), made.options, first, second, self._needed[value])
        known = self.builder.once(key, lambda: self._held_between(value, made.options, first, second))
        if known is None:
            return None
        nbytes, kinds, ties = known
        # Equal tables are one array, so that the solver can share what it derives from them.
        kind = self.builder.once((*key, made), lambda: kinds[made.option])
        others = [(st.value_variable[value], kind), (st.op_variable[after], second.groups)]
        if before is not None and first is not None:
            others.append((st.op_variable[before], first.groups))
        tied = zip(others, ties, strict=True)
        return nbytes, [Edge(u, variable, groups, states, table) for (u, groups), (states, table) in tied]

    def _held_between(
        self, value: int, options: Sequence[AvailableLayouts], first: RequiredLayouts | None, second: RequiredLayouts
    ) -> tuple[Floats, Ints, list[_Tie]] | None:
        """Bytes of each state of a value before the `second` op that takes it, after a `first` one if there is; the
        kind of each option; what ties the states to that and to what the ops need, the second first.

        Options that are held alike have states together: the first op needs none of the large tensors; or one, and the
        second another layout; or both one. Where ratios may be any, one layout may be two tensors if it is cut."""
        any_ratio, before = self.builder.ratios is None, () if first is None else first.layouts
        kinds: dict[tuple[tuple[tuple[float, ...], ...], tuple[Layout, ...]], int] = {}
        sizes: dict[Layout, Floats] = {}
        of: list[int] = []
        for option in options:
            least = [self._least_until(value, option, needed) for needed in second.layouts]
            tensors = [t for t in self.builder.offer(value, option).tensors if t in before]
            tensors = [t for t in tensors if not (any_ratio and any(p.is_cut for p in t))]
            sizes |= {t: self.tensor_bytes(value, t) for t in tensors if t not in sizes}
            until = dict(zip(second.layouts, least, strict=True))
            large = tuple(t for t in tensors if t in until and np.any(sizes[t] > until[t]))
            of.append(kinds.setdefault((tuple(tuple(held.tolist()) for held in least), large), len(kinds)))
        nbytes, states = list[Floats](), list[tuple[int, tuple[bool, ...], tuple[bool, ...]]]()
        for (least, large), kind in kinds.items():
            for held in dict.fromkeys(least):
                ends = tuple(each == held for each in least)
                nbytes.append(np.array(held))
                states.append((kind, tuple(t not in large for t in before), ends))
                for tensor in large:
                    begins = tuple(t == tensor for t in before)
                    # What is stored may have been read for the last time when it was brought to the other layout.
                    for same in (False, True):
                        both = tuple(end and (t == tensor) == same for t, end in zip(second.layouts, ends, strict=True))
                        if any(both):
                            nbytes.append(np.maximum(held, sizes[tensor]) if same else np.array(held))
                            states.append((kind, begins, both))
        if len(states) == len(kinds) or len(states) > _MOST_STATES:
            return None
        by_kind = np.array([kind for kind, *_ in states])
        ties = [(by_kind, _forbidding(~np.eye(len(kinds), dtype=bool))), _tie([ends for *_, ends in states])]
        if first is not None:
            ties.append(_tie([begins for _, begins, _ in states]))
        return np.stack(nbytes, axis=1), np.array(of), ties

    def _least_until(self, value: int, option: AvailableLayouts, needed: Layout) -> Floats:
        """A lower bound on the bytes of a value that are held until an op needs it in a layout [sums]: those of the
        smallest tensor that is this layout or from which local steps make it."""
        known, tensors = self.structure.layouts[value], self.builder.offer(value, option).tensors
        follows = lambda t: t in tensors or known.free[known.number[t], known.number[needed]]
        return np.min([self.tensor_bytes(value, t) for t in self._tensors(value, option) if follows(t)], axis=0)

    def _needs(self, value: int, op: int) -> RequiredLayouts:
        return self.structure.needs(op, next(i for i, v in self.graph.ops[op].value_operands if v == value))

    def _ties(self, ends: Sequence[tuple[int, Ints, int]], variable: int) -> list[Edge]:
        """Edges that tie a variable to `ends`, each (variable, group of each of its states, number of groups): its
        states are the combinations of their groups, in row-major order."""
        counts = tuple(count for *_, count in ends)
        rows = self.builder.once(("rows", counts), lambda: tuple(np.indices(counts).reshape(len(counts), -1)))
        match = lambda n: self.builder.once(("match", n), lambda: _forbidding(~np.eye(n, dtype=bool)))
        return [Edge(u, variable, groups, rows[k], match(count)) for k, (u, groups, count) in enumerate(ends)]

    def _held(self, value: int, used: bool) -> Floats:
        """Bytes of a value that a device holds under each of its options [sums, options]: those of its smallest tensor
        or, unless `at_least`, of a source's first one. If it is `used` before and after: of all its shared tensors but
        partial ones."""
        choices = self.structure.choices[self.structure.value_variable[value]]
        ways = self.builder.conversions(value)
        source = not self.at_least and value not in self.graph.producer

        def make() -> Floats:
            found: list[Floats] = []
            for a in choices.options:
                tensors = self._tensors(value, a)
                kept = [t for t in tensors if not (is_partial(t) and len(tensors) > 1)]
                if used and kept:
                    found.append(np.sum([self.tensor_bytes(value, t) for t in kept], axis=0))
                else:
                    some = tensors[: 1 if source else None]
                    found.append(np.min([self.tensor_bytes(value, t) for t in some], axis=0))
            return np.stack(found, axis=1)

        needed = self._needed[value] if self.at_least else ()
        return self.builder.once(("held", ways, choices.options, source, used, needed), make)

    def _tensors(self, value: int, option: AvailableLayouts) -> tuple[Layout, ...]:
        """The layouts in which a value may be held under an option. With `at_least` these include layouts that some op
        needs and that local steps make, such as a slice after which the rest is freed."""
        tensors = self.builder.offer(value, option).tensors
        if not self.at_least:
            return tensors
        known = self.structure.layouts[value]
        free: npt.NDArray[np.bool_] = np.any(known.free[[known.number[t] for t in tensors]], axis=0)
        return (*tensors, *(n for n in self._needed[value] if n not in tensors and free[known.number[n]]))

    @cached_property
    def _needed(self) -> Sequence[tuple[Layout, ...]]:
        """The layouts that the uses of each value require."""
        found: list[dict[Layout, None]] = [{} for _ in self.graph.values]
        for use in self.structure.uses:
            found[use.value].update(dict.fromkeys(use.needs.layouts))
        return [tuple(sorted(needed)) for needed in found]

    def _made_bytes(self, alive: LiveSet, choices: Domain) -> Floats:
        """Bytes that an op under each of its states writes, in the layouts that it makes."""
        op = self.graph.ops[alive.op]
        held = np.zeros((self.sums, len(choices.triples)))
        for t, triples in enumerate(choices.triples):
            compute = Compute(op.index, triples)
            for value in alive.made:
                held[:, t] += self.tensor_bytes(value, compute.result_layout(op.results.index(value)))
        return held[:, choices.triple]

    def tensor_bytes(self, value: int, layout: Layout) -> Floats:
        """The bytes of one tensor in each sum [sums]."""
        held = held_fraction(layout, lambda *cut: self.builder.held(value, *cut))
        return self.graph.values[value].nbytes * self._counted(held)


def _tie(allowed: Sequence[tuple[bool, ...]]) -> _Tie:
    """Of states, each with the layouts that it allows."""
    number: dict[tuple[bool, ...], int] = {}
    rows = np.array([number.setdefault(mine, len(number)) for mine in allowed])
    return rows, _forbidding(~np.array([*number]).T)


def _forbidding(pairs: npt.NDArray[np.bool_]) -> Floats:
    """A table that allows all but some pairs."""
    return np.where(pairs, np.inf, 0.0)
