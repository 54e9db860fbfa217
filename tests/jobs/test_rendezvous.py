"""The rendezvous between threads of one process: meeting, and every way in which a member is lost."""

import inspect
import json
import os
import re
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from thoroughness import THOROUGH

from hapsynth.rendezvous import client as client_module
from hapsynth.rendezvous import peers as peers_module
from hapsynth.rendezvous import server as server_module
from hapsynth.rendezvous import wire
from hapsynth.rendezvous.address import JobError, Timeouts, find_address, free_ports
from hapsynth.rendezvous.client import Client
from hapsynth.rendezvous.meeting import _initializing
from hapsynth.rendezvous.peers import Peers
from hapsynth.rendezvous.server import COMPARING, PROTOCOL, Server, serving_host
from hapsynth.rendezvous.wire import Channel

pytestmark = pytest.mark.waits

LIMIT_S = 300.0


class Often(Timeouts):
    """Gives signs of life often, however long it waits for them: a busy machine delays some."""

    beat = 0.1


SOON = Often(join=2.0, barrier=LIMIT_S, silence=1.5)
"""Where somebody does not come, or is not heard of. After 2 s of silence a client would call once more."""
PATIENT = Often(join=LIMIT_S, barrier=LIMIT_S, silence=LIMIT_S)


class Job:
    """Processes of one job, as threads; `reasons[rank]` is why it was over for that one."""

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}
        self.notes: list[str] = []
        self.told = threading.Condition()
        self.clients: list[Client] = []
        self.server: Server | None = None

    def serve(self, processes: int = 2, timeouts: Timeouts = PATIENT) -> int:
        self.server = Server(("localhost", 0), processes, timeouts)
        return self.server.port

    def join(
        self,
        port: int,
        rank: int,
        processes: int = 2,
        timeouts: Timeouts = PATIENT,
        token: str | None = None,
        here: int = 0,
        cuda: str | None = None,
    ) -> Client:
        def over(reason: str) -> None:
            with self.told:
                self.reasons[rank] = reason
                self.told.notify_all()

        told = self.notes.append
        client = Client(("localhost", port), rank, processes, timeouts, over, told, token=token, here=here, cuda=cuda)
        self.clients.append(client)
        return client

    def reason(self, rank: int) -> str:
        with self.told:
            assert self.told.wait_for(lambda: rank in self.reasons, LIMIT_S), "nothing was noticed"
            return self.reasons[rank]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self.server is not None:
            self.server.close()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def hello(port: int, rank: int, **other: Any) -> tuple[socket.socket, dict[str, Any]]:
    """A process that only says hello, and what it is told."""
    connection = socket.create_connection(("localhost", port), timeout=LIMIT_S)
    said = {"protocol": PROTOCOL, "rank": rank, "host": "far", "pid": 7, "processes": 2, **other}
    connection.sendall(json.dumps({"hello": said}).encode() + b"\n")
    with connection.makefile() as lines:
        return connection, json.loads(lines.readline())


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor() as pool:
        return [f.result(LIMIT_S) for f in [pool.submit(call) for call in calls]]


def test_processes_meet_some_of_them_and_all(job: Job) -> None:
    port = job.serve(3)
    a, b, c = at_once(*(lambda rank=rank: job.join(port, rank, 3) for rank in range(3)))
    meet = lambda client, name, ranks: lambda: client.gather(name, client.rank * 10, ranks)
    assert at_once(*(meet(client, "all", [0, 1, 2]) for client in (c, a, b))) == [[0, 10, 20]] * 3
    assert at_once(meet(c, "some", [0, 2]), meet(a, "some", [0, 2])) == [[0, 20]] * 2
    for client in (a, b, c):
        client.leave()
    assert not job.reasons


