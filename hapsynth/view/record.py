"""What a page shows of a plan, as JSON has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hapsynth._quantities import counted, finite, is_known, nbytes, percent, plural, seconds
from hapsynth.instructions.layout import Layout, cuts_of, format_layout
from hapsynth.instructions.program.program import Compute, Convert, reads, writes
from hapsynth.running.base import Planned
from hapsynth.running.names import Names
from hapsynth.search.cost.program_cost import padded_bytes
from hapsynth.view.step import Bar, Step, merged

_LANES = 24
"""Groups of devices that are drawn, those first in mesh order; the others are counted."""
_FINEST = 5000
"""Bars as short as this part of the step are drawn together where they follow on one another."""
_DETAIL = 1e-3
"""Of the peak: less than that is no change of what is held."""


def plan_record(plan: Planned, name: str) -> dict[str, Any]:
    """Everything of one plan, which is called `name`. Times are in microseconds."""
    step, names = Step(plan), Names(plan.traced)
    drawn = range(len(step.groups))[:_LANES]
    lanes = [lane for g, lane in enumerate(step.lanes) if not lane.devices or g in drawn]
    points, held = step.memory
    return {
        "name": name,
        "figures": figures(plan, step),
        "bounds": _bounds(plan),
        "makespan": _us(step.makespan_s),
        "lanes": [
            {
                "name": lane.name,
                "devices": len(lane.devices),
                "busy": _us(lane.busy_s),
                "last": _us(max((bar.end for bar in lane.bars), default=0.0)),
                "bars": [_bar(bar) for bar in merged(lane.bars, step.makespan_s / _FINEST)],
            }
            for lane in lanes
        ],
        "leftOut": max(len(step.groups) - _LANES, 0),
        "memory": [_memory(plan, step, g, points, held[g]) for g in drawn],
        "exact": plan.result.exact,
        "program": list(_program(plan, step, names)),
        "arguments": list(_arguments(plan, step, names)),
    }


def difference(plan: Planned, other: Planned) -> list[list[str]]:
    """Where two plans of one function differ: [what, source line, in the first, in the second] for every op that is
    made of others or makes others, and every value that is converted otherwise. Their meshes may be of unlike lengths;
    none where they have unlike numbers of axes, or run other ops twice."""
    graph = plan.traced.graph
    if graph.fingerprint != other.traced.graph.fingerprint or len(plan.program.axes) != len(other.program.axes):
        return []
    names = Names(plan.traced)
    ops = [_ops(p) for p in (plan, other)]
    steps = [_conversions(p) for p in (plan, other)]
    rows: list[list[str]] = []
    for v in (*graph.inputs, *graph.constants):
        rows += _unlike(names.value(v), "", *(s.get(v, "") for s in steps))
    for op in graph.ops:
        rows += _unlike(op.name, op.source, *(o.get(op.index, "") for o in ops))
        for v in op.results:
            rows += _unlike(f"{graph.values[v].name} is sent", op.source, *(s.get(v, "") for s in steps))
    return rows


def _unlike(what: str, source: str, first: str, second: str) -> list[list[str]]:
    return [] if first == second else [[what, source, first, second]]


def _ops(plan: Planned) -> dict[int, str]:
    return {i.op: _triple(plan, i) for i in plan.program.instructions if isinstance(i, Compute)}


def _conversions(plan: Planned) -> dict[int, str]:
    found: dict[int, list[str]] = {}
    for i in plan.program.instructions:
        if isinstance(i, Convert):
            text = f"{i.step} {format_layout(i.source)} → {format_layout(i.target)}"
            found.setdefault(i.value, []).append(text)
    return {v: ", ".join(sorted(texts)) for v, texts in found.items()}


def _us(s: float) -> float:
    return round(s * 1e6, 3)


def _bar(bar: Bar) -> list[Any]:
    """[start, end, what, first instruction, how many instructions]; -1 for an argument that is fed."""
    first = bar.instructions[0] if bar.instructions else -1
    return [_us(bar.start), _us(bar.end), bar.does[0], first, len(bar.instructions)]


def figures(plan: Planned, step: Step) -> list[list[str]]:
    """[what, figure, explanation]"""
    r, graph = plan.result, plan.traced.graph
    used = plan.devices
    peaks = [(r.memory_bytes[d] / r.memory_limit_bytes[d], d) for d in used if r.memory_limit_bytes[d]]
    fullest = max(peaks)[1] if peaks else used[0]
    busiest, exposed = step.exposed
    collectives = plan.program.collectives()
    gap = lambda bound, part: percent(part) if is_known(bound, r.cost_s) else "none known"
    at_any = gap(r.joint_lower_bound_s, r.joint_gap)
    return [
        ["step time", seconds(r.cost_s), "predicted" + (", collectives beside computing" if r.overlap else "")],
        ["gap", gap(r.lower_bound_s, r.gap), f"to the lower bound at these shard sizes; {at_any} at any"],
        [
            "exposed",
            percent(exposed / step.makespan_s) if step.makespan_s else "-",
            f"of the step, in which {busiest.name} waits",
        ],
        ["communication", seconds(step.communication_s), f"{counted(collectives)} collectives"],
        [
            "fullest device",
            percent(r.memory_bytes[fullest] / max(r.memory_limit_bytes[fullest], 1)),
            f"{nbytes(r.memory_bytes[fullest])} of {nbytes(r.memory_limit_bytes[fullest])} on device {fullest}",
        ],
        ["devices", f"{len(used)} of {plan.cluster.n}", f"of {plan.cluster.name}, {plural(len(graph.ops), 'op')}"],
    ]


def _bounds(plan: Planned) -> list[tuple[str, float | None, str]]:
    """(name, seconds, about)"""
    r = plan.result
    found: list[tuple[str, float | None, str]] = [("step time", r.cost_s, "this plan")]
    if r.with_all_s is not None:
        found.append(("with all devices", finite(r.with_all_s), "the best program found"))
    for name, bound, about in (
        ("size bound", r.ratio_bound_s, "this program at any shard sizes"),
        ("lower bound", r.lower_bound_s, "any program at these shard sizes"),
        ("joint bound", r.joint_lower_bound_s, "any program at any shard sizes"),
    ):
        if bound > 0:
            found.append((name, bound, about))
    return found


def _memory(plan: Planned, step: Step, group: int, points: Sequence[float], held: Any) -> dict[str, Any]:
    devices = [plan.devices[d] for d in step.groups[group]]
    top = float(held.max(initial=1.0))
    changes = np.flatnonzero(np.abs(np.diff(held, prepend=-top)) > _DETAIL * top)
    return {
        "name": step.lanes[group].name,
        "at": [_us(points[k]) for k in changes.tolist()],
        "bytes": [round(float(held[k])) for k in changes.tolist()],
        "peak": max(plan.result.memory_bytes[d] for d in devices),
        "limit": min(plan.result.memory_limit_bytes[d] for d in devices),
    }


def _triple(plan: Planned, i: Compute | Convert) -> str:
    graph = plan.traced.graph
    named = lambda v, layout: f"{graph.values[v].name}|{format_layout(layout)}"
    before = ", ".join(named(v, layout) for v, layout in reads(graph, i))
    after = ", ".join(named(v, layout) for v, layout in writes(graph, i))
    return f"{{{before}}} {graph.ops[i.op].name if isinstance(i, Compute) else i.step} {{{after}}}"


def _program(plan: Planned, step: Step, names: Names) -> Iterator[list[Any]]:
    """[instruction, shape, source line, begins, takes, whether it is a collective]"""
    graph = plan.traced.graph
    for k, i in enumerate(plan.program.instructions):
        if isinstance(i, Compute):
            results, source = graph.ops[i.op].results, graph.ops[i.op].source
            value = results[0] if results else None
        else:
            value, maker = i.value, graph.producer.get(i.value)
            source = names.paths.get(value, "") if maker is None else graph.ops[maker].source
        shape = "" if value is None else names.shape(value)
        sends = isinstance(i, Convert) and i.is_collective
        yield [_triple(plan, i), shape, source, _us(step.begins[k]), _us(step.seconds[k]), sends]


def _arguments(plan: Planned, step: Step, names: Names) -> Iterator[dict[str, Any]]:
    """How each argument lies: of every dimension that is cut, what each group's devices hold, in mesh order."""
    group_of = {d: g for g, group in enumerate(step.groups) for d in group}
    carried = plan.traced.graph.state
    for value in plan.traced.graph.inputs:
        layout = plan.program.inputs[value]
        yield {
            "path": names.value(value),
            "shape": list(plan.traced.graph.values[value].shape),
            "type": names.shape(value),
            "layout": format_layout(layout),
            "state": value in carried,
            "bytes": plan.traced.graph.values[value].nbytes,
            "held": round(padded_bytes(plan.sizes, value, layout)),
            "cuts": _cuts(plan, step, value, layout, group_of),
        }


def _cuts(plan: Planned, step: Step, value: int, layout: Layout, group_of: dict[int, int]) -> list[list[Any]]:
    """[dimension, [[elements, group] of each shard]]"""
    found: list[list[Any]] = []
    for dim, axes, way in cuts_of(layout):
        lengths = plan.sizes.lengths(value, dim, axes, way)
        position = step.costs.position(axes).tolist()
        owner = {at: group_of[d] for d, at in reversed(list(enumerate(position)))}
        found.append([dim, [[length, owner[at]] for at, length in enumerate(lengths)]])
    return found
