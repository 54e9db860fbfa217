"""Gathers that start later hold what they gather for a shorter time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from slow_devices import SPEEDS, thin_cluster

import hapsynth
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Convert
from hapsynth.search.memory.profile import peak
from hapsynth.search.scheduling.prefetch import prefetched


def forward(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in ws:
        x = jax.numpy.tanh(x @ w)
    return x


def planned(**options: Any) -> hapsynth.Plan:
    """Weights stored cut and used whole: gathers, which nothing keeps from starting at once."""
    args = [np.zeros((64, 64), np.float32)] * 6, np.zeros((512, 64), np.float32)
    fixed = {f"[0][{k}]": "S(0)" for k in range(6)} | {"[1]": "S(0)"}
    cluster = thin_cluster(SPEEDS["two"], bandwidth=1e6)
    return hapsynth.synthesize(forward, args, cluster, leave_out=False, fixed=fixed, overlap=True, **options)


@pytest.fixture(scope="module")
def plan() -> hapsynth.Plan:
    return planned()


def test_less_is_held_the_later_they_start(plan: hapsynth.Plan) -> None:
    graph, costs = plan.traced.graph, plan.cost_model()
    count = len(plan.program.instructions)
    held: list[float] = []
    for ahead in (count, 4, 2, 0):
        program = prefetched(graph, plan.program, ahead)
        check(graph, program, plan.sizes)
        held.append(peak(program, plan.sizes, costs))
    assert held == sorted(held, reverse=True)
    assert held[-1] < peak(plan.program, plan.sizes, costs) == plan.memory[0] <= held[0]
    last = prefetched(graph, plan.program, 0).instructions
    gathers = [at for at, i in enumerate(last) if isinstance(i, Convert)]
    assert gathers == [*range(0, len(last), 3)]


def test_what_is_too_large_starts_prefetched(plan: hapsynth.Plan) -> None:
    """Rather than to refuse the program: the limit is what the gathers need at their uses."""
    least = peak(prefetched(plan.traced.graph, plan.program, 0), plan.sizes, plan.cost_model())
    limit = int((least + plan.memory[0]) / 2)
    limited = planned(memory_limit=limit)
    assert max(limited.memory) <= limit
    assert limited.memory[0] == peak(limited.program, limited.sizes, limited.cost_model())
    assert sorted(map(str, limited.program.collectives())) == ["all_gather"]
    assert limited.cost >= plan.cost
