"""Mixtures of programs: none of the same parts has a shorter longest chain."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
from assignments import CASES, Space, case, programs, random_assignment, random_chain

from hapsynth.search.formulation.chains import Chain
from hapsynth.search.planning.makespan.branches import Seen
from hapsynth.search.planning.makespan.mixtures import _shortest, mixtures
from hapsynth.search.solver import Ints

TOLERANCE = 1e-6
_MOST_PARTS = 11


def seen(given: Space, choices: Ints) -> Seen:
    return Seen(choices, given.costs.occupancy(choices.tolist()))


def mixed_into(given: Space, chains: Sequence[Chain], base: Ints, others: Sequence[Ints]) -> list[Ints]:
    return mixtures(given.chains, chains, seen(given, base), [seen(given, x) for x in others], TOLERANCE)


def longest(given: Space, chains: Sequence[Chain], choices: Ints) -> float:
    taken = given.costs.occupancy(choices.tolist())
    return max(chain.length(taken) for chain in chains)


def parts_of(given: Space, base: Ints, other: Ints) -> list[list[int]]:
    """The variables in which two programs differ, those together that edges of the problem join."""
    st, left = given.search.choices, {*np.flatnonzero(base != other).tolist()}
    edges = [(st.value_variable[use.value], use.variable) for use in st.uses]
    edges += [(st.op_variable[op], st.value_variable[value]) for op, value in st.links]
    found: list[list[int]] = []
    while left:
        part = [left.pop()]
        for variable in part:
            near = {v if u == variable else u for u, v in edges if variable in (u, v)} & left
            left -= near
            part += near
        found.append(part)
    return found


def possible(given: Space, base: Ints, others: Sequence[Ints]) -> Iterator[Ints]:
    """All mixtures that are programs."""
    problem = given.builder.problem()
    parts = [(part, other) for other in others for part in parts_of(given, base, other)]
    for some in chain.from_iterable(combinations(parts, k) for k in range(len(parts) + 1)):
        mixed = base.copy()
        for part, other in some:
            mixed[part] = other[part]
        taken = [variable for part, _ in some for variable in part]
        if len(taken) == len({*taken}) and np.isfinite(problem.cost(mixed)):
            yield mixed


@pytest.mark.parametrize("name", ["layers", "several results", "clipped", "tied"])
def test_none_of_the_same_parts_is_shorter(name: str) -> None:
    given, rng, compared, gained = case(name), random.Random(3), 0, 0
    problem = given.builder.problem()
    for seed in range(12):
        ((base, *_),) = programs(given, 1, seed)
        others = [random_assignment(problem, base, rng, 4) for _ in range(2)]
        if sum(len(parts_of(given, base, other)) for other in others) > _MOST_PARTS:
            continue
        chains = [*given.chains.alone, *(random_chain(given, rng) for _ in range(6))]
        found = mixed_into(given, chains, base, others)
        assert all(np.isfinite(problem.cost(each)) for each in found)
        lengths = [longest(given, chains, each) for each in found]
        assert all(a <= b * (1 + 1e-5) for a, b in pairwise(lengths))
        mixed = found[0] if found else base
        got = longest(given, chains, mixed)
        # Of two parts that an edge joins one alone is taken, though both may be possible.
        least = min(longest(given, chains, each) for each in possible(given, base, others))
        alone = min(longest(given, chains, each) for each in (base, *others))
        assert least / (1 + 1e-9) <= got <= longest(given, chains, base) * (1 + TOLERANCE)
        for other in others:
            of_one = min(longest(given, chains, each) for each in possible(given, base, [other]))
            assert got <= of_one * (1 + 2 * TOLERANCE)
        compared += 1
        gained += got < alone * (1 - 1e-3)
    assert compared > 3
    assert gained or name not in ("layers", "tied")


@pytest.mark.parametrize("name", [name for name in CASES if name != "layers"][:3])
def test_a_program_has_no_mixture_with_itself(name: str) -> None:
    given = case(name)
    base = np.array(given.search.choices.replicated())
    assert mixed_into(given, given.chains.alone, base, [base]) == []


def test_ctrl_c_is_python_s_after_programs_were_mixed() -> None:
    lengths, changes = np.array([2.0, 1.0]), np.array([[-1.0, 0.9], [0.2, -0.1]])
    assert _shortest(lengths, changes, np.zeros((0, 2), np.int64), TOLERANCE)[0] == [0]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
