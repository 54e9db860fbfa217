"""Random assignments of a choice space, and the programs that they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import control_cases
import graphs
import jax
import jax.numpy as jnp
import numpy as np
import strategies
from jax import lax
from random_programs import mlp_args, mlp_step

from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.ir import Graph
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Convert, Program, reads
from hapsynth.search.formulation.chain_weights import ChainCosts
from hapsynth.search.formulation.chains import Chain, ChainSpace
from hapsynth.search.formulation.problem_builder import ProblemBuilder
from hapsynth.search.planning.candidate import Candidate
from hapsynth.search.planning.effort import Clock, Effort
from hapsynth.search.planning.makespan.clocks import least_seconds, resources
from hapsynth.search.planning.search_at_ratios import FixedRatioSearch
from hapsynth.search.planning.task import PlanningOptions, Task
from hapsynth.search.scheduling.tasks import TaskGraph, tasks_of
from hapsynth.search.solver import Ints, Problem

_TRIES = 8


class Space(NamedTuple):
    """A task at some ratios."""

    task: Task
    search: FixedRatioSearch
    builder: ProblemBuilder
    costs: ChainCosts

    @property
    def chains(self) -> ChainSpace:
        return self.costs.space


def space(fn: Callable[..., Any], args: Sequence[Any], cluster: Cluster, carry: Any = None, **options: Any) -> Space:
    """At the first ratios that a planner begins from."""
    task = Task(trace(fn, tuple(args), carry=carry).graph, cluster, PlanningOptions(**options))
    search = FixedRatioSearch(task, Clock(None), Effort())
    builder = search.builder(task.ratios(*task.starts()[0]))
    chains, first = (
        ChainSpace(search.choices, resources(task.costs), least_seconds(builder)),
        np.unique(task.costs.kind_of, return_index=True)[1],
    )
    return Space(task, search, builder, ChainCosts(builder, chains, first))


def random_assignment(problem: Problem, begin: Sequence[int] | Ints, rng: random.Random, moves: int) -> Ints:
    """Some finite assignment: from one, `moves` variables are moved, with those that are tied to them."""
    around: list[list[int]] = [[] for _ in problem.unary]
    for e, (u, v, *_) in enumerate(problem.edges):
        around[u].append(e)
        around[v].append(e)
    found = np.array(begin)

    def possible(e: int) -> bool:
        u, v, gu, gv, table = problem.edges[e]
        return bool(np.isfinite(table[gu[found[u]], gv[found[v]]]))

    for _ in range(moves):
        before, moved = found.copy(), [rng.randrange(len(found))]
        found[moved[0]] = rng.randrange(problem.unary[moved[0]].size)
        for at in moved:
            for e in around[at]:
                u, v, *_ = problem.edges[e]
                other = v if u == at else u
                if other not in moved and not possible(e) and len(moved) < 8:
                    states = list(range(problem.unary[other].size))
                    rng.shuffle(states)
                    for found[other] in states:
                        if possible(e):
                            break
                    moved.append(other)
        fine = all(np.isfinite(problem.unary[at][found[at]]) and all(map(possible, around[at])) for at in moved)
        if not fine:
            found = before
    assert np.isfinite(problem.cost(found))
    return found


def programs(given: Space, count: int, seed: int, *, frugal: bool = False) -> list[tuple[Ints, Candidate, TaskGraph]]:
    """Random assignments as programs at the ratios assumed; `frugal`: of those that waste nothing."""
    rng, found = random.Random(seed), list[tuple[Ints, Candidate, TaskGraph]]()
    problem, choices = given.builder.problem(), np.array(given.search.choices.replicated())
    moves = 4 if frugal else 3 * choices.size
    for _ in range(count * (_TRIES if frugal else 1)):
        moved = random_assignment(problem, choices, rng, moves)
        candidate = given.search.maker.chosen(given.builder, moved)
        if frugal and wasteful(given.task.graph, candidate.program):
            continue
        choices = moved
        check(given.task.graph, candidate.program, candidate.sizes)
        found.append((choices, candidate, tasks_of(candidate.program, candidate.sizes, given.task.costs)))
    return found[-count:]


def wasteful(graph: Graph, program: Program) -> bool:
    """Whether some conversion is made twice, or for nothing. An order may put it anywhere, so what an assignment says
    that it is for need not wait for it; there are assignments of the same programs without it."""
    converts = [i for i in program.instructions if isinstance(i, Convert)]
    read = {p for i in program.instructions for p in reads(graph, i)}
    read |= {(v, layout) for v, layout in zip(graph.outputs, program.outputs) if isinstance(v, int)}
    made = [(i.value, i.target) for i in converts]
    return len(set(made)) < len(made) or not read.issuperset(made)


def random_chain(given: Space, rng: random.Random, longest: int = 4) -> Chain:
    """A chain with random ops on a path as cuts, and random resources."""
    chains, cuts = given.chains, list[int]()
    for _ in range(rng.randint(1, longest)):
        after = chains.reach.descendants(cuts[-1]) if cuts else np.ones(len(given.task.graph.ops), bool)
        among = [op for op in np.flatnonzero(after & ~chains.in_block).tolist() if op not in cuts]
        if not among:
            break
        cuts.append(rng.choice(among))
    stream, link = rng.randrange(chains.resources.kinds), chains.resources.link
    begins = rng.random() < 0.5
    turns = [stream if (n % 2 == 0) == begins else link for n in range(len(cuts) + 1)]
    return chains.chain(cuts, turns)


def joined_chain(given: Space, rng: random.Random) -> Chain | None:
    """A chain with a set on the link between a random op on a stream and `Deferral.join`; None where that is None, or
    random ops lie on no path to it."""
    chains, join = given.chains, given.chains.deferral.join
    if join is None:
        return None
    among = np.flatnonzero(chains.reach.ancestors(join) & ~chains.in_block & chains.deferral.is_cut).tolist()
    cuts = sorted(rng.choices([op for op in among if op != join], k=rng.randint(1, 2))) if len(among) > 1 else []
    if not cuts or not chains.reach.descendants(cuts[0])[cuts[-1]]:
        return None
    kinds = chains.resources.kinds
    stream = rng.randrange(kinds)
    return chains.chain([*cuts, join], [kinds, stream, kinds, stream][-len(cuts) - 2 :])


def layers(p: Any, batch: Any) -> Any:
    """A step of two layers that begins and ends with their weights."""
    loss = lambda p: jnp.mean((jnp.tanh(batch @ p["a"]) @ p["b"]) ** 2)
    return jax.tree.map(lambda p, g: p - 0.1 * g, p, jax.grad(loss)(p))


def tied(p: Any, batch: Any) -> Any:
    """A step whose first weight is also its last, and that ends with what its other gradients do not wait for."""
    hidden = lambda p: jnp.tanh(jnp.tanh(batch @ p["a"]) @ p["b"])
    loss = lambda p: jnp.mean((hidden(p) @ p["a"]) ** 2)
    return jax.tree.map(lambda p, g: p - 0.1 * g / jnp.sum(g * g), p, jax.grad(loss)(p))


def clipped(p: Any, batch: Any) -> Any:
    """A step whose updates all wait for all gradients."""
    loss = lambda p: jnp.mean((jnp.tanh(batch @ p["a"]) @ p["b"]) ** 2)
    gradients = jax.grad(loss)(p)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda p, g: p - g / norm, p, gradients)


def several(x: Any, w: Any) -> Any:
    """Ops of several results, some of which are taken twice, some never."""
    a, b = lax.top_k(x @ w, 4)
    c, d = jnp.split(jnp.sin(x), 2)
    s, _ = lax.sort((x, x * 2), num_keys=1)
    return a + a * b, c @ w, c + d, s, b


def again(x: Any, w: Any) -> Any:
    """One value that many take, and that is carried on twice."""
    y = x @ w
    return jnp.tanh(y) @ w + y.T @ y, y + y.sum(0), y


FOUR = graphs.cluster([3.0, 3.0, 1.0, 1.0], bandwidth=1e9)
HOSTS = strategies.hosts(2, 2, network=1e8, intra=1e9)


def slowed(cluster: Cluster) -> Cluster:
    """With devices that compute more slowly beside a collective, some much more than others."""
    factors = {kind: 1.2 + n for n, kind in enumerate(dict.fromkeys(cluster.devices))}
    return replace(cluster, devices=tuple(replace(kind, contention=factors[kind]) for kind in cluster.devices))


f = control_cases.floats
CASES: dict[str, tuple[Callable[..., Any], Any, Cluster]] = {
    "training": (mlp_step, mlp_args(), FOUR),
    "layers on hosts": (layers, ({"a": f(64, 96), "b": f(96, 64)}, f(80, 64)), HOSTS),
    "layers": (layers, ({"a": f(64, 96), "b": f(96, 64)}, f(80, 64)), FOUR),
    "several results": (several, (f(24, 24), f(24, 24)), FOUR),
    "several results on hosts": (several, (f(24, 24), f(24, 24)), HOSTS),
    "taken again": (again, (f(64, 64), f(64, 64)), FOUR),
    "taken again on hosts": (again, (f(64, 64), f(64, 64)), HOSTS),
    "tied": (tied, ({"a": f(64, 64), "b": f(64, 64)}, f(960, 64)), FOUR),
    "tied, slowed": (tied, ({"a": f(64, 64), "b": f(64, 64)}, f(960, 64)), slowed(FOUR)),
    "clipped": (clipped, ({"a": f(64, 96), "b": f(96, 64)}, f(960, 64)), FOUR),
    "clipped, slowed": (clipped, ({"a": f(64, 96), "b": f(96, 64)}, f(960, 64)), slowed(FOUR)),
    "training, slowed": (mlp_step, mlp_args(), slowed(FOUR)),
    "several results, slowed": (several, (f(24, 24), f(24, 24)), slowed(FOUR)),
    "taken again, slowed": (again, (f(64, 64), f(64, 64)), slowed(FOUR)),
    "taken again on hosts, slowed": (again, (f(64, 64), f(64, 64)), slowed(HOSTS)),
    **{
        name: (*control_cases.CASES[name], FOUR)
        for name in ("scanned layers", "nested", "cond", "cond of floats", "swapped", "while of floats")
    },
}


def case(name: str, **options: Any) -> Space:
    """A task of the table at its first ratios."""
    fn, args, cluster = CASES[name]
    return space(fn, args, cluster, **options)
