"""Where the collectives of a program in staged form start and are waited for, so that devices compute meanwhile.

The order of the program's instructions decides: collectives start in that order, the same in every process, each as
soon as its operand is there and the one before it has started; those of a bundle of the program are one. What needs
nothing that arrives is computed in that order too. What does, as an optimizer's update, waits until a collective needs
it, or to the end, where it goes in the order of the collectives: so nothing waits for the network that need not.
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
) -> list[LocalStage | CollectiveStage]:
    """Local stages, and collective stages where they start, of steps in none of which a host decides. What `arrives`
    first; all have arrived at the end, where what `leaves` is handed over."""
    run = _with_results(graph, _as_needed(graph, _apart(steps)))
    return _Stages(graph, run, _sent(graph, run), arrives).stages(leaves)


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
    """What is made of what arrives, before the first collective that needs it, or at the end, in the order in which the
    collectives start: nothing else waits."""
    out: list[LocalStep] = []
    late: dict[Name, LocalStep] = {}
    after: dict[Name, int] = {}
    """What arrives or is made of that: the number of the last collective that it takes."""

    def emit(names: Iterable[Name]) -> None:
        for name in sorted((name for name in late if name in names), key=after.__getitem__):
            if step := late.get(name):
                for made in makes(graph, step):
                    late.pop(made, None)
                emit(needs(graph, step))
                out.append(step)

    for number, step in enumerate(steps):
        needed, made, sent = needs(graph, step), makes(graph, step), _is_sent(graph, step)
        plain = isinstance(step, Stage | Loop | Cond)
        arriving = [after[name] for name in needed if name in after]
        if plain and arriving:
            late.update((name, step) for name in ordered(made))
            after.update((name, max(arriving)) for name in made)
            continue
        # Slots of a loop are overwritten.
        emit(needed if plain or sent else {*late})
        out.append(step)
        if sent:
            after.update((name, number) for name in made)
    emit({*late})
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


def _sent(graph: Graph, steps: Sequence[LocalStep]) -> list[tuple[int, CollectiveStage]]:
    """The collectives in their order, those of a bundle as one stage, each with the place of the step after which it
    can start. In loops and branches those that follow one another are one, until something needs what they bring."""
    maker: dict[Name, int] = {}
    brings, is_open = set[Name](), False
    ready: list[int] = []
    runs: list[dict[int, Convert]] = []
    for place, step in enumerate(steps):
        needed, made = needs(graph, step), makes(graph, step)
        is_open &= brings.isdisjoint(needed | made)
        made_at = [maker[name] for name in needed if name in maker]
        # What another collective brings is handed over here, not before.
        ready.append(max((place if _is_sent(graph, steps[at]) else at for at in made_at), default=-1))
        maker.update((name, place) for name in made)
        if not isinstance(step, Convert) or not _is_sent(graph, step):
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
        self.under_way: dict[Name, CollectiveStage] = {}

    def stages(self, leaves: tuple[CollectiveStage, ...]) -> list[LocalStage | CollectiveStage]:
        self._start(-1)
        for place, step in enumerate(self.run):
            if not _is_sent(self.graph, step):
                self._wait(needs(self.graph, step))
                self.steps.append(step)
            self._start(place)
        self._wait(set(self.under_way))
        self._close(leaves)
        return self.found

    def _start(self, place: int) -> None:
        """The collectives that can start after a step."""
        starting = self.starting.get(place)
        if starting:
            self._wait({name for stage in starting for s in stage.steps for name in needs(self.graph, s)})
            self._close(tuple(starting))
            self.found += starting
            self.under_way |= {name: stage for stage in starting for s in stage.steps for name in makes(self.graph, s)}

    def _wait(self, names: set[Name]) -> None:
        """A stage of its own begins with what has to arrive."""
        due = list(dict.fromkeys(stage for name, stage in self.under_way.items() if name in names))
        if due:
            if self.steps:
                self._close()
            self.arrives += due
            self.under_way = {name: stage for name, stage in self.under_way.items() if stage not in due}

    def _close(self, leaves: tuple[CollectiveStage, ...] = ()) -> None:
        if self.arrives or self.steps or leaves:
            self.found.append(LocalStage(tuple(self.arrives), tuple(self.steps), leaves))
            self.arrives, self.steps = [], []
