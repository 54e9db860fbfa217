"""Random programs on clusters with random hosts and links: what a program costs is what its instructions cost, what the
arrays say that sizes are chosen by, and what its tasks take one after the other.

HAPSYNTH_RANDOM_LINKS=1000 python -m pytest tests/search/cost/test_random_links.py   tries so many.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from math import fsum
from typing import Any

import jax
import numpy as np
import pytest
from graphs import cluster
from random_programs import RandomProgram, mlp_args, mlp_step

from hapsynth.cluster.cluster import Cluster
from hapsynth.cluster.links import HostLinks, Link
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.program import Compute, Convert, Program
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.search.cost.model import CostModel, Floats
from hapsynth.search.cost.program_cost import (
    by_cheapest_steps,
    conversion_cost,
    instruction_costs,
    load_seconds,
    program_cost,
)
from hapsynth.search.cost.program_index import ProgramIndex
from hapsynth.search.scheduling.tasks import tasks_of
from hapsynth.search.sizing.sizer import Sizer

COUNT = int(os.environ.get("HAPSYNTH_RANDOM_LINKS", "12"))
AXES = ((("a", 8),), (("a", 2), ("b", 4)), (("a", 7),), (("a", 4), ("b", 2)), (("a", 2), ("b", 2), ("c", 2)))


def link(rng: random.Random) -> Link:
    return Link(10 ** rng.uniform(7, 11), 10 ** rng.uniform(-6, -3.5))


def random_cluster(rng: random.Random, n: int) -> Cluster:
    """Hosts of any numbers of devices, not always one after the other; some with links of their own, some pairs."""
    hosts = [0]
    while len(hosts) < n:
        hosts.append(hosts[-1] + (rng.random() < 0.4))
    if rng.random() < 0.3:
        hosts = [d % 2 for d in range(n)]
    own = lambda: link(rng) if rng.random() < 0.5 else None
    every = sorted(set(hosts))
    pairs = {(a, b): link(rng) for a in every for b in every if a < b and rng.random() < 0.2}
    return replace(
        cluster([rng.choice([1.0, 3.0]) for _ in range(n)]),
        hosts=tuple(hosts),
        network=link(rng),
        intra=own(),
        host_links={host: HostLinks(own(), own()) for host in every},
        pairs=pairs,
    )


def on_each_device(program: Program, sizes: Sizes, costs: CostModel) -> list[Floats]:
    """Seconds of each instruction [devices]; all wait for a conversion."""
    index = ProgramIndex.of(program, sizes.classes, costs)
    loads = load_seconds(index, sizes)
    alike = lambda i: np.full(costs.n, conversion_cost(costs, sizes, i)[0])
    each = enumerate(program.instructions)
    return [loads[index.load_of[k]] if isinstance(i, Compute) else alike(i) for k, i in each]


@pytest.mark.few(3)
@pytest.mark.parametrize("axes", AXES)
def test_what_a_program_costs_is_what_its_parts_do(axes: tuple[tuple[str, int], ...]) -> None:
    fn: Any = lambda *args: [x * 2.0 for x in jax.tree.leaves(mlp_step(*args))]
    graph = replace(trace(fn, mlp_args()).graph, carry=())
    table, over_hosts = FactorTable(graph), 0
    for seed in range(-(-COUNT // len(AXES))):
        rng = random.Random(seed)
        where = random_cluster(rng, int(np.prod([size for _, size in axes])))
        costs = CostModel(graph, where, table, axes)
        maker = RandomProgram(graph, axes, rng, hosts=costs.hosts, owned=seed % 3 == 2)
        program = maker.build()
        one, other = (maker.sizes(program, "skewed") for _ in range(2))
        whole = program_cost(program, one, costs)
        sizer = Sizer(program, one.classes, costs)
        apart = whole - program_cost(program, other, costs)
        assert apart == pytest.approx(sizer.variable_cost(one) - sizer.variable_cost(other), abs=1e-9 * whole), seed
        if one.classes.owned and len(axes) == 1:
            # Whatever is best for the others, an owner has all.
            sizer.best(np.ones(costs.n)).check(program.axes)
        each = [c.seconds for c in instruction_costs(program, one, costs)]
        tasks, held = tasks_of(program, one, costs), on_each_device(program, one, costs)
        assert [float(seconds.max()) for seconds in held] == pytest.approx(each, rel=1e-9), seed
        assert sorted(k for places in tasks.instructions for k in places) == [*range(len(each))]
        # The ops of a kernel may be slowest on several devices; a task without instructions feeds an argument.
        ran = [float(sum(held[k] for k in places).max()) for places in tasks.instructions if places]
        assert [s for s, places in zip(tasks.longest, tasks.instructions) if places] == pytest.approx(ran, rel=1e-9)
        fed = fsum(s for s, places in zip(tasks.longest, tasks.instructions) if not places)
        assert fsum(each) + fed == pytest.approx(whole, rel=1e-9), seed
        for i in program.instructions:
            if isinstance(i, Convert) and i.is_collective:
                steps = costs.steps(i.source, i.target, i.axis)
                least = min(conversion_cost(costs, one, i.with_step(step))[0] for step in steps)
                (chosen,) = by_cheapest_steps(replace(program, instructions=(i,)), one, costs).instructions
                assert isinstance(chosen, Convert)
                assert conversion_cost(costs, one, chosen)[0] == least
                over_hosts += i.collective.over != "positions"
    assert over_hosts or len(axes) > 1
