"""Where the collectives of a program in staged form start and are waited for, so that devices compute meanwhile.

The order of the program's instructions decides: collectives start in that order, the same in every process, each as
soon as its operand is there and the one before it has started. What needs nothing that arrives is computed in that
order too. What does, as an optimizer's update, waits until a collective needs it, or to the end, where it goes in the
order of the collectives: so nothing waits for the network that need not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

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
    instructions_of,
    is_local,
    makes,
    needs,
    ordered,
)

Family = Callable[[Convert], tuple[Hashable | None, float]]
"""What collectives that go as one have in common, None for one that goes alone, and the bytes that this one sends."""


def overlapped(
    family: Family,
    started_bytes: int,
    graph: Graph,
    arrives: tuple[CollectiveStage, ...],
    steps: Sequence[LocalStep],
    leaves: tuple[CollectiveStage, ...],
) -> list[LocalStage | CollectiveStage]:
    """Local stages, and collective stages where they start, of steps in none of which a host decides. What `arrives`
    first; all have arrived at the end, where what `leaves` is handed over. `started_bytes`: as `LoweringOptions` has
    it."""
    run = _with_results(graph, _as_needed(graph, _apart(steps)))
    return _Stages(graph, run, _sent(family, started_bytes, graph, run), arrives).stages(leaves)


def _apart(steps: Sequence[LocalStep]) -> list[LocalStep]:
    """One instruction each."""
    return [
        one
        for step in steps
        for one in ([Stage((i,)) for i in instructions_of(step)] if isinstance(step, Stage) else [step])
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


@dataclass
class _Bundle:
    """Collectives that go as one: their places, the bytes that they send, and the first place that needs one."""

    members: list[int] = field(default_factory=list)
    nbytes: float = 0.0
    needed: int = 0


def _sent(
    family: Family, started_bytes: int, graph: Graph, steps: Sequence[LocalStep]
) -> list[tuple[int, CollectiveStage]]:
    """The collectives in their order, each with the place of the step after which it can start. Small ones of a family
    go together, with the last of them, unless one is needed before."""
    first_use: dict[int, int] = {}
    maker: dict[Name, int] = {}
    ready: list[int] = []
    for place, step in enumerate(steps):
        made_at = [maker[name] for name in needs(graph, step) if name in maker]
        for at in made_at:
            first_use.setdefault(at, place)
        # What another collective brings is handed over here, not before.
        ready.append(max((place if _is_sent(graph, steps[at]) else at for at in made_at), default=-1))
        maker.update((name, place) for name in makes(graph, step))
    bundles: list[_Bundle] = []
    filling: dict[Hashable, _Bundle] = {}
    for place, step in enumerate(steps):
        if not isinstance(step, Convert) or not _is_sent(graph, step):
            continue
        name, nbytes = family(step)
        bundle = filling.get(name) if name is not None else None
        if bundle is None or bundle.nbytes >= started_bytes or bundle.needed <= place:
            bundle = _Bundle(needed=len(steps))
            bundles.append(bundle)
            if name is not None:
                filling[name] = bundle
        bundle.members.append(place)
        bundle.nbytes += nbytes
        bundle.needed = min(bundle.needed, first_use.get(place, len(steps)))
    found: list[tuple[int, CollectiveStage]] = []
    start = -1
    for bundle in sorted(bundles, key=lambda bundle: bundle.members[-1]):
        start = max(start, *(ready[place] for place in bundle.members))
        sent = [step for place in bundle.members if isinstance(step := steps[place], Convert)]
        found.append((start, CollectiveStage(tuple(sent))))
    return found


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
