"""The report of `hapsynth search` of several functions with one state."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hapsynth._quantities import finite, is_known, percent, plural, seconds
from hapsynth.report.json_records import SEVERAL_SCHEMA, costs_of, search_record
from hapsynth.report.summary import print_summary
from hapsynth.report.tables import Table, heading
from hapsynth.several.plans import Plans


def several_record(plans: Plans) -> dict[str, Any]:
    """The document of `search --json` of several functions."""
    return {
        "schema": SEVERAL_SCHEMA,
        "status": "planned",
        "frequency": plans.frequency,
        "alone_s": {name: finite(cost) for name, cost in plans.alone.items()},
        "cost_s": finite(plans.cost),
        "lower_bound_s": finite(plans.lower_bound),
        "gap": finite(plans.gap),
        "state": plans.layouts,
        "functions": {name: search_record(plan) for name, plan in plans.items()},
    }


def several_infeasible_record(frequency: dict[str, float], message: str) -> dict[str, Any]:
    """As `several_record`, where no programs fit: the same keys, null where there is no figure."""
    return {
        "schema": SEVERAL_SCHEMA,
        "status": "infeasible",
        "message": message,
        "frequency": frequency,
        "alone_s": {},
        **dict.fromkeys(("cost_s", "lower_bound_s", "gap")),
        "state": {},
        "functions": {},
    }


def print_several(out: Console, plans: Plans, *, listing: bool = False) -> None:
    """The cost of sharing the state, then the report of each function; `listing` as in `print_summary`."""
    out.print(f"{plural(len(plans), 'function')} planned with one state: {', '.join(plans)}\n")
    rows: list[list[str]] = []
    for name, plan in plans.items():
        alone = plans.alone.get(name)
        more = "-" if not alone else percent(plan.cost / alone - 1)
        alone_cell = "-" if alone is None else seconds(alone)
        rows.append([name, f"{plans.frequency[name]:g}", seconds(plan.cost), alone_cell, more])
    out.print(Table(["function", "called", "step time", "planned alone", "dearer by"], rows))
    graph, program = plans.state_of.traced.graph, plans.state_of.program
    values = [graph.inputs[source] for source, _ in graph.carry]
    cut = sum(graph.values[v].nbytes for v in values if any(p.is_sharded for p in program.inputs[v]))
    whole = sum(graph.values[v].nbytes for v in values)
    out.print(f"\nstate          {plural(len(values), 'array')}, {percent(cut / max(whole, 1))} of the bytes cut")
    out.print(f"step time      {seconds(plans.cost)} predicted, of each as often as it is called")
    proved = f"{seconds(plans.lower_bound)} with any state that all share, gap {percent(plans.gap)}"
    out.print(f"lower bound    {proved if is_known(plans.lower_bound, plans.cost) else 'none known'}")
    for name, plan in plans.items():
        out.print(heading(f"==== {name}"))
        print_summary(out, plan, costs_of(plan), listing=listing)
