"""A process's side of the rendezvous: it joins, meets the others, gives signs of life, hears when all is over."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hapsynth.jobs._address import Address, JobError, Patience
from hapsynth.jobs._server import PROTOCOL, SUSPECT_S


class Client:
    """Joins the rendezvous at `address` as process `rank` of `processes`.

    `over`: called once, from another thread, with the reason why the job is over. `note`: called with what a person may
    want to know while this process waits. Raises JobError where no rendezvous answers in time or it refuses.
    """

    def __init__(
        self,
        address: Address,
        rank: int,
        processes: int,
        patience: Patience,
        over: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self.rank, self.patience = rank, patience
        self.host, self.pid = socket.gethostname(), os.getpid()
        self.calls, self.doing = Counter[tuple[int, ...]](), "at work"
        self._on_over, self._note = over, note
        self._changed = threading.Condition()
        self._values: dict[str, list[Any]] = {}
        self._reason, self._told = "", False
        self._left = False
        self._sending = threading.Lock()
        self._connection, self._lines = self._join(address, processes)
        self._heard = time.monotonic()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, name="hapsynth heartbeat", daemon=True).start()

    def __str__(self) -> str:
        return f"process {self.rank} on {self.host} (pid {self.pid})"

    def gather(self, name: str, value: Any, ranks: Sequence[int]) -> list[Any]:
        """The values of all processes in `ranks`, in that order, once all have given theirs: a barrier.

        JobError where the job is over.
        """
        self._send({"gather": name, "ranks": list(ranks), "value": value})
        with self._changed:
            self._changed.wait_for(lambda: name in self._values or self._told)
            if name not in self._values:
                raise JobError(self._reason)
            return self._values.pop(name)

    def leave(self, error: str = "") -> None:
        """Say that this process makes no more calls; with an error the job is over for the others too."""
        with self._changed:
            if self._left:
                return
            self._left = True
        self._send({"leave": error, "calls": list(self.calls.items())})
        if error:
            # Why the job is over, which may be another process's fault, is said first.
            with self._changed:
                self._changed.wait_for(lambda: self._told, SUSPECT_S + 2 * self.patience.beat)

    def close(self) -> None:
        """Leave, and hear no more."""
        self.leave()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _join(self, address: Address, processes: int) -> tuple[socket.socket, Any]:
        where = f"{address[0]}:{address[1]}"
        until = time.monotonic() + self.patience.join
        while True:
            try:
                connection = socket.create_connection(address, timeout=self.patience.silence)
                if connection.getsockname() != connection.getpeername():
                    break
                # Where nobody listens yet at a port of the range for clients, a client may be given that very port.
                connection.close()
            except OSError as error:
                if time.monotonic() > until:
                    raise JobError(
                        f"{self} found no rendezvous at {where} within {self.patience.join:g} s ({error}): process 0 "
                        "serves it from its first call of a plan, or of hapsynth.jobs.connect(), on; see whether it "
                        "runs and its port can be reached (HAPSYNTH_JOIN_S allows more)"
                    ) from None
                time.sleep(0.1)
        lines = connection.makefile("rb")
        hello = {"protocol": PROTOCOL, "rank": self.rank, "host": self.host, "pid": self.pid, "processes": processes}
        try:
            connection.sendall(json.dumps({"hello": hello}).encode() + b"\n")
            said = json.loads(lines.readline())
            if "over" in said:
                raise JobError(said["over"])
            if said["welcome"] != PROTOCOL:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, JobError) as error:
            lines.close()
            connection.close()
            if isinstance(error, JobError):
                raise
            raise JobError(
                f"{self} found something at {where} that is not the rendezvous of process 0: set "
                "HAPSYNTH_RENDEZVOUS=HOST:PORT to a free port of process 0's host, the same in every process"
            ) from None
        connection.settimeout(None)
        return connection, lines

    def _listen(self) -> None:
        with suppress(OSError, ValueError), self._connection, self._lines:
            for line in self._lines:
                self._heard = time.monotonic()
                match json.loads(line):
                    case {"gathered": name, "values": values}:
                        with self._changed:
                            self._values[name] = values
                            self._changed.notify_all()
                    case {"waiting": missing, "seconds": seconds}:
                        self._note(f"{self} waits for {missing}, since {seconds:.0f} s")
                    case {"over": reason}:
                        self._end(reason, even_left=True)
                    case _:
                        pass
        self._end("process 0, which serves the rendezvous, has died: its own output says why, or its system's log")

    def _beat(self) -> None:
        last = time.monotonic()
        while not (self._left or self._reason):
            time.sleep(self.patience.beat)
            now = time.monotonic()
            if now - last > self.patience.silence / 2:
                # This process was stopped itself: what the server said meanwhile is still to be read.
                self._heard = now
            last = now
            self._say_alive()
            if now - self._heard > self.patience.silence:
                self._end(
                    f"process 0, which serves the rendezvous, has not been heard of for {self.patience.silence:g} s: "
                    "it is stopped, its machine is down or the network between is (HAPSYNTH_SILENCE_S allows more)"
                )

    def _say_alive(self) -> None:
        if not self._left:
            self._send({"beat": list(self.calls.items()), "doing": self.doing})

    def _send(self, message: dict[str, Any]) -> None:
        """What can't be sent is found out by listening."""
        with suppress(OSError), self._sending:
            self._connection.sendall(json.dumps(message).encode() + b"\n")

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
