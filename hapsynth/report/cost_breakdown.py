"""Where a predicted second comes from: every instruction's seconds as the sum that the cost model makes of them.

An op takes runs x (launches x overhead + max(FLOPs / rate, bytes / bandwidth)) on the device that takes longest over
it, a collective runs x (latency + wire bytes x seconds per byte). The lines add up to the plan's cost or, where its
collectives run beside computing, to what it takes without. `hapsynth explain --cost` prints them in groups, the most
expensive one by one, with the sources of their figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import fsum
from typing import Any, TypeVar

import numpy as np
from rich.console import Console

from hapsynth._quantities import percent, plural, seconds, si
from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.instructions.collectives import STEPS, Balanced
from hapsynth.instructions.layout import R, S
from hapsynth.instructions.program.program import Compute, Convert
from hapsynth.instructions.program.sizes import layout_nodes
from hapsynth.plan import Plan
from hapsynth.report.summary import print_left_out
from hapsynth.report.tables import Table, heading
from hapsynth.running.names import Names
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.network import Sent, Shares, even_fractions
from hapsynth.search.cost.program_cost import shares, shares_of
from hapsynth.search.cost.program_index import cut_nodes_of
from hapsynth.search.cost.work import Work

COST_SCHEMA = "hapsynth-cost-1"
SUMMED = ", one instruction after another"
"""Of sums over the instructions of a plan whose step is shorter."""


@dataclass(frozen=True)
class Computing:
    """An op, or an argument that is fed, on the device that takes longest over it; figures are those of one run.

    `op_class`: the class of its work, or `fed`, `other`. `seconds`: of all runs. `device`: its position in the cluster.
    `flops`: of whole tiles, which take `compute_s` seconds.
    """

    what: str
    op_class: str
    dtype: str
    seconds: float
    runs: float
    device: int
    kind: str
    launches: int
    overhead_s: float
    flops: float
    compute_s: float
    rate_from: str
    nbytes: float
    bandwidth: float
    bandwidth_from: str

    @property
    def computes(self) -> bool:
        """Whether the FLOPs take longer than the bytes."""
        return self.compute_s > self.nbytes / self.bandwidth

    @property
    def rate(self) -> float | None:
        """FLOP/s that are reached at this size; None where nothing is computed."""
        return self.flops / self.compute_s if self.flops and self.compute_s else None


@dataclass(frozen=True)
class Sending:
    """A collective along a mesh axis; figures are those of one run, but for `seconds`.

    `wire_bytes`: that one group sends over its slowest link, of which `padding_bytes` would be spared if all shards
    were of one size. `turned_s`: what it costs that what it sends is transposed only afterwards (`CostModel.turning`).
    `others`: the seconds of each step that could do the same along the axis; of what goes to an owner or comes from
    it, those of what would stand there without, between even shards or to all.
    """

    what: str
    step: str
    axis: str
    seconds: float
    runs: float
    latency_s: float
    wire_bytes: float
    padding_bytes: float
    s_per_byte: float
    turned_s: float
    link_from: str
    others: dict[str, float] = field(default_factory=dict[str, float])


Line = Computing | Sending


def cost_lines(plan: Plan) -> list[Line]:
    """The terms of a plan's seconds, arguments first, then the instructions in order; those that take no time are
    left out."""
    return [line for line in _Lines(plan).all() if line.seconds > 0]


def cost_record(plan: Plan, lines: Sequence[Line]) -> dict[str, Any]:
    """The document of `explain --cost --json`. `sum_s`: of the lines, which is `cost_s` but for plans with overlap."""
    return {
        "schema": COST_SCHEMA,
        "cost_s": plan.cost,
        "sum_s": fsum(line.seconds for line in lines),
        "computing": [{**asdict(line), "rate": line.rate} for line in lines if isinstance(line, Computing)],
        "sending": [asdict(line) for line in lines if isinstance(line, Sending)],
    }


class _Lines:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.model, self.names = plan, plan.cost_model(), Names(plan.traced)
        self.graph = plan.traced.graph

    def all(self) -> Iterator[Line]:
        plan, model, graph = self.plan, self.model, self.graph
        for value, layout in plan.program.inputs.items():
            work = model.feed_work(value, layout)
            if work is not None:
                fractions = shares(model, plan.sizes, layout_nodes(value, layout))
                yield self._computing(self.names.value(value), "fed", work, fractions, 1.0)
        for i in plan.program.instructions:
            if isinstance(i, Convert):
                yield self._converting(i)
                continue
            yield self._op(i)
            if i.op in graph.unsure:
                yield from self._agreeing(i)

    def _op(self, i: Compute) -> Computing:
        work = self.model.work(i.op, i.triples)
        fractions = shares(self.model, self.plan.sizes, cut_nodes_of(self.model, i))
        runs = self.graph.runs[self.graph.ops[i.op].region]
        op_class = work.op_class.partition(":")[0] or "other"
        return self._computing(self.names.instruction(i), op_class, work, fractions, runs)

    def _computing(self, what: str, op_class: str, work: Work, fractions: Sequence[Floats], runs: float) -> Computing:
        model = self.model
        device = int(model.device_times(work, fractions).argmax())
        flops, moved, _ = (float(of[device]) for of in model.loads(work, fractions))
        alone = np.where(np.arange(model.n) == device, flops, 0.0)
        spent = float(model.speeds(work.op_class, work.dtype, ordinary=work.ordinary).seconds(alone)[device])
        kind = model.cluster.devices[device]
        return Computing(
            what,
            op_class,
            work.dtype,
            runs * model.time(work, fractions),
            runs,
            self.plan.devices[device],
            kind.name,
            work.launches,
            kind.overhead,
            flops,
            spent,
            rate_source(self.plan.cluster, kind, work.op_class, work.dtype, ordinary=work.ordinary) if spent else "",
            moved,
            kind.bandwidth,
            _source(self.plan.cluster, kind),
        )

    def _converting(self, i: Convert) -> Sending:
        model = self.model
        at = i.value, i.source, i.target, i.axis
        sent = model.sent(*at, shares_of(self.plan.sizes, i.value), i.collective)
        # Between cuts that are both even nothing moves, so of what is moved nothing counts as padding; nor of what goes
        # piece by piece.
        unpadded = i.collective.recuts or i.collective.balances or i.collective.in_rounds
        even = sent if unpadded else model.sent(*at, model.evenly, i.collective)
        runs = self.graph.runs[i.region]
        what, padding = self.names.instruction(i), max(sent.wire_bytes - even.wire_bytes, 0.0)
        took = sent.seconds, sent.latency_s, sent.turned_s
        line = self._sending(what, i.step, i.axis, took, (sent.wire_bytes, padding), runs)
        steps = model.steps(i.source, i.target, i.axis)
        by = {step.name: model.sent(*at, shares_of(self.plan.sizes, i.value), step) for step in steps}
        by |= self._without_owner(i)
        return replace(line, others={name: runs * s.seconds for name, s in by.items() if name != i.step})

    def _without_owner(self, i: Convert) -> dict[str, Sent]:
        """What stands for a step to an owner, or from one, where all devices have the value or a part of it."""
        source, target = i.source[i.axis], i.target[i.axis]
        shape, n = self.graph.values[i.value].shape, self.model.lengths[i.axis]
        if source.owner is None and target.owner is None:
            return {}
        dim = max(range(len(shape)), key=lambda d: shape[d])
        part = even_fractions(shape[dim], n)
        shares = Shares(lambda *cut: float(part.max()), lambda *cut: part)
        ends = [(S(dim), R)] if target == R else [(source, R), (source, S(dim))]
        found: dict[str, Sent] = {}
        for before, after in ends:
            changed = [(*old[: i.axis], p, *old[i.axis + 1 :]) for old, p in ((i.source, before), (i.target, after))]
            for step in self.model.steps(changed[0], changed[1], i.axis):
                found[step.name] = self.model.sent(i.value, changed[0], changed[1], i.axis, shares, step)
        return found

    def _agreeing(self, i: Compute) -> Iterator[Sending]:
        """`CostModel.uniform_time`, axis by axis."""
        what = f"agreement on {self.names.instruction(i)}"
        runs = self.graph.runs[self.graph.ops[i.op].region]
        for axis, link in enumerate(self.model.links):
            if link.n > 1:
                wire = link.wire_bytes("all_reduce", 4.0)
                took = link.seconds("all_reduce", wire), link.seconds("all_reduce", 0.0), 0.0
                yield self._sending(what, "all_reduce", axis, took, (wire, 0.0), runs)

    def _sending(
        self, what: str, step: str, axis: int, took: tuple[float, float, float], sent: tuple[float, float], runs: float
    ) -> Sending:
        """`took`: seconds, of them the latency and those for transposes; `sent`: bytes, and the padding of them."""
        (seconds, latency, turned), (wire, padding) = took, sent
        per_byte = (seconds - latency - turned) / wire if wire else 0.0
        source = link_source(self.model, axis, step)
        name = self.model.axes[axis][0]
        return Sending(what, step, name, runs * seconds, runs, latency, wire, padding, per_byte, turned, source)


def _source(cluster: Cluster, kind: DeviceKind) -> str:
    """Where a kind's figures stand, with the day on which they were measured."""
    day = cluster.profile.get("when")
    return f"{kind.source or 'the cluster file'}{f', {day}' if (kind.measured or kind.ops) and day else ''}"


