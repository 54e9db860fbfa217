"""The report of `hapsynth search`: the certificate, the sizes, the memory, the communication, the program in brief."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from hapsynth._quantities import counted, indices, is_known, nbytes, percent, plural, seconds
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.rules.replicated_ops import named, uncovered, unpriced
from hapsynth.plan import Plan
from hapsynth.report.json_records import Entry, best_baseline
from hapsynth.report.program_listing import brief
from hapsynth.report.tables import Table, device_groups, heading, span
from hapsynth.report.timeline import hidden
from hapsynth.running.names import Names
from hapsynth.search.cost.program_cost import Cost
from hapsynth.search.planning.baseline_subsets import label
from hapsynth.search.planning.baselines import ONE_DEVICE

_STATUS = {
    "optimal": "optimal: no program at any shard sizes is cheaper",
    "optimal_at_ratios": "optimal at these shard sizes: no other program is cheaper at them",
    "gap": "not proved optimal: the search ended with a gap",
    "unpriced": "optimal only as far as costs are known: what is unpriced counts as one elementwise op",
    "infeasible": "infeasible",
}
_NO_BOUND = "no bound: sized anew without a search, or interrupted before there was one"
_ROWS = 12
_WORTHWHILE = 1.05
"""Times as fast: a plan that is less is no reason to give up something simpler."""


def print_summary(
    out: Console,
    plan: Plan,
    costs: Sequence[Cost],
    entries: Mapping[str, Entry] | None = None,
    *,
    listing: bool = False,
) -> None:
    """The whole report of one plan. `costs`: of its instructions, in order (`costs_of`); `entries`: the plan and the
    baselines (`comparison`), where these were planned; `listing`: every instruction instead of the program in brief."""
    graph = plan.traced.graph
    collectives = sum(isinstance(i, Convert) and i.is_collective for i in plan.program.instructions)
    out.print(
        f"{plural(len(graph.ops), 'op')} planned for {plan.cluster.name}: {plural(plan.cluster.n, 'device')}, "
        f"{', '.join(f'{name} ({len(group)})' for name, group in device_groups(plan.cluster))}"
    )
    print_left_out(out, plan)
    out.print(heading("Program"))
    out.print(
        f"{plural(len(plan.program.instructions), 'instruction')}, {plural(collectives, 'collective')} "
        f"({counted(plan.program.collectives())})"
    )
    if listing:
        out.print(plan.program.text(graph), end="")
    else:
        for line in brief(plan, costs):
            out.print(line)
    out.print(heading("Shard sizes, in units, of each dimension class"))
    out.print(sizes_table(plan))
    out.print(heading("Memory per device, predicted peak"))
    out.print(memory_table(plan))
    if graph.again is not None:
        out.print(f"{plural(len(graph.again.ops), 'op')} of the function run twice, so that less is held between")
    wire = sum(c.wire_bytes for c in costs)
    moving = sum(c.seconds for c in costs if isinstance(c.instruction, Convert))
    out.print(heading("Certificate"))
    print_certificate(out, plan)
    for line in _gain(plan, entries):
        out.print(line)
    part = f"{seconds(moving)} of it"
    if plan.result.overlap:
        sent_s = plan.timeline.communication_s
        part = f"{seconds(sent_s)}, {hidden(sent_s, plan.result.exposed_communication_s)}"
    out.print(f"communication  {part}, {nbytes(wire)} over the slowest link")
    whole = named(plan.traced.graph)
    out.print(f"replicated     {'no primitive' if not whole else counted(whole)}")
    for row in uncovered(plan.traced.graph):
        if row.primitive in whole:
            out.print(f"               {row.primitive}: {row.reason}")
    timings = plan.result.timings_s
    spent = ", ".join(f"{key[:-2]} {timings[key]:.1f} s" for key in timings if key != "total_s")
    out.print(f"planned in     {timings.get('total_s', 0.0):.1f} s ({spent}), {plan.result.expanded} nodes expanded")


def _gain(plan: Plan, entries: Mapping[str, Entry] | None) -> Iterator[str]:
    """What the plan gains over the best baseline and over one device, and that it is next to nothing where it is."""
    best, alone = best_baseline(entries), (entries or {}).get(ONE_DEVICE)
    others: list[tuple[str, Entry]] = []
    if best is not None:
        # Which baseline is the best is another matter with collectives beside computing.
        how = "" if plan.result.overlap else ", without overlap"
        others.append((f"the best baseline ({label(best[0])}{how})", best[1]))
    if alone is not None:
        others.append((f"one device ({plan.cluster.devices[alone.devices[0]].name})", alone))
    if not others or not plan.cost:
        return
    said = [f"{e.cost_s / plan.cost:.2f}x over {name}" if e.fits else f"{name} is too small" for name, e in others]
    yield f"gain           {', '.join(said)}"
    for name, e in others:
        if e.fits and e.cost_s < _WORTHWHILE * plan.cost:
            yield f"               next to nothing over {name}: {seconds(e.cost_s)}"


def print_left_out(out: Console, plan: Plan) -> None:
    """Which devices the plan leaves out, if any, and why."""
    with_all = plan.result.with_all_s
    if len(plan.devices) == plan.cluster.n:
        return
    used = set(plan.devices)
    kinds = Counter(kind.name for d, kind in enumerate(plan.cluster.devices) if d not in used)
    what = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    why = ""
    if with_all is not None:
        why = ": no program fits with them"
        if math.isfinite(with_all) and plan.cost:
            why = f": the step would take {with_all / plan.cost:.2f}x as long with them"
    out.print(f"uses {len(used)} of {plan.cluster.n} devices ({indices(plan.devices)}), leaves out {what}{why}")


def print_certificate(out: Console, plan: Plan) -> None:
    """Cost, bounds, gaps, and the status in words."""
    r = plan.result
    out.print(f"step time      {seconds(r.cost_s)} predicted{', collectives beside computing' if r.overlap else ''}")
    if r.overlap:
        out.print(
            f"exposed        {seconds(r.exposed_communication_s)} in which the device that computes longest waits"
        )
        # Of a plan at other sizes there are none.
        if r.clocks_s:
            out.print(f"busy           {', '.join(f'{name} {seconds(s)}' for name, s in r.clocks_s.items())}")
    for name, bound, where, gap in (
        ("lower bound", r.lower_bound_s, "at these shard sizes", r.gap),
        ("size bound ", r.ratio_bound_s, "for this program at any shard sizes", r.rounding_gap),
        ("joint bound", r.joint_lower_bound_s, "at any shard sizes", r.joint_gap),
    ):
        proved = f"{seconds(bound)} {where}, gap {percent(gap)}"
        out.print(f"{name}    {proved if is_known(bound, r.cost_s) else 'none known'}")
    out.print(f"status         {_STATUS[r.status] if is_known(r.lower_bound_s, r.cost_s) else _NO_BOUND}")
    unknown = unpriced(plan.traced.graph)
    for name, ops in unknown.items():
        where = ", ".join(dict.fromkeys(op.source for op in ops if op.source))
        out.print(f"unpriced       {name} x{len(ops)}{f' ({where})' if where else ''}: what it takes is not known")
    if unknown:
        out.print("               hapsynth.register_rule(..., flops=...) says it; expect, that a branch is never taken")
    if r.interrupted:
        out.print("interrupted    the best plan so far; a longer search may find a better one, or prove this one")


def sizes_table(plan: Plan) -> Table:
    """One row per distinct cut, the classes with the most bytes first."""
    names, groups = Names(plan.traced), device_groups(plan.cluster)
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    classes = plan.sizes.classes.all
    order = sorted(range(len(classes)), key=lambda c: -names.weight(classes[c]))
    for c in order:
        alike.setdefault((classes[c].units, plan.sizes.of_devices(c)), []).append(c)
    rows: list[list[str]] = []
    for (units, shares), members in alike.items():
        tensors = sum(len(classes[c].members) for c in members)
        share_of = dict(zip(plan.devices, shares, strict=True))
        cells = [span([share_of.get(d, 0) for d in group]) for _, group in groups]
        rows.append([names.cut(classes[members[0]]), str(len(members)), str(tensors), str(units), *cells])
    if len(rows) > _ROWS:
        left = len(rows) - _ROWS
        rows = [*rows[:_ROWS], [f"... {plural(left, 'more kind')} of cut", *[""] * (3 + len(groups))]]
    if not rows:
        rows = [["nothing is cut: every device computes everything", *[""] * (3 + len(groups))]]
    counts = ["alike", "tensors", "units"]
    return Table(["class, by its largest tensor", *counts, *(name for name, _ in groups)], rows, minor=counts)


def memory_table(plan: Plan) -> Table:
    """Predicted peak and limit of each group of devices."""
    rows: list[list[str]] = []
    for name, group in device_groups(plan.cluster):
        peak_bytes = max(plan.result.memory_bytes[d] for d in group)
        limit = min(plan.result.memory_limit_bytes[d] for d in group)
        rows.append([name, nbytes(peak_bytes), nbytes(limit), percent(peak_bytes / limit)])
    peak = "peak, exact shards" if plan.result.exact else "peak"
    return Table(["devices", peak, "limit", "used"], rows)