def test_what_all_say_together_is_longer_than_a_line_of_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the facts of plans of many arguments are, and the pieces of a checkpoint: no server has died of it."""
    monkeypatch.setattr(wire, "LINE_BYTES", 1 << 18)
    port, much = job.serve(), "x" * 250_000
    clients = [job.join(port, rank) for rank in range(2)]
    said = at_once(*(lambda c=c: c.gather("much", much, [0, 1]) for c in clients))
    assert said[0] == said[1] == [much] * 2
    assert not job.reasons


def test_a_process_that_dies(job: Job) -> None:
    port = job.serve()
    alive = job.join(port, 0)
    connection, told = hello(port, 1)
    assert told == {"welcome": PROTOCOL}
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert "process 1 on far (pid 7) has died" in job.reason(0)
    with pytest.raises(JobError, match="process 1 on far"):
        alive.gather("late", 1, [0, 1])


def test_a_process_that_is_not_heard_of(job: Job) -> None:
    port = job.serve(timeouts=SOON)
    job.join(port, 0)
    connection, _ = hello(port, 1)
    with connection:
        assert "process 1 on far (pid 7) has not been heard of for 1.5 s" in job.reason(0)


def test_a_process_that_never_comes(job: Job) -> None:
    alone = job.join(job.serve(timeouts=Often(join=0.5, silence=LIMIT_S)), 0)
    with pytest.raises(JobError, match=r"process 1 did not come to the plan within 0\.5 s, where process 0 waits"):
        alone.gather("first", 1, [0, 1])


def test_a_process_that_is_alive_and_elsewhere(job: Job) -> None:
    port = job.serve(timeouts=Often(join=0.1, barrier=0.5, silence=LIMIT_S))
    waits, elsewhere = job.join(port, 0), job.join(port, 1)
    elsewhere.doing = "compiling"
    assert job.server is not None
    while job.server._members[1].doing != "compiling":
        time.sleep(0.01)
    with pytest.raises(JobError, match=r"process 1 on .*, compiling did not come .* HAPSYNTH_BARRIER_S"):
        waits.gather("first", 1, [0, 1])


def test_processes_that_come_to_unlike_plans(job: Job) -> None:
    port = job.serve()
    a, b = job.join(port, 0), job.join(port, 1)

    def meet(client: Client, ranks: list[int]) -> None:
        with pytest.raises(JobError, match=r"plan of process.* and others to one of process"):
            client.gather("first", 1, ranks)

    at_once(lambda: meet(a, [0, 1]), lambda: meet(b, [1, 0]))


def test_a_process_that_ends_before_the_others(job: Job) -> None:
    port = job.serve()
    goes_on, ends = job.join(port, 0), job.join(port, 1)
    goes_on.calls[0, 1], ends.calls[0, 1] = 2, 1
    ends.leave()
    assert "has ended after 1 call of plans, and process 0" in job.reason(0)
    assert "has ended after 1 call of plans, and process 0" in job.reason(1)


def test_one_that_ends_as_the_others_have_still_to_say_that_their_call_raised(job: Job) -> None:
    """Signs of life are a beat apart; a last call that raises in all ends no job."""
    port = job.serve()
    says_later, ends = job.join(port, 0), job.join(port, 1)
    says_later.calls[0, 1], ends.calls[0, 1] = 2, 1
    server = job.server
    assert server is not None
    while (0, 1) not in server._members[0].calls:
        time.sleep(0.01)
    with server._lock:
        server._hear(server._members[1], {"leave": "", "calls": [[[0, 1], 1]]})
        present, left = server._all(), server._members[1].heard
        server._judge(present, left + PATIENT.beat)
        assert not server._over
        server._judge(present, left + 3 * PATIENT.beat)
        assert "has ended after 1 call of plans" in server._over


def test_one_that_takes_part_in_fewer_plans_may_end_first(job: Job) -> None:
    port = job.serve(3)
    a, b, ends = (job.join(port, rank, 3) for rank in range(3))
    for client in (a, b):
        # The plan of these two alone that they came to first is no fault of the third's.
        client.calls[0, 1] = 5
    at_once(*(lambda c=c: c.gather("1", 0, [0, 1]) for c in (a, b)))
    at_once(*(lambda c=c: c.gather("1", 0, [0, 1, 2]) for c in (a, b, ends)))
    ends.leave()
    for client in (a, b):
        client._say_alive()
    with job.told:
        assert not job.told.wait_for(lambda: job.reasons, 3 * PATIENT.beat)
    a.leave()
    b.leave()


def test_hosts_that_a_signal_came_to_wait_for_one_another(job: Job) -> None:
    """What runs on the others still saves."""
    port = job.serve(3)
    launchers = [job.join(port, rank, 3, here=1) for rank in range(3)]
    server = job.server
    assert server is not None
    for member in (server._launchers[rank] for rank in range(2)):
        server._hear(member, {"interrupted": "SIGTERM came"})
    # Its process saved, and ended by the signal all the same.
    server._hear(server._launchers[1], {"ended": 1, "how": "process 1 was killed by signal 15", "failed": True})
    server._hear(server._launchers[1], {"leave": "", "calls": []})
    assert not server._over
    launchers[0].leave()
    assert [job.reason(rank) for rank in range(3)] == ["SIGTERM came"] * 3


def test_a_process_that_joins_again_is_the_same_one(job: Job) -> None:
    """As after a preflight that failed: that it left before may be heard of later."""
    port = job.serve()
    stays, first = job.join(port, 0), job.join(port, 1)
    again = job.join(port, 1)
    first.close()
    assert at_once(*(lambda c=c: c.gather("first", c.rank, [0, 1]) for c in (stays, again))) == [[0, 1]] * 2
    assert not job.reasons


def test_one_that_returns_is_waited_for(job: Job) -> None:
    """As after a preflight that failed, which its caller bears: another is sooner at the next plan."""
    port = job.serve()
    quick, first = job.join(port, 0), job.join(port, 1)
    quick.calls[0, 1] = 1
    first.close(returns=True)

    def comes() -> Any:
        time.sleep(5 * PATIENT.beat)
        return job.join(port, 1).gather("first", 1, [0, 1])

    assert at_once(lambda: quick.gather("first", 0, [0, 1]), comes) == [[0, 1]] * 2
    assert not job.reasons


@pytest.mark.parametrize("patient", [False, True])
def test_a_meeting_that_waits_as_long_as_all_live(job: Job, patient: bool) -> None:
    short = replace(PATIENT, barrier=0.2)
    port = job.serve(timeouts=short)
    quick, slow = job.join(port, 0, timeouts=short), job.join(port, 1, timeouts=short)

    def comes() -> Any:
        time.sleep(0.6)
        return slow.gather("save", 1, [0, 1], patient=patient)

    meet = lambda: at_once(lambda: quick.gather("save", 0, [0, 1], patient=patient), comes)
    if patient:
        assert meet() == [[0, 1]] * 2
    else:
        with pytest.raises(JobError, match=r"did not come to the plan within 0\.2 s"):
            meet()


WAITS = r"process 0 on .*, saving, waits after 2 calls of plans for process 1 on .*, which is in call 3: every process "


@pytest.mark.parametrize(
    ("begun", "aside", "ago", "ends"),
    [
        ((2, 3), False, 2 * LIMIT_S, WAITS),
        # The other is to come yet, has just gone on, or calls are made by another thread.
        ((2, 2), False, 2 * LIMIT_S, ""),
        ((2, 3), False, 0.0, ""),
        ((2, 3), True, 2 * LIMIT_S, ""),
    ],
)
def test_one_that_waits_for_one_that_has_passed(
    job: Job, begun: tuple[int, int], aside: bool, ago: float, ends: str
) -> None:
    """As where one saves and the others make their next call: both would wait for ever."""
    port = job.serve()
    saves, other = clients = [job.join(port, rank) for rank in range(2)]
    saves.doing = "saving"
    for client, calls in zip(clients, begun):
        client.calls[0, 1] = calls
    meet = lambda client: client.gather("meeting", None, (0, 1), patient=True, aside=aside)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(meet, saves)
        server = job.server
        assert server is not None
        while not server._gathers or [server._members[rank].calls for rank in range(2)] != [c.calls for c in clients]:
            assert not waiting.done(), waiting.exception()
            time.sleep(0.01)
        with server._lock:
            (gather,) = server._gathers.values()
            gather.began -= 2 * LIMIT_S
            server._members[1].calls_since -= ago
        if ends:
            assert re.match(ends, job.reason(0))
            assert isinstance(waiting.exception(LIMIT_S), JobError)
            return
        with job.told:
            assert not job.told.wait_for(lambda: job.reasons, 4 * PATIENT.beat)
        assert meet(other) == waiting.result(LIMIT_S) == [None, None]


def test_one_that_saves_as_the_other_compares_plans(job: Job) -> None:
    port = job.serve()
    a, b = job.join(port, 0), job.join(port, 1)

    def meet(client: Client, name: str) -> None:
        with pytest.raises(JobError, match=r"comes to meeting 5.*, and others to meeting 5.*: call the same"):
            client.gather(name, 1, [0, 1])

    at_once(lambda: meet(a, "meeting 5 (saving)"), lambda: meet(b, "meeting 5"))


PLANNED = r"every process of the mesh must call `hapsynth\.synthesize`; to plan in one alone give it the `Cluster`"


@pytest.mark.parametrize(
    ("other_does", "timeouts", "says"),
    [
        ("loads", PATIENT, rf"comes to meeting 1.*, and others to meeting 1.*: {PLANNED}"),
        (
            "computes",
            replace(PATIENT, barrier=0.2),
            rf"did not come to the plan within 0\.2 s.*: {PLANNED}.*HAPSYNTH_BARRIER_S",
        ),
        (
            "is not there",
            replace(PATIENT, join=0.2),
            rf"did not come to the plan within 0\.2 s.* runs; {PLANNED}.*HAPSYNTH_JOIN_S",
        ),
    ],
)
def test_one_that_plans_for_the_mesh_alone(job: Job, other_does: str, timeouts: Timeouts, says: str) -> None:
    """As where a script has process 0 plan, and the others load the plan."""
    port = job.serve(timeouts=timeouts)
    clients = [job.join(port, rank) for rank in range(1 if other_does == "is not there" else 2)]
    doing = [COMPARING, "placing arguments"] if other_does == "loads" else [COMPARING]

    def meet(client: Client, doing: str) -> None:
        with pytest.raises(JobError, match=says):
            client.gather(f"meeting 1 ({doing})", None, [0, 1])

    at_once(*(partial(meet, client, what) for client, what in zip(clients, doing)))


def test_a_connection_to_itself_is_none(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    port = job.serve(1)
    connect, tried = socket.create_connection, list[str]()

    def to_itself(address: Any, **options: Any) -> socket.socket:
        if tried:
            return connect(address, **options)
        tried.append("once")
        with socket.create_server(("localhost", 0)) as probe:
            free = probe.getsockname()
        return connect(free, source_address=free, **options)

    monkeypatch.setattr(socket, "create_connection", to_itself)
    assert job.join(port, 0, 1).gather("alone", 5, [0]) == [5]


@pytest.mark.parametrize("waits", [False, True])
def test_one_that_dies_behind_the_others_has_not_only_made_fewer_calls(job: Job, waits: bool) -> None:
    """Its launcher is to say how it ended, which takes longer than the next look at who made which calls."""
    port = job.serve()
    launcher = Client(("localhost", port), 0, 2, PATIENT, lambda _: None, job.notes.append, here=2)
    job.clients.append(launcher)
    ahead = job.join(port, 0)

    def wait() -> None:
        with suppress(JobError):
            ahead.gather("meeting", None, (0, 1))

    if waits:
        threading.Thread(target=wait, daemon=True).start()
    else:
        ahead.calls[0, 1] = 5
    connection, _ = hello(port, 1)
    time.sleep(3 * PATIENT.beat)
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    time.sleep(3 * PATIENT.beat)
    launcher.say({"ended": 1, "how": "process 1 was killed by signal 9", "failed": True})
    assert job.reason(0) == "process 1 was killed by signal 9"


def test_one_that_has_ended_never_comes_to_jaxs_initialization(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the others are in by their stack: before JAX knows its processes somebody's absence shows nowhere else."""
    monkeypatch.setattr(server_module, "_INITIALIZING_S", 0.2)
    port = job.serve()
    launcher = Client(("localhost", port), 0, 2, PATIENT, lambda _: None, job.notes.append, here=2)
    job.clients.append(launcher)
    waits = job.join(port, 0)
    waits.find_doing = _initializing
    launcher.say({"ended": 1, "how": "process 1 ended with exit code 0", "failed": False})
    with job.told:
        assert not job.told.wait_for(lambda: job.reasons, 0.2 + 3 * PATIENT.beat)
    file = inspect.getsourcefile(inspect.unwrap(jax.distributed.initialize))
    assert file is not None
    made: dict[str, Any] = {}
    exec(compile("def initialize(work):\n    return work()", file, "exec"), made)
    said = made["initialize"](lambda: job.reason(0))
    assert said.startswith("process 1 ended with exit code 0, and process 0 waits for it in jax.distributed.initialize")


