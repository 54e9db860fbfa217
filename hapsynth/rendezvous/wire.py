"""Lines of JSON over a connection, with bounds on what a stranger can make this process hold, wait for or print."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

HELLO_BYTES = 1 << 12
"""Of the first line, which anybody may send."""
LINE_BYTES = 1 << 26
"""Of a line from a process of the job: what it says of a checkpoint's pieces may be tens of MiB."""
_UNSENT = 4096
"""Messages to one that does not read."""


def printable(text: object, most: int = 2000) -> str:
    """Text from elsewhere on one line, without what moves a terminal's cursor or begins a new line of a log."""
    shown = (
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text)[:most]
    )
    return "".join(shown)


def encoded(message: dict[str, Any]) -> bytes:
    """A message as a line, for `Channel.say` to several."""
    return json.dumps(message).encode() + b"\n"


class Channel:
    """One end of a connection. What is said is sent by a thread of its own, so that nobody waits for who does not read;
    ValueError where a line is none of ours, OSError where the connection fails."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""
        self._unsent: queue.Queue[bytes | None] = queue.Queue(_UNSENT)
        self._sender: threading.Thread | None = None
        self._starting = threading.Lock()
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def peer(self) -> str:
        """The address of the other end."""
        with suppress(OSError, IndexError):
            return str(self.connection.getpeername()[0])
        return ""

    def read(self, most: int, until: float | None = None) -> dict[str, Any] | None:
        """The next message; None at the end. `until`: on the monotonic clock, for the whole line."""
        held = bytearray(self._rest)
        seen = 0
        while (end := held.find(b"\n", seen)) < 0:
            seen = len(held)
            if seen > most:
                raise ValueError(f"a line of more than {most} bytes")
            if until is not None:
                self.connection.settimeout(max(0.01, until - time.monotonic()))
            part = self.connection.recv(1 << 16)
            if not part:
                return None
            held += part
        self._rest = bytes(held[end + 1 :])
        if until is not None:
            self.connection.settimeout(None)
        try:
            found = json.loads(held[:end])
        except RecursionError:
            raise ValueError("brackets in brackets without end") from None
        if not isinstance(found, dict):
            raise ValueError("a message is an object")
        return found

    def messages(self, lines: int = 1) -> Iterator[dict[str, Any]]:
        """All to the end. `lines`: of how many processes one message may hold the lines."""
        while (found := self.read(lines * LINE_BYTES)) is not None:
            yield found

    def say(self, message: dict[str, Any] | bytes) -> None:
        """At once; whoever can't be told is noticed by what it does not say."""
        with self._starting:
            if self._sender is None:
                self._sender = threading.Thread(target=self._send, name="hapsynth sender", daemon=True)
                self._sender.start()
        try:
            self._unsent.put_nowait(message if isinstance(message, bytes) else encoded(message))
        except queue.Full:
            self.hang_up()

    def flush(self, seconds: float) -> None:
        """Wait until all is sent that was said."""
        until = time.monotonic() + seconds
        while self._unsent.unfinished_tasks and self._sender and self._sender.is_alive() and time.monotonic() < until:
            time.sleep(0.01)

    def hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        with suppress(queue.Full):
            self._unsent.put_nowait(None)

    def close(self) -> None:
        """After the last message was read; ends the thread that sends."""
        self.hang_up()
        self.connection.close()

    def _send(self) -> None:
        while (data := self._unsent.get()) is not None:
            try:
                self.connection.sendall(data)
            except OSError:
                return
            self._unsent.task_done()
