"""The rendezvous: a small TCP server in process 0 that hears of every process and decides when the job is over.

Each line is a JSON object. A process says `hello` with what it is, `gather` with a name, the processes that take part
and its value, `beat` with how many calls it has begun of plans of which processes, and `leave`. It is told `welcome`,
`gathered` with all values, `waiting` with who is missing, `beat`, and `over` with the reason why the job ends.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hapsynth._words import plural
from hapsynth.jobs._address import Address, JobError, Patience

PROTOCOL = 1
_NOTICE_S = 30.0
SUSPECT_S = 1.0
_LOOPBACK = ("localhost", "127.0.0.1")


@dataclass(eq=False)
class Member:
    """A process that has said hello. `heard`: when, on the server's clock. `calls`: how many it has begun, by the
    processes that take part in the plan.

    One that has `left` makes no more calls; it may still wait for the others to end, until its connection is `gone`.
    """

    rank: int
    host: str
    pid: int
    connection: socket.socket
    heard: float
    calls: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])
    left: bool = False
    failed: bool = False
    gone: bool = False
    doing: str = "at work"

    def __str__(self) -> str:
        return f"process {self.rank} on {self.host} (pid {self.pid})"

    def tell(self, message: dict[str, Any]) -> None:
        """A process that can't be told is noticed by what it does not say."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")


@dataclass(eq=False)
class _Gather:
    ranks: tuple[int, ...]
    began: float
    noticed: float
    values: dict[int, Any] = field(default_factory=dict[int, Any])


