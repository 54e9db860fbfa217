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
parts of other programs are tried in the best one, as they are scheduled (path relinking).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import isclose, prod
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from hapsynth.instructions.program.program import Compute, Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.analysis.reachability import Mask
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.program_cost import by_cheapest_steps
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.chain_weights import ChainCosts, IdealChainCosts, WeightedBuilder
from hapsynth.search.formulation.chains import SENT, Chain, ChainSpace, Occupancy, Resources
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.memory.profile import MemoryProfile, peak
from hapsynth.search.planning.branches import Branch, Seen, unlike_uses
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.memory_bound_schedules import schedules_holding_less
from hapsynth.search.planning.mixtures import mixture, unlike_parts
from hapsynth.search.planning.search_at_ratios import AdditiveSolution, FixedRatioSearch
from hapsynth.search.scheduling.critical_path import Step, critical_path
from hapsynth.search.scheduling.group_testing import improving
from hapsynth.search.scheduling.list_schedule import iterated, ordered, refined, schedule
from hapsynth.search.scheduling.tasks import Machine, TaskGraph, tasks_of
from hapsynth.search.scheduling.timeline import Timeline, simulate
from hapsynth.search.sizing.makespan_lp import LINK
from hapsynth.search.sizing.ratios import Ratios
from hapsynth.search.solver import Ints

_FIRST_ROUNDS = 2
"""Of weights, which tell how good a program there is at some ratios."""
_MORE_ROUNDS = 4
"""Where that was not so good, and yet the bound allows better ones."""
_ROUNDS = 2
"""More, at the ratios of the search by sums."""
_TURNS, _ROUNDS_AGAIN = 5, 3
"""At the ratios that each turn goes on with: rounds at near weights."""
_ROUNDS_OF_BOUND, _STATES_OF_BOUND = (16, 128), 3_000_000
"""In the end, for the bound alone: as many rounds as come to so many states of their problems, within these."""
_LEAST_RISE = 0.08
"""Of the gap: where the bound of a branch may rise by less, the branch is parted."""
_LEAST_MAY_RISE = 1e-4
"""Of the bound: what a part counts for at least. Of ways to part a branch that leave one part where it is, that is the
best in which the other rises the most."""
_MOST_IN_VAIN = 5
"""Rounds that tell nothing new, each halfway from the one before to the best weights, until a branch is parted."""
_PATIENCE, _LEAST_CLOSED = 40, 0.03
"""They end when the last so many rounds together closed less than this part of the gap, as far as each counts for all
branches. The gap of the MLP of examples/ fell from 36 to 21 % in the first 64 rounds, in 14 s, and to 15 % in 480."""
_MIXTURES = 2
"""Of the last program with each of the best ones."""
_BASES = 4
"""Of the programs that limit a bound, those that the others are mixed into."""
_LEAST_WEIGHT, _LEAST_BY_LEVEL = 2e-2, 4e-3
"""Of each resource's own chain: of what has next to no weight any choice would do, and no dual tells them apart. It
costs the bound as much, so that there is less of it where a dual goes on from one nearby."""
_STEP, _LONG_STEP = 0.5, 0.8
"""From the weights of the best bound to those that limit it as far as is known; a long one where the bound rose the
last time and no program has come up since that limits it more."""
_LEVEL = 0.5
"""From the best bound to the most that it may come to: where the next one is sought at near weights."""
_PROMISING = 1.08
"""Times as long as the best program so far: what takes longer with its collectives bundled as they are sent is no
better in other bundles."""
_SEARCHING = 0.8
"""Of a time budget: programs and bounds are sought in it; in the rest the best are scheduled again."""
_LINKED, _LINKS, _LINKED_IN_VAIN = 2, 32, 12
"""Programs that the best one is linked with, one after the other, and how many between two of them are looked at, in
all and in a row without a better one."""
_TRIED, _NEARLY = 8, 1.01
"""Programs that are scheduled again, or more until one fits, and how many times as long as the best their quick
schedules are at most."""
TOLERANCE = 2e-3
"""Relative: what a search leaves undecided, of bounds and of makespans."""
_NODES = 5000
"""Of a problem's search: close to the best weights many programs are nearly as good, and to tell them apart takes
long. With 500 the bound of BERT on `poplar_b` stood still at 583 ms, as what was found was no longer the best at its
weights, and with these comes to 589."""


