"""The rendezvous: a small TCP server that hears of every process and decides when the job is over. `hapsynth launch`
serves it where process 0 is to run; without it process 0 does.

Each line is a JSON object. A process says `hello` with what it is, `gather` with a name, the processes that take part,
its value and, from the thread that makes its calls, how many it had begun, `beat` with how many it has begun of plans
of which processes, and `leave`. It is told `welcome`, `gathered` with all values, `waiting` with who is missing,
`peers` with where the others answer, `beat`, `closes` before the server ends in peace, and `over` with the reason why
the job ends. A launcher says `ended` of a process that has, `stopped` of one that a signal has, and `interrupted` of
itself. Where a connection carries nothing any more, `again` on a new one is a sign of life, too: TCP waits ever longer
before it sends once more.
"""

from __future__ import annotations

import hmac
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from itertools import product
from typing import Any

from hapsynth._quantities import plural
from hapsynth.rendezvous.address import Address, JobError, Timeouts
from hapsynth.rendezvous.wire import HELLO_BYTES, Channel, encoded, printable

PROTOCOL = 2
_NOTICE_S = 30.0
_STRANGERS = 128
"""Connections that have not said hello; the oldest goes when there are more."""
AT_WORK = "at work"
INITIALIZING = "in jax.distributed.initialize"
COMPARING = "comparing what to plan"
"""What a process does at the meeting before one of them plans for all."""
_INITIALIZING_S = 5.0
_CUT = 0.65
"""Of the silence that is borne: for two that don't reach each other, which is noticed seconds after it began."""


Calls = dict[tuple[int, ...], int]
"""How many have begun, by the processes that take part in the plan."""


@dataclass(eq=False)
class Member:
    """A process that has said hello, or the launcher of the processes from `rank` on, `here` of them. `heard`: when, on
    the server's clock. `calls`: how many it has begun, by the processes that take part in the plan; since when it has
    begun no other.

    One that has `left` makes no more calls, unless it `returns`; it may still wait for the others to end, until its
    connection is `gone`.
    """

    rank: int
    host: str
    pid: int
    channel: Channel
    heard: float
    key: str = ""
    port: int = 0
    answer: str = ""
    here: int = 0
    cuda: str | None = None
    """The package by which JAX uses the GPUs there; '' where it sees some and has none."""
    calls: Calls = field(default_factory=Calls)
    calls_since: float = 0.0
    left: bool = False
    returns: bool = False
    failed: bool = False
    interrupted: bool = False
    gone: bool = False
    doing: str = AT_WORK
    doing_since: float = 0.0

    @property
    def has_ended(self) -> bool:
        """Whether it makes no more calls, though nothing failed in it."""
        return self.left and not self.returns and not self.failed

    def __str__(self) -> str:
        return named(self.rank, self.host, self.pid, self.here)


@dataclass(eq=False)
class _Gather:
    """`calls`: those that who waits had begun, where it makes them in the same thread."""

    ranks: tuple[int, ...]
    began: float
    noticed: float
    patient: bool
    values: dict[int, Any] = field(default_factory=dict[int, Any])
    calls: dict[int, Calls] = field(default_factory=dict[int, Calls])


@dataclass(frozen=True)
class _Suspicion:
    """Why the job is over, unless something better is heard soon. `says`: the process itself did, with its error."""

    reason: str
    rank: int
    says: bool
    at: float


