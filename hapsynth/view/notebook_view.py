"""What a notebook shows of a plan: its figures, and a strip of the predicted step."""

from __future__ import annotations

from html import escape

from hapsynth.running.base import Planned
from hapsynth.view.record import figures
from hapsynth.view.step import BOTH, COMPUTES, SENDS, Lane, Step, merged

_COLORS = {COMPUTES: "#3b6fb6", SENDS: "#d9822b", BOTH: "#8a5aa8"}
_WIDTH, _HEIGHT, _LANES = 720, 14, 12


def notebook_html(plan: Planned) -> str:
    """A table and a drawing, without scripts, so that every notebook shows them."""
    step = Step(plan)
    cells = "".join(
        f"<tr><th style='text-align:left'>{escape(what)}</th><td style='text-align:left'>{escape(figure)}</td>"
        f"<td style='text-align:left;opacity:.7'>{escape(about)}</td></tr>"
        for what, figure, about in figures(plan, step)
    )
    some = [lane for lane in step.lanes if lane.devices][:_LANES] + [lane for lane in step.lanes if not lane.devices]
    rows = "".join(
        f"<tr><td style='text-align:right;white-space:nowrap'>{escape(lane.name)}</td>"
        f"<td style='padding:1px'>{_strip(lane, step.makespan_s)}</td></tr>"
        for lane in some
    )
    legend = "blue: computes, orange: sends, grey: waits"
    return (
        f"<div><table>{cells}</table><table style='border-collapse:collapse'>{rows}</table>"
        f"<small>{legend}; plan.to_html(path) writes the whole page</small></div>"
    )


def _strip(lane: Lane, makespan_s: float) -> str:
    """A lane as SVG, bars that are finer than it together."""
    scale = _WIDTH / makespan_s if makespan_s else 0.0
    last = max((bar.end for bar in lane.bars), default=0.0) if lane.devices else 0.0
    drawn = [f"<rect width='{last * scale:.1f}' height='{_HEIGHT}' fill='#d4d4d4'/>"]
    drawn += [
        f"<rect x='{bar.start * scale:.1f}' width='{max((bar.end - bar.start) * scale, 0.2):.1f}' "
        f"height='{_HEIGHT}' fill='{_COLORS[bar.does]}'/>"
        for bar in merged(lane.bars, 2.0 / scale if scale else 0.0)
    ]
    return f"<svg width='{_WIDTH}' height='{_HEIGHT}' viewBox='0 0 {_WIDTH} {_HEIGHT}'>{''.join(drawn)}</svg>"