def test_who_failed_first_is_named_though_another_says_so_first(job: Job) -> None:
    """A process that dies breaks the collective of another, which may be quicker to say that it failed."""
    port = job.serve(timeouts=replace(PATIENT, suspicion=LIMIT_S))
    quick = job.join(port, 0)
    connection, _ = hello(port, 1)
    leaving = threading.Thread(target=quick.leave, args=("JaxRuntimeError: connection closed",))
    leaving.start()
    connection.shutdown(socket.SHUT_RDWR)
    connection.close()
    assert "process 1 on far (pid 7) has died" in job.reason(0)
    leaving.join()


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        ("ValueError: a bad batch", "mend that, and start the job again"),
        ("MemoryError: no room", "lower memory_limit, and start"),
        ("OSError: [Errno 28] No space left on device", "free space there"),
    ],
)
def test_an_error_ends_the_others(job: Job, error: str, way_out: str) -> None:
    port = job.serve(timeouts=replace(PATIENT, suspicion=0.1))
    # That this one is ahead of the one that fails is no fault of its own.
    job.join(port, 0).calls[0, 1] = 2
    job.join(port, 1).leave(error)
    assert f"ended with {error}: its own output has the traceback; " in job.reason(0)
    assert way_out in job.reason(0)


@pytest.mark.parametrize("before", [True, False])
def test_two_that_do_not_reach_each_other(job: Job, before: bool) -> None:
    """Though both reach the rendezvous: no heartbeat crosses that link, and a collective waits for it for ever. Also
    where they never did, once one is in a call."""
    timeouts = Often(join=LIMIT_S, barrier=LIMIT_S, silence=4.0 if THOROUGH else 2.0)
    port = job.serve(3, timeouts)
    # A launcher, which has the number of its first process, says nothing of whom that reaches.
    job.clients.append(Client(("localhost", port), 1, 3, timeouts, lambda _: None, job.notes.append, here=1))
    clients = [job.join(port, rank, 3, timeouts) for rank in range(3)]
    peers = [c._peers for c in clients if c._peers is not None]
    while any(len(found._known[1]) < 2 for found in peers):
        time.sleep(0.01)
    if not before:
        with job.told:
            # Calls stand still for long: whoever computes for minutes answers all the same.
            assert not job.told.wait_for(lambda: job.reasons, 1.2 * timeouts.silence)
    for a, b in ((1, 2), (2, 1)):
        others, reached = peers[a]._known
        cut = [(r, host, 1 if r == b else at, said) for r, host, at, said in others]
        peers[a]._known = cut, reached if before else {0}
    if not before:
        with job.told:
            assert not job.told.wait_for(lambda: job.reasons, timeouts.silence)
        clients[1].calls[0, 1, 2] = clients[2].calls[0, 1, 2] = 1
    assert re.search(r"process [12] on .* has not reached process [12] on .* for \d s, and both reach", job.reason(0))


