"""The choices of a plan: the triple of every op, and the conversions of every value that its uses share.

Variables: one per source value (how it is stored, which conversions are made once for all its uses), one per op
(its triples, and the same for its result). An op of several results has a variable of its own and one per result, as
has along several axes one whose result is used more than once.
Edges: a use costs nothing where the layout it needs is among the producer's tensors, else the cheapest private
conversion; carried outputs must be brought to the layout in which their input is stored. So every assignment that is
not contradictory is a program.

The choices do not depend on ratios. Equal ops, as of equal layers, share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hapsynth._jax import is_extended
from hapsynth.graph.ir import Graph
from hapsynth.instructions.collectives import step_between
from hapsynth.instructions.factors import Triples
from hapsynth.instructions.layout import Layout, Placement, R, Reduction, S
from hapsynth.instructions.program.program import Access, Compute, reads, writes
from hapsynth.instructions.rules.factor_table import FactorTable, cut_nodes
from hapsynth.instructions.staging.fusion import widens
from hapsynth.search.formulation.conversions import LayoutSet
from hapsynth.search.solver import Ints

_T = TypeVar("_T")

Allowed = Callable[[int, int], bool]
"""Whether (value, dimension) may be cut: baselines restrict it."""
Owners = Mapping[int, tuple[int, ...]]
"""Op -> the positions along the mesh axis of the devices that may own it: run it alone, for all."""
Convertible = Callable[[int, Placement, Placement], bool]
"""Whether a value may be converted by a step between two placements along one axis."""


class Interned(tuple[_T, ...]):
    """A tuple made once per choice space and shared (`ChoiceSpace.once`). It equals itself alone, so it is as quick a
    key as an integer, however long it is."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other


_NONE: Interned[Any] = Interned()
_CUTS, _TOGETHER = 8, 2
"""For a value with at most `_CUTS` cuts besides the one in which it is made, every set of them is offered; with more,
as the number of sets doubles with each, only sets of at most `_TOGETHER`."""


def cuts_together(count: int) -> int:
    """The largest number of its `count` further cuts in which a value may exist at once, for all its uses."""
    return count if count <= _CUTS else _TOGETHER


class _Touched(NamedTuple):
    """The union, over some placements of a value, of its cut dimensions, pending reductions and owners."""

    dims: set[int]
    reductions: set[Reduction]
    owners: set[int]

    @classmethod
    def by(cls, placements: Iterable[Placement]) -> _Touched:
        found = cls(set(), set(), set())
        for p in placements:
            if p.owner is not None:
                found.owners.add(p.owner)
            elif p.is_sharded:
                found.dims.add(p.dim)
            elif p.is_partial:
                found.reductions.add(p.reduction)
        return found

    def add(self, other: _Touched) -> None:
        self.dims.update(other.dims)
        self.reductions.update(other.reductions)
        self.owners.update(other.owners)


class AvailableLayouts(NamedTuple):
    """The layouts in which a value exists: `computed`, and `targets`, to which it is converted once for all uses, by
    the cheapest path from the layouts that exist already."""

    computed: Layout
    targets: tuple[Layout, ...] = ()


class State(NamedTuple):
    """One choice: the triples (None for a source or a separate result) and the availability (None for an op whose
    results have variables of their own)."""

    triples: Triples | None
    availability: AvailableLayouts | None


@dataclass(frozen=True, eq=False)
class Domain:
    """The states of a variable; equal variables share one domain. `triple`, `option` [states]: the index of each
    state's triples and of its availability, -1 for None."""

    triples: Interned[Triples]
    options: Interned[AvailableLayouts]
    triple: Ints
    option: Ints

    def __len__(self) -> int:
        return self.triple.size

    def state(self, i: int) -> State:
        """One of the states."""
        t, a = int(self.triple[i]), int(self.option[i])
        return State(self.triples[t] if t >= 0 else None, self.options[a] if a >= 0 else None)

    @property
    def states(self) -> list[State]:
        return [self.state(i) for i in range(len(self))]


