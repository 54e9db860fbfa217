"""The additive problem whose costs are weighted lengths of chains: its optimum is a lower bound on the makespan.

For weights of chains that sum to 1, no program's makespan is below its weighted chain lengths, and these are a sum over
its choices. The programs are those of a plain builder, whose conversions go the ways that are the cheapest without
weights, or all (`ChainCosts.certain`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

from hapsynth.instructions.layout import cuts_of
from hapsynth.search.analysis.reachability import Mask
from hapsynth.search.cost.model import Floats
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.chains import SENT, Chain, ChainSpace, Occupancy
from hapsynth.search.formulation.choice_space import AvailableLayouts, Interned, RequiredLayouts
from hapsynth.search.formulation.conversions import Conversions
from hapsynth.search.formulation.deferral import SentAfter
from hapsynth.search.formulation.problem_builder import NO_SIZES, ProblemBuilder
from hapsynth.search.solver import Edge, Ints, Problem

Row = tuple[float, ...]


class ChainCosts:
    """What the choices of a plain `builder` come to on each resource of a `ChainSpace`; the stream of a kind is that of
    one of its `devices` [kinds].

    `certain`: conversions are priced at the least over all ways, so bounds hold for every program. Otherwise along the
    ways that are the cheapest alone, as in the programs that a builder makes of its choices: this separates programs
    better, but in a bundle another way may be cheaper."""

    def __init__(self, builder: ProblemBuilder, space: ChainSpace, devices: Ints, *, certain: bool = True) -> None:
        self.builder, self.space, self.devices, self.certain = builder, space, devices, certain
        self.graph, self.structure, self.costs = builder.graph, builder.structure, builder.costs
        self.plain = builder.plain_outputs()
        self.ways = [builder.conversions(v) for v in range(len(self.graph.values))]

    @cached_property
    def op_keys(self) -> list[tuple[Any, ...]]:
        """Per op, a key that determines its seconds in a step."""
        runs, uniform = self.graph.runs, self.costs.uniform_time
        return [(self.builder.times_key(o.index), runs[o.region], uniform(o.index)) for o in self.graph.ops]

    @cached_property
    def op_seconds(self) -> list[Floats]:
        """Per op, its seconds in a step under each of its triples [triples, kinds + 1]."""

        def made(op: int, key: tuple[Any, ...]) -> Floats:
            times, runs, uniform = key
            seconds = self.builder.once(("kind times", times), lambda: self._op_times(op, times[2]))
            return self.builder.once(("op seconds", key), lambda: runs * (seconds + uniform))

        return [made(op, key) for op, key in enumerate(self.op_keys)]

    def _op_times(self, op: int, vectors: tuple[int, ...]) -> Floats:
        builder, ratios = self.builder, self.builder.ratios
        assert ratios is not None
        held = [tuple(vectors[c] for c in cuts) if vectors else () for cuts in builder.cuts(op).groups]
        works = [self.costs.work(op, triples) for triples in self.structure.triples[op]]
        seconds = self.costs.times_on(
            self.devices, [(w, [ratios.devices[v] for v in at]) for w, at in zip(works, held, strict=True)]
        )
        seconds[[NO_SIZES in at for at in held]] = np.inf
        return seconds

    def weighted_op(self, op: int, weights: Row) -> Floats:
        """The weighted seconds of an op under each of its triples [triples]. `weights` [kinds + 1]: for its seconds on
        each kind of device, and on the slowest."""
        return _times(self.op_seconds[op], weights)

    @cached_property
    def sent_after(self) -> SentAfter:
        """The seconds that deferrable ops send after themselves."""
        return SentAfter(self.space.deferral, self.builder, self._certain_ways)

    @cached_property
    def deferred_seconds(self) -> dict[int, Floats]:
        """Deferrable op -> [triples, layouts that its use needs or 1, 2 kinds]: the lesser of its seconds on each kind
        of device and the seconds that it sends after itself; then the same with those that it sends before the join.
        What it sends is divided by the slowdown, as the part that slows computing down is counted anyway."""
        deferral, slowdowns = self.space.deferral, np.array(self.space.resources.slowdowns)
        found: dict[int, Floats] = {}
        for deferrable in deferral.ops:
            sent = self.sent_after.seconds(deferrable)
            joined = np.zeros_like(sent)
            if deferral.before_join[deferrable.op]:
                joined = self.sent_after.seconds(deferrable, deferral.join)
            seconds = self.op_seconds[deferrable.op][:, None, :-1]
            least = [np.minimum(seconds, each[:, :, None] / slowdowns) for each in (sent, joined)]
            found[deferrable.op] = np.concatenate(least, axis=-1)
        return found

    def weighted_deferred(self, op: int, weights: Row) -> Floats:
        """The weighted `deferred_seconds` of an op [triples, layouts that its use needs or 1]. `weights` [2 kinds]: of
        each kind of device, then of each where the op precedes the join."""
        return _times(self.deferred_seconds[op], weights)

    def weighted_feeds(self, value: int, weights: Floats) -> Floats:
        """The weighted seconds of putting an argument into memory as each option stores it [options]; `weights` as for
        `weighted_op`."""
        return _times(self.feeds(value), weights)

    def on_streams(self, weights: Floats) -> Floats:
        """The effective weights of the kinds' compute streams [..., kinds]; at ideal ratios their sum is split between
        kinds by `parts`."""
        return weights

    def feeds(self, value: int) -> Floats:
        """Seconds to put an argument into memory as each option stores it [options, kinds + 1]."""
        return self.builder.once(("kind feeds", value), lambda: self._feeds(value))

    def _feeds(self, value: int) -> Floats:
        variable = self.structure.value_variable[value]
        options = self.structure.choices[variable].options
        ratios = self.builder.ratios
        assert ratios is not None
        found = np.zeros((len(options), len(self.costs.kinds) + 1))
        for n, option in enumerate(options):
            work = self.costs.feed_work(value, option.computed)
            if work is not None:
                held = [ratios.devices[ratios.of(value, *cut)] for cut in cuts_of(option.computed)]
                found[n] = self.costs.times_on(self.devices, [(work, held)])[0]
        return found

    def least_ways(self, value: int, inside: bool = False) -> Conversions:
        """The ways between layouts, at the least that they take of the link. `inside`: in a loop or branch; elsewhere a
        step may be one of a bundle, of which each pays the least per byte (`CostModel.least_in_bundle`)."""
        ways, least = self.ways[value], partial(self.builder.least_step_time, value)
        if inside:
            return ways
        if self.certain:
            return self._certain_ways(value)
        return self.builder.once(("repriced ways", ways), lambda: ways.repriced(least))

    def _certain_ways(self, value: int) -> Conversions:
        ways, least = self.ways[value], partial(self.builder.least_step_time, value)
        return self.builder.once(("least ways", ways), lambda: Conversions(ways.layouts, least))

    def along(self, value: int, inside: bool) -> Floats:
        """Seconds of the cheapest conversion between layouts, in the columns of `Resources.counted` [layouts, layouts,
        columns]; `inside` as for `least_ways`."""
        ways = self.least_ways(value, inside)
        return self.builder.once(("along", ways), lambda: self._counted(ways.seconds))

    def offers(self, value: int, options: Interned[AvailableLayouts]) -> tuple[Floats, Ints, Floats]:
        """For every option: seconds of its shared conversions [options, columns], the layouts that then exist [options,
        most], and the seconds of the conversions before each of them [options, most, columns]."""
        ways, inside = self.ways[value], self.graph.home[value] > 0

        def make() -> tuple[Floats, Ints, Floats]:
            least, (_, tensors) = self.least_ways(value, inside), self.builder.offers(value, options)
            before, total = np.zeros(tensors.shape), np.zeros(len(options))
            number = ways.layouts.number
            for n, option in enumerate(options):
                made, targets = number[option.computed], [number[t] for t in option.targets]
                total[n], so_far = _shared(ways, least, made, targets)
                before[n] = [so_far[t] for t in tensors[n].tolist()]
                if self.certain:
                    total[n] = min(total[n], _shared(least, least, made, targets)[0])
                    before[n] = least.seconds[made, tensors[n]]
            return self._counted(total), tensors, self._counted(before)

        return self.builder.once(("chain offers", ways, options, inside, self.certain), make)

    def _counted(self, seconds: Floats) -> Floats:
        """Seconds on the link [...] spread over the columns of `Resources.counted` [..., columns]; infinite ones stay
        so."""
        finite = np.isfinite(seconds)[..., None]
        return np.where(finite, np.where(finite, seconds[..., None], 0.0) * self.space.resources.counted, np.inf)

    def occupancy(self, assignment: Sequence[int]) -> Occupancy:
        """The `Occupancy` of an assignment's program."""
        st, graph, kinds = self.structure, self.graph, len(self.costs.kinds)
        states, columns = st.listed, self.space.resources.counted.size
        triple = np.array([states[v][0][assignment[v]] for v in st.op_variable], dtype=np.int64)
        option = [states[v][1][assignment[v]] for v in st.value_variable]
        (of_ops, op_begin), (offered, value_begin) = self._op_rows, self._offered
        ops, values = of_ops[op_begin + triple], offered[value_begin + np.array(option, dtype=np.int64)]
        deferred = np.zeros((len(graph.ops), 2 * kinds))
        for op, _, use in self.space.deferral.ops:
            group = 0 if use is None else use.needs.groups[assignment[use.variable]]
            deferred[op] = self.deferred_seconds[op][triple[op], group]
        runs = np.array([graph.runs[home] for home in graph.home])[:, None]
        ends = np.zeros_like(values)
        for value in self.plain:
            for end in self.builder.ends(value):
                ends[value] += self._nearest(value, option[value], end, None, inside=False)[0]
        row: list[int] = []
        for use, (groups, known) in zip(st.uses, self._use_rows, strict=True):
            key = option[use.value], groups[assignment[use.variable]]
            found = known.get(key)
            if found is None:
                found = known[key] = len(self._known_rows)
                self._known_rows.append(self._nearest(use.value, key[0], use.needs, key[1], inside=use.place > 0))
            row.append(found)
        nearest = np.array(self._known_rows, dtype=np.float64).reshape(-1, 2, columns)[np.array(row, dtype=np.int64)]
        uses = nearest[:, 0] * np.array([use.runs for use in st.uses])[:, None]
        shared = nearest[:, 1] * runs[[use.value for use in st.uses]]
        fed = np.zeros(kinds + 1)
        for value, n in enumerate(option):
            if value not in graph.producer:
                fed += self.feeds(value)[n]
        return Occupancy(ops.reshape(len(graph.ops), kinds + 1), deferred, uses, shared, values * runs, ends, fed[None])

    @cached_property
    def _op_rows(self) -> tuple[Floats, Ints]:
        """Seconds of all ops' triples [rows, kinds + 1], and the row at which each op's begin."""
        return _stacked(self.op_seconds, len(self.costs.kinds) + 1)

    @cached_property
    def _offered(self) -> tuple[Floats, Ints]:
        """Seconds of the shared conversions of all values' options [rows, columns], and the row at which each value's
        begin."""
        st = self.structure
        every = [self.offers(value, st.choices[v].options)[0] for value, v in enumerate(st.value_variable)]
        return _stacked(every, self.space.resources.counted.size)

    @cached_property
    def _known_rows(self) -> list[tuple[Row, Row]]:
        """Results of `_nearest`, at the indices that the dicts of `_use_rows` hold."""
        return []

    @cached_property
    def _use_rows(self) -> list[tuple[list[int], dict[tuple[int, int], int]]]:
        """Per use, the index of the layout that each state of its variable requires, and (option, layout) -> index into
        `_known_rows`; equal uses share both."""
        st, home = self.structure, self.graph.home
        groups: dict[RequiredLayouts, list[int]] = {}
        known: dict[object, dict[tuple[int, int], int]] = {}
        found: list[tuple[list[int], dict[tuple[int, int], int]]] = []
        for use in st.uses:
            options = st.choices[st.value_variable[use.value]].options
            key = self.ways[use.value], options, use.needs, use.place > 0, home[use.value] > 0
            if use.needs not in groups:
                groups[use.needs] = use.needs.groups.tolist()
            found.append((groups[use.needs], known.setdefault(key, {})))
        return found

    def _nearest(
        self,
        value: int,
        n: int,
        needs: RequiredLayouts,
        group: int | None,
        *,
        inside: bool,
    ) -> tuple[Row, Row]:
        """From the layout of option `n` from which a required one is reached the soonest: seconds of the conversion
        from it, and of the shared conversions before it [columns each]. `group`: the required layout's index in
        `needs`; None for any of these."""
        ways, home = self.ways[value], self.graph.home[value] > 0
        options = self.structure.choices[self.structure.value_variable[value]].options

        def make() -> tuple[Row, Row]:
            _, tensors, before = self.offers(value, options)
            among = needs.layouts if group is None else (needs.layouts[group],)
            targets = [ways.layouts.number[layout] for layout in among]
            seconds = ways.seconds[tensors[n]][:, targets]
            which, target = np.unravel_index(int(seconds.argmin()), seconds.shape)
            return tuple(self.along(value, inside)[tensors[n][which], targets[target]]), tuple(before[n, which])

        return self.builder.once(("nearest", ways, options, n, needs, group, inside, home, self.certain), make)