@pytest.mark.parametrize(("platform", "told"), [("cpu", [1]), ("gpu", [])])
def test_whom_accelerators_never_reach_they_may_not_need(
    job: Job, monkeypatch: pytest.MonkeyPatch, platform: str, told: list[int]
) -> None:
    """NCCL may have a network of its own."""
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(client_module, "_STANDS_S", 0.0)
    client = job.join(job.serve(), 0)
    client.calls[0, 1] = 1
    asked = threading.Semaphore(0)
    monkeypatch.setattr(client._peers, "unreached", lambda: asked.release() or ([], [1]))
    # Before the call began, since then, and again: what the second round found is kept by now.
    assert all(asked.acquire(timeout=LIMIT_S) for _ in range(3))
    assert client._never == told


def test_who_never_answers_is_waited_for_some_seconds(job: Job) -> None:
    """And asked again: he may be on a busy machine."""
    port = job.serve()
    clients = [job.join(port, rank) for rank in range(2)]
    at_once(*(lambda c=c: c.gather("meeting", None, (0, 1)) for c in clients))
    peers = clients[0]._peers
    assert peers is not None
    assert peers.never() == []
    # What answers at that address is not the one.
    began = time.monotonic()
    peers.know([(1, peers.host, peers.port, "another")], 0.5)
    assert peers.never() == [1]
    assert 0.5 < time.monotonic() - began < 60
    peers.know([(1, peers.host, peers.port, "another")], LIMIT_S)
    threading.Timer(0.5, lambda: setattr(peers, "answer", "another")).start()
    assert peers.never() == []


