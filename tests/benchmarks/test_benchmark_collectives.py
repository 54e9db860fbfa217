"""The measured comparison of collectives: what is compared, and how it is told."""

from __future__ import annotations

from dataclasses import replace

import collectives
import pytest
from graphs import cluster
from harness.timing import gain, median_interval
from systems.planned import by_shares

from hapsynth.graph.trace import trace
from hapsynth.instructions.collectives import STEPS, steps_between


def test_the_ceiling_of_hosts_of_three_and_one() -> None:
    """2 x 3/4 of the tensor over 2 x 1/2; of two by two the same; of four hosts 2 x 7/8 over 2 x 3/4."""
    assert collectives.ceiling((0, 0, 0, 1)) == collectives.ceiling((0, 0, 1, 1)) == pytest.approx(1.5)
    assert collectives.ceiling((0, 0, 1, 1, 2, 2, 3, 3)) == pytest.approx(7 / 6)


def test_flat_takes_the_usual_collectives_and_free_the_cheaper_ones() -> None:
    fn, _ = target = collectives.mlp()
    where = cluster([6.0, 3.0, 1.0, 1.0], bandwidth=2.5e6, latency=1e-4)
    slow = replace(
        where, devices=tuple(replace(d, flops={"float32": 1e10 * s}) for d, s in zip(where.devices, (6, 3, 1, 1)))
    )
    plans = {s: by_shares(fn, trace(*target), slow, collectives.PARTS, o) for s, o in collectives.SYSTEMS.items()}
    for plan in plans.values():
        assert all(shares[0] * 11 == 6 * sum(shares) for shares in plan.sizes.shares)
    usual = lambda i: steps_between(i.source[i.axis], i.target[i.axis])[0].name == i.step
    made = {
        s: [i for i in plan.program.instructions if getattr(i, "is_collective", False)] for s, plan in plans.items()
    }
    assert all(map(usual, made["flat"]))
    assert any(STEPS[i.step].balances for i in made["free"])
    assert plans["free"].cost < plans["flat"].cost / 1.2


@pytest.mark.parametrize("name", ["lm", "moe"])
def test_every_argument_divides_by_the_parts(name: str) -> None:
    fn, shapes = collectives.MODELS[name]()
    graph = trace(fn, shapes).graph
    assert all(any(n % 11 == 0 for n in graph.values[v].shape) for v in graph.inputs if graph.values[v].shape)


def test_gains_are_of_like_rounds() -> None:
    assert gain([2.0, 4.0, 6.0, 8.0], [1.0, 2.0, 3.0, 4.0]) == (2.0, None)
    assert gain([6.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 6) == (3.5, (1.0, 6.0))


def test_order_statistics_hold_the_median_with_95_percent() -> None:
    """As tables of the sign test have them: of 8 the least and the most, of 9 one further in, of 20 the sixth."""
    found = {n: median_interval(list(range(n, 0, -1))) for n in (1, 5, 6, 8, 9, 20, 60)}
    assert found == {1: None, 5: None, 6: (1, 6), 8: (1, 8), 9: (2, 8), 20: (6, 15), 60: (22, 39)}
