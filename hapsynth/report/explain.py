"""The report of `hapsynth explain`: where the seconds go, and why each value lies as it does."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import Protocol, Self

from rich.console import Console

from hapsynth._errors import UsageError
from hapsynth._quantities import nbytes, percent, plural, seconds
from hapsynth.instructions.layout import Layout, format_layout
from hapsynth.instructions.program.program import Convert, reads, writes
from hapsynth.plan import Plan
from hapsynth.report.cost_breakdown import SUMMED, cost_lines, print_costs
from hapsynth.report.summary import print_certificate, print_left_out, sizes_table
from hapsynth.report.tables import Table, console, heading
from hapsynth.report.timeline import print_timeline
from hapsynth.running.names import Names
from hapsynth.search.cost.program_cost import Cost, feed_costs, padded_bytes
from hapsynth.whatif.alternatives import Alternative, Alternatives

_KINDS = 14


def find_value(plan: Plan, name: str) -> int:
    """The value called `name`; UsageError with the nearest names where there is none."""
    names = Names(plan.traced)
    value = names.find(name)
    if value is None:
        near = difflib.get_close_matches(name, names.all(), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; name an argument path, or a value as in a listing"
        raise UsageError(f"--value {name}: the function has no such value{hint}")
    return value


def explain(plan: Plan, value: str | None = None, *, cost: bool = False, top: int = 5) -> str:
    """Where a plan's seconds go and why its values lie as they do: what the command `hapsynth explain` prints.

    `value`: about one alone, an argument's path such as `[0]['w']` or a name as in `plan.program`'s listing. `cost`:
    every second as FLOPs / rate, bytes / bandwidth and latency. `top`: how many of each are listed. Takes seconds, as
    it searches for the best programs with other layouts. Raises ValueError for a value that there is not, and where
    both `value` and `cost` are given.
    """
    if cost and value is not None:
        raise ValueError(f"value is {value!r} and cost is True, which is about the whole plan; leave one of them out")
    text = StringIO()
    out = console(text)
    if cost:
        print_costs(out, plan, cost_lines(plan), top)
        return _plain(text)
    explainer = Explainer.of(out, plan, top, lambda _: None)
    if value is None:
        explainer.everything()
        return _plain(text)
    try:
        number = find_value(plan, value)
    except UsageError as error:
        raise ValueError(str(error).removeprefix("--value ")) from None
    explainer.one(number)
    return _plain(text)


def _plain(text: StringIO) -> str:
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


class Answers(Protocol):
    """The costs of a plan and of the programs beside it, as `Alternatives` computes them."""

    @property
    def costs(self) -> Sequence[Cost]: ...

    @property
    def layouts(self) -> Mapping[int, Layout]: ...

    def spent(self) -> Mapping[int, float]: ...

    def others(self, value: int) -> Sequence[Layout]: ...

    def best_with(self, value: int, layout: Layout) -> Alternative | None: ...

    def best_other(self, value: int) -> Alternative | None: ...


class Explainer:
    """Prints explanations of one plan.

    `fed_s`: the seconds of each argument that is new at every step. `top`: how many values and instructions are
    listed. `tell` is called with the name of each search.
    """

    def __init__(
        self,
        out: Console,
        plan: Plan,
        answers: Answers,
        fed_s: Sequence[float],
        top: int,
        tell: Callable[[str], None],
    ) -> None:
        self.out, self.plan, self.answers, self.top, self.tell = out, plan, answers, top, tell
        self.graph, self.names = plan.traced.graph, Names(plan.traced)
        self.fed, self.fed_s = len(fed_s), sum(fed_s)
        self.total = self.fed_s + sum(cost.seconds for cost in answers.costs)
        overlap = plan.result.overlap
        self.own_s = self.total if overlap else plan.cost
        """What other programs are compared with: the sum over the plan's instructions, as theirs is."""
        self.summed = SUMMED if overlap else ""

    @classmethod
    def of(cls, out: Console, plan: Plan, top: int, tell: Callable[[str], None]) -> Self:
        """With the costs of today's cost model."""
        alternatives = Alternatives(plan)
        fed_s = [s for _, s in feed_costs(plan.program, plan.sizes, alternatives.model)]
        return cls(out, plan, alternatives, fed_s, top, tell)

    def everything(self) -> None:
        """Where the seconds go, the cuts, the inputs, and the most expensive values."""
        self.out.print(
            f"{plural(len(self.graph.ops), 'op')} planned for {self.plan.cluster.name}, "
            f"{plural(self.plan.cluster.n, 'device')}; {seconds(self.plan.cost)} predicted step time"
        )
        print_left_out(self.out, self.plan)
        self._kinds()
        self._collectives()
        if self.plan.result.overlap:
            print_timeline(self.out, self.plan, self.top)
        self.out.print(heading("Shard sizes, in units, of each dimension class"))
        self.out.print(sizes_table(self.plan))
        self._inputs()
        self._values()
        self.out.print(heading("Certificate"))
        print_certificate(self.out, self.plan)

    def one(self, value: int) -> None:
        """Everything about one value: its layouts along the program, and the cost of every other one."""
        self.out.print(
            f"{self.names.value(value)}  {self.names.shape(value)}, {nbytes(self.graph.values[value].nbytes)}"
        )
        rows: list[list[str]] = []
        for cost in self.answers.costs:
            i = cost.instruction
            touched = [p for p in (*reads(self.graph, i), *writes(self.graph, i)) if p[0] == value]
            if touched:
                layouts = " -> ".join(dict.fromkeys(format_layout(layout) for _, layout in touched))
                rows.append(
                    [self.names.instruction(cost.instruction), layouts, seconds(cost.seconds), _bytes(cost.wire_bytes)]
                )
        self.out.print(heading("Instructions that touch it"))
        self.out.print(Table(["instruction", "layout", "seconds", "wire bytes"], rows, left=2))
        self.out.print(heading(f"The best program with each layout of it, at the plan's shard sizes{self.summed}"))
        planned = format_layout(self.answers.layouts[value])
        memory = tuple(self.plan.memory[d] for d in self.plan.devices)
        rows = [[f"{planned} (the plan)", seconds(self.own_s), "", "", nbytes(max(memory)), self._fits(memory)]]
        for layout in self.answers.others(value):
            self.tell(f"searching without the layout of {self.names.value(value)}")
            best = self.answers.best_with(value, layout)
            rows.append([format_layout(layout), *self._cells(best)])
        time = "sum" if self.summed else "step time"
        self.out.print(Table(["layout", time, "difference", "", "memory", "fits"], rows))

    def _kinds(self) -> None:
        count: Counter[str] = Counter()
        spent: dict[str, float] = {}
        wire: dict[str, float] = {}
        for cost in self.answers.costs:
            i = cost.instruction
            name = i.step if isinstance(i, Convert) else self.graph.ops[i.op].name
            count[name] += 1
            spent[name] = spent.get(name, 0.0) + cost.seconds
            wire[name] = wire.get(name, 0.0) + cost.wire_bytes
        if self.fed:
            fed = "arguments fed"
            count[fed], spent[fed], wire[fed] = self.fed, self.fed_s, 0.0
        order = sorted(spent, key=lambda name: (-spent[name], name))
        shown = order if len(order) <= _KINDS else order[: _KINDS - 1]
        rows = [[n, str(count[n]), seconds(spent[n]), self._share(spent[n]), _bytes(wire[n])] for n in shown]
        if rest := order[len(shown) :]:
            left = sum(spent[n] for n in rest)
            rows.append([plural(len(rest), "other kind"), str(sum(count[n] for n in rest)), seconds(left)])
            rows[-1] += [self._share(left), ""]
        rows.append(["in all", str(count.total()), seconds(self.total), "", _bytes(sum(wire.values()))])
        self.out.print(heading(f"Where the seconds go{self.summed}"))
        self.out.print(Table(["instruction", "count", "seconds", "share", "wire bytes"], rows))

    def _collectives(self) -> None:
        costs = [c for c in self.answers.costs if isinstance(c.instruction, Convert) and c.instruction.is_collective]
        costs.sort(key=lambda c: -c.seconds)
        rows = [
            [self.names.instruction(c.instruction), nbytes(c.wire_bytes), seconds(c.seconds), self._share(c.seconds)]
            for c in costs[: self.top]
        ]
        if len(costs) > self.top:
            rest = costs[self.top :]
            left = sum(c.seconds for c in rest)
            rows.append(
                [f"{len(rest)} more", nbytes(sum(c.wire_bytes for c in rest)), seconds(left), self._share(left)]
            )
        if rows:
            self.out.print(heading("The dearest collectives"))
            self.out.print(Table(["collective", "wire bytes", "seconds", "share"], rows))

    def _inputs(self) -> None:
        """The largest inputs, one of each shape and layout, each with the best program that stores it otherwise."""
        program, sizes = self.plan.program, self.plan.sizes
        alike: dict[object, list[int]] = {}
        for value in sorted(self.graph.inputs, key=lambda v: (-self.graph.values[v].nbytes, v)):
            v = self.graph.values[value]
            alike.setdefault((v.shape, str(v.dtype), program.inputs[value]), []).append(value)
        rows: list[list[str]] = []
        for members in list(alike.values())[: self.top]:
            value = members[0]
            layout = program.inputs[value]
            stored = padded_bytes(sizes, value, layout)
            self.tell(f"searching without the layout of {self.names.value(value)}")
            other = self.answers.best_other(value)
            rows.append(
                [
                    self.names.value(value),
                    str(len(members)),
                    self.names.shape(value),
                    format_layout(layout),
                    nbytes(stored),
                    "-" if other is None else format_layout(other.layout),
                    *self._cells(other)[1:3],
                ]
            )
        left = sum(len(m) for m in list(alike.values())[self.top :])
        if left:
            rows.append([f"{plural(left, 'more input')} (--value PATH asks about one)", *[""] * 7])
        self.out.print(heading("Inputs: layout, bytes on a device, and the best program that stores it otherwise"))
        headers = ["input", "alike", "shape", "layout", "per device", "otherwise", "costs", ""]
        self.out.print(Table(headers, rows, minor=["alike", "shape", "per device"]))

    def _values(self) -> None:
        spent = self.answers.spent()
        order = [v for v in sorted(spent, key=lambda v: (-spent[v], v)) if v in self.graph.producer]
        rows: list[list[str]] = []
        for value in order[: self.top]:
            self.tell(f"searching without the layout of {self.names.value(value)}")
            other = self.answers.best_other(value)
            cells = self._cells(other)
            rows.append(
                [
                    self.names.value(value),
                    format_layout(self.answers.layouts[value]),
                    seconds(spent[value]),
                    "-" if other is None else format_layout(other.layout),
                    *cells[1:3],
                ]
            )
        self.out.print(heading("The dearest values: how each is made, and the best program that makes it otherwise"))
        self.out.print(Table(["value", "made as", "seconds", "otherwise", "costs", ""], rows, left=2))

    def _cells(self, other: Alternative | None) -> list[str]:
        """Step time, or the sum over instructions, difference in seconds and percent, memory, fits."""
        if other is None:
            return ["impossible", "-", "", "-", "-"]
        own = self.own_s
        more = other.cost_s - own
        # The search proves its results to a relative 1e-5: less than that is nothing.
        if abs(more) <= 2e-5 * own:
            more = 0.0
        memory = other.memory_bytes
        sign = "+" if more >= 0 else "-"
        if more and not other.proved:
            sign = f"<= {sign}"
        return [
            seconds(other.cost_s),
            sign + seconds(abs(more)) if more else "no more",
            f"{sign}{percent(abs(more) / own)}" if more else "",
            "-" if memory is None else nbytes(max(memory)),
            "-" if memory is None else self._fits(memory),
        ]

    def _fits(self, memory: Sequence[float]) -> str:
        """Whether each device that takes part has so much."""
        limits = self.plan.result.memory_budget.limits
        return "yes" if all(peak <= limit for peak, limit in zip(memory, limits, strict=True)) else "no"

    def _share(self, spent: float) -> str:
        return percent(spent / self.total) if self.total else "-"


def _bytes(value: float) -> str:
    return nbytes(value) if value else ""
