"""Group testing: changes that help alone are all found, and no more trials are made than allowed."""

from __future__ import annotations

import random

import pytest

from hapsynth.search.scheduling.group_testing import improving


def test_changes_that_help_alone_are_found() -> None:
    rng = random.Random(0)
    for _ in range(100):
        gains = [rng.choice([-3.0, -1.0, 1.0, 2.0]) for _ in range(rng.randrange(12))]
        taken, best = found(gains)
        assert sum(gains[k] for k in taken) == best
        assert {k for k, gain in enumerate(gains) if gain > 0} <= taken


def found(gains: list[float]) -> tuple[set[int], float]:
    best = 0.0

    def is_better(some: set[int]) -> bool:
        nonlocal best
        gain = sum(gains[k] for k in some)
        if gain <= best:
            return False
        best = gain
        return True

    return improving(len(gains), is_better, 1000), best


def test_trials_in_vain_end() -> None:
    """In a row: each that helps lets as many follow."""
    made: list[set[int]] = []

    def helps(some: set[int]) -> bool:
        made.append(some)
        return len(made) == 3

    assert improving(8, helps, 100, in_vain=4) == {4, 5, 6, 7}
    assert len(made) == 3 + 4
    assert improving(8, lambda some: False, 2, in_vain=4) == set()


@pytest.mark.parametrize("trials", [0, 1, 5])
def test_trials_end(trials: int) -> None:
    made: list[set[int]] = []
    assert improving(8, lambda some: bool(made.append(some)), trials) == set()
    assert len(made) == trials
    assert made[:3] == [{*range(8)}, {*range(4)}, {*range(4, 8)}][:trials]
