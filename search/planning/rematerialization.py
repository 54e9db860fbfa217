"""Which ops to run twice so that less is held: minimum cuts between what is held and what is made again.

Most is held at some op `at`. What is made before it and taken after it is held there, or made again from what is: at a
price per byte, the cheapest choice is a minimum cut (functorch's partitioner takes one of bytes alone; Checkmate, arXiv
1910.02653, is an integer program). Rising prices give the choices worth having: each holds less than the one before and
computes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hapsynth.graph.ir import Graph, Rematerialized
from hapsynth.graph.rematerialize import blocks, can_run_again, recomputed
from hapsynth.search.analysis.fusion import materialized
from hapsynth.search.analysis.liveness import Liveness
from hapsynth.search.cost.model import Floats
from hapsynth.search.planning.device_subsets import ClusterPlanner
from hapsynth.search.planning.ideal_work import IdealWorkBound
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.planning.task import Task
from hapsynth.search.result import Result
from hapsynth.search.scheduling.timeline import never
from hapsynth.search.solver.min_cut import Hyperedge, cheapest_labels

_PRICES = 12
_SPREAD = 1e4
"""Between the mean price of a byte and the lowest and highest that are tried first."""
_BETWEEN = 3
"""How often the ways between two prices that differ are halved."""
_LESS = 0.98
"""What a choice holds, at most, of what the one before does."""
_NEXT_TO_NOTHING = 0.02
"""Of a step, what second runs may take without a look at whether the graph itself is cheaper."""
_LEAST_LOOK_S = 30.0
"""Seconds for that look, at least: a small graph's search ends long before, however busy the machine is."""


class Choice(NamedTuple):
    """A graph with second runs, the seconds that they take, and the bytes at its fullest op, uncut."""

    graph: Graph
    seconds: float
    nbytes: float


def choices(graph: Graph, seconds: Floats, stopped: Callable[[], bool] = never) -> list[Choice]:
    """Ways to hold less than `graph` does, from the one that computes the least to the one that holds the least; just
    those found before it is `stopped`.

    `seconds`: of each op, in any unit [ops].
    """
    if not graph.ops:
        return []
    held = held_at(graph)
    ends = [b.stop - 1 for b in blocks(graph)]
    at = next(end for end in ends if end >= int(held.argmax()))
    problem = _Problem(graph, at, seconds)
    per_byte = problem.mean_price()
    if not per_byte:
        return []
    prices = np.geomspace(per_byte / _SPREAD, per_byte * _SPREAD, _PRICES).tolist()
    known: dict[float, tuple[int, ...]] = {}
    for _ in range(_BETWEEN + 1):
        known |= {price: problem.cheapest(price) for price in prices if not stopped()}
        pairs = list(pairwise(sorted(known.items())))
        prices = [(a * b) ** 0.5 for (a, x), (b, y) in pairs if x != y]
    found = list[Choice]()
    for ops in dict.fromkeys(filter(None, known.values())):
        if stopped():
            break
        other = recomputed(graph, Rematerialized(at, ops))
        found.append(Choice(other, float(seconds[list(ops)].sum()), float(held_at(other).max())))
    best = float(held.max())
    worth: list[Choice] = []
    for choice in sorted(found, key=lambda c: c.seconds):
        if choice.nbytes < best * _LESS:
            best = choice.nbytes
            worth.append(choice)
    return worth


def held_at(graph: Graph) -> Floats:
    """Bytes alive at each op, uncut, in the order of the graph: float64 [ops]."""
    stored = materialized(graph)
    lives = Liveness(graph, stored)
    change = np.zeros(len(graph.ops) + 3)
    nbytes = np.array([v.nbytes if s else 0 for v, s in zip(graph.values, stored, strict=True)], dtype=np.float64)
    np.add.at(change, lives.first + 1, nbytes)
    np.subtract.at(change, lives.last + 2, nbytes)
    return np.cumsum(change)[1 : len(graph.ops) + 1]