@dataclass(frozen=True, eq=False)
class Restriction:
    """Restrictions that a caller may impose. `stored`: input value -> the layout in which it is stored. `ends`:
    position of an output -> its layout. `allowed`: the dimensions that may be cut. `private`: values never converted
    once for all uses (ZeRO-3 gathers its parameters again for every use). `convertible`: the conversions that may be
    made. `role`: a key; values with equal keys get equal answers from `convertible`, and share what is derived from
    them. `cuttable`: value -> dimensions that may be cut although no op asks for it."""

    stored: Mapping[int, Layout] = field(default_factory=dict)
    allowed: Allowed | None = None
    private: frozenset[int] = frozenset()
    convertible: Convertible | None = None
    role: Callable[[int], object] = lambda value: value
    ends: Mapping[int, Layout] = field(default_factory=dict)
    cuttable: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class RequiredLayouts:
    """The layouts that a variable's states require of a value. `groups` [states]: indices into `layouts`."""

    layouts: tuple[Layout, ...]
    groups: Ints


@dataclass(frozen=True, eq=False)
class Use:
    """One edge, from a value to the variable that uses it. `reader`: the op that takes the value, or -1 where it is
    carried to the next step. `place`: the region in which it is converted for this use; `runs`: the executions of that
    conversion per step."""

    value: int
    variable: int
    needs: RequiredLayouts
    reader: int
    place: int = 0
    runs: float = 1.0


