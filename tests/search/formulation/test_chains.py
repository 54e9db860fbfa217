"""Chains are lower bounds: no program is done before any of its chains, in whatever order it runs."""

from __future__ import annotations

import random
from dataclasses import replace
from math import fsum

import numpy as np
import pytest
from assignments import CASES, Space, case, joined_chain, programs, random_chain, space
from orders import random_order

from hapsynth.cluster.cluster import Link
from hapsynth.instructions.collectives import steps_between
from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.search.cost.model import CostModel
from hapsynth.search.cost.program_cost import conversion_cost, shares_of
from hapsynth.search.formulation.chain_weights import ChainCosts
from hapsynth.search.formulation.chains import Chain, Occupancy
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.scheduling.list_schedule import schedule
from hapsynth.search.scheduling.tasks import Machine, TaskGraph
from hapsynth.search.scheduling.timeline import simulate

ROUNDING = 1 + 1e-9


@pytest.fixture(scope="module", params=CASES)
def given(request: pytest.FixtureRequest) -> Space:
    return case(request.param)


def chains_of(given: Space, taken: Occupancy, rng: random.Random) -> list[Chain]:
    every = range(len(given.task.graph.ops))
    drawn = [draw(given, rng) for draw in (random_chain, joined_chain) for _ in range(12)]
    return [*given.chains.alone, *filter(None, drawn), *given.chains.longest(taken, every)]


@pytest.mark.few(4)
def test_no_program_is_shorter_than_a_chain(given: Space) -> None:
    rng, tight = random.Random(1), 0.0
    for choices, _, tasks in programs(given, 4, seed=5, frugal=True):
        taken = given.costs.occupancy(choices.tolist())
        best = schedule(tasks)
        drawn = [simulate(tasks, random_order(rng, tasks)).makespan_s for _ in range(4)]
        shortest = min(best.makespan_s, *drawn)
        # Of what may go with more, chains have next to no latency, as that may be a bundle's.
        saved = fsum(t.link.seconds(t.step, 0.0) for t in best.tasks.transfers.values())
        for chain in chains_of(given, taken, rng):
            assert chain.length(taken) <= shortest * ROUNDING, chain.key
            tight = max(tight, chain.length(taken) / (shortest - saved))
    assert tight > 0.75


def test_nor_is_one_in_which_those_above_the_threshold_go_together() -> None:
    """Where latency is most of a step, and copies into a bundle take less."""
    fn, args, cluster = CASES["layers"]
    slow, small = replace(cluster, network=Link(1e9, 1e-3)), LoweringOptions(bundled_bytes=16)
    given, rng, together = space(fn, args, slow, lowering=small), random.Random(1), 0
    for choices, _, tasks in programs(given, 12, seed=5, frugal=True):
        taken, best = given.costs.occupancy(choices.tolist()), schedule(tasks)
        together += sum(
            len(best.tasks.instructions[task]) > 1 and sent.nbytes > len(best.tasks.instructions[task]) * 16
            for task, sent in best.tasks.transfers.items()
        )
        for chain in chains_of(given, taken, rng):
            assert chain.length(taken) <= best.makespan_s * ROUNDING, chain.key
    assert together


def test_the_longest_chain_is_no_shorter_than_others_that_alternate(given: Space) -> None:
    rng, every = random.Random(2), range(len(given.task.graph.ops))
    for choices, *_ in programs(given, 2, seed=6):
        taken = given.costs.occupancy(choices.tolist())
        longest = given.chains.longest(taken, every)
        assert len(longest) <= given.chains.resources.kinds
        # A shared conversion counts for the first use of a set alone; the search counts it for any.
        if longest and not taken.values.any():
            most = max(chain.length(taken) for chain in longest)
            others = [random_chain(given, rng).length(taken) for _ in range(30)]
            assert most * ROUNDING >= max(others)


def busy(tasks: TaskGraph, machine: Machine, group: int) -> float:
    """Seconds that a group of devices is taken up by a machine; what takes everything counts."""
    on = (k for k, m in enumerate(tasks.machine) if m in (machine, Machine.EVERYTHING))
    return fsum(float(tasks.seconds[k, group]) for k in on)


def spared(costs: CostModel, candidate: Candidate) -> float:
    """Seconds that balanced collectives, which go alone, take over what the usual ones would add to a bundle."""
    found = 0.0
    for i in candidate.program.instructions:
        if isinstance(i, Convert) and i.collective.balances:
            held, (usual, *_) = shares_of(candidate.sizes, i.value), steps_between(i.source[i.axis], i.target[i.axis])
            least = costs.least_in_bundle(i.value, i.source, i.target, i.axis, held, usual)
            found += max(0.0, conversion_cost(costs, candidate.sizes, i)[0] - least)
    return found


def test_chains_of_one_resource_are_what_it_does(given: Space) -> None:
    costs, kinds = given.task.costs, given.chains.resources.kinds
    as_they_go = ChainCosts(given.builder, given.chains, given.costs.devices, certain=False)
    for choices, candidate, tasks in programs(given, 4, seed=7):
        certain, taken = (each.occupancy(choices.tolist()) for each in (given.costs, as_they_go))
        lengths = [chain.length(taken) for chain in given.chains.alone]
        assert all(chain.length(certain) <= chain.length(taken) * ROUNDING for chain in given.chains.alone)
        first = [int(np.flatnonzero(costs.kind_of == k)[0]) for k in range(kinds)]
        streams = [busy(tasks, Machine.COMPUTE, tasks.group_of[device]) for device in first]
        sent = busy(tasks, Machine.LINK, 0)
        # Where they go together most of what is no byte's at the best rate is saved.
        saved = fsum(
            t.link.seconds(t.step, t.wire_bytes) - t.wire_bytes * t.link.beta for t in tasks.transfers.values()
        )
        slower = [(1 - 1 / factor) * lengths[kinds] for factor in given.chains.resources.slowdowns]
        assert lengths[:kinds] == pytest.approx([a + b for a, b in zip(streams, slower, strict=True)], rel=1e-9)
        (of_link,) = lengths[kinds:]
        assert (sent - saved - spared(costs, candidate)) / ROUNDING <= of_link <= sent * ROUNDING


def test_nothing_counts_twice_in_a_chain(given: Space) -> None:
    rng = random.Random(3)
    ((choices, *_),) = programs(given, 1, seed=8)
    taken = given.costs.occupancy(choices.tolist())
    for chain in chains_of(given, taken, rng):
        assert np.unique(chain.places).size == chain.places.size
        assert (taken.flat[chain.places] >= 0).all()


def test_places_are_those_of_the_fields(given: Space) -> None:
    ((choices, *_),) = programs(given, 1, seed=8)
    taken, chains = given.costs.occupancy(choices.tolist()), given.chains
    fields = chains.by_field(taken.flat)
    assert taken.flat.size == chains.place_count
    for name, rows in fields.items():
        np.testing.assert_array_equal(rows, getattr(taken, name))
        last = rows.shape[1] - 1
        columns = np.where(np.arange(len(rows)) % 2, last, -1)
        np.testing.assert_array_equal(taken.flat[chains.places(name, columns)], rows[1::2, last])
    numbers = {name: np.arange(len(fields[name])) for name in ("ops", "uses", "values")}
    numbered = chains.by_field(chains.in_each_place(**numbers, fed=7))
    assert (numbered.pop("fed") == 7).all()
    for name, rows in numbered.items():
        alike = {"deferred": "ops", "shared": "uses", "ends": "values"}.get(name, name)
        assert (rows == numbers[alike][:, None]).all()
