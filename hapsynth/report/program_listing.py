"""A program in brief: every collective, with the local instructions between them counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hapsynth._quantities import nbytes, plural, seconds
from hapsynth.instructions.layout import format_layout
from hapsynth.instructions.program.program import Convert
from hapsynth.plan import Plan
from hapsynth.running.names import Names
from hapsynth.search.cost.program_cost import Cost

_NAMED = 4
"""Kinds of local instructions that a stage's line names."""


def brief(plan: Plan, costs: Sequence[Cost], lines: int = 28) -> list[str]:
    """The program as at most `lines` lines or so; the middle is left out of a longer one."""
    names = Names(plan.traced)
    graph = plan.traced.graph
    listed: list[str] = []
    local: list[Cost] = []
    for cost in costs:
        i = cost.instruction
        if not isinstance(i, Convert) or not i.is_collective:
            local.append(cost)
            continue
        listed += _stage(plan, local)
        local = []
        value = graph.values[i.value]
        triple = f"{{{value.name}|{format_layout(i.source)}}} {i.step} {{{value.name}|{format_layout(i.target)}}}"
        what = names.value(i.value).removeprefix(f"{value.name} ")
        listed.append(
            f"* {triple}  {names.shape(i.value)}, {nbytes(cost.wire_bytes)}, {seconds(cost.seconds)}  # {what}"
        )
    listed += _stage(plan, local)
    if len(listed) > lines:
        first, last = lines * 2 // 3, lines // 3
        left_out = listed[first:-last]
        collectives = sum(line.startswith("*") for line in left_out)
        listed[first:-last] = [f"  ... {plural(collectives, 'more collective')} (--program prints everything) ..."]
    return listed


def _stage(plan: Plan, local: Sequence[Cost]) -> list[str]:
    if not local:
        return []
    graph = plan.traced.graph
    kinds: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for cost in local:
        i = cost.instruction
        name = i.step if isinstance(i, Convert) else graph.ops[i.op].name
        kinds[name] += 1
        spent[name] += cost.seconds  # pyright: ignore[reportArgumentType]
    order = sorted(kinds, key=lambda name: (-spent[name], -kinds[name], name))
    named = ", ".join(f"{name} x{kinds[name]}" for name in order[:_NAMED])
    more = ", ..." if len(order) > _NAMED else ""
    total = seconds(sum(cost.seconds for cost in local))
    return [f"  {plural(len(local), 'local instruction')}, {total}: {named}{more}"]
