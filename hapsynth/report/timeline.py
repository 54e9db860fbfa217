"""The predicted step as text: what each device does when; with overlap what it waits for, and how much that hides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console

from hapsynth._quantities import indices, percent, plural, seconds
from hapsynth.plan import Plan
from hapsynth.report.tables import Table, heading
from hapsynth.running.names import Names
from hapsynth.search.scheduling.tasks import Machine
from hapsynth.search.scheduling.timeline import Timeline
from hapsynth.search.scheduling.waits import waits
from hapsynth.view.step import BOTH, COMPUTES, SENDS, Lane, Step

_COLUMNS = 72


def hidden(communication_s: float, exposed_s: float) -> str:
    """How much of the communication goes on beside computing."""
    beside = max(communication_s - exposed_s, 0.0)
    part = f" ({percent(beside / communication_s)})" if communication_s else ""
    return f"{seconds(beside)}{part} of it hidden behind computing"


def print_timeline(out: Console, plan: Plan, top: int) -> None:
    """The bars, what each device does in all, the `top` longest waits, and the contention."""
    timeline = plan.timeline
    tasks, machine = timeline.tasks, np.array(timeline.tasks.machine, dtype=np.int64)
    devices = np.array(plan.devices)
    groups = [devices[tasks.group_of == g].tolist() for g in range(timeline.end.shape[1])]
    names = [f"{indices(group)} {plan.cluster.devices[group[0]].name}" for group in groups]
    shown = range(len(groups))[:top]
    print_step(out, Step(plan), top)
    slower = timeline.computed - tasks.seconds[machine == Machine.COMPUTE].sum(axis=0)
    slower -= tasks.seconds[machine == Machine.EVERYTHING].sum(axis=0) - sum(tasks.sent_in.values())
    rows = [
        [names[g], *(seconds(x[g]) for x in (timeline.computed, np.maximum(slower, 0.0), timeline.exposed))]
        for g in shown
    ]
    if len(groups) > len(shown):
        rows.append([f"{len(groups) - len(shown)} more", "", "", ""])
    out.print(heading("What each device does until its last result"))
    out.print(Table(["devices", "computes", "slowed by sending", "exposed"], rows))
    _print_waits(out, plan, timeline, names, top)
    out.print(
        f"communication  {seconds(timeline.communication_s)}, {hidden(timeline.communication_s, timeline.exposed_s)}"
    )
    for line in contention_lines(plan):
        out.print(line)


def contention_lines(plan: Plan) -> Iterable[str]:
    """How much longer computing takes beside a collective, and a collective beside it, and where that is from."""
    for kind in dict.fromkeys(plan.used.devices):
        known = "as its description says" if kind.contention is not None else "a default: not measured"
        delay = kind.contention_delay
        late = f", of which each exchange takes {seconds(delay)} longer then" if delay else ""
        slower = f"{kind.name}: computing takes {kind.slowdown:g}x as long beside a collective"
        yield f"contention     {slower} ({known}){late}"


def _print_waits(out: Console, plan: Plan, timeline: Timeline, names: Sequence[str], top: int) -> None:
    """Collectives and, together, loops and branches, those that some device waits for the longest first."""
    label, tasks = Names(plan.traced), timeline.tasks
    found = waits(timeline)
    order = sorted(found, key=lambda task: (-found[task].max(), task))
    rows: list[list[str]] = []
    for task in order[:top]:
        places, group = tasks.instructions[task], int(found[task].argmax())
        made = label.instruction(plan.program.instructions[places[0]]) if places else "an argument"
        is_sent = tasks.machine[task] is Machine.LINK
        if is_sent and len(places) > 1:
            made += f", with {len(places) - 1} more"
        kind = "collective" if is_sent else "loop or branch"
        times = (timeline.start[task, group], timeline.end[task, group], found[task][group])
        rows.append([made, kind, *map(seconds, times), names[group]])
    if len(order) > top:
        left = max(float(sum(found[task][g] for task in order[top:])) for g in range(len(names)))
        rows.append([plural(len(order) - top, "shorter wait"), "", "", "", seconds(left), "at most"])
    if rows:
        out.print(heading("The longest waits"))
        out.print(Table(["for", "kind", "begins", "ends", "exposed", "on devices"], rows, left=2))


def print_step(out: Console, step: Step, top: int) -> None:
    """A bar for each of the first `top` groups of devices that do the same, and one for collectives."""
    devices = [lane for lane in step.lanes if lane.devices]
    lanes = [*devices[:top], *(lane for lane in step.lanes if not lane.devices)]
    wide = max((len(lane.name) for lane in lanes), default=0)
    columns = max(min(_COLUMNS, out.width - wide - 2), 1)
    out.print(heading("Timeline, predicted: devices compute (#) or wait (.), collectives (=), loops and branches (@)"))
    for lane in lanes:
        busy, idle = ("#", ".") if lane.devices else ("=", " ")
        out.print(f"{lane.name:{wide}}  {_bar(lane, step.makespan_s, columns, busy, idle)}")
    if len(devices) > top:
        out.print(f"{plural(len(devices) - top, 'more group')} of devices")


def _bar(lane: Lane, makespan_s: float, columns: int, busy: str, idle: str) -> str:
    """What takes most of each of so many parts of the step."""
    edges = np.linspace(0.0, makespan_s, columns + 1)

    def part(*does: str) -> np.ndarray:
        ran = np.array([(bar.start, bar.end) for bar in lane.bars if bar.does in does]).reshape(-1, 2, 1)
        within = np.minimum(ran[:, 1], edges[1:]) - np.maximum(ran[:, 0], edges[:-1])
        return np.clip(within, 0.0, None).sum(axis=0) / max(edges[1], 1e-300)

    marks = np.where(part(BOTH) > 0.5, "@", np.where(part(COMPUTES, SENDS) >= 0.5, busy, idle))
    return "".join(marks.tolist()).rstrip()
