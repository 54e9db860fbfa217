"""The report of `hapsynth compare`: the plan beside the baselines."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console

from hapsynth._quantities import nbytes, plural, seconds
from hapsynth.plan import Plan
from hapsynth.report.json_records import OURS, Entry
from hapsynth.report.summary import print_certificate, print_left_out
from hapsynth.report.tables import Table, heading
from hapsynth.search.planning.baseline_subsets import label


def print_comparison(out: Console, plan: Plan, entries: Mapping[str, Entry]) -> None:
    """Step time, memory and communication of every plan; then by how much this one wins."""
    ours = entries[OURS].cost_s
    out.print(
        f"{plural(len(plan.traced.graph.ops), 'op')} on {plan.cluster.name}, {plural(plan.cluster.n, 'device')}; "
        "predicted by one cost model"
    )
    how = "without overlap: one instruction after another (--overlap: collectives beside computing)"
    if plan.result.overlap:
        how = "with overlap: collectives beside computing"
    out.print(f"plan and baselines {how}")
    if plan.traced.graph.again is not None:
        ops = plural(len(plan.traced.graph.again.ops), "op")
        out.print(f"{ops} run twice, so that less is held between: chosen for the plan, and the same in baselines")
    print_left_out(out, plan)
    rows: list[list[str]] = []
    for name, e in entries.items():
        count = sum(n for n, _ in e.collectives.values())
        wire = sum(b for _, b in e.collectives.values())
        rows.append(
            [
                label(name),
                seconds(e.cost_s),
                f"{e.cost_s / ours:.2f}x" if ours else "-",
                nbytes(e.memory_bytes),
                "yes" if e.fits else "no",
                str(count),
                nbytes(wire),
            ]
        )
    out.print(heading("Plans"))
    out.print(Table(["plan", "step time", "speedup by hapsynth", "memory", "fits", "collectives", "wire bytes"], rows))
    kinds = sorted({c for e in entries.values() for c in e.collectives})
    if kinds:
        out.print(heading("Collectives: how many, and bytes over the slowest link"))
        cells = [[label(name), *(_cell(e.collectives.get(kind)) for kind in kinds)] for name, e in entries.items()]
        out.print(Table(["plan", *kinds], cells))
    out.print(heading("Certificate"))
    print_certificate(out, plan)


def _cell(traffic: tuple[int, float] | None) -> str:
    return "-" if traffic is None else f"{traffic[0]}  {nbytes(traffic[1])}"
