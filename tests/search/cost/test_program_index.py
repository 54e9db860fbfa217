"""What is asked of a program is found once, and is what evaluation adds up."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from math import fsum

import graphs
import numpy as np
import pytest

from hapsynth.instructions.program.program import Convert
from hapsynth.instructions.program.sizes import Classes
from hapsynth.search.cost.program_cost import feed_costs, instruction_costs, program_cost, shares
from hapsynth.search.cost.program_index import ProgramIndex
from hapsynth.search.memory.profile import MemoryProfile
from hapsynth.search.sizing.sizer import Sizer


@pytest.fixture(scope="module", params=[0, 1, 2, 3])
def planned(request: pytest.FixtureRequest):
    return graphs.planned(request.param, bandwidth=1e11)


def test_all_share_one_index(planned) -> None:
    costs, result = planned
    sizer = Sizer(result.program, result.sizes.classes, costs)
    index = sizer.class_costs.index
    assert ProgramIndex.of(result.program, result.sizes.classes, costs) is index is sizer.memory.index
    assert MemoryProfile(result.program, result.sizes.classes, costs).index is index
    # Classes of its own, or another model: another index.
    other = Classes.build(costs.graph, result.program, costs.table)
    assert ProgramIndex.of(result.program, other, costs) is not index
    assert ProgramIndex.of(result.program, result.sizes.classes, costs.on(costs.cluster)) is not index


def test_nothing_is_kept_that_nobody_holds(planned) -> None:
    costs, result = planned
    alive = weakref.ref(ProgramIndex.of(result.program, result.sizes.classes, costs.on(costs.cluster)))
    gc.collect()
    assert alive() is None


def test_the_cost_is_the_sum_of_what_the_index_has(planned) -> None:
    costs, result = planned
    program, sizes = result.program, result.sizes
    index = ProgramIndex.of(program, sizes.classes, costs)
    found = list(instruction_costs(program, sizes, costs))
    for k, cost in enumerate(found):
        i, place = program.instructions[k], index.load_of[k]
        assert (place < 0) == isinstance(i, Convert)
        if not isinstance(i, Convert):
            load = index.loads[place]
            assert load.work == costs.work(i.op, i.triples)
            assert load.cuts == tuple((sizes.classes.of[n], len(n[2])) for n in load.nodes)
            seconds = costs.time(load.work, shares(costs, sizes, load.nodes))
            assert cost.seconds == index.runs[k] * (seconds + costs.uniform_time(i.op))
    assert len(index.loads) == len(set(index.loads)) <= len(program.instructions)
    fed = fsum(s for _, s in feed_costs(program, sizes, costs))
    assert program_cost(program, sizes, costs) == fsum(c.seconds for c in found) + fed
    assert set(index.feeds) == {v for v, _ in feed_costs(program, sizes, costs)}


def test_makers_come_first_and_make_what_is_read(planned) -> None:
    costs, result = planned
    index = ProgramIndex.of(result.program, result.sizes.classes, costs)
    there = set(result.program.inputs.items())
    for k, (needs, results) in enumerate(index.accesses):
        made = {p for m in index.makers[k] for p in index.accesses[m][1]}
        assert all(m < k for m in index.makers[k])
        assert set(needs) <= made | there
        there.update(results)
    lives = np.array([(t.start, t.stop) for t in index.tensors])
    assert (lives[:, 0] <= lives[:, 1]).all()


def test_accesses_are_those_of_the_graph_asked_about(planned) -> None:
    """A program that is run at other shapes has another graph."""
    costs, result = planned
    program = result.program
    assert program.accesses(costs.graph) is program.accesses(costs.graph)
    other = replace(costs.graph)
    assert program.accesses(other) is not program.accesses(costs.graph)
    assert program.accesses(other) == program.accesses(costs.graph)
    # What is made of a program has accesses of its own.
    shorter = replace(program, instructions=program.instructions[:1])
    assert len(shorter.accesses(costs.graph)) == 1
