"""Where the launchers of a job and its processes meet: each launcher tells how its processes ended, or that a signal
stopped one, and hears when the job is over on another host."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import IO, Any

from hapsynth.rendezvous.address import (
    BIND,
    COORDINATOR,
    LAUNCHER,
    RENDEZVOUS,
    TOKEN,
    JobError,
    Timeouts,
    find_address,
    free_ports,
    parse_address,
)
from hapsynth.rendezvous.client import Client
from hapsynth.rendezvous.server import Server, named, serving_host

_JOIN_S = 300.0
"""For the launchers of other hosts, which somebody has to start: as long as JAX waits for their processes."""
_OTHERS_S = 5.0
_UNHEARD_S = 3.0


class Supervisor:
    """The launcher of processes `rank` to `rank + here - 1` in its job; a context manager. Serves the rendezvous where
    it is that of process 0.

    `meet`: where JAX's coordinator and the rendezvous are to be, as in a process's environment; `local`: this launcher
    chose that, and may choose again. Raises JobError where a port is taken.
    """

    def __init__(self, rank: int, here: int, processes: int, meet: Mapping[str, str], *, local: bool) -> None:
        self.rank, self.here, self.processes = rank, here, processes
        self.over = ""
        """Why the job is over, once it is."""
        self.environment = {**meet, TOKEN: os.environ.get(TOKEN) or (secrets.token_hex(16) if local else "")}
        self._patience = Timeouts.of()
        self._server: Server | None = None
        self._held: socket.socket | None = None
        self._client: Client | None = None
        self._unsaid: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        if local:
            self._serve_here()
        else:
            self._serve_others()
        who = named(0, socket.gethostname(), os.getpid(), here) if rank == 0 else "the launcher of process 0"
        self.environment[LAUNCHER] = f"{who}, which serves the rendezvous,"

    def _serve_here(self) -> None:
        """On addresses that no other machine reaches."""
        _, port = parse_address(self.environment[COORDINATOR], COORDINATOR)
        while (held := _held(port)) is None:
            (port,) = free_ports(1)
        self._held = held
        self._server = Server(("127.0.0.1", 0), self.processes, self._patience, self.environment[TOKEN])
        self.environment |= {COORDINATOR: f"localhost:{port}", RENDEZVOUS: f"127.0.0.1:{self._server.port}"}
        self.environment[BIND] = os.environ.get(BIND) or f"127.0.0.1:{port}"

    def _serve_others(self) -> None:
        where = find_address(None, {**os.environ, **self.environment})
        self.environment[RENDEZVOUS] = f"[{where[0]}]:{where[1]}" if ":" in where[0] else f"{where[0]}:{where[1]}"
        if self.rank:
            return
        host, port = parse_address(self.environment[COORDINATOR], COORDINATOR)
        at = serving_host(host)
        if not os.environ.get(BIND):
            check_port(at, port, self.environment[COORDINATOR])
            if at:
                self.environment[BIND] = f"[{at}]:{port}" if ":" in at else f"{at}:{port}"
        self._server = Server(where, self.processes, self._patience, self.environment[TOKEN])
        if not self.environment[TOKEN]:
            text = f"whoever reaches {self.environment[RENDEZVOUS]} can end this job; set one secret on every host"
            print(f"hapsynth launch: {TOKEN} is not set: {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> Supervisor:
        joining = threading.Thread(target=self._join, name="hapsynth launcher", daemon=True)
        joining.start()
        if self._server is not None:
            joining.join()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._lock:
            client, self._unsaid = self._client, []
        if client is not None:
            client.close()
        if self._server is not None:
            self._server.close()
        if self._held is not None:
            self._held.close()

    def say(self, message: dict[str, Any]) -> None:
        """Now, or when this launcher has met the others."""
        with self._lock:
            if self._client is None:
                self._unsaid.append(message)
            else:
                self._client.say(message)

    def flush(self) -> None:
        """Wait until what was said has gone."""
        if self._client is not None:
            self._client.flush(1.0)

    def leave(self) -> None:
        """All processes here have ended."""
        if self._client is not None:
            self._client.leave()

    def wait_for_others(self, given_up: Callable[[], bool]) -> None:
        """Until the launchers of the other hosts have ended: this one takes the rendezvous with it. Once the job is
        over they have some seconds to hear why."""
        if self._server is None or self.here == self.processes:
            return
        until = float("inf")
        # One that the network does not reach can't be told.
        while self._server.launchers(self.rank, _UNHEARD_S if self.over else float("inf")) and not given_up():
            now = time.monotonic()
            until = min(until, now + _OTHERS_S) if self.over else until
            if now > until:
                return
            time.sleep(0.05)

    def _join(self) -> None:
        where = parse_address(self.environment[RENDEZVOUS], RENDEZVOUS)
        timeouts = replace(self._patience, join=max(_JOIN_S, self._patience.join))
        try:
            client = Client(
                where,
                self.rank,
                self.processes,
                timeouts,
                self._is_over,
                lambda _: None,
                serves=self.environment[LAUNCHER],
                here=self.here,
                token=self.environment[TOKEN],
            )
        except JobError as error:
            self._is_over(str(error))
            return
        with self._lock:
            for message in self._unsaid:
                client.say(message)
            self._client = client

    def _is_over(self, reason: str) -> None:
        self.over = self.over or reason


def check_port(host: str, port: int, name: str) -> None:
    """JobError where something listens there already: of JAX it is a crash that names no port."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise JobError(
            f"process 0 on {socket.gethostname()} can't serve JAX's coordinator at {name}: port {port}: "
            f"{error.strerror}; end what an earlier job left there, or give --coordinator HOST:PORT with a free one"
        ) from None


def _held(port: int) -> socket.socket | None:
    """A socket that keeps a port of this machine for JAX's coordinator, which shares it; None where it is taken."""
    if sys.platform != "linux":
        return socket.socket()
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", port))
    except OSError:
        held.close()
        return None
    return held


_REAP = """
import os, signal, sys, time
groups, launcher, grace = {}, sys.argv[1], float(sys.argv[2])
for line in sys.stdin:
    what, pid, name = line.split(None, 2)
    groups[int(pid)] = name.strip()
    if what == "ended":
        del groups[int(pid)]
    if what == "done":
        sys.exit()
def send(number):
    for pid in list(groups):
        try:
            os.killpg(pid, number)
            os.killpg(pid, signal.SIGCONT)
        except OSError:
            del groups[pid]
try:
    names = ', '.join(groups.values())
    sys.stderr.write(f"hapsynth launch: {launcher} has died: start the job again; its processes are ended: {names}\\n")
    sys.stderr.flush()
except OSError:
    pass
for number, seconds in ((0, 2.0), (signal.SIGTERM, grace)):
    until = time.monotonic() + seconds
    send(number)
    while groups and time.monotonic() < until:
        time.sleep(0.05)
        send(0)
send(signal.SIGKILL)
"""


class Reaper:
    """A process that ends the others when this one has died, in whatever way: its input ends then."""

    def __init__(self, launcher: str, grace_s: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", _REAP, launcher, str(grace_s)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def started(self, pid: int, name: str) -> None:
        self._say(f"started {pid} {name}\n")

    def ended(self, pid: int) -> None:
        self._say(f"ended {pid} -\n")

    def close(self) -> None:
        self._say("done 0 -\n")
        with suppress(OSError):
            self._input.close()
        self._process.wait()

    @property
    def _input(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _say(self, line: str) -> None:
        with suppress(OSError):
            self._input.write(line)
            self._input.flush()
