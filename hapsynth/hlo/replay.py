"""A scheduled program run on paper: how much of what is sent is hidden behind what is computed.

XLA's schedule has one stream that computes, in the order of the text, and one that sends: a collective takes the link
from its start, or from when the one before it has ended, and its end holds the computing up for as long as it is not
there. So a transfer is hidden as far as what is scheduled between its start and its end takes as long: none of that
needs it. How long things take is asked of the caller: a kernel by a device's roofline, a collective by the network's
price. While something is sent, computing takes `slowdown` times as long.

Of a switch the device's own branch is run where it is known, else the one that takes longest; of a loop of many trips
the second stands for all that follow, and one whose trips XLA does not know runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace

from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.hlo.collectives import Collective, started, trips_of
from hapsynth.hlo.text import Instruction, Module, parse
from hapsynth.hlo.work import FREE, Computation, Work

Price = Callable[[Collective], float]
"""Seconds of one run of a collective."""
RUN_OTHERS = ("while", "conditional", "call", "async-start")
"""Instructions that run computations."""


@dataclass(frozen=True)
class Replay:
    """One call on one device, in seconds. `computing_s`: of the kernels; `sending_s`: of the collectives; `exposed_s`:
    in which nothing is computed, as it waits for a collective. `sent_bytes` goes over the wire, of which `hidden_bytes`
    beside computing. `kernels`: that are launched; `products`: FLOPs of contractions; `library_calls`: cuBLAS's,
    cuDNN's and other kernels that are not XLA's own."""

    seconds: float = 0.0
    computing_s: float = 0.0
    sending_s: float = 0.0
    exposed_s: float = 0.0
    hidden_s: float = 0.0
    sent_bytes: float = 0.0
    hidden_bytes: float = 0.0
    kernels: float = 0.0
    library_calls: float = 0.0
    products: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of the bytes on the wire that is hidden; 1 where nothing is sent."""
        return self.hidden_bytes / self.sent_bytes if self.sent_bytes else 1.0

    @property
    def hidden_of_time(self) -> float:
        """The share of the seconds in which something is sent that is hidden; 1 where nothing is sent."""
        return self.hidden_s / self.sending_s if self.sending_s else 1.0

    def __add__(self, other: Replay) -> Replay:
        """One after the other."""
        return Replay(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Replay)))

    def times(self, trips: float) -> Replay:
        return Replay(*(trips * getattr(self, f.name) for f in fields(Replay)))


def replay(
    text: str,
    kind: DeviceKind,
    price: Price,
    branches: Mapping[int, int] | None = None,
    device: int | None = None,
) -> Replay:
    """Run a program's text (`compiled.as_text()`) on a device of a kind. `branches`: which branch the device takes of
    a switch of so many. `device`: its place in the mesh, as not all send in each collective; None: one that does. That
    takes as long on all, as the next collective waits for those that have sent.

    Raises HloError for another text.
    """
    clock = _Clock(parse(text), kind, price, branches or {}, device)
    clock.run(clock.module.entry)
    return replace(clock.done, seconds=clock.now)


def loops_of_unknown_trips(text: str) -> int:
    """How many loops of a program's text are run once here, as XLA does not know how often they are."""
    every = (i for instructions in parse(text).computations.values() for i in instructions)
    return sum(i.opcode == "while" and trips_of(i) is None for i in every)


def steps_of(module: Module, computation: str) -> Iterator[tuple[Instruction, Collective | None, Work | None]]:
    """What each instruction starts, or does; neither for what takes no time, and for what runs others."""
    inside = Computation(module, computation)
    types = {i.name: i.type for i in inside.instructions}
    for i in inside.instructions:
        start = started(module, i, types)
        idle = start is not None or i.opcode in RUN_OTHERS or i.opcode in FREE or i.opcode.endswith("-done")
        yield i, start, None if idle else inside.work(i)


def kernel_seconds(work: Work, kind: DeviceKind) -> float:
    """By the roofline: a launch, and then computing or moving bytes, whichever takes longer."""
    computing = work.elementwise / kind.rate("float32", ordinary=True)
    for flops, dtype, precise in work.contracted:
        curve = kind.curve("matmul", dtype, ordinary=precise)
        computing += flops / kind.rate(dtype, ordinary=precise) if curve is None else float(curve.seconds(flops))
    return kind.overhead + max(computing, work.nbytes / kind.bandwidth)


