"""Loops and branches on stored shards: what they carry is stored as a plan's arguments are, and all devices go the same
way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hapsynth.graph.ir import Graph, Literal
from hapsynth.instructions.program.program import Property
from hapsynth.instructions.staging.stages import Cond, Loop, Step
from hapsynth.lower._collective_order import Order, region_communicates
from hapsynth.lower._storage import with_weak_type

Env = dict[Property, Any]
Run = Callable[[Sequence[Step], Env], None]
Uniform = Callable[[Any], Any]
"""Makes a decision that unlike devices may have rounded apart the same on all."""


def run_loop(graph: Graph, uniform: Uniform, loop: Loop, env: Env, run: Run, order: Order) -> None:
    """Run a loop in `env`, to which its results are added; `run` runs steps."""
    ordered = region_communicates(graph, loop)
    strong = lambda p, x: with_weak_type(x, graph.values[p[0]].dtype, False)
    held = lambda env, properties: [strong(p, env[p]) for p in properties]
    initial = [
        strong(p, jnp.asarray(x.value, x.dtype) if isinstance(x, Literal) else env[x])
        for x, p in zip(loop.initial, loop.carried, strict=True)
    ]

    def entered() -> list[Any]:
        return [order.token()] if ordered else []

    def starts(token: Sequence[Any]) -> None:
        if ordered:
            order.start(*token)

    def body(carried: Sequence[Any], parts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        inside: Env = {**env, **dict(zip((*loop.carried, *loop.parts), (*carried, *parts), strict=True))}
        run(loop.body, inside)
        return held(inside, loop.onward), held(inside, loop.pieces)

    def goes_on(carried: Sequence[Any]) -> Any:
        inside: Env = {**env, **dict(zip(loop.tested, carried, strict=True))}
        run(loop.test, inside)
        assert loop.goes_on is not None
        return uniform(inside[loop.goes_on]) if loop.unsure else inside[loop.goes_on]

    region = loop.region
    with jax.named_scope(f"hap/{region.kind}_{region.index}"):
        if region.kind == "scan":

            def scanned(state: tuple[list[Any], list[Any]], parts: Sequence[Any]) -> tuple[Any, list[Any]]:
                starts(state[0])
                onward, pieces = body(state[1], parts)
                return (entered(), onward), pieces

            (token, final), stacked = lax.scan(
                scanned,
                (entered(), initial),
                held(env, loop.whole),
                length=int(region.count),
                reverse=region.reverse,
                unroll=region.unroll,
            )
            env.update(zip(loop.stacked, stacked, strict=True))
        else:
            # The test stands in the body: a condition of XLA's should not communicate.
            def iterate(state: tuple[Any, list[Any], list[Any]]) -> tuple[Any, list[Any], list[Any]]:
                starts(state[1])
                onward, _ = body(state[2], ())
                more = goes_on(onward)
                return more, entered(), onward

            first = goes_on(initial)
            _, token, final = lax.while_loop(lambda state: state[0], iterate, (first, entered(), initial))
    starts(token)
    env.update(zip(loop.final, final, strict=True))


def run_cond(graph: Graph, uniform: Uniform, cond: Cond, env: Env, run: Run, order: Order) -> None:
    """Run one of several branches in `env`, to which its results are added."""
    number = jnp.asarray(cond.number.value) if isinstance(cond.number, Literal) else env[cond.number]

    ordered = region_communicates(graph, cond)

    def branch(steps: Sequence[Step], given: Sequence[Property]) -> Callable[[Any], tuple[Any, list[Any]]]:
        def taken(token: Any) -> tuple[Any, list[Any]]:
            inside = dict(env)
            if ordered:
                order.start(token)
            run(steps, inside)
            made = [with_weak_type(inside[p], graph.values[p[0]].dtype, False) for p in given]
            return (order.token() if ordered else None), made

        return taken

    branches = [branch(steps, given) for steps, given in zip(cond.branches, cond.given, strict=True)]
    with jax.named_scope("hap/cond"):
        taken = uniform(number) if cond.unsure else number
        token, made = lax.switch(taken, branches, order.token() if ordered else None)
    if ordered:
        order.start(token)
    env.update(zip(cond.results, made, strict=True))
