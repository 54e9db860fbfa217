"""Several functions with one state on the command line: picking one, and what `hapsynth search` tells of them all."""

from __future__ import annotations

import difflib
from typing import Any

from rich.console import Console

from hapsynth._words import percent, plural, seconds
from hapsynth.plan import Plan, load
from hapsynth.plan_file import holds_several
from hapsynth.report.model_file import Target, Targets, UsageError, load_target
from hapsynth.report.record import SEVERAL_SCHEMA, finite, search_record
from hapsynth.report.summary import print_summary
from hapsynth.report.text import heading, table
from hapsynth.several import Plans, load_plans


def picked(found: Target | Targets, function: str | None) -> Target:
    """The one function that a command is about; UsageError where that is open, or there is none of the name."""
    if isinstance(found, Target):
        if function is not None:
            where = f"{found.path}: {found.name}()"
            raise UsageError(f"--function picks one of several, but {where} returns one: leave it out")
        return found
    if function is None:
        raise UsageError(f"{found}: this is about one of them, pick it, e.g. --function {next(iter(found.each))}")
    if function not in found.each:
        near = difflib.get_close_matches(function, found.each, n=1)
        raise UsageError(f"--function {function}: {found}" + (f"; did you mean {near[0]}?" if near else ""))
    return found.each[function]


def loaded(path: str, file: str, function: str | None) -> tuple[Plan, Target]:
    """A saved plan, which may be one of several in its file, and what it is a plan of."""
    found = load_target(file)
    target = picked(found, function)
    if function is None or not isinstance(found, Targets) or not holds_several(path):
        return load(path, target.fn, target.args, example_kwargs=target.kwargs), target
    return load_plans(path, found.functions, found.args, example_kwargs=found.kwargs)[function], target


def several_record(plans: Plans) -> dict[str, Any]:
    """What `search --json` writes of several functions."""
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
    """As `several_record`, where no programs fit: the same keys, null for what there is none of."""
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
    """What the state shared comes to, then the report of each function; `listing` as in `print_summary`."""
    out.print(f"{plural(len(plans), 'function')} planned with one state: {', '.join(plans)}\n")
    rows: list[list[str]] = []
    for name, plan in plans.items():
        alone = plans.alone.get(name)
        more = "-" if not alone else percent(plan.cost / alone - 1)
        known = "-" if alone is None else seconds(alone)
        rows.append([name, f"{plans.frequency[name]:g}", seconds(plan.cost), known, more])
    out.print(table(["function", "called", "step time", "planned alone", "dearer by"], rows))
    graph, program = plans.state_of.traced.graph, plans.state_of.program
    values = [graph.inputs[source] for source, _ in graph.carry]
    cut = sum(graph.values[v].nbytes for v in values if any(p.is_sharded for p in program.inputs[v]))
    whole = sum(graph.values[v].nbytes for v in values)
    out.print(f"\nstate          {plural(len(values), 'array')}, {percent(cut / max(whole, 1))} of the bytes cut")
    out.print(f"step time      {seconds(plans.cost)} predicted, of each as often as it is called")
    out.print(f"lower bound    {seconds(plans.lower_bound)} with any state that all share, gap {percent(plans.gap)}")
    for name, plan in plans.items():
        out.print(heading(f"==== {name}"))
        print_summary(out, plan, listing=listing)
