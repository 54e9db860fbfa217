"""The collector of cyclic garbage is as the user left it once a plan is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from graphs import cluster, random_graph

from hapsynth._gc import gc_paused
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import PlanningOptions, Task


@pytest.fixture(autouse=True)
def usual() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield 700, 10, 10
    gc.set_threshold(*before)


def test_plans_that_overlap(usual: tuple[int, int, int]) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(gc_paused())
    assert gc.get_threshold()[0] > 700
    second.enter_context(gc_paused())
    first.close()
    assert gc.get_threshold()[0] > 700
    second.close()
    assert gc.get_threshold() == usual


def test_an_error(usual: tuple[int, int, int]) -> None:
    with pytest.raises(KeyboardInterrupt), gc_paused():
        raise KeyboardInterrupt
    assert gc.get_threshold() == usual


@pytest.mark.parametrize("own", [(0, 10, 10), (1_000_000, 5, 5)])
def test_what_the_user_chose_stays(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with gc_paused():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_a_plan(usual: tuple[int, int, int]) -> None:
    seen: list[tuple[int, int, int]] = []
    graph = random_graph(0, ops=4).graph
    Planner(Task(graph, cluster([2.0, 1.0]), PlanningOptions(progress=lambda _: seen.append(gc.get_threshold())))).run()
    assert seen
    assert all(first > 700 for first, *_ in seen)
    assert gc.get_threshold() == usual
