"""What `hapsynth explain --cost` prints: the lines of `hapsynth.report.costs` in groups, the dearest one by one, and
where their figures come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import fsum
from typing import TypeVar

from rich.console import Console

from hapsynth._words import percent, plural, seconds, si
from hapsynth.plan import Plan
from hapsynth.report.costs import Computing, Line, Sending
from hapsynth.report.summary import print_left_out
from hapsynth.report.text import heading, table

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
        out.print(table(headers, rows, left=2))
    if sending:
        turns = any(s.turned_s for s in sending)
        after = " + what is transposed only afterwards" if turns else ""
        out.print(heading(f"Between devices: collectives x latency + bytes / bandwidth{after}"))
        headers = ["collective", "axis", "count", "latency", "wire bytes", "of it padding", "bandwidth"]
        headers += ["transposing"] if turns else []
        rows = _groups(sending, lambda s: (s.step, s.axis, s.latency_s), partial(_sent, turns=turns), total)
        out.print(table([*headers, "seconds", "share"], rows, left=2))
    out.print(f"\nin all         {seconds(total)}")
    out.print(heading("The dearest"))
    for line in sorted(lines, key=lambda line: -line.seconds)[:top]:
        out.print(_formula(line))
    out.print(heading("Where the figures come from"))
    # Of the ops of a class some may have been measured themselves.
    found = {(f"{c.kind}: {c.dtype} {c.op_class}", c.rate_from) for c in computing if c.rate}
    found |= {(f"{c.kind}: bandwidth, overhead", c.bandwidth_from) for c in computing}
    found |= {(f"{s.step} along {s.axis}", s.link_from) for s in sending}
    out.print(table(["figure", "source"], sorted(found), left=2))


def _groups(
    lines: Iterable[_L], key: Callable[[_L], object], cells: Callable[[list[_L]], list[str]], total: float
) -> list[list[str]]:
    """A row for each group of like lines, the dearest first."""
    found: dict[object, list[_L]] = {}
    for line in lines:
        found.setdefault(key(line), []).append(line)
    spent = {k: fsum(line.seconds for line in group) for k, group in found.items()}
    order = sorted(found, key=lambda k: -spent[k])
    return [[*cells(found[k]), seconds(spent[k]), percent(spent[k] / total)] for k in order]


def _computed(group: list[Computing]) -> list[str]:
    """The work is what takes longer: FLOPs or bytes."""
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
        return f"{line.what}: {_sum(runs, seconds(line.latency_s) + spent)} = {seconds(line.seconds)}{padding}"
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
