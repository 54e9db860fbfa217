"""Whoever puts an op off puts off what it sends: a program sends that after it, in whatever order it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import graphs
import numpy as np
import pytest
from assignments import CASES, FOUR, Space, case, clipped, programs, space, tied
from control_cases import floats
from jax import numpy as jnp

from hapsynth.search.planning.makespan import MakespanSearch

ROUNDING = 1 + 1e-9


@pytest.fixture(scope="module", params=CASES)
def given(request: pytest.FixtureRequest) -> Space:
    return case(request.param)


@pytest.mark.few(12)
def test_no_program_sends_less_after_an_op(given: Space) -> None:
    structure, deferral, sent_after = given.search.choices, given.chains.deferral, given.costs.sent_after
    least = {deferrable: sent_after.seconds(deferrable) for deferrable in deferral.ops}
    for deferrable in deferral.ops if deferral.join is not None else ():
        before = sent_after.seconds(deferrable, deferral.join)
        assert (before <= least[deferrable]).all()
        if not deferral.before_join[deferrable.op] and deferrable.use is None:
            assert not before.any()
    for choices, *_ in programs(given, 6, seed=9):
        taken = given.costs.occupancy(choices.tolist())
        by_value = given.chains.sent_of_each(taken)
        for deferrable, seconds in least.items():
            variable, use = structure.op_variable[deferrable.op], deferrable.use
            group = 0 if use is None else use.needs.groups[choices[use.variable]]
            found = seconds[structure.choices[variable].triple[choices[variable]], group]
            assert found <= by_value[list(deferrable.values)].sum() * ROUNDING


def test_values_are_of_one_op_and_wait_for_no_cut_beside_it(given: Space) -> None:
    graph, reach, deferral = given.task.graph, given.chains.reach, given.chains.deferral
    every = [value for deferrable in deferral.ops for value in deferrable.values]
    assert len(set(every)) == len(every)
    for op, values, _ in deferral.ops:
        related = reach.ancestors(op) | reach.descendants(op)
        for value in values:
            assert not (deferral.is_cut & ~related & reach.ancestors(graph.producer[value])).any()


def update(w: Any, x: Any, y: Any) -> Any:
    """The gradient of a weight, and beside it what takes long to send in the end."""
    gradient = x.T @ y
    return w - gradient / jnp.sum(gradient * gradient), jnp.cumsum(jnp.sin(x @ w), axis=0)


def test_a_gradient_counts_itself_or_what_it_sends() -> None:
    given = space(update, (floats(64, 64), floats(4096, 64), floats(4096, 64)), FOUR)
    graph, costs = given.task.graph, given.costs
    gradient = next(op.index for op in graph.ops if op.name == "dot_general")
    (mine,) = (deferrable for deferrable in given.chains.deferral.ops if deferrable.op == gradient)
    sent = costs.sent_after.seconds(mine)[:, 0]
    partial = [ts[0].results[0].is_partial for ts in given.search.choices.triples[gradient]]
    (value,) = graph.ops[gradient].results
    layouts, steps = costs.ways[value].layouts.layouts, costs.least_ways(value).single
    # Sums over shares of the batch are reduced before they are squared; what is whole, or cut, stays as it is.
    reduced = min(seconds for (a, _), seconds in steps.items() if layouts[a][0].is_partial)
    assert sent.tolist() == [reduced if is_partial else 0.0 for is_partial in partial]
    least = np.minimum(costs.op_seconds[gradient][:, :-1], sent[:, None])
    # The sum of squares waits for all of it.
    np.testing.assert_array_equal(costs.deferred_seconds[gradient][:, 0], np.hstack([least, least]))


@pytest.mark.parametrize(("fn", "width", "batch", "bandwidth"), [(clipped, 512, 16384, 1e10), (tied, 256, 65536, 1e9)])
def test_chains_are_longer_for_what_may_be_put_off(fn: Any, width: int, batch: int, bandwidth: float) -> None:
    args = {"a": floats(width, width), "b": floats(width, width)}, floats(batch, width)
    given = space(fn, args, graphs.cluster([3.0, 3.0, 1.0, 1.0], bandwidth=bandwidth))
    search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
    search.run(4)
    assert search.best is not None
    taken, every = search.best.seen.taken, range(len(given.task.graph.ops))
    longest = lambda taken: max(chain.length(taken) for chain in given.chains.longest(taken, every))
    without = longest(replace(taken, deferred=np.zeros_like(taken.deferred)))
    assert 1.03 * without < longest(taken) <= search.best.makespan_s


def test_what_is_sent_before_a_norm_counts_before_what_follows_it() -> None:
    """The updates follow the norm, which waits for every gradient's reduction, whenever that gradient is computed."""
    args = {"a": floats(512, 512), "b": floats(512, 512)}, floats(16384, 512)
    given = space(clipped, args, graphs.cluster([3.0, 3.0, 1.0, 1.0], bandwidth=1e10))
    search = MakespanSearch(given.search, given.builder.ratios, np.array(given.search.choices.replicated()))
    search.run(4)
    assert search.best is not None
    deferral, kinds = given.chains.deferral, given.chains.resources.kinds
    assert deferral.join is not None
    assert [deferral.before_join[d.op] for d in deferral.ops].count(True) >= 2
    taken, every = search.best.seen.taken, range(len(given.task.graph.ops))
    longest = lambda taken: max(chain.length(taken) for chain in given.chains.longest(taken, every))
    at_the_end = taken.deferred.copy()
    at_the_end[:, kinds:] = 0
    assert longest(replace(taken, deferred=at_the_end)) < longest(taken) <= search.best.makespan_s
