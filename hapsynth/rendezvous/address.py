"""What the environment says about a job: where its processes meet, and how long they wait for each other."""

from __future__ import annotations

import math
import os
import random
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
BIND = "JAX_COORDINATOR_BIND_ADDRESS"
RENDEZVOUS = "HAPSYNTH_RENDEZVOUS"
PREFLIGHT = "HAPSYNTH_PREFLIGHT"
TOKEN = "HAPSYNTH_TOKEN"
"""A secret of the job that every process of it has; of the environment, as command lines are for all to read."""
LAUNCHER = "HAPSYNTH_LAUNCHER"
"""Set by a launcher that serves the rendezvous: how it is called, and that processes needn't."""

Address = tuple[str, int]


class JobError(RuntimeError):
    """The processes of a job can't work together; the text names them and the way out."""


def parse_address(text: str, name: str) -> Address:
    """`host:port`; JobError names what holds another text. An IPv6 host may stand in brackets."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise JobError(f"{name} is {text!r}; give HOST:PORT, as in node1:1234")
    return host.strip("[]"), int(port)


def says_where(environment: Mapping[str, str]) -> bool:
    """Whether the environment has what `find_address` needs."""
    return bool(environment.get(RENDEZVOUS) or environment.get(COORDINATOR))


def find_address(given: str | None = None, environment: Mapping[str, str] = os.environ) -> Address:
    """Where process 0 serves the rendezvous: as given, as HAPSYNTH_RENDEZVOUS says, or beside JAX's coordinator."""
    if given is not None:
        return parse_address(given, "the address of the rendezvous")
    if environment.get(RENDEZVOUS):
        return parse_address(environment[RENDEZVOUS], RENDEZVOUS)
    if environment.get(COORDINATOR):
        host, port = parse_address(environment[COORDINATOR], COORDINATOR)
        return parse_address(f"{host}:{port + 1}", f"{RENDEZVOUS} (one above the port of {COORDINATOR})")
    raise JobError(
        f"this plan runs on several processes, and where they meet is not known: start them with `hapsynth launch`, or "
        f"set {COORDINATOR}=HOST:PORT (as given to jax.distributed.initialize; the rendezvous takes the next port) or "
        f"{RENDEZVOUS}=HOST:PORT in each, HOST being process 0's; {PREFLIGHT}=off runs the plan without any checks"
    )


def free_ports(count: int) -> range:
    """Ports of this host in a row that nothing listens at; JobError where it has none.

    They are taken later, so below those that Linux gives to outgoing connections, of which any may come in between.
    """
    try:
        outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        outgoing = 1 << 15
    lowest, end = (10_000, outgoing) if outgoing > 20_000 else (20_000, 1 << 16)
    # Of the system, not of the seeded generator: jobs started alike would all ask for the same ports.
    draw = random.SystemRandom()
    for _ in range(100):
        first = draw.randrange(lowest, end - count)
        ports = range(first, first + count)
        with ExitStack() as stack:
            try:
                for port in ports:
                    stack.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
        return ports
    raise JobError(
        f"no {count} free ports in a row were found on {socket.gethostname()}; give --coordinator HOST:PORT with a "
        "free one whose next one is free too"
    )


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Those of `JOB` are read from `HAPSYNTH_<NAME>_S`, so that a slow job can be given more."""

    JOB: ClassVar[tuple[str, ...]] = ("join", "barrier", "silence")

    join: float = 60.0
    """For a process that has not come to its first plan."""
    barrier: float = 600.0
    """For one that is alive and does not come to the next check, such as a slow one that compiles."""
    silence: float = 20.0
    """For one that is not heard of."""
    suspicion: float = 1.0
    """For the one that failed first to be known, where another says that it failed."""
    hello: float = 5.0
    """For the first line of whoever connects, in all."""

    @property
    def beat(self) -> float:
        """Between two signs of life."""
        return min(1.0, self.silence / 5)

    @staticmethod
    def of(environment: Mapping[str, str] = os.environ) -> Timeouts:
        found: dict[str, float] = {}
        for name in Timeouts.JOB:
            key = f"HAPSYNTH_{name.upper()}_S"
            text = environment.get(key) or str(getattr(Timeouts, name))
            try:
                found[name] = float(text)
            except ValueError:
                found[name] = math.nan
            if not (math.isfinite(found[name]) and found[name] > 0):
                raise JobError(f"{key} is {text!r}; give a number of seconds above 0")
        return Timeouts(**found)
