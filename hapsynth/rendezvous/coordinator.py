"""The connections of JAX's coordination service bear a link that is down as long as the job's own do.

gRPC lets a server give up a connection when what it sent has not been acknowledged for 20 s (its TCP_USER_TIMEOUT), and
all clients of the service then end. TCP doubles its wait: what is lost as a link goes down is sent again 0.2, 0.6, ...
12.6 and 25.4 s later, so a link that was back after 15 s ended the job. Who is silent for too long is for the
rendezvous to find out.
"""

from __future__ import annotations

import os
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

_OPEN = Path("/proc/self/fd")
_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", None)


def bear_silence(port: int, seconds: float) -> None:
    """Let connections of this process from or to a port wait at least so long for what they sent to be acknowledged;
    on Linux, elsewhere as they are."""
    if _USER_TIMEOUT is None or not _OPEN.is_dir():
        return
    names: list[str] = []
    with suppress(OSError):
        names = os.listdir(_OPEN)
    for name in names:
        # Other threads may open and close files meanwhile; a copy remains what it was. Only sockets are copied: closing
        # any descriptor of a file releases all POSIX locks that the process has on it.
        with suppress(OSError), ExitStack() as stack:
            if not os.readlink(_OPEN / name).startswith("socket:"):
                continue
            copy = os.dup(int(name))
            stack.callback(os.close, copy)
            if not stat.S_ISSOCK(os.fstat(copy).st_mode):
                continue
            connection = socket.socket(fileno=copy)
            stack.callback(connection.detach)
            if connection.type == socket.SOCK_STREAM and port in _ports(connection):
                wait = connection.getsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT)
                if 0 < wait < seconds * 1000:
                    connection.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, int(seconds * 1000))


def _ports(connection: socket.socket) -> tuple[int, ...]:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return ()
    return connection.getsockname()[1], connection.getpeername()[1]
