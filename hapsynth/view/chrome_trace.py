"""The predicted step of a plan in Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from hapsynth.running.base import Planned
from hapsynth.running.names import Names
from hapsynth.view.step import Bar, Step


def trace_events(plan: Planned) -> str:
    """The JSON text: a thread for each group of devices that do the same and for each link, and a counter of the bytes
    that each group holds. Times are in microseconds from the step's begin."""
    step, names = Step(plan), Names(plan.traced)
    devices, links, memory = 1, 2, 3
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": text}}
        for pid, text in ((devices, f"devices of {plan.cluster.name}"), (links, "links"), (memory, "memory"))
    ]
    for thread, lane in enumerate(step.lanes, 1):
        where = {"pid": devices if lane.devices else links, "tid": thread}
        events.append({"ph": "M", **where, "name": "thread_name", "args": {"name": lane.name}})
        events += [
            {
                "ph": "X",
                **where,
                "ts": bar.start * 1e6,
                "dur": (bar.end - bar.start) * 1e6,
                "name": _name(plan, names, bar),
                "cat": bar.does,
                "args": {"instructions": [names.instruction(plan.program.instructions[k]) for k in bar.instructions]},
            }
            for bar in lane.bars
        ]
    points, held = step.memory
    for lane, of in zip(step.lanes, held, strict=False):
        before = None
        for at, nbytes in zip(points, of.tolist(), strict=True):
            if nbytes != before:
                events.append(
                    {"ph": "C", "pid": memory, "name": lane.name, "ts": at * 1e6, "args": {"bytes": round(nbytes)}}
                )
                before = nbytes
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False)


def _name(plan: Planned, names: Names, bar: Bar) -> str:
    """`dot_general -> v80 (mlp.py:57)`, and how many more."""
    if not bar.instructions:
        return "an argument is fed"
    first = names.instruction(plan.program.instructions[bar.instructions[0]])
    more = len(bar.instructions) - 1
    return f"{first} and {more} more" if more else first