def test_another_machines_loopback_address_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "CONNECT_S", 0.1)
    peers = Peers(1, "127.0.0.1")
    try:
        peers.host = "192.0.2.7"
        peers.know([(0, "127.0.1.1", peers.port, peers.answer), (2, "192.0.2.8", 1, "x")], 0.0)
        assert [p[0] for p in peers._known[0]] == [2]
        assert peers.unreached() == ([], [])
    finally:
        peers.close()


def test_process_0_dies_or_is_not_heard_of(job: Job) -> None:
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]

        def welcome() -> socket.socket:
            connection, _ = listener.accept()
            connection.sendall(json.dumps({"welcome": PROTOCOL}).encode() + b"\n")
            return connection

        silent, _ = at_once(welcome, lambda: job.join(port, 1, timeouts=SOON))
        with silent:
            assert "process 0, which serves the rendezvous, has not been heard of" in job.reason(1)
        job.reasons.clear()
        dead, _ = at_once(welcome, lambda: job.join(port, 1))
        dead.close()
        assert "process 0, which serves the rendezvous, has died" in job.reason(1)


def test_process_0_ends_before_the_others(job: Job) -> None:
    """As after `jax.distributed.shutdown()`: who only writes results then goes on."""
    port = job.serve()
    client = job.join(port, 1)
    assert job.server is not None
    job.server.closes(LIMIT_S)
    job.server.close()
    with pytest.raises(JobError, match="process 0, which serves the rendezvous, has ended: every process must make"):
        client.gather("late", 1, [0, 1])
    assert not job.reasons


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"protocol": 0}, "another version of hapsynth"),
        ({"processes": 3}, "of a job of 3 processes, and this one has 2"),
        ({"rank": 0}, r"process 0 on far \(pid 7\) and process 0 on .* are both process 0"),
    ],
)
def test_who_does_not_belong_is_turned_away(job: Job, other: dict[str, Any], says: str) -> None:
    port = job.serve()
    stays = job.join(port, 0)
    connection, told = hello(port, **{"rank": 1, **other})
    connection.close()
    assert re.search(says, told["over"])
    # The job goes on without it.
    assert stays.gather("alone", 5, [0]) == [5]