def _shared(ways: Conversions, least: Conversions, made: int, targets: Sequence[int]) -> tuple[float, dict[int, float]]:
    """Seconds to convert a value from its `made` layout to all `targets` along the paths of `ways`, with the step times
    of `least`; and the seconds before each layout on these paths."""
    seconds, hops = ways.reached(made, targets)
    so_far = {made: 0.0}
    for a, b, _ in hops:
        so_far[b] = so_far[a] + least.single[a, b]
    return sum(least.single[a, b] for a, b, _ in hops) if np.isfinite(seconds) else np.inf, so_far


class IdealChainCosts(ChainCosts):
    """Lower bounds on the costs of a `builder` without ratios, each instruction at the ratios that suit it.

    A chain is on one device. Its length is averaged over all devices, `parts` [kinds] being the weight of each kind's.
    The mean of a cut instruction is least where all of it is left to the kind on which it weighs the least.
    """

    def __init__(self, builder: ProblemBuilder, space: ChainSpace, parts: Floats) -> None:
        super().__init__(builder, space, np.zeros(0, dtype=np.int64))
        self.parts = parts

    @cached_property
    def deferred_seconds(self) -> dict[int, Floats]:
        # The ratios that suit an op and those that suit what it sends are others.
        kinds, triples = self.space.resources.kinds, self.structure.triples
        return {d.op: np.zeros((len(triples[d.op]), 1, 2 * kinds)) for d in self.space.deferral.ops}

    def weighted_op(self, op: int, weights: Row) -> Floats:
        works = [self.costs.work(op, triples) for triples in self.structure.triples[op]]
        seconds = self._least(works, weights) + sum(weights) * self.costs.uniform_time(op)
        return self.graph.runs[self.graph.ops[op].region] * seconds

    def weighted_feeds(self, value: int, weights: Floats) -> Floats:
        options = self.structure.choices[self.structure.value_variable[value]].options
        works = [self.costs.feed_work(value, option.computed) for option in options]
        if not works or works[0] is None:
            return np.zeros(len(options))
        return self._least([w for w in works if w is not None], weights)

    def on_streams(self, weights: Floats) -> Floats:
        return weights.sum(axis=-1, keepdims=True) * self.parts

    def _least(self, works: Sequence[Work], weights: Sequence[float] | Floats) -> Floats:
        *streams, slowest = weights
        found = self.costs.least_weighted(works, np.array(streams))
        return found + slowest * np.array(self.costs.ideal_times(works)) if slowest else found


