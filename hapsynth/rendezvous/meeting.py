"""This process in its job: it joins at the rendezvous, meets the others, and ends when the job is over."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hapsynth import _jax
from hapsynth._nvidia import cuda_plugin, visible_gpus
from hapsynth._xla_flags import UNSHARED
from hapsynth.rendezvous.address import (
    COORDINATOR,
    LAUNCHER,
    PREFLIGHT,
    RENDEZVOUS,
    TOKEN,
    Address,
    JobError,
    Timeouts,
    find_address,
    parse_address,
    says_where,
)
from hapsynth.rendezvous.client import PROCESS_0, Client
from hapsynth.rendezvous.cpu_scheduling import as_batch_work
from hapsynth.rendezvous.server import AT_WORK, INITIALIZING, Server, named, serving_host

ENDED = 1
"""Exit status of a process that ends because its job is over."""
_SAID = 8192
"""Bytes of what process 0 says to all at the beginning."""
_DRAIN_S = 2.0
_LATE_S = 10.0
"""To join a job only to say what it ends of: JAX's exit would wait for the others for minutes."""


class Meeting:
    """This process's part in its job: one for as long as it lives."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._server: Server | None = None
        self._joining: threading.Thread | None = None
        self._failed = False
        self._status = ENDED
        self._in_call: tuple[int, ...] = ()
        """The processes of the plan whose call has begun and not ended."""
        self._calls = Counter[tuple[int, ...]]()
        """Those that have begun, by the processes of the plan, also before this one parted from the others."""
        self._caller = 0
        """The thread that makes them."""
        self.held = Counter[tuple[int, ...]]()
        """Meetings, by the processes that met."""
        self._address: Address | None = None
        self._agreed = ""
        self.coordinator: str | None = None
        """The address that JAX was initialized with, where it was given."""

    @property
    def _token(self) -> str:
        return self._agreed or os.environ.get(TOKEN, "")

    @property
    def joined(self) -> bool:
        """Whether this process has met the others."""
        return self._client is not None

    @property
    def knows_where(self) -> bool:
        """Whether the environment says where the processes meet, or they have agreed on it."""
        return self._address is not None or says_where(os.environ)

    @property
    def client(self) -> Client:
        """This process's side of the rendezvous, which it joins now if it has not. Raises JobError as `join` does."""
        self.join()
        assert self._client is not None
        return self._client

    def join(self, address: str | None = None) -> None:
        """As `connect`."""
        here = (jax.process_index(), jax.process_count())
        if self._joining is not None:
            self._joining.join()
        if self._client is not None:
            if (self._client.rank, self._client.processes) == here:
                return
            self._client.close()
        if address is None and not self.knows_where:
            self.agree(None)
        try:
            where = self._address if self._address and address is None else find_address(address)
            timeouts = Timeouts.of()
            if here[0] == 0 and self._server is None and LAUNCHER not in os.environ:
                self._serve(where, here[1], timeouts)
            self._client = _client(where, *here, timeouts, self._token)
            self._client.calls = self._calls
            if self.coordinator is not None:
                self._client.coordinator_port = parse_address(self.coordinator, COORDINATOR)[1]
        except JobError:
            self._failed = True
            raise

    def agree(self, coordinator: str | None) -> None:
        """All processes of the job agree where the rendezvous is and on a token. Process 0 draws them, unless the
        environment has them, and JAX's first collective carries them: all must come to it, gloo gives them 30 s.
        JobError where they don't."""
        rank, processes = jax.process_index(), jax.process_count()
        given = coordinator or os.environ.get(COORDINATOR)
        host = parse_address(given, COORDINATOR)[0] if given else ""
        said: dict[str, Any] = {}
        try:
            if rank == 0:
                asked = os.environ.get(RENDEZVOUS)
                where = parse_address(asked, RENDEZVOUS) if asked else (host or socket.gethostname(), 0)
                self._agreed = self._token or secrets.token_hex(16)
                server = self._serve(where, processes, Timeouts.of())
                said = {"host": where[0], "port": server.port, "token": self._token, "fixed": bool(asked)}
        except JobError as error:
            said = {"error": str(error)[:1000]}
        try:
            said = _from_process_0(said)
        except (RuntimeError, ValueError) as error:
            self._failed = True
            reason = next(iter(str(error).splitlines()), "")
            raise JobError(
                f"process {rank} of {processes} did not meet the others, so where they meet could not be agreed on "
                f"({reason[:200]}): see the output of the process that failed; where one only comes later, call "
                "hapsynth.jobs.initialize() in place of jax.distributed.initialize()"
            ) from error
        if "error" in said:
            self._failed = True
            raise JobError(said["error"])
        # The coordinator was reached under this process's own name for it.
        self._address = (said["host"] if said["fixed"] or not host else host, said["port"])
        self._agreed = said["token"]

    def _serve(self, where: Address, processes: int, timeouts: Timeouts) -> Server:
        self._server = Server(where, processes, timeouts, self._token)
        if not (self._token or serving_host(where[0]).startswith("127.")):
            _say(
                f"{TOKEN} is not set: whoever reaches {where[0]}:{self._server.port} can end this job; set one secret "
                "in every process, or begin it with hapsynth.jobs.initialize, which draws one"
            )
        return self._server

    def join_soon(self, rank: int, processes: int, environment: Mapping[str, str]) -> None:
        """From a thread of its own, before JAX knows the processes."""

        def work() -> None:
            # What is wrong here is said by whoever asks for the others.
            with suppress(JobError):
                timeouts, token = Timeouts.of(environment), environment.get(TOKEN, "")
                client = _client(find_address(None, environment), rank, processes, timeouts, token)
                client.find_doing, client.calls = _initializing, self._calls
                self._client = client

        if self._joining is None:
            self._joining = threading.Thread(target=work, name="hapsynth heartbeat", daemon=True)
            self._joining.start()

    def gather(self, said: Any, ranks: tuple[int, ...], *, patient: bool = False) -> list[Any]:
        """What each process of `ranks` says, in that order: a barrier, with no time limit where `patient`. JobError
        where the job is over."""
        # Counted by the processes that meet: others may have met without this one.
        self.held[ranks] += 1
        doing = "" if self.client.doing == AT_WORK else f" ({self.client.doing})"
        caller = self._caller or threading.main_thread().ident
        aside = caller != threading.get_ident()
        return self.client.gather(f"meeting {self.held[ranks]}{doing}", said, ranks, patient=patient, aside=aside)

    @contextmanager
    def doing(self, what: str) -> Generator[None]:
        """What the others are told meanwhile that this process does."""
        client = self.client
        client.doing = what
        try:
            yield
        finally:
            client.doing = AT_WORK

    def begin_call(self, ranks: tuple[int, ...]) -> None:
        """A call of a plan of these processes begins."""
        self._in_call = ranks
        self._calls[ranks] += 1
        self._caller = threading.get_ident()

    def end_call(self, returned: bool) -> None:
        """The call has returned; or it raised, or the process exits out of it: then it counts as none, as the others
        wait in theirs for one that is still to come."""
        if self._in_call and not returned:
            self._calls[self._in_call] -= 1
        self._in_call = ()

    def part(self) -> None:
        """Leave, and say why to nobody: all know it, and go their own ways, which may bring them together again."""
        if self._client is not None:
            self._client.close(returns=True)
        self._client = None

    def fail(self, error: BaseException, doing: str) -> None:
        """Leave with an error in doing something: the job is over for the others too. It is printed here, as the end of
        the job ends this process before who raised it is heard of."""
        with suppress(OSError, ValueError):
            traceback.print_exception(error)
            sys.stderr.flush()
        self.client.leave(f"{_described(error)}, in {doing}")
        self._failed = True

    def give_up(self, error: BaseException, status: int) -> None:
        """Leave with an error that the user has been told, where this process has met the others: the job is over for
        them too, and this process ends with `status`."""
        if self._client is not None:
            self._failed, self._status = True, status
            self._client.leave(_described(error))

    def exit(self) -> NoReturn:
        """End this process without JAX's exit, which would wait for the others."""

        def flush() -> None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()

        # Where nobody reads what is written, that takes for ever.
        _aside(flush)
        if self._server is not None:
            # The others go first: without process 0 JAX ends them with a text of its own.
            self._server.drain(_DRAIN_S)
        os._exit(self._status)

    def leave(self) -> None:
        """As the interpreter ends."""
        error: BaseException | None = getattr(sys, "last_value", None)
        if self._joining is not None:
            self._joining.join(_DRAIN_S)
        lost = error is not None and jax.distributed.is_initialized()
        if lost and self._client is None and not self._failed and os.environ.get(PREFLIGHT, "on") == "on":
            _aside(self._join_late, _LATE_S)
        if self._client is not None:
            self.end_call(returned=False)
            self._client.leave("" if error is None else _described(error))
        if self._server is not None and error is None and not self._failed:
            # After a `jax.distributed.shutdown()` the others may have something left to do.
            self._server.closes(_DRAIN_S)
        if self._failed or lost or (error is not None and self._client is not None):
            self.exit()

    def _join_late(self) -> None:
        """Before an error ends a process of a job that has not joined it: the others would miss it for long."""
        with suppress(JobError, RuntimeError, ValueError):
            self.join()