def test_a_port_that_is_taken(job: Job) -> None:
    hasty = replace(SOON, join=0.5, silence=0.5)
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=rf"localhost:{port}.*set HAPSYNTH_RENDEZVOUS=HOST:PORT to a free port"):
            Server(("localhost", port), 2, SOON)
        # What listens there says nothing.
        with pytest.raises(JobError, match="not the rendezvous of process 0"):
            job.join(port, 1, timeouts=hasty)
    with pytest.raises(JobError, match=r"found no rendezvous at localhost:.* within 0\.5 s"):
        job.join(port, 1, timeouts=hasty)


def test_what_is_no_message_loses_only_its_sender(job: Job) -> None:
    port = job.serve()
    stays = job.join(port, 0)
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b'{"hello": 1}\n', b'["hello"]\n', b""):
        with socket.create_connection(("localhost", port), timeout=LIMIT_S) as stranger:
            stranger.sendall(nonsense)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""
    assert stays.gather("alone", 5, [0]) == [5]


# Strangers: what they send ends neither the job nor a thread, and takes no memory.


@pytest.fixture
def besieged(job: Job, request: pytest.FixtureRequest) -> Iterator[tuple[Job, int]]:
    """A job of two and its port; it goes on after whatever was done to it. A parameter is its timeouts."""
    before = set(threading.enumerate())
    job.server = Server(("localhost", 0), 2, getattr(request, "param", PATIENT), "secret")
    port, threads = job.server.port, set(threading.enumerate()) - before
    job.join(port, 0, token="secret")
    yield job, port
    a, b = job.clients[-1], job.join(port, 1, token="secret")
    a.calls[0, 1] = b.calls[0, 1] = 1
    for client in (a, b):
        client._say_alive()
    assert at_once(lambda: a.gather("x", 0, [0, 1]), lambda: b.gather("x", 1, [0, 1])) == [[0, 1]] * 2
    assert not job.reasons
    assert len(threads) == 2
    assert all(t.is_alive() for t in threads)


def test_a_stranger_without_the_secret_is_refused(besieged: tuple[Job, int]) -> None:
    job, port = besieged
    for token in ("", "Secret", None, 7, ["secret"]):
        connection, told = hello(port, 1, **({} if token is None else {"token": token}))
        connection.close()
        assert told == {"over": "", "refused": "token"}
    for rank in (0, 1):
        with socket.create_connection(("localhost", port), timeout=LIMIT_S) as stranger, stranger.makefile() as lines:
            stranger.sendall(json.dumps({"again": {"rank": rank, "host": "far", "pid": 7}}).encode() + b"\n")
            assert "refused" in lines.readline()
    with pytest.raises(JobError, match=r"its HAPSYNTH_TOKEN is not that of the job; set the same secret in every"):
        job.join(port, 1, token="other")


@pytest.mark.parametrize("cuda", ["", "jax-cuda12-plugin", None])
def test_one_that_lacks_the_plugin_for_its_gpus(job: Job, cuda: str | None) -> None:
    """JAX would leave its GPUs aside, and the others wait for them."""
    port = job.serve()
    job.join(port, 0, cuda="jax-cuda12-plugin")
    job.join(port, 1, cuda=cuda)
    if cuda == "":
        name = re.escape(socket.gethostname())
        says = rf"process 1 on {name} .* no plugin for CUDA, as process 0 .* has: install jax-cuda12-plugin on {name} "
        assert [bool(re.search(says, job.reason(rank))) for rank in (0, 1)] == [True, True]
    else:
        with job.told:
            assert not job.told.wait_for(lambda: job.reasons, 3 * PATIENT.beat)