class WeightedBuilder(ProblemBuilder):
    """Problems of a plain builder's choices by the lengths of `chains`, each times its weight. `allowed`: of some
    variables the states that they may take, bool [states]."""

    def __init__(
        self,
        chain_costs: ChainCosts,
        chains: Sequence[Chain],
        weights: Floats,
        allowed: Mapping[int, Mask] | None = None,
    ) -> None:
        plain = chain_costs.builder
        super().__init__(plain.structure, plain.costs, plain.ratios)
        self._made, self._ways, self._times = plain._made, plain._ways, plain._times
        self.chain_costs, self.allowed = chain_costs, allowed or {}
        self._own: dict[object, Floats] = {}
        space = chain_costs.space
        kinds = space.resources.kinds
        places = [chain.places for chain in chains]
        each = np.repeat(weights, [at.size for at in places])
        on_each = np.bincount(np.concatenate(places), each, minlength=space.place_count)
        found = space.by_field(np.asarray(on_each, dtype=np.float64))
        for name, rows in found.items():
            of_ops = {"ops": slice(kinds), "deferred": slice(None), "fed": slice(kinds)}
            streams = of_ops.get(name, slice(SENT + 1, None))
            of_kinds = rows[:, streams]
            by_kind = of_kinds.reshape(len(rows), of_kinds.shape[1] // kinds, kinds)
            rows[:, streams] = chain_costs.on_streams(by_kind).reshape(of_kinds.shape)
        weights_of = {name: np.round(rows, 12) for name, rows in found.items()}
        self.op_weights, self.deferred_weights = weights_of["ops"], weights_of["deferred"]
        self.use_weights, self.shared_weights = weights_of["uses"], weights_of["shared"]
        self.value_weights, self.end_weights = weights_of["values"], weights_of["ends"]
        (self.fed_weights,) = weights_of["fed"]

    @cached_property
    def _problem(self) -> Problem:
        st, kinds = self.structure, self.kinds
        edges = [self._link(op, value) for op, value in st.links]
        for use, (kind, producer, groups), own, shared in zip(
            st.uses, kinds.uses, self.use_weights.tolist(), self.shared_weights.tolist(), strict=True
        ):
            options = st.choices[producer].options
            home = self.graph.runs[self.graph.home[use.value]]
            inside = use.place > 0
            key = "weighted use", self.chain_costs.ways[use.value], kind, tuple(own), tuple(shared), home, inside
            make = lambda u=use, o=options, w=own, s=shared: self._weighted_table(
                u.value, o, u.needs, u.runs, w, s, inside=u.place > 0
            )
            edges.append(Edge(producer, use.variable, groups, use.needs.groups, self._weighted(key, make)))
        for op, _, use in self.chain_costs.space.deferral.ops:
            weights = self.deferred_weights[op].tolist()
            if use is not None and any(weights):
                variable = st.op_variable[op]
                seconds = self.chain_costs.weighted_deferred(op, weights)
                if seconds.any():
                    edges.append(Edge(variable, use.variable, st.choices[variable].triple, use.needs.groups, seconds))
        unary = self._weighted_unary()
        for variable, states in self.allowed.items():
            unary[variable] = np.where(states, unary[variable], np.inf)
        return Problem(tuple(unary), tuple(edges))

    def _weighted(self, key: object, make: Callable[[], Floats]) -> Floats:
        """As `once`, but of this builder's weights: no other has use for it."""
        if key not in self._own:
            self._own[key] = make()
        return self._own[key]

    def _weighted_table(
        self,
        value: int,
        options: Interned[AvailableLayouts],
        needs: RequiredLayouts,
        runs: float,
        own: Sequence[float],
        shared: Sequence[float],
        *,
        inside: bool,
    ) -> Floats:
        """Weighted seconds of a use's own conversion, and of the shared ones before the tensor that it takes: of the
        least of all tensors."""
        ways = self.chain_costs.ways[value]
        _, tensors, before = self.chain_costs.offers(value, options)
        columns = [ways.layouts.number[n] for n in needs.layouts]
        along = _times(self.chain_costs.along(value, inside), own)
        seconds = np.where(np.isfinite(ways.seconds), along, np.inf)[:, columns]
        found = runs * seconds[tensors]
        if any(shared):
            found = found + (self.graph.runs[self.graph.home[value]] * (before @ np.array(shared)))[:, :, None]
        return found.min(axis=1)

    def _weighted_unary(self) -> list[Floats]:
        graph, st, costs = self.graph, self.structure, self.chain_costs
        unary: list[Floats | None] = [None] * len(st.choices)
        by_use = {d.op for d in costs.space.deferral.ops if d.use is not None}
        for op, own_key, weights, deferred in zip(
            graph.ops, costs.op_keys, self.op_weights.tolist(), self.deferred_weights.tolist(), strict=True
        ):
            variable = st.op_variable[op.index]
            lone = st.made_with(op.index)
            of_results = None if lone is None else self._option_key(lone)
            # What counts with a use is an edge's.
            deferred = () if op.index in by_use or not any(deferred) else tuple(deferred)
            deferred_key = (costs.deferred_seconds[op.index].tobytes(), *deferred) if deferred else ()
            key = "op", st.choices[variable], own_key, tuple(weights), deferred_key, of_results

            def make(
                at: int = op.index,
                v: int = variable,
                w: Row = tuple(weights),
                later: Row = deferred,
                value: int | None = lone,
            ) -> Floats:
                seconds = costs.weighted_op(at, w)
                if later:
                    seconds = seconds + costs.weighted_deferred(at, later)[:, 0]
                found = seconds[st.choices[v].triple]
                return found if value is None else found + self._of_options(value)[st.choices[v].option]

            unary[variable] = self._weighted(key, make)
        for value, variable in enumerate(st.value_variable):
            if unary[variable] is None:
                choices = st.choices[variable]
                alike = self._weighted(("states", choices, self._option_key(value)), partial(self._of_states, value))
                feeds = costs.weighted_feeds(value, self.fed_weights) if value not in graph.producer else np.zeros(0)
                unary[variable] = alike + feeds[choices.option] if feeds.any() else alike
        return [u for u in unary if u is not None]

    def _option_key(self, value: int) -> tuple[Any, ...]:
        """What decides `_of_options`."""
        st, costs = self.structure, self.chain_costs
        options, runs = st.choices[st.value_variable[value]].options, self.graph.runs[self.graph.home[value]]
        ends = (tuple(self.end_weights[value].tolist()), *self.ends(value)) if value in costs.plain else ()
        ways = costs.ways[value], self.graph.home[value] > 0
        return "options", ways, options, runs, tuple(self.value_weights[value].tolist()), ends

    def _of_states(self, value: int) -> Floats:
        """Weighted seconds of each state of a value that has a variable of its own."""
        return self._of_options(value)[self.structure.choices[self.structure.value_variable[value]].option]

    def _of_options(self, value: int) -> Floats:
        """Weighted seconds of each of a value's options: of its shared conversions, and of those to where it ends."""
        key = _, _, options, runs, own, ends = self._option_key(value)

        def make() -> Floats:
            seconds = runs * _times(self.chain_costs.offers(value, options)[0], own)
            for end in ends[1:]:
                seconds = seconds + self._weighted_table(value, options, end, 1.0, ends[0], (), inside=False).min(
                    axis=1
                )
            return seconds

        return self._weighted(key, make)


def _times(seconds: Floats, weights: Sequence[float] | Floats) -> Floats:
    """Weighted over the last axis; infinite where some are."""
    finite = np.isfinite(seconds)
    weighted = np.where(finite, seconds, 0.0) @ np.asarray(weights, dtype=np.float64)
    return np.where(finite.all(axis=-1), weighted, np.inf)


def _stacked(rows: Sequence[Floats], columns: int) -> tuple[Floats, Ints]:
    """Arrays [.., columns] in one, the same array once, and where each begins there."""
    apart = {id(each): each for each in rows}
    end = dict(zip(apart, np.cumsum([len(each) for each in apart.values()]).tolist(), strict=True))
    begin = np.array([end[id(each)] - len(each) for each in rows], dtype=np.int64)
    return np.concatenate([np.zeros((0, columns)), *apart.values()]), begin
