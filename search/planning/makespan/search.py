"""The program of the least makespan at given ratios, and a bound on the makespan of all of them.

No program ends before its longest chain does (`formulation/chains.py`), and so not before any weighted mean of its
chains. The program with the least weighted mean is the optimum of an additive problem, which the solver finds with a
lower bound; the weights are those at which the programs seen so far have the greatest least mean (Kelley's cutting
planes), halfway back to those of the best bound so far, as the next ones are soon far off. A chain joins them where it
is the longest in the mean of the programs that limit them (column generation). Each program that comes up is scheduled,
unless a chain shows that it is no better. Of those that limit the bound, such as one that gathers a weight before its
use and one that gathers it at the end of the step, and of the last one and the best, others are put together each time
(`mixtures.py`).

These far weights bring up other programs, near ones raise the bound: once ratios have been looked at it is sought at
the nearest weights at which it may rise halfway to what the programs seen allow (the level bundle method: Lemarechal,
Nemirovskii, Nesterov 1995).
No weights bound it by more than a mean of programs takes, so it is raised in branches (`branches.py`). In the end
patches of other programs are tried in the best one, as they are scheduled (path relinking).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from hapsynth.instructions.program.program import Compute
from hapsynth.search.analysis.reachability import Mask
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.formulation.chain_weights import ChainCosts, IdealChainCosts, WeightedBuilder
from hapsynth.search.formulation.chains import SENT, Chain, ChainSpace, Occupancy
from hapsynth.search.memory.profile import peak
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.effort import LAST_S
from hapsynth.search.planning.makespan.branches import Branch, Seen, unlike_uses
from hapsynth.search.planning.makespan.clocks import first_devices, kinds_of_groups, least_seconds, resources
from hapsynth.search.planning.makespan.mixtures import mixtures
from hapsynth.search.planning.master_problem import limiting_weights, nearest_weights
from hapsynth.search.planning.search_at_ratios import FixedRatioSearch
from hapsynth.search.scheduling.critical_path import PathStep, critical_path
from hapsynth.search.scheduling.group_testing import improving
from hapsynth.search.scheduling.list_schedule import ordered, schedule
from hapsynth.search.scheduling.tasks import Machine, TaskGraph, tasks_of
from hapsynth.search.scheduling.timeline import Timeline
from hapsynth.search.sizing.ratios import Ratios
from hapsynth.search.solver import Ints, Solution
from hapsynth.search.solver.patches import patches

_MORE_ROUNDS = 4
"""Further rounds after a first look whose programs are worse than others', but whose bound allows better ones."""
_ROUNDS_AGAIN = 3
"""Rounds at near weights, at ratios with which a turn continues."""
_ROUNDS_OF_BOUND, _STATES_OF_BOUND = (16, 128), 3_000_000
"""Final rounds for the bound alone: as many as `_STATES_OF_BOUND` allows, summed over the problems' states, within
these limits."""
_LEAST_RISE = 0.08
"""A branch whose bound may rise by less than this fraction of the gap is parted."""
_LEAST_MAY_RISE = 1e-4
"""The least rise that a part is counted with, as a fraction of the bound. So of partings that leave one part's bound as
it is, the one in which the other part's rises the most is the best."""
_MOST_IN_VAIN = 5
"""The number of rounds without news, each halfway from the last to the best weights, after which a branch is parted."""
_PATIENCE, _LEAST_CLOSED = 40, 0.03
"""The final rounds end when the last `_PATIENCE` of them closed less than this fraction of the gap, as far as each
counts for all branches. The gap of the MLP of examples/ fell from 36 to 21 % in the first 64 rounds, in 14 s, and to 15
% in 480."""
_MIXTURES = 2
"""Mixtures of the last program with this many of the best ones."""
_MIXED_ABOVE = 0.02
"""In branches programs are mixed while the gap is above this: that takes as long as the rounds themselves."""
_BASES = 4
"""The number of bound-limiting programs into which the others are mixed."""
_LEAST_WEIGHT, _LEAST_BY_LEVEL = 2e-2, 4e-3
"""The least weight of each resource's own chain: with next to no weight all choices on a resource cost alike, and a
dual cannot tell them apart. The bound loses as much, so the weight is smaller (`_LEAST_BY_LEVEL`) where a dual
continues from one nearby."""
_MOST_LEAST = 0.5
"""The largest sum of these least weights; with many kinds each is smaller."""
_STEP, _LONG_STEP = 0.5, 0.8
"""Step from the weights of the best bound towards the limiting weights, as a fraction of the distance; long where the
bound rose in the last round and no new program limits it more."""
_LEVEL = 0.5
"""The level for near weights: this fraction of the way from the best bound to the most that it can be."""
PROMISING = 1.08
"""A program whose makespan, with its collectives bundled as they are sent, exceeds the best by more than this factor is
no better in other bundles."""
_LINKED, _LINKS, _LINKED_IN_VAIN = 2, 32, 12
"""The number of programs to which the best one is linked, the number of programs looked at on each path, and how many
of them in a row may fail to be better."""
TOLERANCE = 2e-3
"""The relative tolerance of bounds and makespans."""
_NODES = 5000
"""Of a problem's search: close to the best weights many programs are nearly as good, and to tell them apart takes
long. With 500 the bound of BERT on `poplar_b` stood still at 583 ms, as what was found was no longer the best at its
weights, and with these comes to 589."""


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A scheduled program. `chosen`: the program of its choices; `candidate`: the same, possibly with fewer
    collectives; `path`: its critical path."""

    seen: Seen
    chosen: Candidate
    candidate: Candidate
    timeline: Timeline
    path: list[PathStep]

    @property
    def makespan_s(self) -> float:
        return self.timeline.makespan_s


class MakespanSearch:
    """The search for the least makespan at given ratios, from the choices `begin` of a program. `like`: a search at
    other ratios, whose programs, chains and weights this one takes over. `known`: a program of these choices at these
    ratios, whose conversions need not be the cheapest there. `best`: the program of the least makespan so far that
    fits; `bound`: a lower bound on all programs' makespans, in seconds."""

    def __init__(
        self,
        search: FixedRatioSearch,
        ratios: Ratios,
        begin: Ints,
        like: MakespanSearch | None = None,
        known: Candidate | None = None,
    ) -> None:
        self.search, self.builder = search, search.builder(ratios)
        self.costs: CostModel = search.task.costs
        self.structure = search.choices
        self.space = (
            like.space if like else ChainSpace(self.structure, resources(self.costs), least_seconds(self.builder))
        )
        # Within limits a search has variables besides, which count what is held.
        begin = begin[: len(self.structure.choices)]
        first = search.maker.chosen(self.builder, begin)
        tasks = _undominated_tasks(first, self.costs)
        self._chain_costs = ChainCosts(self.builder, self.space, first_devices(self.costs), certain=False)
        self.chains: list[Chain] = list(like.chains if like else self.space.alone)
        self.seen: list[Seen] = []
        self.scheduled: list[Scheduled] = []
        self.best: Scheduled | None = None
        self._tried = set[int]()
        """The places in `seen` of the programs that were scheduled."""
        self._mixed = set[tuple[int, ...]]()
        """What was mixed, by their identities, and by how many chains and paths it was judged."""
        self._lengths: list[list[float]] = []
        """Seconds of the first chains in each program seen."""
        begun_from = (
            (like._whole.weights, like._whole.messages) if like else (np.zeros(0), dict(search.incumbent.messages))
        )
        self._paths: list[Chain] = []
        """Of the programs scheduled, what is on the critical path: it tells what to change, and bounds nothing."""
        self._whole = Branch(*begun_from)
        """All programs."""
        self.branches = [self._whole]
        """Which together have all programs."""
        self._at = self._whole
        """Where rounds are made."""
        self._certified = False
        """Whether `certify` has come to its end."""
        self._by_level = False
        """Whether rounds are at near weights (the level method), for the bound."""
        self._schedule(self._see(begin), first, tasks)
        self.begun = [*self.scheduled]
        """What it was begun from."""
        if known is not None:
            self._schedule(0, known, _undominated_tasks(known, self.costs))
        for other in like.seen if like else ():
            if self._place(other.choices) is None:
                self._see(other.choices)
        if not self._whole.weights.size:
            self._whole.weights = self._parts_of_path(self.scheduled[0])

    @property
    def bound(self) -> float:
        """A lower bound on the makespan, in seconds, of all programs at these ratios."""
        return min(branch.bound for branch in self.branches)

    def run(self, rounds: int, cutoff: float = np.inf, near: float = 0.0) -> None:
        """Search for at most `rounds` more rounds. It ends where the bound exceeds `cutoff` seconds, or the best
        program takes `near` seconds or less."""
        at = self._at
        for _ in range(rounds):
            if at.ended:
                return
            weights, most = self._next_weights() if at.begun else (self._best_weights(), np.inf)
            at.ended |= most <= at.bound * (1 + TOLERANCE)
            if (
                at.ended
                or at.bound >= cutoff
                or self.search.clock.late()
                or (self.best and self.best.makespan_s <= near)
            ):
                return
            self._solve(weights)
            if at is self._whole or self._may_mix():
                self._mix()
            # Programs suggest the next weights: where none is known there is nothing to go by yet.
            at.begun = bool(self._seen_in(at))
            at.ended |= self.best is not None and self.best.makespan_s <= at.bound * (1 + TOLERANCE)

    def _parts_of_path(self, known: Scheduled) -> Floats:
        """Weights from a program's critical path: the fraction of it on each resource. Better ones are soon found from
        them."""
        tasks, resources = known.timeline.tasks, self.space.resources
        found = np.full(len(self.space.alone), self._least_weight)
        kind_of = kinds_of_groups(tasks, self.costs)
        for task, group in known.path:
            at = resources.link if tasks.machine[task] is Machine.LINK else kind_of[group]
            found[at] += float(tasks.seconds[task, group]) / known.makespan_s
        return found / found.sum()

    def _best_weights(self) -> Floats:
        """The weights of all chains at which the bound was found."""
        weights = self._at.weights
        return np.pad(weights, (0, len(self.chains) - weights.size))

    def try_from(self, other: MakespanSearch) -> None:
        """The best program of a search at other ratios, at these."""
        if other.best is not None:
            self._look(other.best.seen.choices)

    def begin_from(self, choices: Ints) -> None:
        """Another program than the first that may be good."""
        known = len(self.scheduled)
        self._look(choices)
        self.begun += self.scheduled[known:]

    def look_again(self, near: float, cutoff: float) -> None:
        """After a first look, some rounds more until a program takes `near` seconds or less, or all take `cutoff`."""
        self.run(_MORE_ROUNDS, cutoff, near)

    def go_on(self, cutoff: float) -> None:
        """Some rounds more, at near weights."""
        # Resources may have less weight there.
        self._by_level, self._whole.ended = True, False
        self.run(_ROUNDS_AGAIN, cutoff)
        self._by_level = False

    def certify(self) -> None:
        """Bounds are from now on those of all programs, whatever ways their conversions go; no program is sought any
        more."""
        if self._certified:
            return
        # First, so that none outlasts an interruption.
        for branch in self.branches:
            branch.bound = 0.0
        self._chain_costs = ChainCosts(self.builder, self.space, first_devices(self.costs))
        level, self._by_level = self._by_level, True
        try:
            self._certify_branches()
            self._certified = True
        finally:
            self._at, self._by_level = self._whole, level

    def _certify_branches(self) -> None:
        """Each by one more problem; where there is no time for that, all programs by one."""
        for branch in self.branches:
            if self.search.clock.late():
                self.branches, self._whole.bound = [self._whole], 0.0
                self._at = self._whole
                self._solve(self._best_weights(), last=True)
                return
            self._at = branch
            self._solve(self._best_weights())

    def raise_bound(self) -> None:
        """Some rounds more for the bound: in the branch that has the least, as long as that may rise, else in its parts
        (branch and bound, least bound first)."""
        self._by_level, self._whole.ended, self._whole.most = True, False, np.inf
        rounds = int(np.clip(_STATES_OF_BOUND // sum(map(len, self.structure.choices)), *_ROUNDS_OF_BOUND))
        closed = list[float]()
        while len(closed) < rounds and self.best and not self.search.clock.late():
            gap, lately = self.best.makespan_s - self.bound, closed[-_PATIENCE:]
            if self.best.makespan_s <= self.bound * (1 + TOLERANCE):
                break
            if len(lately) == _PATIENCE and sum(lately) < gap * _LEAST_CLOSED * len(self.branches):
                break
            self._at = min(self.branches, key=lambda branch: branch.bound)
            stands = self._at.ended or self._at.in_vain > _MOST_IN_VAIN
            stands |= self._at.most - self._at.bound < _LEAST_RISE * gap
            if stands and not self._part():
                break
            bound, makespan = self._at.bound, self.best.makespan_s
            self.run(1)
            # A better program counts in all branches.
            shorter = (makespan - self.best.makespan_s) * len(self.branches)
            closed.append(min(self._at.bound, self.best.makespan_s) - bound + shorter)
        self._at = self._whole
        self._mix()

    def _part(self) -> bool:
        """Put its parts in the place of the branch where rounds are made, and go on in one of them; says whether it has
        any."""
        parted = self._at
        self._mix()
        way = self._best_parting(parted)
        if way is None:
            return False
        parts = parted.parted(*way)
        for part in parts:
            # At the weights of the parted branch its bound is no higher than these programs allow.
            part.begun = bool(self._seen_in(part))
        self.branches.remove(parted)
        self.branches += parts
        self._at = parts[0]
        return True

    def _best_parting(self, branch: Branch) -> tuple[int, Mask] | None:
        """A variable and states of it, those by which the bounds of both parts may rise the most, in the product, as
        far as the programs seen tell and up to the best one. None where the programs that limit the bound use all
        tensors alike."""
        mine = self._seen_in(branch)
        if not mine:
            return None
        lengths = self._lengths_seen()[mine]
        rises: dict[bytes, float] = {}
        best, most = None, 0.0
        for variable, states in unlike_uses(self._limiting(branch), self.space):
            first = states[[self.seen[n].choices[variable] for n in mine]]
            # Either part may be the first.
            key = (first == first[0]).tobytes()
            if key not in rises:
                rises[key] = prod(self._may_rise(branch, lengths[part]) for part in (first, ~first))
            if rises[key] > most:
                best, most = (variable, states), rises[key]
        return best

    def _may_rise(self, branch: Branch, lengths: Floats) -> float:
        """Seconds by which the bound of a part of a branch may rise, `_LEAST_MAY_RISE` at least. `lengths`: of all
        chains in the programs seen that the part has [programs, chains]."""
        top = self.best.makespan_s if self.best else np.inf
        if len(lengths):
            top = min(top, limiting_weights(lengths, self._floors)[1])
        return max(top - branch.bound, _LEAST_MAY_RISE * branch.bound)

    def _limiting(self, branch: Branch) -> list[tuple[Seen, float]]:
        """The programs of a branch that limit its bound, each with its share."""
        mine = self._seen_in(branch)
        if not mine:
            return []
        _, _, shares = limiting_weights(self._lengths_seen()[mine], self._floors)
        return [(self.seen[n], share) for n, share in zip(mine, shares.tolist(), strict=True) if share]

    def _seen_in(self, branch: Branch) -> list[int]:
        """The places of the programs seen that a branch has."""
        return [n for n, known in enumerate(self.seen) if branch.has(known.choices)]

    def bound_for(self, known: Scheduled) -> float:
        """A lower bound, in seconds, on all programs of a program's sizes; 0 if these are not the sizes of the search's
        ratios. Conversions of the program's choices that it leaves out are subtracted."""
        if not self.has_sizes_of(known):
            return 0.0
        return self.bound - max(self.builder.problem().cost(known.seen.choices) - known.chosen.cost, 0.0)

    def has_sizes_of(self, known: Scheduled) -> bool:
        """Whether a program has the sizes of the search's ratios, which whole units, or the memory, may not allow."""
        candidate, ratios = known.candidate, self.builder.ratios
        assumed = ratios.sizes_of(candidate.sizes.classes) if ratios else None
        return assumed is not None and assumed.shares == candidate.sizes.shares

    def joint_bound(self, parts: Floats) -> float:
        """A lower bound, in seconds, on all programs at any ratios, by the chains and weights of the best bound.
        `parts` [kinds]: how the weight of compute streams is split between kinds."""
        ideal = IdealChainCosts(self.search.builder(None), self.space, parts)
        return self._cheapest(ideal, self.chains, self._best_weights()).lower_bound

    def _solve(self, weights: Floats, *, last: bool = False) -> None:
        """Find the program of the least weighted chain lengths, and the bound that this gives. `last`: even if no time
        is left."""
        at = self._at
        # A linear program's are of sum 1 within its tolerance, and a mean of chains bounds makespans only at 1.
        weights = weights / weights.sum()
        # Where a program is beneath the bound it does not rise, and near weights need no more than that.
        beneath = at.bound if self._by_level else -np.inf
        solved = self._cheapest(self._chain_costs, self.chains, weights, beneath, last=last)
        at.messages = solved.messages
        at.rose = solved.lower_bound > at.bound
        if at.rose:
            at.bound, at.weights = solved.lower_bound, weights
        is_new = solved.assignment is not None and self._look(solved.assignment[: len(self.structure.choices)])
        at.in_vain = 0 if at.rose or is_new else at.in_vain + 1

    def _cheapest(
        self,
        costs: ChainCosts,
        chains: Sequence[Chain],
        weights: Floats,
        beneath: float = -np.inf,
        *,
        last: bool = False,
    ) -> Solution:
        search = self.search
        return search.cheapest(
            WeightedBuilder(costs, chains, weights, self._at.allowed),
            search.limits,
            (self.best or self.scheduled[0]).seen.choices,
            at_least=True,
            tolerance=TOLERANCE / 10 if self._by_level else TOLERANCE,
            seconds=(lambda: LAST_S) if last else search.clock.allotted,
            messages=self._at.messages,
            max_nodes=_NODES,
            beneath=beneath,
            despite_interrupt=last,
        )

    def _look(self, choices: Ints) -> bool:
        """Schedule a program, unless one of its chains is as long as the best so far; says whether it was not known.
        It may be known from other ratios, and not be scheduled at these."""
        at = self._place(choices)
        is_new = at is None
        if self._chain_costs.certain or at in self._tried:
            return is_new
        if at is None:
            at = self._see(choices)
        if self.best is None or self.longest_chain(self.seen[at]) < self.best.makespan_s:
            candidate = self.search.maker.chosen(self.builder, choices)
            self._schedule(at, candidate, _undominated_tasks(candidate, self.costs))
        return is_new

    def _schedule(self, at: int, candidate: Candidate, tasks: TaskGraph) -> None:
        """A program seen, as its choices say, and in fewer collectives where some are in a row."""
        self._tried.add(at)
        seen = self.seen[at]
        cutoff = self.best.makespan_s * PROMISING if self.best else np.inf
        self._keep(seen, candidate, candidate, schedule(tasks, quick=True, cutoff=cutoff))
        fewer = self.search.maker.in_fewest_collectives(self.builder, candidate)
        if fewer is not None:
            self._keep(
                seen, candidate, fewer, schedule(_undominated_tasks(fewer, self.costs), quick=True, cutoff=cutoff)
            )

    def _keep(self, seen: Seen, chosen: Candidate, candidate: Candidate, timeline: Timeline) -> None:
        found = Scheduled(seen, chosen, candidate, timeline, critical_path(timeline))
        self.scheduled.append(found)
        if (self.best is None or found.makespan_s < self.best.makespan_s) and self._fits(found):
            self.best = found
        self._paths.append(self._on_path(found))

    def _fits(self, found: Scheduled) -> bool:
        """Whether a program fits in its own order, or as it is scheduled."""
        candidate, limit = found.candidate, self.search.limit
        if candidate.memory <= limit:
            return True
        return peak(ordered(candidate.program, found.timeline), candidate.sizes, self.costs) <= limit

    def _see(self, choices: Ints) -> int:
        self.seen.append(Seen(choices, self._chain_costs.occupancy(choices.tolist())))
        return len(self.seen) - 1

    def longest_chain(self, seen: Seen) -> float:
        """Seconds of the longest of the chains so far in a program seen."""
        return max(chain.length(seen.taken) for chain in self.chains)

    def _lengths_seen(self) -> Floats:
        """Seconds of all chains in the programs seen [programs, chains]: neither become fewer."""
        self._lengths += [[] for _ in self.seen[len(self._lengths) :]]
        for row, seen in zip(self._lengths, self.seen, strict=True):
            row += [chain.length(seen.taken) for chain in self.chains[len(row) :]]
        return np.array(self._lengths)

    def _place(self, choices: Ints) -> int | None:
        """The place in `seen` of the program of these choices."""
        return next((n for n, known in enumerate(self.seen) if np.array_equal(choices, known.choices)), None)

    def _on_path(self, found: Scheduled) -> Chain:
        """What lies on a critical path, in place of a chain."""
        tasks, instructions = found.timeline.tasks, found.candidate.program.instructions
        ops, values = (np.full(len(x), -1) for x in (self.space.graph.ops, self.space.graph.values))
        kind_of = kinds_of_groups(tasks, self.costs)
        for task, group in found.path:
            for i in (instructions[at] for at in tasks.instructions[task]):
                if isinstance(i, Compute) and not self.space.in_block[i.op]:
                    ops[i.op] = kind_of[group]
                elif not isinstance(i, Compute) and tasks.machine[task] is Machine.LINK:
                    values[i.value] = SENT
        uses = np.where(self.space.uses_in_block, -1, values[self.space.use_value])
        return self.space.chain_of(("path", len(self._paths)), ops=ops, uses=uses, values=values, ends=values)

    def _next_weights(self) -> tuple[Floats, float]:
        """Weights of the chains, and the most that a bound can come to as far as the programs seen tell. As long as it
        helps, the chain that is the longest in the mean of the programs that limit them is added (column
        generation)."""
        at = self._at
        mine = self._seen_in(at)
        while True:
            lengths = self._lengths_seen()[mine]
            weights, most, shares = limiting_weights(lengths, self._floors)
            limiting = [(self.seen[n].taken, share) for n, share in zip(mine, shares, strict=True) if share]
            mean = Occupancy.mean(limiting)
            known = {chain.key for chain in self.chains}
            longest = [c for c in self.space.longest(mean) if c.key not in known]
            longer = [c for c in longest if c.length(mean) > most * (1 + TOLERANCE)]
            if not longer:
                before, at.most = at.most, most
                if self._by_level:
                    # Higher than the best program takes none has to be.
                    top = min(most, self.best.makespan_s) if self.best else most
                    best, level = self._best_weights(), at.bound + _LEVEL * (top - at.bound)
                    step = 0.5**at.in_vain
                    return nearest_weights(lengths, best, self._floors, level) * step + best * (1 - step), most
                step = _LONG_STEP if at.rose and most >= before * (1 - TOLERANCE) else _STEP
                return weights * step + self._best_weights() * (1 - step), most
            self.chains += longer

    @property
    def _least_weight(self) -> float:
        """Of each resource's own chain."""
        return min(_LEAST_BY_LEVEL if self._by_level else _LEAST_WEIGHT, _MOST_LEAST / len(self.space.alone))

    @property
    def _floors(self) -> list[float]:
        """The least weight of each chain."""
        least = self._least_weight
        return [least if chain.alone is not None else 0.0 for chain in self.chains]

    def _may_mix(self) -> bool:
        """Whether programs are worth mixing in branches."""
        return self.best is not None and self.best.makespan_s > self.bound * (1 + _MIXED_ABOVE)

    def _mix(self) -> None:
        """Look for better programs among the mixtures of the last one with the best, and of those that limit the
        bound."""
        last = self.seen[-1]
        for place in range(_MIXTURES):
            ranked = self._ranked()
            if place < len(ranked) and ranked[place].seen is not last:
                self._look_at_mixture(ranked[place].seen, [last])
        limiting = sorted(self._limiting(self._at), key=lambda known_and_share: -known_and_share[1])
        for base, _ in limiting[:_BASES]:
            self._look_at_mixture(base, [known for known, _ in limiting if known is not base])

    def _ranked(self) -> list[Scheduled]:
        """The programs scheduled, the best first, and of those of one assignment the best alone."""
        found: dict[int, Scheduled] = {}
        for known in sorted(self.scheduled, key=lambda known: known.makespan_s):
            found.setdefault(id(known.seen), known)
        return [*found.values()]

    def relink(self) -> None:
        """Look for better programs between the best one and others that are nearly as good, as they are scheduled (path
        relinking: Glover, Laguna, Martí 2000): with all patches of one, else half of them, and so on. Of what comes up
        the best is kept: the rest is much like it."""
        known, linked = [*self.scheduled], 0
        for other in self._ranked():
            if self.best is None or linked == _LINKED or self.search.clock.late():
                break
            differs = self.best.seen.choices != other.seen.choices
            patch, count = patches(self.structure.joined_variables, differs)
            if count > 1:
                linked += 1
                is_better = partial(self._is_better_with, self.best.seen.choices, other.seen.choices, patch)
                improving(count, is_better, _LINKS, _LINKED_IN_VAIN)
        self.scheduled = known if self.best in (None, *known) else [*known, self.best]

    def _is_better_with(self, base: Ints, other: Ints, patch: Ints, some: set[int]) -> bool:
        """Whether a program with some patches of another is the best so far."""
        before = self.best
        if not self.search.clock.late():
            self._look(np.where(np.isin(patch, [*some]), other, base))
        return self.best is not before

    def _look_at_mixture(self, base: Seen, others: Sequence[Seen]) -> None:
        chains = [*self.chains, *self._paths]
        known = id(base), *map(id, others), len(chains)
        if known in self._mixed or self.search.clock.late():
            return
        self._mixed.add(known)
        for choices in mixtures(self.space, chains, base, others, TOLERANCE):
            self._look(choices)


def _undominated_tasks(candidate: Candidate, costs: CostModel) -> TaskGraph:
    return tasks_of(candidate.program, candidate.sizes, costs, dominated=False)