@pytest.mark.parametrize("whole", [False, True])
def test_launchers_that_count_other_processes(job: Job, whole: bool) -> None:
    """Each of two hosts with unlike GPUs, as if the other had as many: both hear it. A whole job goes on."""
    job.server = Server(("localhost", 0), 4, PATIENT, "secret")
    port = job.server.port
    job.join(port, 0, 4, token="secret", here=4 if whole else 2)
    with pytest.raises(JobError, match=r"is of a job of 2 processes, and this one has 4: .*--processes \(how many in"):
        job.join(port, 1, 2, token="secret", here=1)
    if whole:
        with job.told:
            assert not job.told.wait_for(lambda: job.reasons, 3 * PATIENT.beat)
    else:
        assert "the launcher of process 1 on" in job.reason(0)


@pytest.mark.parametrize("rank", [2, -1, 10**30, True, 1.0, "1", [1], None])
def test_a_rank_that_is_none_is_refused(besieged: tuple[Job, int], rank: Any) -> None:
    _, port = besieged
    with socket.create_connection(("localhost", port), timeout=LIMIT_S) as connection, connection.makefile() as lines:
        said = {"protocol": PROTOCOL, "rank": rank, "host": "far", "pid": 7, "processes": 2, "token": "secret"}
        connection.sendall(json.dumps({"hello": said}).encode() + b"\n")
        assert "welcome" not in lines.readline()


def test_a_taken_rank_is_its_holders(besieged: tuple[Job, int]) -> None:
    """Also for one that knows where it runs."""
    job, port = besieged
    holder = job.clients[0]
    for key in ("", "0" * 32):
        connection, told = hello(port, 0, host=holder.host, pid=holder.pid, token="secret", key=key)
        connection.close()
        assert "are both process 0" in told["over"]


def test_who_joined_again_does_not_leave_by_the_old_connection(besieged: tuple[Job, int]) -> None:
    job, port = besieged
    first = job.clients[0]
    again = job.join(port, 0, token="secret")
    first.leave("OSError: of the old one")
    with job.told:
        assert not job.told.wait_for(lambda: job.reasons, 3 * PATIENT.beat)
    assert again.gather("alone", 5, [0]) == [5]


@pytest.mark.parametrize("data", [b"x" * (1 << 20), b"[" * (1 << 20), b'{"a":' * 800 + b"\n", b"[" * 4000 + b"\n"])
def test_a_line_without_end_takes_no_memory(besieged: tuple[Job, int], data: bytes) -> None:
    _, port = besieged
    with socket.create_connection(("localhost", port), timeout=LIMIT_S) as stranger:
        sent = 0
        with suppress(OSError):
            while sent < 1 << 28 and not data.endswith(b"\n"):
                stranger.sendall(data)
                sent += len(data)
            stranger.sendall(data)
            assert stranger.recv(100) == b""
        # What the system holds on both sides.
        assert sent < 1 << 25


def test_brackets_without_end_are_no_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sending = threading.Thread(target=theirs.sendall, args=(b'{"beat":' + b"[" * 200_000 + b"\n",))
        sending.start()
        with pytest.raises(ValueError, match="brackets"):
            Channel(ours).read(1 << 20)
        sending.join()


@pytest.mark.parametrize("besieged", [replace(PATIENT, hello=0.5)], indirect=True)
def test_a_stranger_who_takes_his_time_is_sent_off(besieged: tuple[Job, int]) -> None:
    """However often he says a little."""
    _, port = besieged
    with socket.create_connection(("localhost", port), timeout=LIMIT_S) as stranger, suppress(ConnectionError):
        for _ in range(600):
            stranger.sendall(b" ")
            time.sleep(0.05)
        pytest.fail("nobody minded")


def test_more_connections_than_files_may_be_open(besieged: tuple[Job, int]) -> None:
    _, port = besieged
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    with ExitStack() as stack:
        strangers = [socket.socket() for _ in range(300)]
        for stranger in strangers:
            stack.enter_context(stranger)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 300 + 20, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for stranger in strangers:
            stranger.connect(("127.0.0.1", port))
        # So many at most are held, the newest.
        assert strangers[0].recv(1) == b""
        strangers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):
            strangers[-1].recv(1)


def test_one_that_never_reads_is_waited_for_by_nobody(job: Job) -> None:
    port = job.serve()
    stays = job.join(port, 0)
    connection, _ = hello(port, 1)
    assert job.server is not None
    for _ in range(50):
        job.server._members[1].channel.say({"much": "x" * (1 << 20)})
    assert stays.gather("alone", 5, [0]) == [5]
    assert not job.reasons
    connection.close()


