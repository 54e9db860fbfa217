"""One search for all processes of a job, which are threads here that meet at a real rendezvous."""

import dataclasses
import re
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_devices import slow_cluster
from test_rendezvous import Job, at_once

import hapsynth
from hapsynth.jobs import one_search, preflight
from hapsynth.jobs.one_search import searched_once
from hapsynth.jobs.preflight import PreflightError
from hapsynth.jobs.process_facts import plan_fingerprint
from hapsynth.rendezvous import meeting
from hapsynth.rendezvous.address import JobError
from hapsynth.running.plan_cache import found_to_dict, read_found
from hapsynth.search.planning.planner import InfeasibleError
from hapsynth.search.sizing.fixed_ratios import RatioError

X, CLUSTER = np.ones(8, np.float32), slow_cluster((2.0, 1.0))
AtEach = Callable[[Callable[[int], Any]], list[Any]]


class Meetings:
    """The meeting of the process that a thread is."""

    def __init__(self, here: threading.local) -> None:
        self.here = here

    def __getattr__(self, name: str) -> Any:
        return getattr(self.here.meeting, name)


@pytest.fixture
def at_each(monkeypatch: pytest.MonkeyPatch) -> Iterator[AtEach]:
    """Calls a function with 0 in a process 0 and with 1 in a process 1: what it returns or raises in each."""
    job, here, ones = Job(), threading.local(), [meeting.Meeting() for _ in range(2)]
    port = job.serve()
    for rank, one in enumerate(ones):
        one._client = job.join(port, rank)
    for module in (one_search, preflight, meeting):
        monkeypatch.setattr(module, "meeting", Meetings(here))
    monkeypatch.setattr(meeting, "as_batch_work", lambda: None)
    monkeypatch.setattr(jax, "process_index", lambda: getattr(here, "rank", 0))
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def outcome(work: Callable[[int], Any], rank: int) -> Any:
        here.rank, here.meeting = rank, ones[rank]
        try:
            return work(rank)
        except BaseException as error:
            return error

    yield lambda work: at_once(*(partial(outcome, work, rank) for rank in range(2)))
    job.close()


def mesh_of(*ranks: int) -> Any:
    """A device of each process."""
    devices = [SimpleNamespace(process_index=rank, id=rank, platform="cpu", device_kind="cpu") for rank in ranks]
    several = len({*ranks}) > 1
    return SimpleNamespace(devices=np.array(devices), local_devices=devices[:1], is_multi_process=several)


@cache
def plan() -> Any:
    return hapsynth.synthesize(jnp.sin, (X,), CLUSTER, cache=False)


def found() -> Any:
    return plan().traced, dataclasses.replace(plan().result, interrupted=True)


def searched(
    search: Callable[[], Any] = found,
    mesh: Any = None,
    asked: Mapping[str, Any] | None = None,
    to_dict: Callable[[Any], Any] = lambda f: found_to_dict(*f, CLUSTER),
) -> Any:
    """Process 1 searches, unless the mesh says otherwise."""
    mesh, of = mesh or mesh_of(1, 0), plan().traced
    return searched_once(mesh, [of], CLUSTER, asked or {}, search, to_dict, lambda data: read_found("it", data, of))


def test_what_one_process_finds_reaches_the_others(at_each: AtEach) -> None:
    first = found()
    other, own = at_each(lambda rank: searched(lambda: first if rank else None))
    assert own is first
    assert other[1].interrupted
    assert plan_fingerprint(hapsynth.Plan(*other, CLUSTER)) == plan_fingerprint(plan())
    assert other[1].bounds == plan().result.bounds


def test_what_the_search_raises_reaches_the_others_and_all_may_plan_again(at_each: AtEach) -> None:
    """They wait for the plan without a time limit."""

    def broken(_: Any) -> None:
        raise OSError("no such pipe")

    def raises(error: BaseException) -> Any:
        raise error

    own = [InfeasibleError("no room", 7.0, 2.0), RatioError("a granule"), KeyboardInterrupt("by hand")]
    searches = [
        *(partial(searched, partial(raises, error)) for error in own),
        partial(searched, lambda: hapsynth.synthesize(jnp.sin, (X,), CLUSTER, cache=False, progress=broken)),
        partial(searched, partial(raises, SystemExit(3))),
        partial(searched, to_dict=broken),
    ]
    plan()
    for search in searches:
        told, raised = at_each(lambda rank, search=search: search() if rank else searched())
        if raised in own:
            assert type(told) is type(raised)
            assert str(told) == str(raised)
            assert vars(told) == vars(raised)
        else:
            assert isinstance(told, JobError)
            says = f" could not plan: {type(raised).__name__}: {raised}"
            assert str(told).startswith("process 1 on ")
            assert str(told).endswith(says)
            assert raised.args in [("no such pipe",), (3,)]
        assert {type(each) for each in at_each(lambda _: searched())} == {tuple}


def test_one_that_holds_none_of_the_devices_plans_by_itself(at_each: AtEach) -> None:
    first = found()
    assert at_each(lambda rank: searched(lambda: first, mesh_of(0, 2)) if rank else None) == [None, first]


@pytest.mark.parametrize("orders", [((0, 1), (1, 0)), ((1, 0), (0, 1))])
def test_meshes_in_other_orders_are_refused(at_each: AtEach, orders: Sequence[tuple[int, int]]) -> None:
    """By its own mesh each would search, or none."""
    each = at_each(lambda rank: searched(mesh=mesh_of(*orders[rank])))
    assert [type(error) for error in each] == [PreflightError] * 2
    first, second = (", ".join(f"{rank}:{rank}" for rank in order) for order in orders)
    says = f"process 0 on .* has a mesh of devices {first}, and process 1 on .* has a mesh of devices {second}: make"
    assert re.match(says, str(each[0]))


class Anonymous(UserDict[str, str]):
    """Its text is its address."""

    __repr__ = object.__repr__


def test_options_that_agree_may_be_written_in_other_ways(at_each: AtEach) -> None:
    layouts = {"[0]['w']": "S(0)", "[0]['b']": "R"}
    one = {"fixed": layouts, "ratios": jnp.array([0.5, 0.5])}
    other = {"ratios": np.float64([0.5, 0.5]), "fixed": Anonymous(reversed(layouts.items()))}
    own, told = at_each(lambda rank: searched(asked=one if rank else other))
    assert [type(each) for each in (own, told)] == [tuple] * 2


def test_options_that_differ_are_refused(at_each: AtEach) -> None:
    asked = [{"fixed": {"[0]": cut}, "memory_limit": 5.0} for cut in ("S(0)", "R")]
    each = at_each(lambda rank: searched(asked=asked[rank]))
    assert [type(error) for error in each] == [PreflightError] * 2
    says = r"process 0 on .* has options fixed \[0\] S\(0\), and process 1 on .* has options fixed \[0\] R: give synth"
    assert re.match(says, str(each[0]))
