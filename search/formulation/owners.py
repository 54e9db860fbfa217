"""Which parts of an optimizer's update may be run by an owner, one device for all: a parameter server, ZeRO by whole
tensors.

A gradient's sum goes up a tree to the owner and the parameter down one to all: among n devices 2 (1 + ceil(log2 n))
messages, and ceil(log2 n) of the tensor each way. An all-reduce has a message less and no more bytes, but all devices
run the update, and the slowest decides; a reduce-scatter and an all-gather have 2 n messages, fewer bytes, and cut the
update. So an owner is offered where it takes less than both; the problems of all other graphs are as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hapsynth.instructions.layout import Layout, O, P, Placement, R, S
from hapsynth.search.analysis.optimizer_update import UpdateGroup
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import Shares
from hapsynth.search.formulation.choice_space import Owners
from hapsynth.search.sizing.ratios import round_shares

_AXIS = 0


def owners(costs: CostModel, weights: Floats | None = None, *, sparing: bool = False) -> Owners:
    """The ops that may have an owner on a mesh of one axis, each with the positions that may be it: where that takes
    less than all else, the device that is the fastest over the update; and where memory is short (`sparing`), and takes
    less than cutting it, the one with the most room that is left by those before. `weights`: of the devices, by which
    all is cut that is; None where it may be cut as suits.

    None along an axis whose collectives were measured, as what a tree takes would be modelled, and on one of two axes.
    """
    if len(costs.axes) > 1 or costs.n == 1 or costs.links[_AXIS].curves:
        return {}
    known: dict[object, _Update | None] = {}
    found: dict[int, tuple[int, ...]] = {}
    limits, taken = np.array(costs.room.limits), np.zeros(costs.n)
    for group in costs.together.groups:
        key = _kind(costs, group)
        update = known[key] if key in known else known.setdefault(key, _update(costs, group, weights))
        if update is None:
            continue
        positions = [update.fastest] if update.pays else []
        if sparing and costs.room.exact:
            # Small ones go together, and so to one.
            apart = update.nbytes if update.nbytes > costs.lowering.bundled_bytes else 0.0
            at = int(np.argmin((taken + apart) / limits)) if apart else int(np.argmax(limits))
            if update.spares[at]:
                positions.append(at)
                taken[at] += apart
        if positions:
            found |= dict.fromkeys(group.ops, tuple(dict.fromkeys(positions)))
    return found


@dataclass(frozen=True, eq=False)
class _Update:
    """What a part of an optimizer's update takes. `fastest`: the position that runs all of it the soonest; `pays`:
    whether that takes less than to cut the update, and than to have all run it. `spares`: of each position, whether
    less than cut as devices have room. `nbytes`: of what it keeps."""

    fastest: int
    pays: bool
    spares: list[bool]
    nbytes: float


def _kind(costs: CostModel, group: UpdateGroup) -> object:
    """Equal for those that take as long."""
    values = costs.graph.values
    ends = (*group.gradients, *group.parameters)
    sent = [(values[v].shape, values[v].nbytes, costs.conversion_kind(v)) for v in ends]
    return tuple(map(costs.kind, group.ops)), *sent


def _update(costs: CostModel, group: UpdateGroup, weights: Floats | None) -> _Update | None:
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
    scattered, cut, gathered = in_parts(weights)
    fastest = int(by_one.argmin())
    owned = float(by_one[fastest]) + down
    # Gradients are partial, or all devices have them.
    pays = up + owned < min(reduced + by_all, min(reduced, scattered) + cut + gathered)
    pays |= owned < min(by_all, cut + gathered)
    room = costs.room.proportions if weights is None else weights
    spares = up + by_one + down < sum(in_parts(room))
    kept = sum(graph.values[v].nbytes for op in group.ops for _, v in graph.ops[op].value_operands if v in graph.state)
    return _Update(fastest, pays, spares.tolist(), float(kept))


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