meeting = Meeting()
"""This process's."""


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **given: Any,
) -> None:
    """`jax.distributed.initialize` with these arguments; then the processes of the job join at once.

    Of a job that no launcher started process 0 draws the secret without which nobody joins it (unless HAPSYNTH_TOKEN
    has one) and a port for the rendezvous (unless HAPSYNTH_RENDEZVOUS has). Both travel by JAX's first collective, to
    which all processes come together here, and nowhere later: gloo's fails where one is 30 s behind another.
    Raises as `jax.distributed.initialize` and `connect` do.
    """
    jax.distributed.initialize(coordinator_address, num_processes, process_id, **given)
    if jax.process_count() == 1 or not wanted():
        return
    meeting.coordinator = coordinator_address
    if LAUNCHER not in os.environ:
        meeting.agree(coordinator_address)
    connect()


def connect(address: str | None = None) -> None:
    """Join the processes of this job now; otherwise `synthesize` or `load` does, with a mesh of several processes.

    All processes that run a plan, and process 0, which serves the rendezvous, must come. `address`: HOST:PORT on
    process 0's host; by default as HAPSYNTH_RENDEZVOUS says, or JAX_COORDINATOR_ADDRESS with the next port. Where none
    says it, as under srun or mpirun, process 0 draws address and secret, and JAX carries them: then all must come.
    Raises JobError where they do not find each other.
    """
    as_batch_work()
    meeting.join(address)


