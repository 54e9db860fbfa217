"""A process's side of the rendezvous: it joins, meets the others, gives signs of life, hears when all is over."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hapsynth.rendezvous.address import COORDINATOR, TOKEN, Address, JobError, Timeouts, parse_address
from hapsynth.rendezvous.coordinator import bear_silence
from hapsynth.rendezvous.peers import CONNECT_S, Peers, loopback
from hapsynth.rendezvous.server import AT_WORK, PROTOCOL, named
from hapsynth.rendezvous.wire import HELLO_BYTES, Channel, encoded, printable

_KEY = secrets.token_hex(16)
"""Who joins again with it is the one that was there."""
_STANDS_S = 4.0
"""From when on calls that stand still may wait for a process that isn't reached."""
PROCESS_0 = "process 0, which serves the rendezvous,"


class Client:
    """Joins the rendezvous at `address` as process `rank` of `processes`; with `here` as the launcher of so many.

    `over`: called once, from another thread, with the reason why the job is over. `note`: called with what a person may
    want to know while this process waits. `serves`: who serves the rendezvous. `token`: of the environment, if None.
    `cuda`: the package by which JAX uses the GPUs that it sees here, '' where it has none, None where it sees none.
    Raises JobError where no rendezvous answers in time or it refuses.
    """

    def __init__(
        self,
        address: Address,
        rank: int,
        processes: int,
        timeouts: Timeouts,
        over: Callable[[str], None],
        note: Callable[[str], None],
        *,
        serves: str = PROCESS_0,
        here: int = 0,
        token: str | None = None,
        cuda: str | None = None,
    ) -> None:
        self.rank, self.processes, self.timeouts = rank, processes, timeouts
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.calls, self.doing = Counter[tuple[int, ...]](), AT_WORK
        self.find_doing: Callable[[], str] | None = None
        """Asked at each sign of life, where `doing` does not say it."""
        self._address, self._serves, self._here, self._cuda = address, serves, here, cuda
        self._token = os.environ.get(TOKEN, "") if token is None else token
        coordinator = os.environ.get(COORDINATOR)
        self.coordinator_port = parse_address(coordinator, COORDINATOR)[1] if coordinator else None
        """Of JAX's service, whose connections bear silence too."""
        self._on_over, self._note = over, note
        self._changed = threading.Condition()
        self._values: dict[str, list[Any]] = {}
        self._reason, self._told = "", False
        self._left = False
        self._closes = False
        """Whether who serves the rendezvous ends in peace."""
        self._peers: Peers | None = None
        self._unreached: list[int] = []
        self._never: list[int] = []
        self._channel = self._join()
        self._heard = time.monotonic()
        works = [self._listen, self._beat]
        if self._peers is not None:
            works.append(self._watch_peers)
        for work in works:
            threading.Thread(target=work, name="hapsynth heartbeat", daemon=True).start()

    def __str__(self) -> str:
        return named(self.rank, self.host, self.pid, self._here)

    def gather(
        self, name: str, value: Any, ranks: Sequence[int], *, patient: bool = False, aside: bool = False
    ) -> list[Any]:
        """The values of all processes in `ranks`, in that order, once all have given theirs: a barrier. `patient`: it
        waits as long as all of them live. `aside`: calls may go on meanwhile, made by another thread.

        JobError where the job is over.
        """
        begun: dict[str, Any] = {} if aside else {"calls": list(self.calls.items())}
        self.say({"gather": name, "ranks": list(ranks), "value": value, "patient": patient, **begun})
        with self._changed:
            self._changed.wait_for(lambda: name in self._values or self._told)
            if name not in self._values:
                raise JobError(self._reason)
            return self._values.pop(name)

    def unreachable(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` that this process has never reached, nor does within the silence that is borne, where JAX's
        CPU collectives use the same network; none where the others are not known."""
        if self._peers is None or not (loopback(self._peers.host) or _is_own(self._peers.host)):
            return []
        return [r for r in self._peers.never() if r in ranks]

    def leave(self, error: str = "", *, returns: bool = False) -> None:
        """Say that this process makes no more calls, or none before it `returns`; with an error the job is over for the
        others too."""
        with self._changed:
            if self._left:
                return
            self._left = True
        self.say({"leave": error, "calls": list(self.calls.items()), "returns": returns})
        if not self._reason:
            self._channel.flush(2.0)
        if error:
            # Why the job is over, which may be another process's fault, is said first.
            with self._changed:
                self._changed.wait_for(lambda: self._told, self.timeouts.suspicion + 2 * self.timeouts.beat)

    def close(self, *, returns: bool = False) -> None:
        """Leave, and hear no more."""
        self.leave(returns=returns)
        self._channel.hang_up()

    def say(self, message: dict[str, Any]) -> None:
        """What can't be sent is found out by listening."""
        self._channel.say(message)

    def flush(self, seconds: float) -> None:
        """Wait until all is sent that was said."""
        self._channel.flush(seconds)

    def _hello(self) -> dict[str, Any]:
        return {"rank": self.rank, "here": self._here, "host": self.host, "pid": self.pid, "key": _KEY}

    def _join(self) -> Channel:
        where = f"{self._address[0]}:{self._address[1]}"
        until = time.monotonic() + self.timeouts.join
        while True:
            try:
                connection = socket.create_connection(self._address, timeout=self.timeouts.silence)
                if connection.getsockname() != connection.getpeername():
                    break
                # Where nobody listens yet at a port of the range for clients, a client may be given that very port.
                connection.close()
            except OSError as error:
                if time.monotonic() > until:
                    raise JobError(
                        f"{self} found no rendezvous at {where} within {self.timeouts.join:g} s ({error}): {self._from}"
                        "; see whether it runs and its port can be reached (HAPSYNTH_JOIN_S allows more)"
                    ) from None
            time.sleep(0.1)
        channel = Channel(connection)
        hello = {**self._hello(), "protocol": PROTOCOL, "processes": self.processes, "token": self._token}
        hello |= {} if self._cuda is None else {"cuda": self._cuda}
        if not self._here and self.processes > 1:
            # Where others reach this machine: loopback addresses in a job of one machine.
            self._peers = Peers(self.rank, str(connection.getsockname()[0]))
            hello |= {"port": self._peers.port, "answer": self._peers.answer}
        try:
            channel.say({"hello": hello})
            said = channel.read(HELLO_BYTES, time.monotonic() + self.timeouts.silence) or {}
            if "refused" in said:
                raise JobError(
                    f"{self} was refused by the rendezvous at {where}: its {TOKEN} is not that of the job; set the "
                    "same secret in every process, and end what an earlier job left at that port"
                )
            if "over" in said:
                raise JobError(printable(said["over"]))
            if said["welcome"] != PROTOCOL:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, JobError) as error:
            channel.close()
            if self._peers is not None:
                self._peers.close()
            if isinstance(error, JobError):
                raise
            raise JobError(
                f"{self} found something at {where} that is not the rendezvous of process 0: set "
                "HAPSYNTH_RENDEZVOUS=HOST:PORT to a free port of process 0's host, the same in every process"
            ) from None
        connection.settimeout(None)
        return channel

    @property
    def _from(self) -> str:
        if self._serves == PROCESS_0:
            return "process 0 serves it from its first call of a plan, or of hapsynth.jobs.connect(), on"
        return f"{self._serves} serves it"

    def _listen(self) -> None:
        with suppress(OSError, ValueError):
            # What all have said comes in one.
            for message in self._channel.messages(self.processes):
                self._heard = time.monotonic()
                self._hear(message)
        self._channel.close()
        if self._closes:
            # This process goes on alone; whoever would meet others raises.
            with self._changed:
                self._reason = self._reason or f"{self._serves} has ended: every process must make the same calls"
                self._left = self._told = True
                self._changed.notify_all()
        else:
            self._end(f"{self._serves} has died: its own output says why, or its system's log; start the job again")
        if self._peers is not None:
            self._peers.close()

    def _hear(self, message: dict[str, Any]) -> None:
        match message:
            case {"gathered": name, "values": values}:
                with self._changed:
                    self._values[name] = values
                    self._changed.notify_all()
            case {"waiting": missing, "seconds": seconds}:
                self._note(f"{self} waits for {printable(missing)}, since {seconds:.0f} s")
            case {"peers": peers} if self._peers is not None:
                others = [(int(rank), str(host), int(port), str(answer)) for rank, host, port, answer in peers]
                self._peers.know(others, self.timeouts.silence)
                threading.Thread(target=self._peers.unreached, daemon=True).start()
            case {"closes": True}:
                self._closes = True
            case {"over": reason}:
                self._end(printable(reason), even_left=True)
            case _:
                pass

    def _beat(self) -> None:
        last = time.monotonic()
        while not (self._left or self._reason):
            time.sleep(self.timeouts.beat)
            if self.coordinator_port is not None:
                bear_silence(self.coordinator_port, 3 * self.timeouts.silence)
            now = time.monotonic()
            if now - last > self.timeouts.silence / 2:
                # This process was stopped itself: what the server said meanwhile is still to be read.
                self._heard = now
            last = now
            self._say_alive()
            if now - self._heard > max(2.0, 3 * self.timeouts.beat):
                self._call_again(min(CONNECT_S, max(0.1, self._heard + self.timeouts.silence - now)))
                last = now = time.monotonic()
            if now - self._heard > self.timeouts.silence:
                self._end(
                    f"{self._serves} has not been heard of for {self.timeouts.silence:g} s: "
                    "it is stopped, its machine is down or the network between is (HAPSYNTH_SILENCE_S allows more)"
                )

    def _say_alive(self) -> None:
        if not self._left:
            doing = self.doing if self.find_doing is None else self.find_doing() or self.doing
            self.say(
                {"beat": list(self.calls.items()), "doing": doing, "unreached": self._unreached, "never": self._never}
            )

    def _call_again(self, seconds: float) -> None:
        """A sign of life on a new connection, and one of the server's: the old one may carry nothing for long after the
        network is back."""
        with suppress(OSError, ValueError):
            channel = Channel(socket.create_connection(self._address, timeout=seconds))
            try:
                channel.connection.sendall(encoded({"again": {**self._hello(), "token": self._token}}))
                found = channel.read(HELLO_BYTES, time.monotonic() + seconds) or {}
            finally:
                channel.close()
            if found.get("alive"):
                self._heard = time.monotonic()
            elif found.get("over"):
                self._end(printable(found["over"]), even_left=True)

    def _watch_peers(self) -> None:
        """Looks whether the others are reached while the calls of this process stand still."""
        assert self._peers is not None
        calls, since = self.calls.total(), time.monotonic()
        while not (self._left or self._reason):
            time.sleep(self.timeouts.beat)
            if self.calls.total() != calls:
                calls, since, self._unreached, self._never = self.calls.total(), time.monotonic(), [], []
            elif time.monotonic() - since > min(_STANDS_S, self.timeouts.silence / 4):
                self._unreached, never = self._peers.unreached()
                # A launcher, which does without JAX, watches none.
                import jax

                # Whom it never reached it may not need, until it is in a call; accelerators may have a network of
                # their own.
                self._never = never if calls and jax.default_backend() == "cpu" else []

    def _end(self, reason: str, *, even_left: bool = False) -> None:
        with self._changed:
            if self._reason or (self._left and not even_left):
                return
            self._reason = reason
        # Before a waiting gather raises: what is over ends the process, unless its owner decides otherwise.
        self._on_over(reason)
        with self._changed:
            self._told = True
            self._changed.notify_all()


def _is_own(address: str) -> bool:
    """Whether this machine's name means that address, which gloo uses."""
    with suppress(OSError):
        return address in {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    return False
