"""Which parts of an optimizer's update may be run by an owner, one device for all: a parameter server, ZeRO by whole
tensors.

A gradient's sum goes up a tree to the owner and the parameter down one to all: among n devices 2 (1 + ceil(log2 n))
messages, and ceil(log2 n) of the tensor each way. An all-reduce has a message less and no more bytes, but all devices
run the update, and the slowest decides; a reduce-scatter and an all-gather have 2 n messages, fewer bytes, and cut the
update. So an owner is offered where it takes less than both; the problems of all other graphs are as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hapsynth.instructions.collectives import STEPS
from hapsynth.instructions.layout import Layout, O, P, Placement, R, S
from hapsynth.search.analysis.optimizer_update import UpdateGroup
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import Shares
from hapsynth.search.cost.roofline import Roofline
from hapsynth.search.cost.work import Work
from hapsynth.search.formulation.choice_space import Owners
from hapsynth.search.result import SETTLED
from hapsynth.search.sizing.ratios import round_shares

_AXIS = 0


def owners(costs: CostModel, weights: Floats | None = None, *, sparing: bool = False) -> Owners:
    """The ops that may have an owner on a mesh of one axis, each with the positions that may be it: where that takes
    less than all else, the device that is the fastest over the update; and where memory is short (`sparing`), and takes
    less than cutting it, the one with the most room that is left by those before. `weights`: of the devices, by which
    all is cut that is; None where it may be cut as suits.

    None where all of them together gain next to nothing; none along an axis whose collectives were measured, as what a
    tree takes would be modelled; none along one of two axes, nor where programs may not take what brings a value to its
    owner and back.
    """
    offered = all(costs.offers(STEPS[name], _AXIS) for name in ("reduce", "broadcast"))
    if len(costs.axes) > 1 or costs.n == 1 or costs.links[_AXIS].curves or not offered:
        return {}
    sparing = sparing and costs.memory_budget.exact
    known: dict[object, _Update | None] = {}
    fastest, roomiest = _Offer(), _Offer()
    limits, taken = np.array(costs.memory_budget.limits), np.zeros(costs.n)
    for group in costs.bucketing.groups:
        key = _kind(costs, group)
        update = known[key] if key in known else known.setdefault(key, _update(costs, group, weights, sparing))
        if update is None:
            continue
        fastest.add(group, update.fastest, update.gain, update.part)
        # Small ones go together, and so to one.
        apart = update.nbytes if update.nbytes > costs.lowering.bundled_bytes else 0.0
        at = int(np.argmin((taken + apart) / limits)) if apart else int(np.argmax(limits))
        if roomiest.add(group, at, update.spared[at], update.part):
            taken[at] += apart
    found: dict[int, tuple[int, ...]] = {}
    for offer in (fastest, roomiest):
        gain = offer.gain(costs)
        if gain > 0 and gain > SETTLED * _least_step(costs):
            for op, position in offer.positions.items():
                found[op] = tuple(dict.fromkeys((*found.get(op, ()), position)))
    return found


@dataclass(eq=False)
class _Offer:
    """Ops that may have an owner -> its position, and the seconds that each group gains. `parts`: the fraction of a
    latency with which each group is counted."""

    positions: dict[int, int] = field(default_factory=dict[int, int])
    gains: list[float] = field(default_factory=list[float])
    parts: list[float] = field(default_factory=list[float])

    def add(self, group: UpdateGroup, position: int, gain: float, part: float) -> bool:
        """Add a group of ops if it gains anything; returns whether it does."""
        if gain > 0:
            self.positions |= dict.fromkeys(group.ops, position)
            self.gains.append(gain)
            self.parts.append(part)
        return gain > 0

    def gain(self, costs: CostModel) -> float:
        """The seconds gained in all. The groups share a latency with each other, and no longer with the collectives
        that they were bundled with."""
        link = costs.links[_AXIS]
        alone = max(0.0, 1.0 - sum(self.parts)) * (link.seconds("reduce", 0.0) + link.seconds("broadcast", 0.0))
        return sum(self.gains) - alone


@dataclass(frozen=True, eq=False)
class _Update:
    """The costs of a part of an optimizer's update with an owner. `fastest`: the position that runs all of it the
    soonest; `gain`: the seconds that this saves over the cheaper of cut and replicated. `spared` [positions]: the
    seconds saved over cutting it, by the given weights or in proportion to memory. `nbytes`: of the state that it
    keeps; `part`: the fraction of a latency with which its collectives are counted."""

    fastest: int
    gain: float
    spared: list[float]
    nbytes: float
    part: float


def _least_step(costs: CostModel) -> float:
    """A lower bound on the seconds of a graph's ops, however devices share them."""
    graph, runs, works = costs.graph, dict[int, float](), list[Work]()
    for op in graph.ops:
        kind = costs.kind(op.index)
        if kind not in runs:
            works.append(costs.work(op.index, costs.table[op.index].joint(1)[0]))
        runs[kind] = runs.get(kind, 0.0) + graph.runs[op.region]
    count = np.bincount(costs.kind_of, minlength=len(costs.kinds)).astype(np.float64)
    return float(Roofline(costs.figures, works).least_shared(count) @ np.array(list(runs.values()))) if works else 0.0