@dataclass(frozen=True)
class _Transfer:
    """On the link, when its turn has come, for `seconds` until it `ends`."""

    ends: float
    seconds: float
    nbytes: float


class _Clock:
    """Where the two streams are. `now`: of the one that computes; `sent`: when the other has ended all that it has."""

    def __init__(
        self, module: Module, kind: DeviceKind, price: Price, branches: Mapping[int, int], device: int | None
    ) -> None:
        self.module, self.kind, self.price, self.branches, self.device = module, kind, price, branches, device
        self.now, self.sent = 0.0, 0.0
        self.done = Replay()
        self.waits: list[tuple[float, float]] = []
        """From when until when nothing was computed."""
        self._works: dict[str, list[tuple[Instruction, Collective | None, Work | None]]] = {}

    def run(self, name: str) -> None:
        under_way: dict[str, _Transfer] = {}
        for i, start, work in self._instructions(name):
            if start is not None:
                transfer = self._send(start)
                if start.asynchronous:
                    under_way[i.name] = transfer
                else:
                    self._wait(transfer)
            elif work is not None:
                self._compute(work, library="custom_call_target=" in i.attributes)
            elif i.opcode == "while":
                trips = trips_of(i)
                self._loop(i.computations()[0], 1 if trips is None else trips)
            elif i.opcode == "conditional":
                self._branch(i.computations())
            elif i.opcode in ("call", "async-start"):
                self.run(i.computations()[0])
            elif i.opcode.endswith("-done") and i.operands[0] in under_way:
                self._wait(under_way.pop(i.operands[0]))
            elif i.opcode.endswith("-update") and i.operands[0] in under_way:
                under_way[i.name] = under_way.pop(i.operands[0])

    def _instructions(self, name: str) -> list[tuple[Instruction, Collective | None, Work | None]]:
        if name not in self._works:
            self._works[name] = [*steps_of(self.module, name)]
        return self._works[name]

    def _send(self, one: Collective) -> _Transfer:
        seconds = self.price(one)
        self.sent = max(self.now, self.sent) + seconds
        sent = one.wire_bytes if self.device is None else one.sent_by(self.device)
        self.done += Replay(sending_s=seconds, sent_bytes=sent)
        return _Transfer(self.sent, seconds, sent)

    def _wait(self, transfer: _Transfer) -> None:
        """Until it has ended. What was computed while it was waiting for the link itself did not hide it."""
        waited = max(0.0, transfer.ends - self.now)
        if waited:
            self.waits.append((self.now, transfer.ends))
            self.now = transfer.ends
        begun = transfer.ends - transfer.seconds
        exposed = sum(max(0.0, min(end, transfer.ends) - max(start, begun)) for start, end in self.waits)
        hidden = max(0.0, transfer.seconds - exposed)
        share = hidden / transfer.seconds if transfer.seconds else 1.0
        self.done += Replay(exposed_s=waited, hidden_s=hidden, hidden_bytes=share * transfer.nbytes)

    def _compute(self, work: Work, *, library: bool) -> None:
        seconds, slow = kernel_seconds(work, self.kind), self.kind.slowdown
        beside = min(slow * seconds, max(0.0, self.sent - self.now))
        taken = beside + seconds - beside / slow
        self.now += taken
        self.done += Replay(computing_s=taken, kernels=1, library_calls=float(library), products=work.products)

    def _loop(self, body: str, trips: int) -> None:
        if trips < 1:
            return
        self.run(body)
        if trips > 1:
            before, began, sent = self.done, self.now, self.sent
            self.run(body)
            more = (trips - 2) * (self.now - began)
            self.done += (self.done + before.times(-1)).times(trips - 2)
            self.now += more
            # What is under way beside a loop that sends nothing ends when it ends.
            self.sent += more if self.sent > sent else 0.0

    def _branch(self, names: list[str]) -> None:
        if len(names) in self.branches:
            self.run(names[self.branches[len(names)]])
            return
        state = self.now, self.sent, self.done, self.waits
        ends: list[tuple[float, float, Replay, list[tuple[float, float]]]] = []
        for name in names:
            self.now, self.sent, self.done, self.waits = *state[:3], [*state[3]]
            self.run(name)
            ends.append((self.now, self.sent, self.done, self.waits))
        self.now, self.sent, self.done, self.waits = max(ends, key=lambda end: end[0])
