"""The plan of the command line's tiny model with all its costs, as figures in tests/golden/: today's cost model has no
say in reports of it.

    PYTHONPATH=tests/support python tests/support/frozen.py    # plans and freezes anew; review the difference
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from cli_model import write_model

from hapsynth.cli.selection import loaded
from hapsynth.instructions.layout import Layout, format_layout, parse_layout
from hapsynth.instructions.program.program import Compute
from hapsynth.plan import Plan
from hapsynth.report.explain import Explainer, find_value
from hapsynth.report.json_records import Entry
from hapsynth.report.tables import console
from hapsynth.search.cost.program_cost import Cost
from hapsynth.whatif.alternatives import Alternative

GOLDEN = Path(__file__).parents[1] / "golden"
PLAN, FIGURES = GOLDEN / "cli_plan.json", GOLDEN / "cli_figures.json"
VALUE, TOP = "[0]['m']", 3
"""The value and the number of rows that are explained."""


class FrozenAnswers:
    """`hapsynth.report.explain.Answers` from figures. KeyError for a question that was not frozen."""

    def __init__(self, plan: Plan, figures: Mapping[str, Any]) -> None:
        instructions = plan.program.instructions
        self.costs = [Cost(i, *cost) for i, cost in zip(instructions, figures["costs"], strict=True)]
        self.layouts: dict[int, Layout] = dict(plan.program.inputs)
        for i in instructions:
            if isinstance(i, Compute):
                results = plan.traced.graph.ops[i.op].results
                self.layouts.update((v, i.result_layout(n)) for n, v in enumerate(results))
        self.figures = figures

    def spent(self) -> dict[int, float]:
        return {int(value): seconds for value, seconds in self.figures["spent_s"].items()}

    def others(self, value: int) -> list[Layout]:
        return [parse_layout(text) for text in self.figures["others"][str(value)]]

    def best_with(self, value: int, layout: Layout) -> Alternative | None:
        return _alternative(self.figures["best_with"][f"{value} {format_layout(layout)}"])

    def best_other(self, value: int) -> Alternative | None:
        return _alternative(self.figures["best_other"][str(value)])


class Frozen:
    """A plan from a folder with its model, and the figures of its reports."""

    def __init__(self) -> None:
        figures: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8"))
        self.plan, _ = loaded(str(PLAN), "model.py", None)
        # Plan files have no times of planning.
        self.plan.result = replace(self.plan.result, timings_s=figures["timings_s"])
        self.answers = FrozenAnswers(self.plan, figures)
        self.fed_s: Sequence[float] = figures["fed_s"]
        self.entries = {name: Entry(**entry) for name, entry in figures["entries"].items()}


def _alternative(found: list[Any] | None) -> Alternative | None:
    if found is None:
        return None
    layout, cost_s, memory, proved = found
    return Alternative(parse_layout(layout), cost_s, None if memory is None else tuple(memory), proved)


class _Recorder:
    """Passes questions on to `Alternatives` and keeps the answers."""

    def __init__(self, answers: Any) -> None:
        self._answers, self.costs, self.layouts = answers, answers.costs, answers.layouts
        self.figures: dict[str, Any] = {"spent_s": answers.spent(), "others": {}, "best_with": {}, "best_other": {}}
        self.spent = answers.spent

    def others(self, value: int) -> list[Layout]:
        layouts = self._answers.others(value)
        self.figures["others"][str(value)] = [format_layout(layout) for layout in layouts]
        return layouts

    def best_with(self, value: int, layout: Layout) -> Alternative | None:
        best = self._answers.best_with(value, layout)
        self.figures["best_with"][f"{value} {format_layout(layout)}"] = _as_list(best)
        return best

    def best_other(self, value: int) -> Alternative | None:
        best = self._answers.best_other(value)
        self.figures["best_other"][str(value)] = _as_list(best)
        return best


def _as_list(best: Alternative | None) -> list[Any] | None:
    return best and [format_layout(best.layout), best.cost_s, best.memory_bytes, best.proved]


def freeze() -> None:
    """Plan the tiny model with today's cost model, and write both files."""
    from dataclasses import asdict

    from hapsynth.api import synthesize
    from hapsynth.cli.model_file import Target, load_target
    from hapsynth.cluster.cluster import Cluster
    from hapsynth.report.json_records import comparison
    from hapsynth.search.cost.program_cost import feed_costs
    from hapsynth.whatif.alternatives import Alternatives

    target = load_target("model.py")
    assert isinstance(target, Target)
    plan = synthesize(target.fn, target.args, Cluster.load("mixed.toml"))
    plan.save(PLAN)
    recorder = _Recorder(Alternatives(plan, None))
    fed_s = [s for _, s in feed_costs(plan.program, plan.sizes, plan.cost_model())]
    explainer = Explainer(console(StringIO()), plan, recorder, fed_s, TOP, lambda text: None)
    explainer.everything()
    explainer.one(find_value(plan, VALUE))
    figures = {
        "timings_s": {name: round(seconds, 1) for name, seconds in plan.result.timings_s.items()},
        "costs": [[cost.seconds, cost.wire_bytes] for cost in recorder.costs],
        "fed_s": fed_s,
        **recorder.figures,
        "entries": {name: asdict(entry) for name, entry in comparison(plan).items()},
    }
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary, chdir(temporary):
        write_model(Path(temporary))
        freeze()
