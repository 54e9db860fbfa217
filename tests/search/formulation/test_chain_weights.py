"""The weighted problem costs what its chains' lengths come to."""

from __future__ import annotations

import random

import graphs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from assignments import CASES, Space, case, programs, random_chain, space

from hapsynth.instructions.layout import P, S
from hapsynth.search.formulation.chain_weights import WeightedBuilder
from hapsynth.search.formulation.chains import Chain, Occupancy
from hapsynth.search.solver import Ints, solve

_STEP = 1e-3


@pytest.fixture(scope="module", params=CASES)
def given(request: pytest.FixtureRequest) -> Space:
    return case(request.param)


def weighed(given: Space, chains: list[Chain], weights: np.ndarray, choices: Ints) -> float:
    return WeightedBuilder(given.costs, chains, weights).problem().cost(choices)


def test_conversions_take_the_ways_that_take_the_least_of_the_link() -> None:
    """Alone a gradient is reduced whole and sliced, as a tree has fewer messages; among others it is scattered."""
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    many = graphs.cluster([1.0] * 32, bandwidth=12.5e9, latency=20e-6)
    args = [floats(1024, 1024)] * 4, floats(4096, 1024)
    fn = lambda ws, x: ([w - x.T @ jnp.sin(x @ w) for w in ws], x)
    given = space(fn, args, many, carry=[("[0]", "[0]")])
    gradients = [op.results[0] for op in given.task.graph.ops if op.name == "dot_general"][1::2]
    for value in gradients:
        ways, least = given.costs.ways[value], given.costs.least_ways(value)
        number = ways.layouts.number
        partial, cut = number[P("sum"),], number[S(0),]
        assert len(ways.path((P("sum"),), (S(0),)) or ()) == 2
        assert least.seconds[partial, cut] == least.single[partial, cut] < ways.single[partial, cut]


def lengths(given: Space, chains: list[Chain], taken: Occupancy) -> np.ndarray:
    return np.array([chain.length(taken) for chain in chains])


def drawn(given: Space, rng: random.Random, count: int) -> tuple[list[Chain], np.ndarray]:
    """Chains, those of one resource first, and weights that sum to 1."""
    chains = [*given.chains.alone, *(random_chain(given, rng) for _ in range(count))]
    weights = np.array([rng.random() ** 3 for _ in chains])
    return chains, weights / weights.sum()


def one_tensor(given: Space, choices: Ints) -> bool:
    """Whether every value has one tensor to take."""
    states = [domain.state(s).availability for domain, s in zip(given.search.choices.choices, choices.tolist())]
    return all(state is None or not state.targets for state in states)


@pytest.mark.few(12)
def test_it_is_the_weighted_sum_of_lengths(given: Space) -> None:
    rng, equal = random.Random(1), 0
    chains, weights = drawn(given, rng, 6)
    problem = WeightedBuilder(given.costs, chains, weights).problem()
    for choices, *_ in programs(given, 8, seed=2):
        want = float(weights @ lengths(given, chains, given.costs.occupancy(choices.tolist())))
        # The least over tensors.
        assert problem.cost(choices) <= want * (1 + 1e-9)
        if one_tensor(given, choices):
            assert problem.cost(choices) == pytest.approx(want, rel=1e-9)
        equal += problem.cost(choices) >= want * (1 - 1e-9)
    assert equal or len(given.task.costs.axes) > 1
    whole = np.array(given.search.choices.replicated())
    want = float(weights @ lengths(given, chains, given.costs.occupancy(whole.tolist())))
    assert problem.cost(whole) == pytest.approx(want, rel=1e-9)


def test_what_goes_before_and_after_shared_conversions_is_the_least_of_all_tensors(given: Space) -> None:
    """Alone on one link, a use takes what is nearest; so the problem is exact, whatever is shared."""
    alone = list(given.chains.alone)
    for n in range(len(alone)):
        weights = np.eye(len(alone))[n]
        for choices, *_ in programs(given, 2, seed=3):
            want = alone[n].length(given.costs.occupancy(choices.tolist()))
            got = weighed(given, alone, weights, choices)
            exact = n < given.chains.resources.kinds or len(given.task.costs.axes) == 1
            assert got == pytest.approx(want, rel=1e-9) if exact else got <= want * (1 + 1e-9)


def test_the_derivative_in_a_weight_is_the_length(given: Space) -> None:
    rng = random.Random(4)
    chains, weights = drawn(given, rng, 3)
    # Without shared conversions no use has a choice of tensors: no kinks.
    choices = np.array(given.search.choices.replicated())
    assert one_tensor(given, choices)
    found = lengths(given, chains, given.costs.occupancy(choices.tolist()))
    for n in range(len(chains)):
        step = _STEP * np.eye(len(chains))[n]
        more, less = (weighed(given, chains, weights + s, choices) for s in (step, -step))
        assert (more - less) / (2 * _STEP) == pytest.approx(found[n], rel=1e-6, abs=1e-9 * found.max())


def test_its_optimum_is_below_every_program(given: Space) -> None:
    chains, weights = drawn(given, random.Random(5), 6)
    problem = WeightedBuilder(given.costs, chains, weights).problem()
    least = solve(problem, start=np.array(given.search.choices.replicated())).lower_bound
    assert least >= 0
    for choices, *_ in programs(given, 4, seed=6):
        assert least <= float(weights @ lengths(given, chains, given.costs.occupancy(choices.tolist()))) * (1 + 1e-9)