class ChoiceSpace:
    """What may be chosen: variables, states and edges of one graph under one restriction, at any ratio."""

    def __init__(
        self,
        graph: Graph,
        table: FactorTable,
        restriction: Restriction | None = None,
        axes: int = 1,
        *,
        sparing: bool = False,
        owners: Owners | None = None,
        agreed_axes: frozenset[int] = frozenset(),
    ) -> None:
        """`sparing`: the layout in which a value is held between its op and its only use is a choice too, which matters
        where memory is short. `owners`: the positions along the one axis that may run an op alone. `agreed_axes`: the
        mesh axes along which devices round differently, so that ops that select elements are run by one device for all
        instead of redundantly."""
        assert axes == 1 or not owners
        self.graph, self.table, self.axes, self.sparing = graph, table, axes, sparing
        self.owners, self.agreed_axes = owners or {}, agreed_axes
        self.restriction = restriction or Restriction()
        self._interned: dict[object, Any] = {}
        self._computes: dict[tuple[int, int], tuple[Compute, Access]] = {}
        self.triples = [self._triples(op.index) for op in graph.ops]
        self.layouts = self._layout_sets()
        number: dict[object, int] = {}
        kinds = [(known, v.shape, v.nbytes) for known, v in zip(self.layouts, graph.values, strict=True)]
        self.value_kinds = [number.setdefault(kind, len(number)) for kind in kinds]
        """Values of one kind have the same layouts, shape and bytes."""
        self.choices: list[Domain] = []
        self.value_variable = [-1] * len(graph.values)
        self.op_variable = [-1] * len(graph.ops)
        self.links: list[tuple[int, int]] = []
        """(op, result) where that has a variable of its own."""
        self._uses_of = self._counted_uses()
        self._add_variables()
        self.uses = [*self._op_uses(), *self._carry_uses()]

    def _triples(self, op: int) -> Interned[Triples]:
        factors = self.table[op]
        every = self.once((factors, self.axes), lambda: Interned(factors.joint(self.axes)))
        if self.agreed_axes and op in self.graph.selections:
            agreed = lambda: (factors.agreed(t, self.agreed_axes) for t in factors.joint(self.axes))
            every = self.once((factors, self.axes, "agreed"), lambda: Interned(t for t in agreed() if t is not None))
        owners, whole = self.owners.get(op, ()), factors.owned
        if owners and whole is not None:
            alone = lambda: Interned((*every, *(factors.owned_by((whole,), owner) for owner in owners)))
            every = self.once((factors, owners, every), alone)
        allowed = self.restriction.allowed
        if allowed is None:
            return every
        cuts = lambda t: (n for _, nodes in cut_nodes(self.graph, op, factors, t) for n in nodes)
        kept = [all(allowed(v, d) for v, d, *_ in cuts(t)) for t in every]
        return self.once((every, *kept), lambda: Interned(t for t, keep in zip(every, kept, strict=True) if keep))

    def once(self, key: object, make: Callable[[], _T]) -> _T:
        """The result of `make` for a key, computed once; equal ops share it."""
        if key not in self._interned:
            self._interned[key] = make()
        return self._interned[key]

    def _layout_sets(self) -> list[LayoutSet]:
        """Per value, the layouts that its uses require or its op makes, and those on conversion paths between them."""
        graph = self.graph
        touched = [_Touched.by(()) for _ in graph.values]
        for op in graph.ops:
            needs, makes = self._touched(self.triples[op.index])
            for position, value in op.value_operands:
                touched[value].add(needs[position])
            for value, made in zip(op.results, makes, strict=True):
                touched[value].add(made)
        for value, layout in self.restriction.stored.items():
            touched[value].add(_Touched.by(layout))
        for value in (graph.values[v] for v in graph.inputs):
            if not graph.uses[value.index] and not is_extended(value.dtype):
                # Nothing asks for it, so it may lie in any way.
                touched[value.index].dims.update(d for d, n in enumerate(value.shape) if n)
        for value, also in self.restriction.cuttable.items():
            touched[value].dims.update(also)
        for position, layout in self.restriction.ends.items():
            value = graph.outputs[position]
            if isinstance(value, int):
                touched[value].add(_Touched.by(p for p in layout if p.is_sharded))
        for source, target in graph.carry:
            a, b = graph.inputs[source], graph.outputs[target]
            if isinstance(b, int):
                touched[b].add(touched[a]._replace(reductions=set()))
        for op, value in graph.ties.items():
            touched[value].add(self._touched(self.triples[op])[1][0])
        if self.axes > 1 and self.restriction.allowed is None:
            for value in graph.values:
                if value.shape and max(value.shape) > 1 and not is_extended(value.dtype):
                    # What is reduced along several axes is best cut on the way, even where nobody needs it cut.
                    touched[value.index].dims.add(value.shape.index(max(value.shape)))
        in_order = ((tuple(sorted(t.dims)), tuple(sorted(t.reductions)), tuple(sorted(t.owners))) for t in touched)
        return [self._layout_set(value, *parts) for value, parts in enumerate(in_order)]

    def _layout_set(
        self, value: int, dims: tuple[int, ...], reductions: tuple[Reduction, ...], owners: tuple[int, ...]
    ) -> LayoutSet:
        """The layouts of a value that cut these dimensions, combine so, and have these owners."""
        key = ("layouts", dims, reductions, owners)
        return self.once(key, lambda: LayoutSet(self.axes, dims, reductions, owners=owners))

    def _touched(self, triples: Interned[Triples]) -> tuple[list[_Touched], list[_Touched]]:
        """What all triples do to every operand and result."""

        def make() -> tuple[list[_Touched], list[_Touched]]:
            single = [t for ts in triples for t in ts]
            operands, results = range(len(single[0].operands)), range(len(single[0].results))
            return (
                [_Touched.by(t.operands[i] for t in single) for i in operands],
                [_Touched.by(t.results[i] for t in single) for i in results],
            )

        return self.once(("touched", triples), make)

    def _counted_uses(self) -> list[int]:
        """How many uses each value has: a conversion for one alone need not be shared."""
        graph = self.graph
        found = [len(graph.uses[v.index]) for v in graph.values]
        for v in graph.outputs:
            if isinstance(v, int):
                found[v] += 1
        for v in graph.ties.values():
            found[v] += 1
        return found

    def _add_variables(self) -> None:
        for value in self.graph.sources:
            stored = self._stored(value)
            key = ("stored", stored, self._option_key(value))
            options = self.once(key, lambda v=value, s=stored: Interned(a for c in s for a in self.options(v, c)))
            self.value_variable[value] = self._add_alone(options)
        for op in self.graph.ops:
            triples = self.triples[op.index]
            if len(op.results) == 1 and not (self.axes > 1 and self._option_key(op.results[0])[1]):
                # Along several axes the triples of an op and what may be available of its result are few, and all
                # pairs of them are many.
                (value,) = op.results
                self.op_variable[op.index] = self.value_variable[value] = self._add_made(value, triples, 0)
                continue
            self.op_variable[op.index] = self._add(("op", triples), triples, _NONE, lambda _: (-1,))
            for position, value in enumerate(op.results):
                self.links.append((op.index, value))
                self.value_variable[value] = self._add_alone(self._made_options(value, triples, position))

    def made_with(self, op: int) -> int | None:
        """The result whose variable is the op's; None where each has one of its own."""
        (first, *_) = self.graph.ops[op].results or (None,)
        return first if first is not None and self.value_variable[first] == self.op_variable[op] else None

    def _made_options(self, value: int, triples: Interned[Triples], position: int) -> Interned[AvailableLayouts]:
        """The availability options of a result that has a variable of its own."""

        def make() -> Interned[AvailableLayouts]:
            computed = dict.fromkeys(tuple(t.results[position] for t in ts) for ts in triples)
            return Interned(a for c in computed for a in self.options(value, c))

        return self.once(("made", triples, position, self._option_key(value)), make)

    def _add_alone(self, options: Interned[AvailableLayouts]) -> int:
        """A variable that is no op."""
        return self._add(("alone", options), _NONE, options, lambda _: range(len(options)))

    def _add_made(self, value: int, triples: Interned[Triples], position: int) -> int:
        """The variable of an op with one result: its triples, each with the options of what it makes."""
        key = ("op", triples, self._option_key(value))

        def make() -> tuple[Interned[AvailableLayouts], list[list[int]]]:
            number: dict[AvailableLayouts, int] = {}
            rows: list[list[int]] = []
            for ts in triples:
                computed = tuple(t.results[position] for t in ts)
                rows.append([number.setdefault(a, len(number)) for a in self.options(value, computed)])
            return Interned(number), rows

        options, rows = self.once(("options", *key), make)
        return self._add(key, triples, options, lambda t: rows[t])

    def _add(
        self,
        key: object,
        triples: Interned[Triples],
        options: Interned[AvailableLayouts],
        of: Callable[[int], Iterable[int]],
    ) -> int:
        def make() -> Domain:
            pairs = [(t, a) for t in (range(len(triples)) if triples else (-1,)) for a in of(t)]
            triple, option = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
            return Domain(triples, options, triple, option)

        self.choices.append(self.once(("choices", key), make))
        return len(self.choices) - 1

    def _stored(self, value: int) -> tuple[Layout, ...]:
        if value in self.restriction.stored:
            return (self.restriction.stored[value],)
        return self.layouts[value].storable

    def _option_key(self, value: int) -> tuple[LayoutSet, bool]:
        several = self.sparing or self._uses_of[value] > 1
        shared = several and value not in self.restriction.private
        return self.layouts[value], shared

    def options(self, value: int, computed: Layout) -> tuple[AvailableLayouts, ...]:
        """Every set of conversions worth sharing. None for a value used once: its use converts it as cheaply, if not as
        sparingly."""
        key = _, shared = self._option_key(value)
        if not shared:
            return (AvailableLayouts(computed),)
        known = self.layouts[value]
        several = self._cut_options if self.axes == 1 else self._target_options
        return self.once(("shared", key, computed), lambda: (AvailableLayouts(computed), *several(known, computed)))

    def _target_options(self, known: LayoutSet, computed: Layout) -> Iterable[AvailableLayouts]:
        """One layout that is not there for nothing; what lies on the way to it is there too. Along more than two axes
        there are too many to offer those that are hardly of use."""
        free = known.free[known.number[computed]]
        worth = ~free if self.axes == 2 else ~free & known.worth_sharing(computed)
        for target in known.storable:
            if worth[known.number[target]]:
                yield AvailableLayouts(computed, (target,))

    def _cut_options(self, known: LayoutSet, computed: Layout) -> Iterable[AvailableLayouts]:
        """To R, which gives every slice for nothing, to an owner, or to a set of cuts."""
        (made,) = computed
        if made == R:
            return
        yield AvailableLayouts(computed, ((R,),))
        if made.owner is not None or (made.is_partial and step_between(made, S(0)) is None):
            return
        for owner in known.owned if made.is_partial else ():
            yield AvailableLayouts(computed, ((owner,),))
        yield from self._sets_of_cuts(known, computed)

    def _sets_of_cuts(self, known: LayoutSet, computed: Layout) -> Iterable[AvailableLayouts]:
        """The cuts in which a value may be besides that in which it is made."""
        (made,) = computed
        others = [(shard,) for shard in known.shards if shard != made]
        for count in range(1, cuts_together(len(others)) + 1):
            for chosen in combinations(others, count):
                if made.is_sharded:
                    yield AvailableLayouts(computed, chosen)
                    continue
                for first in chosen:
                    # One reduce-scatter, the other cuts from it: cheaper than reducing twice.
                    yield AvailableLayouts(computed, (first, *(c for c in chosen if c != first)))

    def replicated(self) -> list[int]:
        """The assignment in which every device runs the whole function: there is always one."""
        whole = (R,) * self.axes
        return [self.once(("whole", c), lambda c=c: _whole_state(c, whole)) for c in self.choices]

    def alike(self, other: ChoiceSpace, choices: Ints) -> Ints | None:
        """The choices that are the same program as those of another choice space of the graph; None where one of them
        is not to be chosen here."""
        if len(other.choices) != len(self.choices):
            return None
        found: list[int] = []
        for mine, its, n in zip(self.choices, other.choices, choices.tolist(), strict=True):
            places = self.once(("places", mine), lambda d=mine: {state: i for i, state in enumerate(d.states)})
            at = places.get(its.state(n))
            if at is None:
                return None
            found.append(at)
        return np.array(found)

    def compute(self, op: int, triple: int) -> tuple[Compute, Access]:
        """An op under one of its triples, by their number, and what it reads and writes: one for all programs."""
        key = op, triple
        if key not in self._computes:
            made = Compute(op, self.choices[self.op_variable[op]].triples[triple])
            self._computes[key] = made, (reads(self.graph, made), writes(self.graph, made))
        return self._computes[key]

    @cached_property
    def joined_variables(self) -> Ints:
        """The pairs of variables of each use, a value's and its reader's, and then of each link [pairs, 2]."""
        uses = [(self.value_variable[use.value], use.variable) for use in self.uses]
        links = [(self.op_variable[op], self.value_variable[value]) for op, value in self.links]
        return np.array([*uses, *links], dtype=np.int64).reshape(-1, 2)

    @cached_property
    def listed(self) -> list[tuple[list[int], list[int]]]:
        """Of each variable, the triple and the option of each of its states, by their numbers: as plain lists, for what
        looks at one state after another."""
        return [self.once(("listed", c), lambda c=c: (c.triple.tolist(), c.option.tolist())) for c in self.choices]

    @cached_property
    def widening(self) -> list[bool]:
        """Of each op whether it makes much out of little (`widens`)."""
        return [widens(self.graph, op) for op in self.graph.ops]

    def needs(self, op: int, position: int) -> RequiredLayouts:
        """The layouts that an op's states ask of an operand."""
        choices = self.choices[self.op_variable[op]]
        make = lambda: _needs([tuple(t.operands[position] for t in ts) for ts in choices.triples], choices.triple)
        return self.once(("needs", choices, position), make)

    def _op_uses(self) -> Iterable[Use]:
        for op in self.graph.ops:
            variable = self.op_variable[op.index]
            for position, value in op.value_operands:
                place = self.graph.place_of_conversion(value, self.graph.read_in(op, position))
                yield Use(value, variable, self.needs(op.index, position), op.index, place, self.graph.runs[place])

    def _carry_uses(self) -> Iterable[Use]:
        """A carried output must be brought to the layout in which its input is stored, and so in every loop."""
        for source, target in self.graph.carry:
            a, b = self.graph.inputs[source], self.graph.outputs[target]
            if isinstance(b, int) and a != b:
                variable = self.value_variable[a]
                choices = self.choices[variable]
                needs = self.once(
                    ("stored needs", choices),
                    lambda c=choices: _needs([o.computed for o in c.options], c.option),
                )
                yield Use(b, variable, needs, -1)
        for op, value in self.graph.ties.items():
            variable = self.op_variable[op]
            choices = self.choices[variable]
            needs = self.once(
                ("carried needs", choices),
                lambda c=choices: _needs([tuple(t.results[0] for t in ts) for ts in c.triples], c.triple),
            )
            place = self.graph.place_of_conversion(value, self.graph.ops[op].region)
            yield Use(value, variable, needs, op, place, self.graph.runs[place])


def _needs(layouts: list[Layout], index: Ints) -> RequiredLayouts:
    """The layouts without repeats, and which of them each state asks for."""
    number: dict[Layout, int] = {}
    rows = np.array([number.setdefault(layout, len(number)) for layout in layouts], dtype=np.int64)
    return RequiredLayouts(tuple(number), rows[index])


def _whole_state(choices: Domain, whole: Layout) -> int:
    is_whole = lambda t: all(p == R for p in t.operands) and not any(p.is_sharded for p in t.results)
    for i, state in enumerate(choices.states):
        if state.triples is not None and not all(map(is_whole, state.triples)):
            continue
        a = state.availability
        if a is None or whole == a.computed or whole in a.targets:
            return i
    return 0
