"""Whether two processes of a job reach each other: heartbeats cross only where the rendezvous is served.

Each process answers at a port of its own with what it is. While its calls stand still it connects to the others, which
says of the network between alone: whoever computes or compiles for long answers all the same.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

CONNECT_S = 2.0
_MOST = 64
"""Others that one process connects to: its next ones, by their numbers."""
_AT_ONCE = 16

Peer = tuple[int, str, int, str]
"""Rank, host, port, and what it answers."""


class Peers:
    """This process's own port, at the address `host`; and the others, as far as their addresses mean them here."""

    def __init__(self, rank: int, host: str) -> None:
        self.rank, self.host, self.answer = rank, host, secrets.token_hex(8)
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.port: int = self._listener.getsockname()[1]
        # Others, and who of them was reached, change together: a round of asking that is under way keeps its own.
        self._known: tuple[list[Peer], set[int]] = [], set()
        self._until = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._serve, name="hapsynth peers", daemon=True).start()

    def know(self, others: Sequence[Peer], seconds: float) -> None:
        """The others are these, and have so long to be reached."""
        # This machine's own addresses mean another one there, where it has them itself.
        inside = loopback(self.host)
        order = sorted(
            (p for p in others if p[0] != self.rank and loopback(p[1]) == inside),
            key=lambda p: (p[0] - self.rank) % (1 << 32),
        )
        self._known, self._until = (order[:_MOST], set()), time.monotonic() + seconds

    def never(self) -> list[int]:
        """Those that have not been reached in the time that they have, nor are now."""
        while missing := [p[0] for p in self._known[0] if p[0] not in self._known[1]]:
            self.unreached()
            if time.monotonic() > self._until:
                return [rank for rank in missing if rank not in self._known[1]]
            time.sleep(0.1)
        return []

    def unreached(self) -> tuple[list[int], list[int]]:
        """Those that were reached before and are not now; and those that never were, where some were."""
        others, reached = self._known
        left, failed = list(others), list[int]()

        def work() -> None:
            while left:
                try:
                    rank, host, port, answer = left.pop()
                except IndexError:
                    return
                if _answers(host, port, answer):
                    reached.add(rank)
                else:
                    failed.append(rank)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_AT_ONCE, len(left)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        known = sorted(r for r in failed if r in reached)
        return known, sorted({*failed} - {*known}) if reached else []

    def close(self) -> None:
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # None to be had: this process has as many files open as it may.
                time.sleep(0.1)
                continue
            with suppress(OSError), connection:
                connection.settimeout(CONNECT_S)
                connection.sendall(self.answer.encode())


def loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host.split("%")[0]).is_loopback
    return False


def _answers(host: str, port: int, answer: str) -> bool:
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            until, said = time.monotonic() + CONNECT_S, b""
            while len(said) < len(answer) and time.monotonic() < until:
                part = connection.recv(64)
                if not part:
                    break
                said += part
            return said.decode(errors="replace") == answer
    except OSError:
        return False
