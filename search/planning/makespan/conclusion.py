"""A search for the least makespan from its first look to its end: at other ratios, by its bound, in its last order."""

from __future__ import annotations

import numpy as np

from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.cost.model import CostModel
from hapsynth.search.planning.baselines import Baselines
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.makespan.clocks import busy_seconds
from hapsynth.search.planning.makespan.final_schedule import Overlapped, best_within_limit
from hapsynth.search.planning.makespan.search import TOLERANCE, MakespanSearch, Scheduled
from hapsynth.search.planning.search_at_ratios import FixedRatioSearch
from hapsynth.search.scheduling.tasks import Machine
from hapsynth.search.sizing.ratios import Ratios
from hapsynth.search.solver import Ints

_FIRST_ROUNDS = 2
"""First rounds, which show how good the programs at some ratios are."""
_ROUNDS = 2
"""Further rounds, at the ratios of the search for the least sum."""
_TURNS = 5
"""Turns of a search at several ratios; each continues at those with the least bound."""
_SEARCHING = 0.8
"""The fraction of a time budget for programs and bounds; in the rest the best programs are scheduled again."""


def first_look(search: FixedRatioSearch, best: Candidate, ratios: Ratios) -> MakespanSearch | None:
    """The first rounds from the best program of the search by sums, whose own ratios are given; None where none that
    fits is found at these."""
    choices = best.choices
    if choices is None:
        # It was found by other choices, before one that does not fit showed that memory is short.
        again = search.best(ratios, None, TOLERANCE, certain=True).candidate
        choices = None if again is None else again.choices
    if choices is None:
        return None
    found = MakespanSearch(search, ratios, choices)
    for known in _baselines(search):
        found.begin_from(known)
    found.run(_FIRST_ROUNDS)
    return found


def _baselines(search: FixedRatioSearch) -> list[Ints]:
    """What people run today as choices: a search that is led by weights comes upon it late, and it may be the best."""
    space, task = search.choices, search.task
    if space.axes > 1 or task.cluster.n == 1 or search.clock.late():
        return []
    return space.once("baselines", lambda: Baselines(task).choices_of(space))


def concluded(found: MakespanSearch, cutoff: float = np.inf) -> Overlapped | None:
    """The program of the least makespan, found from a first look on; None where none fits in its order. What takes more
    than `cutoff` seconds is of no use."""
    search, first, begun = found.search, found, found.begun
    with search.clock.within(_SEARCHING):
        found.run(_ROUNDS, cutoff)
        pool = _at_other_ratios(found, cutoff)
        found = min(pool, key=_least_makespan)
        best_so_far = found.best
        if best_so_far and not found.has_sizes_of(best_so_far) and not search.clock.late():
            # The bound was found at ratios that this program does not have: once more at its own.
            pool.append(_at(best_so_far.candidate.sizes, found, cutoff))
            found = min(pool, key=_least_makespan)
        if not search.clock.late() and found.bound < cutoff:
            for other in pool:
                found.try_from(other)
            found.raise_bound()
            found.relink()
            if found.best and not found.has_sizes_of(found.best) and found.bound < cutoff and not search.clock.late():
                # A better program came up, and the bound is of other ratios than it has.
                own = _at(found.best.candidate.sizes, found, cutoff)
                if own.bound < cutoff:
                    own.raise_bound()
                found = min(own, found, key=_least_makespan)
    fitting = best_within_limit(found, begun)
    if not fitting:
        return None
    best = min(fitting, key=lambda each: each.makespan_s)
    # Their ratios may be those of the first search alone.
    searches = (first, found) if best.known in begun else (found,)
    for each in searches:
        each.certify()
    return best.overlapped._replace(lower_bound_s=max(each.bound_for(best.known) for each in searches))


def _at_other_ratios(found: MakespanSearch, cutoff: float) -> list[MakespanSearch]:
    """Searches at the ratios that suit overlap the best: those of the search by sums, those by speed, and those that
    balance each best program. In turn the one with the least bound goes on, which says the least of what is there,
    until a turn gains nothing."""
    search = found.search
    weights, _ = search.task.starts()[0]
    pool, balanced = [found], list[Scheduled]()
    if found.best is not None and not search.clock.late():
        pool.append(_begun_at(search.task.ratios(weights), found, cutoff))
    for _ in range(_TURNS):
        best = min(pool, key=_least_makespan)
        known = best.best
        if known is None or search.clock.late():
            break
        if known not in balanced:
            balanced.append(known)
            sizes = _balanced(known, search.task.costs)
            if sizes is not None:
                pool.append(_at(sizes, best, cutoff))
        at = min(pool, key=lambda each: each.bound)
        if at.bound >= min(map(_least_makespan, pool)) * (1 - TOLERANCE):
            break
        at.go_on(cutoff)
        if min(map(_least_makespan, pool)) >= known.makespan_s * (1 - TOLERANCE):
            break
    return pool


def _at(sizes: Sizes, found: MakespanSearch, cutoff: float) -> MakespanSearch:
    """The first rounds at the ratios of these sizes, which the best program has there too."""
    assert found.best is not None
    known = found.best.candidate.at(sizes)
    return _begun_at(found.search.task.own_ratios(sizes), found, cutoff, known)


def _begun_at(ratios: Ratios, found: MakespanSearch, cutoff: float, known: Candidate | None = None) -> MakespanSearch:
    """The first rounds at some ratios, from the best program of a search at others."""
    assert found.best is not None
    again = MakespanSearch(found.search, ratios, found.best.seen.choices, found, known)
    again.run(_FIRST_ROUNDS, cutoff)
    return again


def _least_makespan(found: MakespanSearch) -> float:
    return found.best.makespan_s if found.best else np.inf


def _balanced(found: Scheduled, costs: CostModel) -> Sizes | None:
    """Sizes of a program that share its critical path better between devices and link; None where they gain nothing."""
    candidate, tasks = found.candidate, found.timeline.tasks
    spent = dict.fromkeys(Machine, 0.0)
    for task, group in found.path:
        spent[tasks.machine[task]] += float(tasks.seconds[task, group])
    computing, total = spent[Machine.COMPUTE], sum(spent.values())
    sizer = candidate.sizer
    # What contention takes counts as if it were the same at other sizes.
    besides = sizer.besides(candidate.sizes, busy_seconds(found.timeline, costs, contention=True))
    sizes = sizer.balanced(candidate.sizes, besides, computing / total if total else 1.0)
    return None if sizes.shares == candidate.sizes.shares else sizes