class Server:
    """Serves the rendezvous from threads of its own, as long as the process lives or until `close`.

    Raises JobError where the port is taken or the host is not this one.
    """

    def __init__(self, address: Address, processes: int, patience: Patience) -> None:
        self.processes, self.patience = processes, patience
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.RLock()
        self._members: dict[int, Member] = {}
        self._gathers: dict[tuple[str, tuple[int, ...]], _Gather] = {}
        self._over, self._suspected, self._suspected_at = "", "", 0.0
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
            for member in self._members.values():
                _hang_up(member.connection)

    def drain(self, seconds: float) -> None:
        """Wait until all others have gone: this process takes the rendezvous and JAX's coordinator with it."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(not m.gone for m in self._members.values() if m.rank):
            time.sleep(0.02)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="hapsynth rendezvous", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection, from its hello to its end."""
        member = None
        # What is not ours, or breaks off, is not worth a traceback: whoever is missed by it is named.
        with suppress(OSError, ValueError, KeyError, TypeError), connection, connection.makefile("rb") as lines:
            connection.settimeout(self.patience.silence)
            member = self._hello(json.loads(lines.readline()), connection)
            if member is None:
                return
            connection.settimeout(None)
            for line in lines:
                self._hear(member, json.loads(line))
        if member is not None:
            with self._lock:
                died, member.left, member.gone = not member.left, True, True
                if died and self._members.get(member.rank) is member:
                    self._end(f"{member} has died: its own output says why, or the system's log where it was killed")

    def _hello(self, said: dict[str, Any], connection: socket.socket) -> Member | None:
        hello = said["hello"]
        member = Member(hello["rank"], hello["host"], hello["pid"], connection, time.monotonic())
        with self._lock:
            there = self._members.get(member.rank)
            problem = self._over
            if hello["protocol"] != PROTOCOL:
                problem = f"{member} has another version of hapsynth: install the same one everywhere"
            elif hello["processes"] != self.processes:
                problem = f"{member} is of a job of {hello['processes']} processes, and this one has {self.processes}"
            elif there is not None and not there.left and (there.host, there.pid) != (member.host, member.pid):
                problem = f"{member} and {there} are both process {member.rank}: end what an earlier job left behind"
            if problem:
                member.tell({"over": problem})
                return None
            self._members[member.rank] = member
            member.tell({"welcome": PROTOCOL})
        return member

    def _hear(self, member: Member, said: dict[str, Any]) -> None:
        with self._lock:
            member.heard = time.monotonic()
            match said:
                case {"gather": name, "ranks": ranks, "value": value}:
                    self._gather(member, name, tuple(ranks), value)
                case {"beat": calls, "doing": doing}:
                    member.calls, member.doing = _counted(calls), doing
                case {"leave": error, "calls": calls}:
                    member.calls, member.left, member.failed = _counted(calls), True, bool(error)
                    if error and not self._suspected:
                        # What failed in it may be another process's fault, which is noticed within a beat or two.
                        self._suspected = f"{member} ended with {error}: its own output has the traceback"
                        self._suspected_at = member.heard
                case _:
                    raise ValueError(said)

    def _gather(self, member: Member, name: str, ranks: tuple[int, ...], value: Any) -> None:
        now = time.monotonic()
        gather = self._gathers.setdefault((name, ranks), _Gather(ranks, now, now))
        gather.values[member.rank] = value
        if len(gather.values) == len(ranks):
            del self._gathers[name, ranks]
            for rank in ranks:
                self._members[rank].tell({"gathered": name, "values": [gather.values[r] for r in ranks]})
            return
        for other in self._gathers.values():
            # Each waits for one that waits at the other.
            if other is not gather and other.values.keys() & {*ranks} and gather.values.keys() & {*other.ranks}:
                self._end(
                    f"{member} comes to a plan of {_listed(ranks)}, and others to one of {_listed(other.ranks)}: "
                    "call the same plans in the same order everywhere"
                )

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self.patience.beat):
            with self._lock:
                now = time.monotonic()
                if now - last > self.patience.silence / 2:
                    # This process itself was stopped, or starved: it can't blame others for its silence.
                    for waited in (*self._members.values(), *self._gathers.values()):
                        if isinstance(waited, Member):
                            waited.heard = now
                        else:
                            # One that began as it went on again is not to lie ahead.
                            waited.began = min(now, waited.began + now - last)
                            waited.noticed = min(now, waited.noticed + now - last)
                last = now
                present = [m for m in self._members.values() if not m.gone]
                for member in present:
                    member.tell({"over": self._over} if self._over else {"beat": True})
                if not self._over:
                    self._judge(present, now)
                if self._suspected and now - self._suspected_at > SUSPECT_S:
                    self._end(self._suspected)

    def _judge(self, present: Sequence[Member], now: float) -> None:
        for member in present:
            if not member.left and now - member.heard > self.patience.silence:
                self._end(
                    f"{member} has not been heard of for {self.patience.silence:g} s: it is stopped, its machine is "
                    "down or the network between is; continue or restart it (HAPSYNTH_SILENCE_S allows more)"
                )
            for ranks, calls in member.calls.items():
                for other in (self._members[r] for r in ranks):
                    if other.left and not other.failed and other.calls.get(ranks, 0) < calls:
                        self._end(
                            f"{other} has ended after {plural(other.calls.get(ranks, 0), 'call')} of plans, and "
                            f"{member} is in call {calls}: every process must make the same calls"
                        )
        for gather in list(self._gathers.values()):
            self._judge_waiting(gather, now)

    def _judge_waiting(self, gather: _Gather, now: float) -> None:
        missing = [r for r in gather.ranks if r not in gather.values]
        never = [r for r in missing if r not in self._members]
        waited = now - gather.began
        here = f"{_listed(sorted(gather.values))} wait{'s' if len(gather.values) == 1 else ''} at a plan"
        gone = [
            str(self._members[r])
            for r in missing
            if r not in never and self._members[r].left and not self._members[r].failed
        ]
        if gone:
            self._end(f"{', '.join(gone)} has ended, and {here}: every process must make the same calls")
        elif never and waited > self.patience.join:
            self._end(
                f"{_listed(never)} did not come to the plan within {self.patience.join:g} s, where {here}: see whether "
                "it runs and calls the plan (HAPSYNTH_JOIN_S allows more)"
            )
        elif waited > self.patience.barrier:
            self._end(
                f"{', '.join(self._named(r) for r in missing)} did not come to the plan within "
                f"{self.patience.barrier:g} s, where {here}: call the same plans in the same order everywhere, or set "
                "HAPSYNTH_BARRIER_S higher where compiling takes longer"
            )
        elif now - gather.noticed > _NOTICE_S:
            gather.noticed = now
            for rank in gather.values:
                self._members[rank].tell({"waiting": ", ".join(self._named(r) for r in missing), "seconds": waited})

    def _named(self, rank: int) -> str:
        return f"{self._members[rank]}, {self._members[rank].doing}" if rank in self._members else f"process {rank}"

    def _end(self, reason: str) -> None:
        """The job is over: told now and, for those who say hello later, from now on."""
        if not self._over:
            self._over = reason
            for member in self._members.values():
                member.tell({"over": reason})


def _counted(calls: Sequence[tuple[Sequence[int], int]]) -> dict[tuple[int, ...], int]:
    return {tuple(ranks): count for ranks, count in calls}


def _listed(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _listen(address: Address) -> socket.socket:
    host, port = address
    try:
        if host in _LOOPBACK:
            return socket.create_server((host, port))
        # All addresses, as JAX's coordinator: a machine's name may mean another one of them here than elsewhere.
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise JobError(
            f"process 0 on {socket.gethostname()} can't serve the rendezvous at {host}:{port}: {error.strerror}; "
            f"set HAPSYNTH_RENDEZVOUS=HOST:PORT to a free port of this host, the same in every process"
        ) from None


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