def join_launched(environment: Mapping[str, str] = os.environ) -> None:
    """In a process that a launcher started, which serves the rendezvous: join already while it is imported, so that all
    hear of what fails before the first plan. The processes that it starts itself do not."""
    if not (environment.get(LAUNCHER) and environment.get(RENDEZVOUS) and environment.get(PREFLIGHT, "on") == "on"):
        return
    if os.getsid(0) != os.getpid():
        return
    rank, processes = (int(environment[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    if processes > 1:
        meeting.join_soon(rank, processes, environment)


def _client(where: Address, rank: int, processes: int, timeouts: Timeouts, token: str) -> Client:
    # The number is known now: JAX, asked for it as it ends, starts its backend again and waits for the others.
    over = partial(_end, named(rank, socket.gethostname(), os.getpid()))
    serves = os.environ.get(LAUNCHER) or PROCESS_0
    # By name, as no backend is to be started yet.
    cuda = cuda_plugin() if visible_gpus(getattr(jax.config, "jax_platforms", None) or "") else None
    return Client(where, rank, processes, timeouts, over, _say, serves=serves, token=token, cuda=cuda)


def from_each(own: np.ndarray) -> np.ndarray:
    """The array of each process, all of one shape: [processes, ...]. A collective of one device of each, as they may
    have unlike numbers of them."""
    first = {d.process_index: d for d in reversed(jax.devices())}
    mesh = Mesh([first[rank] for rank in sorted(first)], ("processes",))
    rows = NamedSharding(mesh, PartitionSpec("processes"))
    here = first[jax.process_index()]
    sent = jax.make_array_from_single_device_arrays((mesh.size, *own.shape), rows, [jax.device_put(own[None], here)])
    options = dict(UNSHARED) if _jax.is_gpu(here.platform) else {}
    every = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()), compiler_options=options)(sent)
    return np.asarray(every.addressable_data(0))


def _same(x: jax.Array) -> jax.Array:
    """By name, so that JAX compiles it once for each shape."""
    return x


def _from_process_0(said: Mapping[str, Any]) -> dict[str, Any]:
    """What process 0 says, in all."""
    mine = np.zeros(_SAID, np.uint8)
    text = json.dumps(said).encode() if jax.process_index() == 0 else b""
    mine[: len(text)] = list(text[:_SAID])
    return json.loads(bytes(from_each(mine)[0]).rstrip(b"\0"))


def _described(error: BaseException) -> str:
    """An error and the line of the user's code that it came from, for the other processes."""
    at = _jax.raised_at(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}{f' ({at})' if at else ''}"


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
    if not wanted():
        return None
    as_batch_work()
    with meeting.doing(doing):
        return meeting.gather(said, ranks_of(mesh), patient=True)


def met(mesh: Mesh, said: Any = None) -> list[Any] | None:
    """As `exchanged`, in the middle of a plan's call; None in a process that has not joined its job."""
    return meeting.gather(said, ranks_of(mesh), patient=True) if meeting.joined else None


def wanted() -> bool:
    """Whether processes meet at all: unless HAPSYNTH_PREFLIGHT=off. JobError where it is neither on nor off."""
    text = os.environ.get(PREFLIGHT, "on")
    if text not in ("on", "off"):
        raise JobError(f"{PREFLIGHT} is {text!r}; give on or off")
    return text == "on"


def ranks_of(mesh: Mesh) -> tuple[int, ...]:
    """The processes that hold devices of a mesh."""
    return tuple(sorted({d.process_index for d in mesh.devices.flat}))


def _say(text: str) -> None:
    with suppress(OSError, ValueError):
        print(f"hapsynth: {text}", file=sys.stderr, flush=True)


def _end(who: str, reason: str) -> NoReturn:
    """End this process, which may be waiting in a collective for ever."""
    _say(f"{who}: the job is over: {reason}")
    meeting.exit()


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


# With hapsynth's import, so after JAX, whose wait for all processes at exit comes after this.
atexit.register(meeting.leave)
join_launched()