class Server:
    """Serves the rendezvous from threads of its own, as long as the process lives or until `close`. Whoever says hello
    must know the `token`.

    Raises JobError where the port is taken or the host is not this one.
    """

    def __init__(self, address: Address, processes: int, timeouts: Timeouts, token: str = "") -> None:
        self.processes, self.timeouts, self._token = processes, timeouts, token
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.RLock()
        self._members: dict[int, Member] = {}
        self._launchers: dict[int, Member] = {}
        self._ended: dict[int, str] = {}
        self._stopped: dict[int, tuple[str, float]] = {}
        self._cut: dict[tuple[int, int], float] = {}
        self._never: dict[tuple[int, int], float] = {}
        self._gathers: dict[tuple[str, tuple[int, ...]], _Gather] = {}
        self._over = ""
        self._suspected: _Suspicion | None = None
        self._interrupted = ""
        self._strangers: list[Channel] = []
        self._closed = threading.Event()
        for work in (self._accept, self._watch):
            threading.Thread(target=work, name="hapsynth rendezvous", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        # Wakes the thread that accepts, which close alone does not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for channel in (*(m.channel for m in self._all()), *self._strangers):
                channel.hang_up()

    def drain(self, seconds: float) -> None:
        """Wait until all others have gone: process 0 takes the rendezvous and JAX's coordinator with it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(not m.gone for m in self._all() if m.rank):
            time.sleep(0.02)

    def closes(self, seconds: float) -> None:
        """Tell all that this process ends in peace: that the rendezvous goes with it is nobody's death."""
        until = time.monotonic() + seconds
        for member in self._all():
            member.channel.say({"closes": True})
        for member in self._all():
            member.channel.flush(until - time.monotonic())

    def launchers(self, but: int, heard_s: float) -> list[Member]:
        """Those that are there and were heard of in so many seconds, but one."""
        since = time.monotonic() - heard_s
        return [m for m in self._all() if m.here and m.rank != but and not m.gone and m.heard > since]

    def _all(self) -> list[Member]:
        with self._lock:
            return [*self._members.values(), *self._launchers.values()]

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # None to be had: this process has as many files open as it may. Half of what strangers hold goes.
                self._drop_strangers(len(self._strangers) // 2)
                self._closed.wait(0.1)
                continue
            channel = Channel(connection)
            with self._lock:
                self._strangers.append(channel)
            self._drop_strangers(_STRANGERS)
            try:
                threading.Thread(target=self._serve, args=(channel,), name="hapsynth rendezvous", daemon=True).start()
            except RuntimeError:
                # No more threads are to be had.
                self._known(channel)
                channel.close()

    def _drop_strangers(self, most: int) -> None:
        with self._lock:
            over = max(len(self._strangers) - most, 0)
            oldest, self._strangers = self._strangers[:over], self._strangers[over:]
        for channel in oldest:
            channel.hang_up()

    def _known(self, channel: Channel) -> None:
        with self._lock, suppress(ValueError):
            self._strangers.remove(channel)

    def _serve(self, channel: Channel) -> None:
        """One connection, from its hello to its end."""
        member = None
        # What is not ours, or breaks off, is not worth a traceback: whoever is missed by it is named.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            said = channel.read(HELLO_BYTES, time.monotonic() + self.timeouts.hello)
            member = self._hello(said or {}, channel)
            self._known(channel)
            if member is not None:
                for message in channel.messages():
                    # One that makes no sense is as if it had not been said.
                    with suppress(ValueError, KeyError, TypeError):
                        self._hear(member, message)
        self._known(channel)
        if member is None:
            # What was answered is to arrive.
            channel.flush(1.0)
        channel.close()
        if member is not None:
            self._lost(member)

    def _lost(self, member: Member) -> None:
        with self._lock:
            died, member.left, member.gone = not member.left, True, True
            if not died or self._there(member) is not member or self._may_still_save(member):
                return
            # Not one that has ended in peace before the others.
            member.failed = True
            reason = f"{member} has died: its own output says why, or the system's log where it was killed; {_AGAIN}"
            if member.here or not any(self._launched(member.rank)):
                self._end(reason)
            elif self._suspected is None or self._suspected.rank != member.rank:
                # Its launcher knows how it ended, and says so at once.
                self._suspected = _Suspicion(reason, member.rank, False, time.monotonic())

    def _there(self, member: Member) -> Member | None:
        return (self._launchers if member.here else self._members).get(member.rank)

    def _may_still_save(self, member: Member) -> bool:
        """Whether it is a process of a launcher that a signal came to. It may end in any way then, and others of its
        host, or of other hosts that the signal came to, are not ended for that."""
        return not member.here and any(launcher.interrupted for launcher in self._launched(member.rank))

    def _launched(self, rank: int) -> Iterable[Member]:
        return (m for m in self._launchers.values() if not m.left and m.rank <= rank < m.rank + m.here)

    def _hello(self, said: dict[str, Any], channel: Channel) -> Member | None:
        """The new member; None for a stranger, and for a sign of life."""
        again = said.get("again")
        hello = again or said["hello"]
        if not hmac.compare_digest(str(hello.get("token", "")).encode(), self._token.encode()):
            channel.say({"over": "", "refused": "token"})
            return None
        rank, here, pid = _whole(hello["rank"]), _whole(hello.get("here", 0)), _whole(hello["pid"])
        host, key = printable(hello["host"], 255), str(hello.get("key", ""))
        made = Member(rank, host, pid, channel, time.monotonic(), key, here=here)
        with self._lock:
            there = self._there(made)
            own = there is not None and hmac.compare_digest(there.key.encode(), key.encode())
            if again is not None:
                if there is not None and own:
                    there.heard = made.heard
                    channel.say({"over": self._over} if self._over else {"alive": True})
                return None
            problem = self._over
            if hello["protocol"] != PROTOCOL:
                problem = f"{made} has another version of hapsynth: install the same one everywhere"
            elif hello["processes"] != self.processes:
                problem = f"{made} is of a job of {hello['processes']} processes, and this one has {self.processes}"
                problem += _UNLIKE_HOSTS if here else ""
            elif not 0 <= rank < self.processes or not 0 <= here <= self.processes - rank:
                problem = f"{made} is not of this job, whose processes are 0 to {self.processes - 1}"
            elif there is not None and not there.gone and not own:
                problem = f"{made} and {there} are both process {rank}: end what an earlier job left behind"
            if problem:
                channel.say({"over": printable(problem)})
                if here and self._token and sum(m.here for m in self._launchers.values()) < self.processes:
                    # One of this job, which can't become whole; of a whole one it is what an earlier job left.
                    self._end(printable(problem))
                return None
            made.cuda = printable(hello["cuda"], 64) if "cuda" in hello else None
            made.port, made.answer = _whole(hello.get("port", 0)), printable(hello.get("answer", ""), 64)
            (self._launchers if here else self._members)[rank] = made
            channel.say({"welcome": PROTOCOL})
            self._judge_plugins()
            if not here and len(self._members) == self.processes:
                known = [[m.rank, m.channel.peer, m.port, m.answer] for m in self._members.values() if m.port]
                peers = encoded({"peers": known})
                for member in self._members.values():
                    member.channel.say(peers)
        return made

    def _hear(self, member: Member, said: dict[str, Any]) -> None:
        with self._lock:
            if self._there(member) is not member:
                # It has joined again, on another connection.
                return
            member.heard = time.monotonic()
            match said:
                case {"gather": name, "ranks": ranks, "value": value}:
                    begun = self._counted(said["calls"], member) if "calls" in said else None
                    name, patient = printable(name, 200), said.get("patient") is True
                    self._gather(member, name, self._ranks(ranks, member), value, patient, begun)
                case {"beat": calls, "doing": doing}:
                    counted = self._counted(calls, member)
                    if counted != member.calls:
                        member.calls, member.calls_since = counted, member.heard
                    self._heard_doing(member, printable(doing, 200))
                    if not member.here:
                        self._heard_of_peers(member, self._cut, said.get("unreached", ()))
                        self._heard_of_peers(member, self._never, said.get("never", ()))
                case {"leave": error, "calls": calls}:
                    member.calls, member.left, member.failed = self._counted(calls, member), True, bool(error)
                    member.returns = said.get("returns") is True
                    if error and self._suspected is None and not self._may_still_save(member):
                        # What failed in it may be another process's fault, which is noticed within a beat or two.
                        reason = f"{member} ended with {printable(error)}: {_way_out(str(error))}"
                        self._suspected = _Suspicion(reason, member.rank, True, member.heard)
                case {"ended": rank, "how": how, "failed": failed} if member.here:
                    self._ended[_whole(rank)] = printable(how)
                    said_why = self._suspected is not None and self._suspected.says and self._suspected.rank == rank
                    if failed and not said_why and not member.interrupted:
                        self._end(printable(how))
                case {"stopped": rank, "who": who} if member.here:
                    self._stopped[_whole(rank)] = (printable(who), member.heard)
                case {"continued": rank} if member.here:
                    self._stopped.pop(_whole(rank), None)
                case {"interrupted": why} if member.here:
                    self._interrupted, member.interrupted = self._interrupted or printable(why), True
                case _:
                    raise ValueError(said)
            interrupted = [m for m in self._launchers.values() if m.interrupted]
            if interrupted and all(m.left for m in interrupted):
                # What runs on hosts that the signal came to, too, may still save.
                self._end(self._interrupted)

    def _heard_doing(self, member: Member, doing: str) -> None:
        if doing != member.doing:
            member.doing, member.doing_since = doing, member.heard

    def _heard_of_peers(self, member: Member, cut: dict[tuple[int, int], float], unreached: Sequence[int]) -> None:
        for rank in [b for a, b in cut if a == member.rank and b not in unreached]:
            del cut[member.rank, rank]
        for rank in unreached:
            if rank in self._members:
                cut.setdefault((member.rank, rank), member.heard)

    def _ranks(self, said: Sequence[Any], member: Member) -> tuple[int, ...]:
        ranks = tuple(map(_whole, said))
        if member.rank not in ranks or len({*ranks}) < len(ranks) or not all(0 <= r < self.processes for r in ranks):
            raise ValueError(said)
        return ranks

    def _counted(self, calls: Sequence[tuple[Sequence[int], int]], member: Member) -> Calls:
        """Those of ranks that there are."""
        found: Calls = {}
        for ranks, count in calls:
            with suppress(ValueError, TypeError):
                found[self._ranks(ranks, member)] = _whole(count)
        return found

    def _gather(
        self, member: Member, name: str, ranks: tuple[int, ...], value: Any, patient: bool, begun: Calls | None
    ) -> None:
        now = time.monotonic()
        gather = self._gathers.setdefault((name, ranks), _Gather(ranks, now, now, patient))
        gather.values[member.rank] = value
        if begun is not None:
            gather.calls[member.rank] = begun
        if len(gather.values) == len(ranks):
            del self._gathers[name, ranks]
            said = encoded({"gathered": name, "values": [gather.values[r] for r in ranks]})
            for rank in ranks:
                self._members[rank].channel.say(said)
            return
        for (others_name, _), other in self._gathers.items():
            # Each waits for one that waits at the other.
            if other is not gather and other.values.keys() & {*ranks} and gather.values.keys() & {*other.ranks}:
                at = f"a plan of {listed(ranks)}, and others to one of {listed(other.ranks)}"
                if ranks == other.ranks:
                    at = f"{name}, and others to {others_name}"
                self._end(f"{member} comes to {at}: {_way_to_meet(name, others_name)}")

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self.timeouts.beat):
            with self._lock:
                now = time.monotonic()
                if now - last > self.timeouts.silence / 2:
                    self._excuse(now, now - last)
                last = now
                present = [m for m in self._all() if not m.gone]
                for member in present:
                    member.channel.say({"over": self._over} if self._over else {"beat": True})
                if not self._over:
                    self._judge(present, now)
                if self._suspected is not None and now - self._suspected.at > self.timeouts.suspicion:
                    self._end(self._suspected.reason)

    def _excuse(self, now: float, slept: float) -> None:
        """This process itself was stopped, or starved: it can't blame others for its silence."""
        for member in self._all():
            member.heard = now
        for gather in self._gathers.values():
            # One that began as it went on again is not to lie ahead.
            gather.began = min(now, gather.began + slept)
            gather.noticed = min(now, gather.noticed + slept)
        self._cut.clear()
        self._never.clear()
        self._stopped = {rank: (who, min(now, since + slept)) for rank, (who, since) in self._stopped.items()}

    def _judge(self, present: Sequence[Member], now: float) -> None:
        for rank, (who, since) in self._stopped.items():
            if rank not in self._ended and now - since > self.timeouts.silence - self.timeouts.beat:
                self._end(
                    f"{who} was stopped by a signal and has not gone on for {self.timeouts.silence:g} s: continue it "
                    "(kill -CONT) sooner, or restart it (HAPSYNTH_SILENCE_S allows more)"
                )
        for member in present:
            for ranks, calls in member.calls.items():
                for other in (self._members[r] for r in ranks if r in self._members):
                    # A call that raises in all is no longer counted, which is heard of each a beat later.
                    gone = other.has_ended and now - other.heard > 2 * self.timeouts.beat
                    if gone and other.calls.get(ranks, 0) < calls:
                        self._end(
                            f"{other} has ended after {plural(other.calls.get(ranks, 0), 'call')} of plans, and "
                            f"{member} is in call {calls}: every process must make the same calls"
                        )
        self._judge_silence(present, now)
        self._judge_initializing(present, now)
        self._judge_links(now)
        for (name, _), gather in list(self._gathers.items()):
            self._judge_waiting(name, gather, now)

    def _judge_silence(self, present: Sequence[Member], now: float) -> None:
        silent = lambda seconds: [m for m in present if not m.left and now - m.heard > seconds]
        if not silent(self.timeouts.silence):
            return
        # All that went silent with it, by their processes: a machine, or the link of this one.
        lost = silent(self.timeouts.silence - 3 * self.timeouts.beat)
        lost = [
            m for m in lost if not m.here or not any(m.rank <= o.rank < m.rank + m.here for o in lost if not o.here)
        ]
        others = [m for m in present if not m.here and m.rank != 0]
        here = f"; or {socket.gethostname()}'s own link is down" if len(others) > 1 and len(lost) >= len(others) else ""
        has = "has" if len(lost) == 1 else "have"
        self._end(
            f"{', '.join(map(str, lost))} {has} not been heard of for {self.timeouts.silence:g} s: it is stopped, its "
            f"machine is down or the network between is{here}; continue or restart it (HAPSYNTH_SILENCE_S allows more)"
        )

    def _judge_initializing(self, present: Sequence[Member], now: float) -> None:
        """Whoever has ended never comes to JAX's initialization, which would wait for five minutes."""
        ended = list(self._ended.values())
        waits = [m for m in present if m.doing == INITIALIZING and not m.left]
        if ended and waits and all(now - m.doing_since > _INITIALIZING_S for m in waits):
            self._end(
                f"{'; '.join(ended)}, and {listed(sorted(m.rank for m in waits))} "
                f"wait{'s' if len(waits) == 1 else ''} for it {INITIALIZING}: every process must come to it"
            )

    def _judge_plugins(self) -> None:
        """Without the plugin for CUDA JAX computes on the CPU, and the others wait in its initialization for GPUs."""
        having = [m for m in self._members.values() if m.cuda]
        lacking = [m for m in self._members.values() if m.cuda == ""]
        if having and lacking:
            hosts = ", ".join(dict.fromkeys(m.host for m in lacking))
            self._end(
                f"{lacking[0]} sees GPUs, and its JAX has no plugin for CUDA, as {having[0]} has: install "
                f"{having[0].cuda} on {hosts} and start the job again, or set JAX_PLATFORMS=cpu in every process, "
                "which uses no GPUs"
            )

    def _judge_links(self, now: float) -> None:
        """Two that don't reach each other wait in a collective for ever. Heard of lately, both are alive."""
        # Who never reached another may be behind a wall that only lets him out: then that one reaches him neither.
        pairs = [(self._cut, pair) for pair in self._cut]
        pairs += [(self._never, (a, b)) for a, b in self._never if (b, a) in self._never]
        for cut, (a, b) in pairs:
            one, other, since = self._members[a], self._members[b], cut[a, b]
            if one.left or other.left or min(one.heard, other.heard) < now - max(3.0, 3 * self.timeouts.beat):
                cut[a, b] = now
            elif now - since > self.timeouts.silence * _CUT:
                self._end(
                    f"{one} has not reached {other} for {now - since:.0f} s, and both reach the rendezvous: the "
                    "network between these two is cut (firewall, route, switch); mend it and restart the job "
                    "(HAPSYNTH_SILENCE_S allows more)"
                )

    def _judge_waiting(self, name: str, gather: _Gather, now: float) -> None:
        missing = [r for r in gather.ranks if r not in gather.values]
        never = [r for r in missing if r not in self._members or self._members[r].returns]
        waited = now - gather.began
        here = f"{listed(sorted(gather.values))} wait{'s' if len(gather.values) == 1 else ''} at a plan"
        gone = [str(self._members[r]) for r in missing if r not in never and self._members[r].has_ended]
        ended = [self._ended[r] for r in never if r in self._ended]
        if gone:
            self._end(f"{', '.join(gone)} has ended, and {here}: every process must make the same calls")
        elif ended:
            self._end(f"{'; '.join(ended)}, and {here}: every process must make the same calls")
        elif passed := next(self._passed(gather, missing, now), ""):
            self._end(passed)
        elif never and waited > self.timeouts.join:
            calls = f"; {_TO_PLAN}" if COMPARING in name else " and calls the plan"
            self._end(
                f"{listed(never)} did not come to the plan within {self.timeouts.join:g} s, where {here}: see whether "
                f"it runs{calls} (HAPSYNTH_JOIN_S allows more)"
            )
        elif waited > self.timeouts.barrier and not gather.patient:
            self._end(
                f"{', '.join(self._named(r) for r in missing)} did not come to the plan within "
                f"{self.timeouts.barrier:g} s, where {here}: {_way_to_meet(name)}; or set HAPSYNTH_BARRIER_S higher "
                "where tracing or compiling takes longer"
            )
        elif now - gather.noticed > _NOTICE_S:
            gather.noticed = now
            for rank in gather.values:
                names = ", ".join(self._named(r) for r in missing)
                self._members[rank].channel.say({"waiting": names, "seconds": waited})

    def _passed(self, gather: _Gather, missing: Sequence[int], now: float) -> Iterator[str]:
        """Who is missed and never comes: it has begun a call that comes after this meeting for one who waits in it, and
        waits in turn for that one. A call that goes on is not waited in: of a plan whose devices send nothing."""
        others = [self._members[r] for r in missing if r in self._members and not self._members[r].left]
        for other in others:
            if now - max(gather.began, other.calls_since) <= self.timeouts.silence:
                continue
            for (rank, begun), (ranks, calls) in product(gather.calls.items(), other.calls.items()):
                if rank in ranks and calls > begun.get(ranks, 0):
                    yield (
                        f"{self._named(rank)}, waits after {plural(begun.get(ranks, 0), 'call')} of plans for {other}, "
                        f"which is in call {calls}: every process must call, save and restore in the same order"
                    )

    def _named(self, rank: int) -> str:
        return f"{self._members[rank]}, {self._members[rank].doing}" if rank in self._members else f"process {rank}"

    def _end(self, reason: str) -> None:
        """The job is over: told now and, for those who say hello later, from now on."""
        if not self._over:
            # What fails after a signal to all is no process's own fault.
            self._over = self._interrupted or reason
            for member in self._all():
                member.channel.say({"over": self._over})


_UNLIKE_HOSTS = (
    ": give every launcher the same --nnodes and -n; or, where hosts have unlike numbers of processes, --processes "
    "(how many in all), --process (the first one there) and -n (how many there)"
)
_AGAIN = "mend that, and start the job again"
_WAYS_OUT = (
    ("MemoryError|RESOURCE_EXHAUSTED|[Oo]ut of memory", "give that host more memory, or set a lower memory_limit"),
    ("Errno 28|No space left|Errno 122", "free space there, or save elsewhere"),
)


def _way_out(error: str) -> str:
    """Of a process that says with which error it ended."""
    way = next((f"{way}, and start the job again" for found, way in _WAYS_OUT if re.search(found, error)), _AGAIN)
    return f"its own output has the traceback; {way}"


_TO_PLAN = (
    "every process of the mesh must call `hapsynth.synthesize`; to plan in one alone give it the `Cluster`, save the "
    "plan, and `hapsynth.load` it in all"
)


def _way_to_meet(*names: str) -> str:
    """Where processes come to unlike meetings, or some of them to none."""
    planning = any(COMPARING in name for name in names)
    return _TO_PLAN if planning else "call the same plans in the same order everywhere"


def _whole(said: Any) -> int:
    if type(said) is not int:
        raise ValueError(said)
    return said


def listed(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def named(rank: int, host: str, pid: int, here: int = 0) -> str:
    """A process, or with `here` the launcher of so many from it on."""
    who = f"the launcher of {listed(range(rank, rank + here))}" if here else f"process {rank}"
    return f"{who} on {host} (pid {pid})"


def serving_host(host: str) -> str:
    """The address to listen at so that others reach this machine as `host`; '' for all of them.

    A machine's name may mean its loopback address here, or one that only others know it by.
    """
    with suppress(OSError, ValueError):
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        if host == "localhost" or ip_address(host.split("%")[0]).is_loopback:
            return next(a for a in ("127.0.0.1", *found) if a in found)
    with suppress(OSError):
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        if len(found) == 1 and not ip_address((only := found.pop()).split("%")[0]).is_loopback:
            family = socket.AF_INET6 if ":" in only else socket.AF_INET
            with socket.socket(family) as probe:
                probe.bind((only, 0))
            return only
    return ""


def _listen(address: Address) -> socket.socket:
    host, port = address
    try:
        if at := serving_host(host):
            return socket.create_server((at, port), family=socket.AF_INET6 if ":" in at else socket.AF_INET)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise JobError(
            f"process 0 on {socket.gethostname()} can't serve the rendezvous at {host}:{port}: {error.strerror}; "
            f"set HAPSYNTH_RENDEZVOUS=HOST:PORT to a free port of this host, the same in every process"
        ) from None