def rate_source(cluster: Cluster, kind: DeviceKind, op_class: str, dtype: str, *, ordinary: bool = False) -> str:
    """Where the rate of a class of ops, or of the op with a signature, comes from on a kind of device."""
    source = _source(cluster, kind)
    if op_class in kind.ops:
        return f"measured curve of the op itself, {source}"
    measured = kind.measured_as(op_class, dtype, ordinary=ordinary)
    if measured is not None:
        return f"measured curve of {' '.join(measured)}, {source}"
    name = kind.counts_as(dtype, ordinary=ordinary)
    peak = f"{name} peak" if name else "float32 peak / 64"
    efficiency = kind.efficiency_at(name)
    return f"{peak}{f' x {efficiency:g}' if efficiency != 1 else ''}, {source}"


def link_source(model: CostModel, axis: int, step: str) -> str:
    """Where the latency and the bandwidth of a collective along an axis come from."""
    cluster, link, collective = model.cluster, model.links[axis], STEPS[step]
    priced_as = collective.even if isinstance(collective, Balanced) else step
    if priced_as in link.curves:
        told = [f"{cluster.profile[key]}" for key in ("machines", "when") if key in cluster.profile]
        return ", ".join([f"measured curve of {priced_as}", *told])
    if (levels := link.levels.get(collective.over)) is not None:
        return f"{levels.between.slowest}, and within hosts {levels.inside.slowest}"
    return link.slowest


