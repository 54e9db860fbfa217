"""A program as its host runs it in staged form: local and collective stages, and loops and branches around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hapsynth.graph.ir import Graph, Literal
from hapsynth.instructions.program.bundles import independent, is_empty
from hapsynth.instructions.program.program import Convert, Property, reads, writes
from hapsynth.instructions.staging.stages import Cond, Loop, Stage, Step


class HostSlot(NamedTuple):
    """A value that no op makes: an `output`, a loop's `trip`, a `decision` of where control flow goes."""

    kind: str
    number: int


Name = Property | HostSlot


@dataclass(frozen=True, eq=False)
class Copies:
    """All at once: each target becomes its source, in memory of its own."""

    sources: tuple[Property | Literal, ...]
    targets: tuple[Name, ...]


@dataclass(frozen=True, eq=False)
class LoopStep:
    """What goes on around one trip of a loop; `trip` counts them."""

    loop: Loop
    trip: HostSlot


class LoopEnter(LoopStep):
    """A loop's first trip: what it carries and, of a scan, what it stacks to and how often it ran."""


class Slice(LoopStep):
    """A scan's parts for this trip."""


class LoopAdvance(LoopStep):
    """The end of a trip: what the next one carries, and the pieces of this one where they are stacked."""


@dataclass(frozen=True, eq=False)
class HostDecision:
    """An int32 by which the host decides; `unsure`: the largest of all devices'."""

    source: Property
    target: HostSlot
    unsure: bool


LocalStep = Stage | Loop | Cond | Convert | Copies | LoopEnter | Slice | LoopAdvance | HostDecision
Sent = Convert | HostDecision


@dataclass(eq=False)
class CollectiveStage:
    """Collectives that don't depend on one another. A local stage before it hands over what they send; one after it,
    the next where nothing overlaps, takes what arrives."""

    steps: tuple[Sent, ...]


@dataclass(eq=False)
class LocalStage:
    """What devices do by themselves: take what `arrives`, run `steps`, hand over what `leaves`.

    `reads` and `writes` are what they have at hand before and after; `dead` of it nobody needs any more.
    """

    arrives: tuple[CollectiveStage, ...]
    steps: tuple[LocalStep, ...]
    leaves: tuple[CollectiveStage, ...]
    reads: tuple[Name, ...] = ()
    writes: tuple[Name, ...] = ()
    dead: tuple[Name, ...] = ()


@dataclass(eq=False)
class HostLoop:
    """A loop with collectives in its body: `count` trips, or as long as `decision`, which `test` makes, is not 0."""

    body: list[Item]
    count: int = 0
    test: list[Item] = field(default_factory=list)
    decision: HostSlot | None = None
    own: tuple[Name, ...] = ()
    dead: tuple[Name, ...] = ()


@dataclass(eq=False)
class HostCond:
    """Branches with collectives, of which `decision` picks one."""

    branches: list[list[Item]]
    decision: HostSlot
    writes: tuple[Property, ...]
    dead: tuple[Name, ...] = ()


Item = LocalStage | CollectiveStage | HostLoop | HostCond
Overlap = Callable[
    [Graph, tuple[CollectiveStage, ...], Sequence[LocalStep], tuple[CollectiveStage, ...]],
    list["LocalStage | CollectiveStage"],
]
"""(graph, what arrives, steps and collectives in their order, what leaves) -> stages, in which collectives run beside
others. What leaves is handed over by the last of them."""


def schedule(
    graph: Graph, steps: Sequence[Step], last: Copies, kept: Iterable[Name], overlap: Overlap | None = None
) -> list[Item]:
    """The items of a program that ends with `last`, with what each reads, writes and leaves dead. `kept` stays.
    Loops and branches with collectives begin when all before them has arrived, also where there is `overlap`."""
    items = _Scheduler(graph, overlap).items([*steps, last])
    _live(graph, items, {*last.targets, *kept})
    return items


class _Scheduler:
    def __init__(self, graph: Graph, overlap: Overlap | None) -> None:
        self.graph, self.overlap, self.slots = graph, overlap, 0

    def slot(self, kind: str) -> HostSlot:
        self.slots += 1
        return HostSlot(kind, self.slots)

    def items(self, steps: Sequence[LocalStep]) -> list[Item]:
        out: list[Item] = []
        run: list[LocalStep] = []
        arrives: tuple[CollectiveStage, ...] = ()

        def close(sent: Sequence[Sent] = ()) -> None:
            nonlocal arrives
            leaves = (CollectiveStage(tuple(sent)),) if sent else ()
            if self.overlap is not None:
                out.extend(self.overlap(self.graph, arrives, run, leaves))
            elif run or arrives or leaves:
                out.append(LocalStage(arrives, tuple(run), leaves))
            out.extend(leaves)
            run.clear()
            arrives = leaves

        waiting = list(steps)[::-1]
        while waiting:
            step = waiting.pop()
            if (
                is_local(self.graph, step)
                or not isinstance(step, Convert | HostDecision | Loop | Cond)
                or (isinstance(step, Convert) and self.overlap is not None)
            ):
                run.append(step)
            elif isinstance(step, Convert | HostDecision):
                sent: list[Sent] = [step]
                while waiting and isinstance(following := waiting[-1], Convert) and self.joins(sent, following):
                    sent.append(following)
                    waiting.pop()
                close(sent)
            elif isinstance(step, Loop):
                trip = self.slot("trip")
                run.append(LoopEnter(step, trip))
                close()
                out.append(self.loop(step, trip))
                run.append(Copies(step.carried, step.final))
            elif isinstance(step.number, Literal):
                taken = min(max(int(step.number.value), 0), len(step.branches) - 1)
                waiting += [Copies(step.given[taken], step.results), *step.branches[taken][::-1]]
            else:
                decision = self.slot("decision")
                decide = HostDecision(step.number, decision, step.unsure)
                if step.unsure:
                    close([decide])
                else:
                    run.append(decide)
                close()
                branches = [
                    self.items([*branch, Copies(given, step.results)])
                    for branch, given in zip(step.branches, step.given, strict=True)
                ]
                out.append(HostCond(branches, decision, step.results))
        close()
        return out

    def joins(self, sent: Sequence[Sent], step: Convert) -> bool:
        """Whether a step is a collective that can run with these."""
        return not is_local(self.graph, step) and independent([s for s in sent if isinstance(s, Convert)], step)

    def loop(self, loop: Loop, trip: HostSlot) -> HostLoop:
        turn = LoopAdvance(loop, trip)
        if loop.region.kind == "scan":
            body = self.items([Slice(loop, trip), *loop.body, turn])
            return HostLoop(body, int(loop.region.count), own=(*loop.carried, *loop.stacked, trip))
        assert loop.goes_on is not None
        decision = self.slot("decision")
        test = self.items(
            [Copies(loop.carried, loop.tested), *loop.test, HostDecision(loop.goes_on, decision, loop.unsure)]
        )
        return HostLoop(self.items([*loop.body, turn]), test=test, decision=decision, own=loop.carried)


