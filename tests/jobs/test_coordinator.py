"""Connections of JAX's coordinator wait for a link that comes back."""

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hapsynth.rendezvous.address import COORDINATOR, Timeouts
from hapsynth.rendezvous.client import Client
from hapsynth.rendezvous.coordinator import bear_silence
from hapsynth.rendezvous.server import Server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the option is Linux's")


def connected(timeout_ms: int) -> tuple[socket.socket, socket.socket, int]:
    """Two ends of a connection that bear so long a silence, and the port of the one that listened."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        port = server.getsockname()[1]
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
    return here, there, port


def waits(*ends: socket.socket) -> list[int]:
    return [end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in ends]


def test_both_ends_wait_longer_and_nothing_else_does() -> None:
    *ends, port = connected(20_000)
    *others, _ = connected(20_000)
    *patient, same = connected(90_000)
    *forever, last = connected(0)
    with socket.create_server(("127.0.0.1", 0)) as listens, open(os.devnull) as no_socket:
        before = len(os.listdir("/proc/self/fd"))
        for known in (port, same, last, listens.getsockname()[1]):
            bear_silence(known, 60.0)
        assert len(os.listdir("/proc/self/fd")) == before
        assert not no_socket.closed
    assert waits(*ends) == [60_000] * 2
    assert waits(*others) == [20_000] * 2
    assert waits(*patient) == [90_000] * 2
    assert waits(*forever) == [0] * 2
    ends[0].sendall(b"still open")
    assert ends[1].recv(10) == b"still open"
    for end in (*ends, *others, *patient, *forever):
        end.close()


def test_locks_of_the_process_stay(tmp_path: Path) -> None:
    """Those of a database, say: they go as any descriptor of their file is closed."""
    code = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    with open(tmp_path / "locked", "w") as locked:
        fcntl.lockf(locked, fcntl.LOCK_EX)
        bear_silence(1, 60.0)
        other = subprocess.run([sys.executable, "-c", code, locked.name], capture_output=True, text=True)
    assert "BlockingIOError" in other.stderr


def test_who_has_joined_a_job_sees_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    *ends, port = connected(1_000)
    monkeypatch.setenv(COORDINATOR, f"127.0.0.1:{port}")
    timeouts = Timeouts(silence=1.0)
    server = Server(("127.0.0.1", 0), 1, timeouts, "")
    client = Client(("127.0.0.1", server.port), 0, 1, timeouts, lambda reason: None, lambda note: None, token="")
    until = time.monotonic() + 30.0
    while waits(*ends) != [3_000] * 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert waits(*ends) == [3_000] * 2
    client.close()
    for end in ends:
        end.close()