def _kind(costs: CostModel, group: UpdateGroup) -> object:
    """A key that is equal for groups with equal costs."""
    values = costs.graph.values
    ends = (*group.gradients, *group.parameters)
    sent = [(values[v].shape, values[v].nbytes, costs.conversion_kind(v)) for v in ends]
    return tuple(map(costs.kind, group.ops)), *sent


def _update(costs: CostModel, group: UpdateGroup, weights: Floats | None, sparing: bool) -> _Update | None:
    """None where some op of it can have no owner."""
    table, graph = costs.table, costs.graph
    whole = [table[op].owned for op in group.ops]
    if None in whole:
        return None
    one = np.ones(costs.n)
    works = [costs.work(op, table[op].owned_by((t,), 0)) for op, t in zip(group.ops, whole, strict=True) if t]
    alone = costs.each_device_times([(work, [one]) for work in works])
    by_all, by_one = float(alone.max(axis=1).sum()), alone.sum(axis=0)
    # One gradient for each parameter, however many terms it is the sum of.
    gradients = sorted(group.gradients, key=lambda v: -graph.values[v].nbytes)[: len(group.parameters)]

    def sent(values: Sequence[int], source: Placement, target: Placement, shares: Floats | None = None) -> float:
        return sum(_sent(costs, v, source, target, shares) for v in values)

    def in_parts(shares: Floats | None) -> tuple[float, float, float]:
        cut = sum(_cut_seconds(costs, op, shares) for op in group.ops)
        return sent(gradients, P(), S(0), shares), cut, sent(group.parameters, S(0), R, shares)

    up, down, reduced = sent(gradients, P(), O(0)), sent(group.parameters, O(0), R), sent(gradients, P(), R)
    # Within a host an all-reduce is priced around all devices, a tree of permutes is not: nobody owns for that alone.
    reduced = min(reduced, up + down)
    fastest = int(by_one.argmin())
    owned = float(by_one[fastest]) + down
    # Gradients are partial, or all devices have them.
    gain = max(reduced + by_all - up, by_all) - owned
    if gain > 0:
        scattered, cut, gathered = in_parts(weights)
        partial = min(reduced + by_all, min(reduced, scattered) + cut + gathered) - up - owned
        gain = max(partial, min(by_all, cut + gathered) - owned)
    spared = np.zeros(costs.n)
    if sparing:
        spared = sum(in_parts(costs.memory_budget.proportions if weights is None else weights)) - (up + by_one + down)
    kept = {v for op in group.ops for _, v in graph.ops[op].value_operands if v in graph.state}
    part = costs.bucketing.part(group.parameters[0], STEPS["broadcast"], costs.n)
    nbytes = float(sum(graph.values[v].nbytes for v in kept))
    return _Update(fastest, gain, spared.tolist(), nbytes, part)


def _cut_seconds(costs: CostModel, op: int, weights: Floats | None) -> float:
    """The least that an op takes cut along one of its dimensions; whole on all devices where it has none to cut."""
    works = [costs.work(op, triples) for triples in costs.table[op].joint(1)]
    cut = [work for work in works if work.divided] or works[:1]
    if weights is None:
        return min(costs.ideal_times(cut))
    return float(costs.times([(work, [weights] * len(work.lanes)) for work in cut]).min())


def _sent(costs: CostModel, value: int, source: Placement, target: Placement, weights: Floats | None) -> float:
    """The least seconds of a step; of cuts along a dimension, along the one that suits."""
    shape = costs.graph.values[value].shape
    if S(0) not in (source, target):
        return _step_s(costs, value, (source,), (target,), Shares(lambda *cut: 1.0))
    even = np.full(costs.n, 1.0 / costs.n)
    found = np.inf
    for dim, rows in enumerate(shape):
        if rows > 1:
            held = np.array(round_shares(even if weights is None else weights, rows)) / rows
            shares = Shares(lambda *cut, held=held: float(held.max()), lambda *cut, held=held: held)
            ends = [(p._replace(dim=dim) if p == S(0) else p,) for p in (source, target)]
            found = min(found, _step_s(costs, value, ends[0], ends[1], shares))
    return found


def _step_s(costs: CostModel, value: int, source: Layout, target: Layout, shares: Shares) -> float:
    steps = costs.steps(source, target, _AXIS)
    return min(costs.conversion(value, source, target, _AXIS, shares, step)[0] for step in steps)