def is_local(graph: Graph, step: LocalStep) -> bool:
    """Whether no device waits for another in a step."""
    match step:
        case Convert():
            return not step.is_collective or is_empty(graph, step)
        case HostDecision():
            return not step.unsure
        case Loop():
            return not step.unsure and all(is_local(graph, s) for s in (*step.body, *step.test))
        case Cond():
            return not step.unsure and all(is_local(graph, s) for branch in step.branches for s in branch)
        case _:
            return True


def _through(graph: Graph, steps: Iterable[LocalStep], last: Iterable[Name]) -> set[Name]:
    """What a run of steps that leaves `last` needs from before it."""
    needed, made = set[Name](), set[Name]()
    for step in steps:
        needed |= needs(graph, step) - made
        made |= makes(graph, step)
    return needed | (set(last) - made)


def needs(graph: Graph, step: LocalStep) -> set[Name]:
    match step:
        case Stage():
            needed, made = set[Name](), set[Name]()
            for i in step.instructions:
                needed |= set(reads(graph, i)) - made
                made.update(writes(graph, i))
            return needed
        case Convert():
            return set(reads(graph, step))
        case Loop():
            body = _through(graph, step.body, (*step.onward, *step.pieces)) - {*step.carried, *step.parts}
            goes_on = () if step.goes_on is None else (step.goes_on,)
            test = _through(graph, step.test, goes_on) - set(step.tested)
            return body | test | set(step.whole) | {p for p in step.initial if not isinstance(p, Literal)}
        case Cond():
            branches = [_through(graph, b, given) for b, given in zip(step.branches, step.given, strict=True)]
            return set[Name]().union(*branches) | ({step.number} if not isinstance(step.number, Literal) else set())
        case Copies():
            return {p for p in step.sources if not isinstance(p, Literal)}
        case LoopEnter():
            return {p for p in step.loop.initial if not isinstance(p, Literal)}
        case Slice():
            return {*step.loop.whole, step.trip}
        case LoopAdvance():
            scan = {*step.loop.stacked, step.trip} if step.loop.region.kind == "scan" else set[Name]()
            return {*step.loop.onward, *step.loop.pieces, *scan}
        case HostDecision():
            return {step.source}


def makes(graph: Graph, step: LocalStep) -> set[Name]:
    match step:
        case Stage():
            return {p for i in step.instructions for p in writes(graph, i)}
        case Convert():
            return set(writes(graph, step))
        case Loop():
            return {*step.final, *step.stacked}
        case Cond():
            return set(step.results)
        case Copies():
            return set(step.targets)
        case LoopEnter() | LoopAdvance():
            scan = {*step.loop.stacked, step.trip} if step.loop.region.kind == "scan" else set[Name]()
            return {*step.loop.carried, *scan}
        case Slice():
            return set(step.loop.parts)
        case HostDecision():
            return {step.target}


def _live(graph: Graph, items: Sequence[Item], needed: set[Name]) -> set[Name]:
    """Note what each item reads, writes and leaves dead, where `needed` is read after them; what they need."""
    needed = set(needed)
    for item in reversed(items):
        match item:
            case LocalStage():
                arrived = set[Name]().union(*(makes(graph, s) for stage in item.arrives for s in stage.steps))
                made = arrived.union(*(makes(graph, s) for s in item.steps))
                left = [p for stage in item.leaves for s in stage.steps for p in needs(graph, s)]
                read = _through(graph, item.steps, left) - arrived
                after = needed
                needed = (needed - made) | read
                item.reads, item.writes = ordered(read), ordered(made & after)
                item.dead = ordered(needed - after)
            case CollectiveStage():
                pass
            case HostLoop():
                decided = {item.decision} if item.decision else set[Name]()
                outer = _live(graph, item.body, set()) | _live(graph, item.test, set())
                # Each trip finds what the first found.
                around = needed | outer | set(item.own)
                _live(graph, item.body, around)
                _live(graph, item.test, around | decided)
                item.dead = ordered((around | decided) - needed)
                needed = around
            case HostCond():
                before = set[Name]().union(*(_live(graph, b, needed) for b in item.branches), {item.decision})
                item.dead = ordered((before | set(item.writes)) - needed)
                needed = before
    return needed


def ordered(names: Iterable[Name]) -> tuple[Name, ...]:
    """The same in every process and run."""
    return tuple(sorted(names, key=lambda n: (isinstance(n, HostSlot), n)))