@dataclass(frozen=True, eq=False)
class Scheduled:
    """A program in an order. `path`: what makes it as long as it is."""

    seen: Seen
    candidate: Candidate
    timeline: Timeline
    path: list[Step]

    @property
    def makespan_s(self) -> float:
        return self.timeline.makespan_s


class MakespanSearch:
    """At some ratios, from the choices of a program; `like`: one at others, whose programs, chains and weights it takes
    over; `known`: a program of these choices at these ratios, whose conversions may go other ways than are the cheapest
    there. `best`: the program of the least makespan so far that fits; `bound`: seconds that every program takes at
    least."""

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
        self._chain_costs = ChainCosts(self.builder, self.space, first_devices(self.costs))
        self.chains: list[Chain] = list(like.chains if like else self.space.alone)
        self.seen: list[Seen] = []
        self.scheduled: list[Scheduled] = []
        self.best: Scheduled | None = None
        self._like = like
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
        self._by_level = False
        """Whether rounds are at near weights (the level method), for the bound."""
        self._schedule(self._see(begin), first, tasks)
        if known is not None:
            self._schedule(self.seen[0], known, _undominated_tasks(known, self.costs))
        for other in like.seen if like else ():
            if not self._is_known(other.choices):
                self._see(other.choices)
        if not self._whole.weights.size:
            self._whole.weights = self._parts_of_path(self.scheduled[0])

    @property
    def bound(self) -> float:
        """Seconds that every program takes at least."""
        return min(branch.bound for branch in self.branches)

    def run(self, rounds: int, bar: float = np.inf, near: float = 0.0) -> None:
        """Search for so many more rounds at most. It ends where the bound exceeds `bar` seconds, or the best program
        takes `near` seconds or less."""
        at = self._at
        for _ in range(rounds):
            if at.ended:
                return
            weights, most = self._next_weights() if at.begun else (self._best_weights(), np.inf)
            at.ended |= most <= at.bound * (1 + TOLERANCE)
            if at.ended or at.bound >= bar or self.search.clock.late() or (self.best and self.best.makespan_s <= near):
                return
            self._solve(weights)
            if at is self._whole:
                self._mix()
            at.begun = True
            at.ended |= self.best is not None and self.best.makespan_s <= at.bound * (1 + TOLERANCE)

    def _parts_of_path(self, known: Scheduled) -> Floats:
        """Of each resource its part of a critical path: weights from which others are soon found."""
        tasks, resources = known.timeline.tasks, self.space.resources
        found = np.full(len(self.space.alone), _LEAST_WEIGHT)
        kind_of = kinds_of_groups(tasks, self.costs)
        for task, group in known.path:
            at = resources.link if tasks.machine[task] is Machine.LINK else kind_of[group]
            found[at] += float(tasks.seconds[task, group]) / known.makespan_s
        return found / found.sum()

    def _best_weights(self) -> Floats:
        """Of all chains, those at which the bound was found."""
        weights = self._at.weights
        return np.pad(weights, (0, len(self.chains) - weights.size))

    def look_again(self, near: float, bar: float) -> None:
        """After a first look, some rounds more until a program takes `near` seconds or less, or all take `bar`."""
        self.run(_MORE_ROUNDS, bar, near)

    def go_on(self, bar: float) -> None:
        """Some rounds more, at near weights."""
        self._by_level = True
        self.run(_ROUNDS_AGAIN, bar)
        self._by_level = False

    def raise_bound(self) -> None:
        """Some rounds more for the bound: in the branch that has the least, as long as that may rise, else in its parts
        (branch and bound, least bound first)."""
        self._by_level, self._whole.ended, self._whole.most = True, False, np.inf
        rounds = int(np.clip(_STATES_OF_BOUND // sum(map(len, self.structure.choices)), *_ROUNDS_OF_BOUND))
        rises: list[float] = []
        while len(rises) < rounds and self.best and not self.search.clock.late():
            gap, lately = self.best.makespan_s - self.bound, rises[-_PATIENCE:]
            if self.best.makespan_s <= self.bound * (1 + TOLERANCE):
                break
            if len(lately) == _PATIENCE and sum(lately) < gap * _LEAST_CLOSED * len(self.branches):
                break
            self._at = min(self.branches, key=lambda branch: branch.bound)
            stands = self._at.ended or self._at.in_vain > _MOST_IN_VAIN
            stands |= self._at.most - self._at.bound < _LEAST_RISE * gap
            if stands and not self._part():
                break
            before = self._at.bound
            self.run(1)
            rises.append(min(self._at.bound, self.best.makespan_s) - before)
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
            top = min(top, self._limiting_weights(lengths)[1])
        return max(top - branch.bound, _LEAST_MAY_RISE * branch.bound)

    def _limiting(self, branch: Branch) -> list[tuple[Seen, float]]:
        """The programs of a branch that limit its bound, each with its share."""
        mine = self._seen_in(branch)
        if not mine:
            return []
        _, _, shares = self._limiting_weights(self._lengths_seen()[mine])
        return [(self.seen[n], share) for n, share in zip(mine, shares.tolist(), strict=True) if share]

    def _seen_in(self, branch: Branch) -> list[int]:
        """The places of the programs seen that a branch has."""
        return [n for n, known in enumerate(self.seen) if branch.has(known.choices)]

    def bound_for(self, known: Scheduled) -> float:
        """Seconds that all programs of a program's sizes take at least; 0 where it has others than the bound is about,
        as whole units cannot have these ratios, or not within the memory. Where a program leaves out conversions that
        its choices have for nothing, their seconds are not in it."""
        candidate, ratios = known.candidate, self.builder.ratios
        assumed = ratios.sizes_of(candidate.sizes.classes) if ratios else None
        if assumed is None or assumed.shares != candidate.sizes.shares:
            return 0.0
        return self.bound - max(self.builder.problem().cost(known.seen.choices) - candidate.cost, 0.0)

    def joint_bound(self, parts: Floats) -> float:
        """Seconds that every program takes at least at any ratios, by the chains and weights of the best bound.
        `parts`: of the weight of streams, each kind's [kinds]."""
        ideal = IdealChainCosts(self.search.builder(None), self.space, parts)
        return self._cheapest(ideal, self.chains, self._best_weights()).lower_bound

    def _solve(self, weights: Floats) -> None:
        """The program of the least weighted chains, and the bound that it is."""
        at = self._at
        # Where a program is beneath the bound it does not rise, and near weights need no more than that.
        beneath = at.bound if self._by_level else -np.inf
        solved = self._cheapest(self._chain_costs, self.chains, weights, beneath)
        at.messages = solved.messages
        at.rose = solved.lower_bound > at.bound
        if at.rose:
            at.bound, at.weights = solved.lower_bound, weights
        is_new = solved.choices is not None and self._look(solved.choices[: len(self.structure.choices)])
        at.in_vain = 0 if at.rose or is_new else at.in_vain + 1

    def _cheapest(
        self, costs: ChainCosts, chains: Sequence[Chain], weights: Floats, beneath: float = -np.inf
    ) -> AdditiveSolution:
        search = self.search
        return search.cheapest(
            WeightedBuilder(costs, chains, weights, self._at.allowed),
            search.limits,
            (self.best or self.scheduled[0]).seen.choices,
            at_least=True,
            tolerance=TOLERANCE / 10 if self._by_level else TOLERANCE,
            seconds=search.clock.allotted,
            messages=self._at.messages,
            max_nodes=_NODES,
            beneath=beneath,
        )

    def _look(self, choices: Ints) -> bool:
        """Schedule a program, unless one of its chains is as long as the best so far; says whether it was not known."""
        if self._is_known(choices):
            return False
        seen = self._see(choices)
        if self.best is None or self.longest_chain(seen) < self.best.makespan_s:
            candidate = self.search.maker.chosen(self.builder, choices)
            self._schedule(seen, candidate, _undominated_tasks(candidate, self.costs))
        return True

    def _schedule(self, seen: Seen, candidate: Candidate, tasks: TaskGraph) -> None:
        bar = self.best.makespan_s * _PROMISING if self.best else np.inf
        timeline = schedule(tasks, quick=True, bar=bar)
        found = Scheduled(seen, candidate, timeline, critical_path(timeline))
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

    def _see(self, choices: Ints) -> Seen:
        self.seen.append(Seen(choices, self._chain_costs.occupancy(choices.tolist())))
        return self.seen[-1]

    def longest_chain(self, seen: Seen) -> float:
        """Seconds of the longest of the chains so far in a program seen."""
        return max(chain.length(seen.taken) for chain in self.chains)

    def _lengths_seen(self) -> Floats:
        """Seconds of all chains in the programs seen [programs, chains]: neither become fewer."""
        self._lengths += [[] for _ in self.seen[len(self._lengths) :]]
        for row, seen in zip(self._lengths, self.seen, strict=True):
            row += [chain.length(seen.taken) for chain in self.chains[len(row) :]]
        return np.array(self._lengths)

    def _is_known(self, choices: Ints) -> bool:
        return any(np.array_equal(choices, known.choices) for known in self.seen)

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
            weights, most, shares = self._limiting_weights(lengths)
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
                    nearest = self._nearest_weights(lengths, at.bound + _LEVEL * (top - at.bound))
                    step = 0.5**at.in_vain
                    return nearest * step + self._best_weights() * (1 - step), most
                step = _LONG_STEP if at.rose and most >= before * (1 - TOLERANCE) else _STEP
                return weights * step + self._best_weights() * (1 - step), most
            self.chains += longer

    def _limiting_weights(self, lengths: Floats) -> tuple[Floats, float, Floats]:
        """Weights at which the least weighted length of some programs is the greatest, this length, and the shares of
        the programs that limit it. `lengths`: [programs, chains]."""
        count, unit = lengths.shape[1], float(lengths.max()) or 1.0
        found = linprog(
            np.array([0.0] * count + [-1.0]),
            A_ub=np.column_stack([-lengths / unit, np.ones(len(lengths))]),
            b_ub=np.zeros(len(lengths)),
            A_eq=np.array([[1.0] * count + [0.0]]),
            b_eq=np.ones(1),
            bounds=[*[(floor, None) for floor in self._floors], (None, None)],
            method="highs",
        )
        return np.maximum(found.x[:count], 0.0), -float(found.fun) * unit, np.maximum(-found.ineqlin.marginals, 0.0)

    def _nearest_weights(self, lengths: Floats, level: float) -> Floats:
        """The weights nearest to the best ones, in the sum of what differs, at which each program's weighted lengths
        are `level` or more."""
        best, unit = self._best_weights(), float(lengths.max()) or 1.0
        count = best.size
        more = [(max(floor - weight, 0.0), None) for floor, weight in zip(self._floors, best, strict=True)]
        found = linprog(
            np.ones(2 * count),
            A_ub=np.column_stack([-lengths, lengths]) / unit,
            b_ub=(lengths @ best - level) / unit,
            A_eq=np.array([[1.0] * count + [-1.0] * count]),
            b_eq=np.array([1.0 - best.sum()]),
            bounds=[*more, *[(0.0, weight) for weight in best]],
            method="highs",
        )
        return best if found.x is None else np.maximum(best + found.x[:count] - found.x[count:], 0.0)

    @property
    def _floors(self) -> list[float]:
        """The least weight of each chain."""
        least = _LEAST_BY_LEVEL if self._by_level else _LEAST_WEIGHT
        return [least if chain.alone is not None else 0.0 for chain in self.chains]

    def _mix(self) -> None:
        """Look for better programs among the mixtures of the last one with the best, and of those that limit the
        bound."""
        last = self.seen[-1]
        for place in range(_MIXTURES):
            ranked = sorted(self.scheduled, key=lambda known: known.makespan_s)
            if place < len(ranked) and ranked[place].seen is not last:
                self._look_at_mixture(ranked[place].seen, [last], [*self.chains, *self._paths])
        limiting = sorted(self._limiting(self._at), key=lambda known_and_share: -known_and_share[1])
        for base, _ in limiting[:_BASES]:
            self._look_at_mixture(base, [known for known, _ in limiting if known is not base], self.chains)

    def relink(self) -> None:
        """Look for better programs between the best one and others that are nearly as good, as they are scheduled (path
        relinking: Glover, Laguna, Martí 2000): with all parts of one, else half of them, and so on. Of what comes up
        the best is kept: the rest is much like it."""
        known, linked = [*self.scheduled], 0
        for other in sorted(known, key=lambda known: known.makespan_s):
            if self.best is None or linked == _LINKED or self.search.clock.late():
                break
            part, count = unlike_parts(self.structure, self.best.seen.choices, other.seen.choices)
            if count > 1:
                linked += 1
                is_better = partial(self._is_better_with, self.best.seen.choices, other.seen.choices, part)
                improving(count, is_better, _LINKS, _LINKED_IN_VAIN)
        self.scheduled = known if self.best in (None, *known) else [*known, self.best]

    def _is_better_with(self, base: Ints, other: Ints, part: Ints, parts: set[int]) -> bool:
        """Whether a program with some parts of another is the best so far."""
        before = self.best
        if not self.search.clock.late():
            self._look(np.where(np.isin(part, [*parts]), other, base))
        return self.best is not before

    def _look_at_mixture(self, base: Seen, others: Sequence[Seen], chains: Sequence[Chain]) -> None:
        if self.search.clock.late():
            return
        choices = mixture(self.space, chains, base, others, TOLERANCE)
        if choices is not None:
            self._look(choices)


class Overlapped(NamedTuple):
    """A program in the order in which it takes the least time found, and seconds that all programs at its ratios take
    at least. `memory_bytes`: of each device. `clocks`: by name, how long each kind of device computes, and collectives
    take together."""

    program: Program
    sizes: Sizes
    timeline: Timeline
    memory_bytes: tuple[float, ...]
    lower_bound_s: float
    clocks: dict[str, float]


def first_look(search: FixedRatioSearch, best: Candidate, ratios: Ratios) -> MakespanSearch | None:
    """The first rounds from the best program of the search by sums, whose own ratios are given; None where it has no
    choices of its own."""
    if best.choices is None:
        return None
    found = MakespanSearch(search, ratios, best.choices)
    found.run(_FIRST_ROUNDS)
    return found


def concluded(found: MakespanSearch, bar: float = np.inf) -> Overlapped | None:
    """The program of the least makespan, found from a first look on; None where none fits in its order. What takes more
    than `bar` seconds is of no use."""
    search, first, least_sum = found.search, found, found.scheduled[0]
    with search.clock.within(_SEARCHING):
        found.run(_ROUNDS, bar)
        found = _at_other_ratios(found, bar)
        best_so_far = found.best
        if best_so_far and found.bound_for(best_so_far) < found.bound * (1 - TOLERANCE) and not search.clock.late():
            # The bound was found at ratios that this program does not have: once more at its own.
            found = min(_at(best_so_far.candidate.sizes, found, bar), found, key=_least_makespan)
        if not search.clock.late() and found.bound < bar:
            found.raise_bound()
            found.relink()
    fitting = _best_within_limit(found, least_sum)
    if not fitting:
        return None
    best = min(fitting, key=lambda each: each.makespan_s)
    # The ratios of the program of the least sum may be those of the first search alone.
    searches = (first, found) if best.known is least_sum else (found,)
    return best.overlapped._replace(lower_bound_s=max(each.bound_for(best.known) for each in searches))


class _Tried(NamedTuple):
    """A program that was scheduled again. `steps`: it or the same by the steps that go together; `timeline`: of these,
    from which its order is; None where that is another."""

    known: Scheduled
    steps: Program
    timeline: Timeline | None
    overlapped: Overlapped

    @property
    def makespan_s(self) -> float:
        return self.overlapped.timeline.makespan_s


def _best_within_limit(found: MakespanSearch, least_sum: Scheduled) -> list[_Tried]:
    """The best programs of a search, and that of the least sum, in orders in which they fit: the best one, and those
    with the least mean of quick schedule and longest chain, as more orders may gain what the schedule is above the
    chain."""
    search, tried, fitting = found.search, list[Scheduled](), list[_Tried]()
    least = np.inf

    def is_tried(known: Scheduled) -> bool:
        same = lambda other: isclose(known.makespan_s, other.makespan_s) or known.candidate.is_like(other.candidate)
        return any(map(same, tried))

    def fit(known: Scheduled) -> None:
        nonlocal least
        tried.append(known)
        again = _within_limit(known, search)
        if again is not None:
            fitting.append(again)
            least = min(least, again.makespan_s)

    chain = {known: found.longest_chain(known.seen) for known in found.scheduled}
    for known in sorted(found.scheduled, key=lambda known: (known is not found.best, known.makespan_s + chain[known])):
        if fitting and (len(tried) >= _TRIED or search.clock.late()):
            break
        if known.makespan_s < least * _NEARLY and chain[known] < least and not is_tried(known):
            fit(known)
    if not is_tried(least_sum) and least_sum.makespan_s < least * _PROMISING:
        fit(least_sum)
    best = min(fitting, key=lambda each: each.makespan_s, default=None)
    if best and best.timeline and not search.clock.late():
        shorter = iterated(best.timeline, search.clock.late)
        overlapped = _timed(ordered(best.steps, shorter), best.known.candidate.sizes, search)
        if overlapped is not None:
            fitting.append(best._replace(overlapped=overlapped))
    return fitting


def _at_other_ratios(found: MakespanSearch, bar: float) -> MakespanSearch:
    """A search at the ratios that suit overlap the best: those of the search by sums, those by speed, and those that
    balance each best program. In turn the one with the least bound goes on, which says the least of what is there,
    until a turn gains nothing."""
    search = found.search
    weights, _ = search.task.starts()[0]
    pool, balanced = [found], list[Scheduled]()
    if found.best is not None and not search.clock.late():
        pool.append(_begun_at(search.task.ratios(weights), found, bar))
    for _ in range(_TURNS):
        best = min(pool, key=_least_makespan)
        known = best.best
        if known is None or search.clock.late():
            break
        if known not in balanced:
            balanced.append(known)
            sizes = _balanced(known, search.task.costs, search.limit)
            if sizes is not None:
                pool.append(_at(sizes, best, bar))
        at = min(pool, key=lambda each: each.bound)
        if at.bound >= min(map(_least_makespan, pool)) * (1 - TOLERANCE):
            break
        at.go_on(bar)
        if min(map(_least_makespan, pool)) >= known.makespan_s * (1 - TOLERANCE):
            break
    return min(pool, key=_least_makespan)


def _at(sizes: Sizes, found: MakespanSearch, bar: float) -> MakespanSearch:
    """The first rounds at the ratios of these sizes, which the best program has there too."""
    assert found.best is not None
    known = found.best.candidate.at(sizes, found.search.limit)
    return _begun_at(found.search.task.own_ratios(sizes), found, bar, known)


def _begun_at(ratios: Ratios, found: MakespanSearch, bar: float, known: Candidate | None = None) -> MakespanSearch:
    """The first rounds at some ratios, from the best program of a search at others."""
    assert found.best is not None
    again = MakespanSearch(found.search, ratios, found.best.seen.choices, found, known)
    again.run(_FIRST_ROUNDS, bar)
    return again


def _least_makespan(found: MakespanSearch) -> float:
    return found.best.makespan_s if found.best else np.inf


def _within_limit(known: Scheduled, search: FixedRatioSearch) -> _Tried | None:
    """A program in an order in which it fits, by the steps that it has or those that go together; None where there is
    none. Where time has run out it is the order that it has."""
    candidate, costs = known.candidate, search.task.costs
    timed = partial(_timed, sizes=candidate.sizes, search=search)
    if search.clock.late():
        ways = [(candidate.program, known.timeline)]
    else:
        ways = [(candidate.program, refined(known.timeline))]
        together = by_cheapest_steps(candidate.program, candidate.sizes, costs, bundled=True)
        if together is not candidate.program:
            tasks = tasks_of(together, candidate.sizes, costs, dominated=False)
            ways.append((together, refined(schedule(tasks, quick=True))))
    fitting = [
        _Tried(known, steps, timeline, overlapped)
        for steps, timeline in ways
        if (overlapped := timed(ordered(steps, timeline))) is not None
    ]
    if fitting or candidate.memory > search.limit:
        return min(fitting, key=lambda each: each.makespan_s, default=None)
    less = schedules_holding_less(candidate.program, candidate.sizes, costs)
    overlapped = next(filter(None, map(timed, less)), None) or timed(candidate.program)
    return overlapped and _Tried(known, candidate.program, None, overlapped)


def as_it_is(search: FixedRatioSearch, best: Candidate) -> Overlapped:
    """The best program of the search by sums, in its own order."""
    found = _timed(best.program, best.sizes, search)
    assert found is not None
    return found


def _undominated_tasks(candidate: Candidate, costs: CostModel) -> TaskGraph:
    return tasks_of(candidate.program, candidate.sizes, costs, dominated=False)


def _timed(program: Program, sizes: Sizes, search: FixedRatioSearch, bound: float = 0.0) -> Overlapped | None:
    """A program in its own order; None where it holds too much."""
    costs = search.task.costs
    memory = MemoryProfile(costs.graph, program, sizes.classes, costs)
    if memory.peak(sizes) > search.limit:
        return None
    tasks = tasks_of(program, sizes, costs)
    timeline = simulate(tasks, range(len(tasks.machine)))
    return Overlapped(program, sizes, timeline, memory.peaks(sizes), bound, clocks(timeline, costs))


def _balanced(found: Scheduled, costs: CostModel, limit: float) -> Sizes | None:
    """Sizes of a program that share its critical path better between devices and link; None where they gain nothing."""
    candidate, tasks = found.candidate, found.timeline.tasks
    spent = dict.fromkeys(Machine, 0.0)
    for task, group in found.path:
        spent[tasks.machine[task]] += float(tasks.seconds[task, group])
    computing, total = spent[Machine.COMPUTE], sum(spent.values())
    sizer = candidate.sizer
    # What contention takes counts as if it were the same at other sizes.
    besides = sizer.besides(candidate.sizes, busy_seconds(found.timeline, costs, contention=True))
    sizes = sizer.balanced(candidate.sizes, besides, computing / total if total else 1.0, limit)
    return None if sizes.shares == candidate.sizes.shares else sizes


def kinds_of_groups(tasks: TaskGraph, costs: CostModel) -> dict[int, int]:
    """Group of devices -> the number of their kind: those of a group are of one."""
    return dict(zip(tasks.group_of.tolist(), costs.kind_of.tolist(), strict=True))


def first_devices(costs: CostModel) -> Ints:
    """Of each kind its first device [kinds]."""
    return np.unique(costs.kind_of, return_index=True)[1]


def busy_seconds(timeline: Timeline, costs: CostModel, *, contention: bool = False) -> dict[int, float]:
    """Of each kind of device, by its number, the seconds that the busiest of its devices computes, and those that
    collectives take together (`LINK`); of both what takes everything. `contention`: with what collectives beside it
    slow computing down."""
    tasks = timeline.tasks
    machine = np.array(tasks.machine, dtype=np.int64)
    everything = machine == Machine.EVERYTHING
    each = tasks.seconds[(machine == Machine.COMPUTE) | everything].sum(axis=0)
    if contention:
        each = np.maximum(each, timeline.computed)
    found = {LINK: float(tasks.seconds[(machine == Machine.LINK) | everything].max(axis=1, initial=0.0).sum())}
    for group, kind in kinds_of_groups(tasks, costs).items():
        found[kind] = max(found.get(kind, 0.0), float(each[group]))
    return found


def clocks(timeline: Timeline, costs: CostModel) -> dict[str, float]:
    """By name, the seconds that each kind of device computes, and those of all collectives."""
    busy, tasks = busy_seconds(timeline, costs), timeline.tasks
    found = {f"compute {kind.name}": busy[k] for k, kind in enumerate(costs.kinds)}
    sent = [k for k, machine in enumerate(tasks.machine) if machine is Machine.LINK]
    return found | ({"collectives": float(tasks.seconds[sent].max(axis=1).sum())} if sent else {})


def least_seconds(builder: ProblemBuilder) -> Floats:
    """Of each op, at the ratios and under the triples that suit it [ops]."""
    costs, triples = builder.costs, builder.structure.triples
    works: dict[object, list[Work]] = {}
    found = [(costs.kind(op), triples[op]) for op in range(len(triples))]
    for op, key in enumerate(found):
        if key not in works:
            works[key] = [costs.work(op, ts) for ts in triples[op]]
    # Many at once, as one by one they take the most of what a first look at many unlike ops does.
    seconds = iter(costs.ideal_times(work for mine in works.values() for work in mine))
    least = {key: min(islice(seconds, len(mine))) for key, mine in works.items()}
    return np.array([least[key] for key in found])


def resources(costs: CostModel) -> Resources:
    """The streams of a cluster's kinds of devices, and the link."""
    return Resources(tuple(kind.slowdown for kind in costs.kinds))