def test_a_process_that_talks_nonsense_ends_no_thread(job: Job) -> None:
    """A count of calls of a process that is none ended the thread that watches."""
    port = job.serve()
    job.join(port, 0)
    connection, _ = hello(port, 1)
    beat = {"doing": "at work"}
    for said in (
        {"beat": [[[0, 1, 77], 5], [[1], 3]], **beat},
        {"beat": [[[0, 1], "x"], [[0, 0], 1], 5], **beat},
        {"beat": 5, **beat},
        {"beat": [], **beat, "unreached": [77, "x", [0]]},
        {"gather": "g", "ranks": [1, 99], "value": 1},
        {"gather": "g", "ranks": "ab", "value": 1},
        # As only a launcher says it.
        {"ended": 0, "how": "by order", "failed": True},
        {"interrupted": "by order"},
        {"never": "heard"},
        {"beat": [[[0, 1, 77], 5], [[1], 3]], **beat},
    ):
        connection.sendall(json.dumps(said).encode() + b"\n")
    assert job.server is not None
    while job.server._members[1].calls != {(1,): 3}:
        time.sleep(0.01)
    with job.told:
        assert not job.told.wait_for(lambda: job.reasons, 5 * PATIENT.beat)
    # Who watches is there.
    connection.close()
    assert "process 1 on far (pid 7) has died" in job.reason(0)


def test_what_moves_a_terminal_is_escaped(job: Job) -> None:
    port = job.serve(timeouts=replace(PATIENT, suspicion=0.1))
    job.join(port, 0)
    connection, _ = hello(port, 1, host="far\x1b[2J\nhapsynth: all is well")
    connection.sendall(json.dumps({"leave": "\x1b]0;x\x07\r\n\u202e", "calls": []}).encode() + b"\n")
    said = job.reason(0)
    connection.close()
    assert r"far\x1b[2J\nhapsynth: all is well" in said
    assert r"\x1b]0;x\x07\r\n\u202e" in said


def test_it_listens_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serving_host("localhost") == serving_host("127.0.0.1") == "127.0.0.1"
    named = {"here": ["127.0.0.1"], "debian": ["127.0.1.1"], "two": ["127.0.0.1", "127.0.0.2"], "far": ["192.0.2.1"]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: [(2, 1, 6, "", (a, 0)) for a in named[host]])
    # A name that means something else to other machines, or nothing that this one has.
    assert {name: serving_host(name) for name in named} == dict.fromkeys(named, "")


def test_where_processes_meet() -> None:
    assert find_address("a:1", {}) == ("a", 1)
    assert find_address(None, {"HAPSYNTH_RENDEZVOUS": "[::1]:7", "JAX_COORDINATOR_ADDRESS": "b:8"}) == ("::1", 7)
    assert find_address(None, {"JAX_COORDINATOR_ADDRESS": "b:8"}) == ("b", 9)
    with pytest.raises(JobError, match=r"hapsynth launch.*JAX_COORDINATOR_ADDRESS=HOST:PORT.*HAPSYNTH_PREFLIGHT=off"):
        find_address(None, {})
    with pytest.raises(JobError, match="HAPSYNTH_RENDEZVOUS is 'node1'; give HOST:PORT"):
        find_address(None, {"HAPSYNTH_RENDEZVOUS": "node1"})
    with pytest.raises(JobError, match="one above the port"):
        find_address(None, {"JAX_COORDINATOR_ADDRESS": "b:65535"})


def test_patience_is_set_by_the_environment() -> None:
    assert Timeouts.of({"HAPSYNTH_JOIN_S": "5"}) == Timeouts(join=5.0)
    for text in ("soon", "0", "-1", "inf"):
        with pytest.raises(JobError, match="HAPSYNTH_SILENCE_S is"):
            Timeouts.of({"HAPSYNTH_SILENCE_S": text})


def test_free_ports_are_none_that_an_outgoing_connection_may_take() -> None:
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if not outgoing.exists():
        pytest.skip("only Linux says which ports it gives to outgoing connections")
    with ExitStack() as stack:
        for _ in range(20):
            ports = free_ports(2)
            assert ports[1] == ports[0] + 1 < int(outgoing.read_text().split()[0])
            for port in ports:
                stack.enter_context(socket.create_server(("", port)))


def test_a_host_without_free_ports_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: Any, **__: Any) -> None:
        raise OSError("Address already in use")

    monkeypatch.setattr(socket, "create_server", taken)
    with pytest.raises(JobError, match=r"no 2 free ports .* give --coordinator HOST:PORT"):
        free_ports(2)