_L = TypeVar("_L", Computing, Sending)


def print_costs(out: Console, plan: Plan, lines: Sequence[Line], top: int) -> None:
    """`top`: of how many instructions to print the sum."""
    total = fsum(line.seconds for line in lines)
    out.print(f"{seconds(plan.cost)} predicted step time on {plan.cluster.name}: {plural(len(lines), 'line')} of cost")
    print_left_out(out, plan)
    computing = [line for line in lines if isinstance(line, Computing)]
    sending = [line for line in lines if isinstance(line, Sending)]
    if computing:
        out.print(heading("On devices: launches x overhead + FLOP / rate or bytes / bandwidth, whichever is longer"))
        headers = ["ops", "slowest device", "count", "launching", "work", "speed", "seconds", "share"]
        rows = _groups(computing, lambda c: (c.op_class, c.dtype, c.kind, c.computes), _computed, total)
        out.print(Table(headers, rows, left=2))
    if sending:
        turns = any(s.turned_s for s in sending)
        after = " + what is transposed only afterwards" if turns else ""
        out.print(heading(f"Between devices: collectives x latency + bytes / bandwidth{after}"))
        headers = ["collective", "axis", "count", "latency", "wire bytes", "of it padding", "bandwidth"]
        headers += ["transposing"] if turns else []
        rows = _groups(sending, lambda s: (s.step, s.axis, s.latency_s), partial(_sent, turns=turns), total)
        out.print(Table([*headers, "seconds", "share"], rows, left=2))
    out.print(f"\nin all         {seconds(total)}{SUMMED if plan.result.overlap else ''}")
    out.print(heading("The dearest"))
    for line in sorted(lines, key=lambda line: -line.seconds)[:top]:
        out.print(_formula(line))
    out.print(heading("Where the figures come from"))
    # Of the ops of a class some may have been measured themselves.
    rates = {(f"{c.kind}: {c.dtype} {c.op_class}", c.rate_from) for c in computing if c.rate}
    rates |= {(f"{c.kind}: bandwidth, overhead", c.bandwidth_from) for c in computing}
    rates |= {(f"{s.step} along {s.axis}", s.link_from) for s in sending}
    out.print(Table(["figure", "source"], sorted(rates), left=2))


