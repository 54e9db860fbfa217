"""Where the collectives of a program in staged form start and are waited for, so that devices compute meanwhile.

The order of the program's instructions decides: collectives start in that order, the same in every process, each as
soon as its operand is there and the one before it has started; those of a bundle of the program are one. What needs
nothing that arrives is computed in that order too. What does, as an optimizer's update, waits until a collective needs
it, or to the end, where it goes in the order of the collectives: so nothing waits for the network that need not.

Then all that arrives may be held at once. Where there is no room for that, collectives start, and what takes their
results is computed, where the program has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hapsynth.graph.ir import Graph
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.staging.stages import Cond, Loop, Stage
from hapsynth.lower._host_schedule import (
    CollectiveStage,
    Copies,
    HostSlot,
    LocalStage,
    LocalStep,
    Name,
    is_local,
    makes,
    needs,
    ordered,
)


def overlapped(
    graph: Graph,
    arrives: tuple[CollectiveStage, ...],
    steps: Sequence[LocalStep],
    leaves: tuple[CollectiveStage, ...],
    *,
    in_order: bool = False,
) -> list[LocalStage | CollectiveStage]:
    """Local stages, and collective stages where they start, of steps in none of which a host decides. What `arrives`
    first; all have arrived at the end, where what `leaves` is handed over. `in_order`: none starts, and nothing waits,
    before or after its place among the steps."""
    alone = _apart(steps)
    run = _with_results(graph, alone if in_order else _as_needed(graph, alone))
    return _Stages(graph, run, _sent(graph, run, in_order), arrives).stages(leaves)


def _apart(steps: Sequence[LocalStep]) -> list[LocalStep]:
    """One instruction each."""
    return [
        one
        for step in steps
        for one in ([Stage((i,)) for i in step.instructions] if isinstance(step, Stage) else [step])
    ]


def _is_sent(graph: Graph, step: LocalStep) -> bool:
    return isinstance(step, Convert) and not is_local(graph, step)


def _as_needed(graph: Graph, steps: Sequence[LocalStep]) -> list[LocalStep]:
    """What is made of what arrives, before the first collective that needs it or makes again what it takes, or at the
    end, in the order in which the collectives start: nothing else waits."""
    out: list[LocalStep] = []
    late: dict[int, int] = {}
    """The places of steps that wait, each with that of the last collective whose results it takes."""
    after: dict[Name, int] = {}
    """What arrives or is made of that: the place of that collective."""
    maker: dict[Name, int] = {}
    readers: dict[Name, list[int]] = {}

    def emit(places: Iterable[int]) -> None:
        """Those of them that wait, and what they need."""
        found, waiting = dict[int, int](), [*places]
        while waiting:
            place = waiting.pop()
            if place in late:
                found[place] = late.pop(place)
                waiting += [maker[name] for name in needs(graph, steps[place]) if name in maker]
        out.extend(steps[place] for place in sorted(found, key=lambda place: (found[place], place)))

    for place, step in enumerate(steps):
        needed, made, sent = needs(graph, step), makes(graph, step), _is_sent(graph, step)
        plain = isinstance(step, Stage | Loop | Cond)
        arriving = [after[name] for name in needed if name in after]
        if plain and arriving:
            late[place] = max(arriving)
            after.update((name, late[place]) for name in made)
            maker.update((name, place) for name in made)
            for name in needed:
                readers.setdefault(name, []).append(place)
            continue
        if sent:
            emit([maker[name] for name in needed | made if name in maker])
            emit([reader for name in made for reader in readers.pop(name, ())])
            after.update((name, place) for name in made)
        elif not plain:
            # Slots of a loop are overwritten.
            emit([*late])
        out.append(step)
    emit([*late])
    return out


def _with_results(graph: Graph, steps: Sequence[LocalStep]) -> list[LocalStep]:
    """Results beside what computes them, so that they need no memory twice; those that arrive at the end, in order."""
    due: dict[Name, list[Copies]] = {}
    rest: list[LocalStep] = []
    others: list[LocalStep] = []
    for step in steps:
        if not isinstance(step, Copies) or not all(_is_output(target) for target in step.targets):
            others.append(step)
            continue
        for source, target in zip(step.sources, step.targets, strict=True):
            one = Copies((source,), (target,))
            if isinstance(source, tuple):
                due.setdefault(source, []).append(one)
            else:
                rest.append(one)
    out: list[LocalStep] = []
    arriving: dict[Name, None] = {}
    for step in others:
        out.append(step)
        made = makes(graph, step) & due.keys()
        if _is_sent(graph, step):
            arriving.update((name, None) for name in made)
        else:
            out += [one for name in ordered(made - arriving.keys()) for one in due.pop(name)]
    return [
        *out,
        *rest,
        *(one for name in arriving for one in due.pop(name)),
        *(one for ones in due.values() for one in ones),
    ]


def _is_output(name: Name) -> bool:
    return isinstance(name, HostSlot) and name.kind == "output"


def _sent(graph: Graph, steps: Sequence[LocalStep], in_order: bool) -> list[tuple[int, CollectiveStage]]:
    """The collectives in their order, those of a bundle as one stage, each with the place of the step after which it
    starts: as soon as it can, or `in_order`. In loops and branches those that follow one another are one, until
    something needs what they bring."""
    maker: dict[Name, int] = {}
    reader: dict[Name, int] = {}
    computed = -1
    brings, is_open = set[Name](), False
    ready: list[int] = []
    runs: list[dict[int, Convert]] = []
    for place, step in enumerate(steps):
        needed, made = needs(graph, step), makes(graph, step)
        is_open &= brings.isdisjoint(needed | made)
        made_at = [maker[name] for name in needed if name in maker]
        # What another collective brings is handed over here, not before.
        waits = [place if _is_sent(graph, steps[at]) else at for at in made_at]
        # What it makes again was taken before.
        waits += [reader[name] for name in made if name in reader]
        ready.append(max([*waits, computed if in_order else -1]))
        maker.update((name, place) for name in made)
        reader.update((name, place) for name in needed)
        if not isinstance(step, Convert) or not _is_sent(graph, step):
            computed = place
            continue
        if not (is_open and _is_alike([*runs[-1].values()][-1], step)):
            runs.append({})
            brings, is_open = set(), True
        runs[-1][place] = step
        brings |= made
    found: list[tuple[int, CollectiveStage]] = []
    start = -1
    for run in runs:
        start = max(start, *(ready[place] for place in run))
        found.append((start, CollectiveStage(tuple(run.values()))))
    return found


def _is_alike(last: Convert, step: Convert) -> bool:
    """Whether a collective is of the bundle of the one before it, or single as that in the same loop or branch."""
    if step.bundle or not step.region:
        return step.bundle > 0 and step.bundle == last.bundle
    return not last.bundle and step.region == last.region


class _Stages:
    """Steps cut into stages: behind those that make what is sent, and before those that need what arrives."""

    def __init__(
        self,
        graph: Graph,
        steps: Sequence[LocalStep],
        sent: Sequence[tuple[int, CollectiveStage]],
        arrives: tuple[CollectiveStage, ...],
    ) -> None:
        self.graph, self.run = graph, steps
        self.starting: dict[int, list[CollectiveStage]] = {}
        for place, stage in sent:
            self.starting.setdefault(place, []).append(stage)
        self.found: list[LocalStage | CollectiveStage] = []
        self.arrives, self.steps = [*arrives], list[LocalStep]()
        self.under_way: dict[CollectiveStage, set[Name]] = {}

    def stages(self, leaves: tuple[CollectiveStage, ...]) -> list[LocalStage | CollectiveStage]:
        self._start(-1)
        for place, step in enumerate(self.run):
            if not _is_sent(self.graph, step):
                self._wait(needs(self.graph, step))
                self.steps.append(step)
            self._start(place)
        self._wait(set[Name]().union(*self.under_way.values()))
        self._close(leaves)
        return self.found

    def _start(self, place: int) -> None:
        """The collectives that can start after a step."""
        starting = self.starting.get(place)
        if starting:
            self._wait({name for stage in starting for s in stage.steps for name in needs(self.graph, s)})
            self._close(tuple(starting))
            self.found += starting
            for stage in starting:
                self.under_way[stage] = set[Name]().union(*(makes(self.graph, s) for s in stage.steps))

    def _wait(self, names: set[Name]) -> None:
        """A stage of its own begins with what has to arrive."""
        due = [stage for stage, made in self.under_way.items() if not made.isdisjoint(names)]
        if due:
            if self.steps:
                self._close()
            self.arrives += due
            for stage in due:
                self.under_way.pop(stage)

    def _close(self, leaves: tuple[CollectiveStage, ...] = ()) -> None:
        if self.arrives or self.steps or leaves:
            self.found.append(LocalStage(tuple(self.arrives), tuple(self.steps), leaves))
            self.arrives, self.steps = [], []
