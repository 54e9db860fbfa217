"""This process in its job: it joins at the rendezvous, meets the others, and ends when the job is over."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from hapsynth.rendezvous.address import (
    LAUNCHER,
    PREFLIGHT,
    RENDEZVOUS,
    TOKEN,
    Address,
    JobError,
    Timeouts,
    find_address,
)
from hapsynth.rendezvous.client import PROCESS_0, Client
from hapsynth.rendezvous.cpu_scheduling import as_batch_work
from hapsynth.rendezvous.server import INITIALIZING, Server, named

ENDED = 1
"""Exit status of a process that ends because its job is over."""
_DRAIN_S = 2.0
_LATE_S = 10.0
"""To join a job only to say what it ends of: JAX's exit would wait for the others for minutes."""


class _Job:
    """This process's part in the job: one for as long as it lives."""

    def __init__(self) -> None:
        self.client: Client | None = None
        self.server: Server | None = None
        self.joining: threading.Thread | None = None
        self.failed = False
        self.in_call: tuple[int, ...] = ()
        """The processes of the plan whose call has begun and not returned."""
        self.checked: weakref.WeakSet[Any] = weakref.WeakSet()
        self.meetings = Counter[tuple[int, ...]]()


_job = _Job()


def connect(address: str | None = None) -> None:
    """Join the processes of this job now; otherwise the first call of a plan does.

    All processes that run a plan, and process 0, which serves the rendezvous, must come. `address`: HOST:PORT on
    process 0's host; by default as HAPSYNTH_RENDEZVOUS says, or JAX_COORDINATOR_ADDRESS with the next port.
    Raises JobError where they do not find each other.
    """
    as_batch_work()
    here = (jax.process_index(), jax.process_count())
    if _job.joining is not None:
        _job.joining.join()
    if _job.client is not None:
        if (_job.client.rank, _job.client.processes) == here:
            return
        _job.client.close()
    try:
        where, timeouts = find_address(address), Timeouts.of()
        if here[0] == 0 and _job.server is None and LAUNCHER not in os.environ:
            _job.server = Server(where, here[1], timeouts, os.environ.get(TOKEN, ""))
        _job.client = _join(where, *here, timeouts)
    except JobError:
        _job.failed = True
        raise


def join_launched(environment: Mapping[str, str] = os.environ) -> None:
    """In a process that a launcher started, which serves the rendezvous: join already while it is imported, so that all
    hear of what fails before the first plan. The processes that it starts itself do not."""
    if not (environment.get(LAUNCHER) and environment.get(RENDEZVOUS) and environment.get(PREFLIGHT, "on") == "on"):
        return
    if _job.joining is not None or os.getsid(0) != os.getpid():
        return
    rank, processes = (int(environment[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    if processes == 1:
        return

    def work() -> None:
        # What is wrong here is said by whoever asks for the others.
        with suppress(JobError):
            client = _join(find_address(None, environment), rank, processes, Timeouts.of(environment))
            client.find_doing = _initializing
            _job.client = client

    _job.joining = threading.Thread(target=work, name="hapsynth heartbeat", daemon=True)
    _job.joining.start()


def _join(where: Address, rank: int, processes: int, timeouts: Timeouts) -> Client:
    # The number is known now: JAX, asked for it as it ends, starts its backend again and waits for the others.
    over = partial(_end, named(rank, socket.gethostname(), os.getpid()))
    serves = os.environ.get(LAUNCHER) or PROCESS_0
    return Client(where, rank, processes, timeouts, over, _say, serves=serves)


def _initializing() -> str:
    """Whether the main thread waits for the other processes in JAX's initialization."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if frame.f_code.co_name == "initialize" and file.name == "distributed.py" and "jax" in file.parts:
            return INITIALIZING
        frame = frame.f_back
    return ""


def exchanged(mesh: Mesh, said: Any, doing: str) -> list[Any] | None:
    """What each process that holds devices of `mesh` says, in the order of their numbers: a barrier, which waits as
    long as all of them live. `said`: as JSON holds it. `doing`: what the others are told that this process does.

    None for several processes without a rendezvous, as HAPSYNTH_PREFLIGHT=off has it. Raises as `before_call` does.
    """
    if not mesh.is_multi_process:
        return [said]
    if not _wanted():
        return None
    client = _joined()
    client.doing = doing
    try:
        return _gathered(client, said, _ranks(mesh))
    finally:
        client.doing = "at work"


def met(mesh: Mesh, said: Any = None) -> list[Any] | None:
    """As `exchanged`, in the middle of a plan's call; None in a process that has not joined its job."""
    return None if _job.client is None else _gathered(_job.client, said, _ranks(mesh))


def _wanted() -> bool:
    text = os.environ.get(PREFLIGHT, "on")
    if text not in ("on", "off"):
        raise JobError(f"{PREFLIGHT} is {text!r}; give on or off")
    return text == "on"


def _joined() -> Client:
    connect()
    assert _job.client is not None
    return _job.client


def _ranks(mesh: Mesh) -> tuple[int, ...]:
    return tuple(sorted({d.process_index for d in mesh.devices.flat}))


def _gathered(client: Client, said: Any, ranks: tuple[int, ...]) -> list[Any]:
    # Counted by the processes that meet: others may have met without this one.
    _job.meetings[ranks] += 1
    return client.gather(f"meeting {_job.meetings[ranks]}", said, ranks)


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        print(f"hapsynth: {text}", file=sys.stderr, flush=True)


def _end(who: str, reason: str) -> NoReturn:
    """End this process, which may be waiting in a collective for ever. JAX would wait for the others at exit."""
    _say(f"{who}: the job is over: {reason}")
    _exit()


def _exit() -> NoReturn:
    def flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()

    # Where nobody reads what is written, that takes for ever.
    _aside(flush)
    if _job.server is not None:
        # The others go first: without process 0 JAX ends them with a text of its own.
        _job.server.drain(_DRAIN_S)
    os._exit(ENDED)


def _aside(work: Callable[[], None], seconds: float = _DRAIN_S) -> None:
    """Do it, or what of it can be done in `seconds`."""
    thread = threading.Thread(target=work, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # Python 3.12.1 and its like start no thread at exit.
        work()
    else:
        thread.join(seconds)


def _join_late() -> None:
    """Before an error ends a process of a job that has not joined it: the others would miss it for long."""
    with suppress(JobError, RuntimeError, ValueError):
        connect()


@atexit.register
def _leave() -> None:
    """Registered with hapsynth's import, so after JAX, whose wait for all processes at exit comes after this."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if _job.joining is not None:
        _job.joining.join(_DRAIN_S)
    lost = error is not None and jax.distributed.is_initialized()
    if lost and _job.client is None and not _job.failed and os.environ.get(PREFLIGHT, "on") == "on":
        _aside(_join_late, _LATE_S)
    if _job.client is not None:
        if _job.in_call:
            # It exits out of a call, in which the others wait for it.
            _job.client.calls[_job.in_call] -= 1
        said = "" if error is None else f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
        _job.client.leave(said)
    if _job.failed or lost or (error is not None and _job.client is not None):
        _exit()


join_launched()