class _Problem:
    """Labels: an op's is 1 where it runs again, a value's where it is there after `at`."""

    def __init__(self, graph: Graph, at: int, seconds: Floats) -> None:
        before = range(at + 1)
        made = [v for o in before for v in graph.ops[o].results]
        place = {v: at + 1 + n for n, v in enumerate(made)}
        late = {v for op in graph.ops[at + 1 :] for _, v in op.value_operands}
        late.update(v for v in graph.outputs if isinstance(v, int))
        self.needed = [place[v] for v in made if v in late]
        self.again = np.array([can_run_again(graph.ops[o]) for o in before])
        self.seconds = seconds[: at + 1]
        self.nbytes = np.array([graph.values[v].nbytes for v in made], dtype=np.float64)
        self.made = [Hyperedge(o, (place[v],), 0.0) for o in before for v in graph.ops[o].results]
        takers: dict[int, list[int]] = {}
        for o in before:
            for v in dict.fromkeys(u for _, u in graph.ops[o].value_operands if u in place):
                takers.setdefault(place[v], []).append(o)
        self.taken = [Hyperedge(v, tuple(ops), 0.0) for v, ops in takers.items()]

    def mean_price(self) -> float:
        """Seconds of all ops by the bytes of all values; 0 where nothing can run again for anything."""
        total = float(self.nbytes.sum())
        return float(self.seconds[self.again].sum()) / total if total and self.needed else 0.0

    def cheapest(self, price: float) -> tuple[int, ...]:
        """The ops to run again where a byte that is held costs `price` seconds."""
        keep = self.nbytes * price
        never = 2 * (float(keep.sum()) + float(self.seconds.sum()))
        first = np.zeros(self.seconds.size + keep.size)
        second = np.r_[np.where(self.again, self.seconds, never), np.zeros(keep.size)]
        first[self.needed] = never
        up = np.r_[keep, np.full(len(self.taken), np.inf)]
        labels = cheapest_labels(first, second, [*self.made, *self.taken], (up, np.zeros(up.size)))
        return tuple(np.flatnonzero(labels[: self.seconds.size] == 1).tolist())


def seconds_of(task: Task) -> Floats:
    """What each op takes at least, by all devices together, in seconds [ops]."""
    return IdealWorkBound(task.choices, task.costs).of_ops(task.cluster)


TaskFor = Callable[[Graph, float | None], Task]
"""Of a graph and a time budget in seconds, or None."""


def planned_to_fit(graph: Graph, task: TaskFor, time_budget_s: float | None) -> tuple[Graph, Result]:
    """The plan of a graph or, where memory is short, the cheapest found of it and of its `choices`, and what it is of.

    Those that hold too much, by what the graph's cheapest program without limits holds and by what did not fit, are
    left out, but for the one that holds the least if all would be. The first that fits without paying for it ends the
    search among them. The graph itself, which can be cheaper by about what the second runs take, is planned where that
    is not next to nothing, and given as long as all that took, at least half a minute. Nothing further is planned once
    a time budget is spent. Raises InfeasibleError where nothing fits. Ctrl-C returns the best so far, or raises
    KeyboardInterrupt.
    """
    began = time.perf_counter()
    left = lambda: None if time_budget_s is None else max(0.05, time_budget_s - (time.perf_counter() - began))
    whole = task(graph, time_budget_s)
    alone = ClusterPlanner(whole)
    excess = alone.first_excess()
    if excess <= 1.0:
        return graph, alone.run()
    best: tuple[Graph, Result] | None = None
    gain, failed = 0.0, list[InfeasibleError]()
    likely = float(held_at(graph).max(initial=0.0)) / excess
    known = choices(graph, seconds_of(whole), alone.no_time)
    # Where memory is short, the least may fit at layouts that hold less than the first program's.
    hopeful, enough = [c for c in known if c.nbytes <= likely] or known[-1:], np.inf
    for choice in hopeful:
        if alone.no_time():
            break
        if choice.nbytes > enough:
            continue
        try:
            result = ClusterPlanner(task(choice.graph, _half(left()))).run()
        except InfeasibleError as error:
            enough = choice.nbytes / error.excess
            failed.append(error)
            continue
        except KeyboardInterrupt:
            if best is None:
                raise
            return best[0], replace(best[1], interrupted=True)
        if best is not None and result.cost_s >= best[1].cost_s:
            best = best[0], replace(best[1], interrupted=result.interrupted)
            break
        best, gain = (choice.graph, result), choice.seconds
        if result.status != "gap" or result.interrupted:
            break
    if best is None:
        try:
            return graph, alone.run()
        except InfeasibleError as error:
            raise min([error, *failed], key=lambda e: (e.needs is None, e.excess)) from None
    if best[1].interrupted or alone.no_time() or gain < _NEXT_TO_NOTHING * best[1].cost_s:
        return best
    try:
        seconds, look = left(), max(_LEAST_LOOK_S, time.perf_counter() - began)
        # Without a budget no clock decides, so that all processes of a job find the same.
        plain = ClusterPlanner(task(graph, None if seconds is None else min(seconds, look))).run()
    except InfeasibleError:
        return best
    except KeyboardInterrupt:
        return best[0], replace(best[1], interrupted=True)
    of, found = best if best[1].cost_s <= plain.cost_s else (graph, plain)
    return of, replace(found, interrupted=plain.interrupted)


def _half(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 2