def _groups(
    lines: Iterable[_L], key: Callable[[_L], object], cells: Callable[[list[_L]], list[str]], total: float
) -> list[list[str]]:
    """A row for each group of like lines, the dearest first."""
    groups: dict[object, list[_L]] = {}
    for line in lines:
        groups.setdefault(key(line), []).append(line)
    spent = {k: fsum(line.seconds for line in group) for k, group in groups.items()}
    order = sorted(groups, key=lambda k: -spent[k])
    return [[*cells(groups[k]), seconds(spent[k]), percent(spent[k] / total)] for k in order]


def _computed(group: list[Computing]) -> list[str]:
    """The work is FLOPs or bytes, whichever takes longer."""
    first = group[0]
    launches = fsum(c.runs * c.launches for c in group)
    cells = [f"{first.dtype} {first.op_class}", first.kind, f"{fsum(c.runs for c in group):g}"]
    cells.append(f"{launches:g} x {seconds(first.overhead_s)}")
    if first.computes:
        flops, spent = fsum(c.runs * c.flops for c in group), fsum(c.runs * c.compute_s for c in group)
        return [*cells, si(flops, "FLOP"), si(flops / spent, "FLOP/s")]
    return [*cells, si(fsum(c.runs * c.nbytes for c in group), "B"), si(first.bandwidth, "B/s")]


def _sent(group: list[Sending], turns: bool) -> list[str]:
    first = group[0]
    wire, spent = (
        fsum(x) for x in zip(*((s.runs * s.wire_bytes, s.runs * s.wire_bytes * s.s_per_byte) for s in group))
    )
    padding = fsum(s.runs * s.padding_bytes for s in group)
    cells = [first.step, first.axis, f"{fsum(s.runs for s in group):g}", seconds(first.latency_s)]
    cells += [si(wire, "B"), si(padding, "B"), si(wire / spent, "B/s") if spent else "-"]
    return [*cells, seconds(fsum(s.runs * s.turned_s for s in group))] if turns else cells


def _formula(line: Line) -> str:
    """`dot_general -> v4 (model.py:8) on device 0 (P4-8GB): 5.000 us + 1.074 GFLOP / 2.75 TFLOP/s = 395.500 us`"""
    runs = "" if line.runs == 1 else f"{line.runs:g} x "
    if isinstance(line, Sending):
        spent = f" + {si(line.wire_bytes, 'B')} / {si(1 / line.s_per_byte, 'B/s')}" if line.s_per_byte else ""
        spent += f" + {seconds(line.turned_s)} to transpose afterwards" if line.turned_s else ""
        padding = f", {si(line.padding_bytes, 'B')} of it padding" if line.padding_bytes else ""
        instead = "".join(f", by {name} {seconds(spent)}" for name, spent in line.others.items())
        return f"{line.what}: {_sum(runs, seconds(line.latency_s) + spent)} = {seconds(line.seconds)}{padding}{instead}"
    launched = f"{line.launches} x " if line.launches > 1 else ""
    terms = [f"{launched}{seconds(line.overhead_s)}"] if line.launches and line.overhead_s else []
    if line.computes and line.rate:
        terms.append(f"{si(line.flops, 'FLOP')} / {si(line.rate, 'FLOP/s')}")
    elif line.nbytes and not line.computes:
        terms.append(f"{si(line.nbytes, 'B')} / {si(line.bandwidth, 'B/s')}")
    where = f"on device {line.device} ({line.kind})"
    return f"{line.what} {where}: {_sum(runs, ' + '.join(terms))} = {seconds(line.seconds)}"


def _sum(runs: str, terms: str) -> str:
    return f"{runs}({terms})" if runs else terms
