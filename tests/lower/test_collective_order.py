"""Collectives beside loops that communicate are ordered by data: XLA's CPU backend orders them by nothing else."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from slow_devices import first_devices, thin_cluster

import hapsynth


def _unordered(hlo: str) -> list[tuple[str, str]]:
    """Pairs of a loop or branch with a collective inside and a collective, or another such, in the same computation of
    which neither depends on the other."""
    computations: dict[str, dict[str, tuple[str, str]]] = {}
    inside: dict[str, tuple[str, str]] = {}
    for line in hlo.splitlines():
        if head := re.match(r"(?:ENTRY )?%([\w.\-]+) \(", line):
            inside = computations[head[1]] = {}
        elif found := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*?([a-z][a-z\-]*)\((.*)", line):
            inside[found[1]] = found[2], found[3]
    collective = re.compile(r"all-(reduce|gather|to-all)|reduce-scatter|collective-permute")
    names = lambda text: re.findall(r"%([\w.\-]+)", text)

    def communicates(op: str, rest: str) -> bool:
        called = [n for n in names(rest) if n in computations]
        return bool(collective.match(op)) or any(communicates(*i) for n in called for i in computations[n].values())

    pairs: list[tuple[str, str]] = []
    for body in computations.values():
        needs: dict[str, set[str]] = {}
        for name, (_, rest) in body.items():
            operands = {n for n in names(rest) if n in needs}
            needs[name] = operands.union(*(needs[n] for n in operands))
        busy = [name for name, i in body.items() if communicates(*i)]
        for i, a in enumerate(busy):
            for b in busy[i + 1 :]:
                regions = [n for n in (a, b) if body[n][0] in ("while", "conditional", "call")]
                if regions and a not in needs[b] and b not in needs[a]:
                    pairs.append((a, b))
    return pairs


def _while(x: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    halved = lax.while_loop(lambda s: jnp.sum(s * s) > 1.0, lambda s: jnp.sin(s) * 0.5, x)
    return halved, jnp.min(jnp.sin(v))


def _scan(x: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.scan(lambda s, _: (jnp.sin(s) - jnp.sum(jnp.sin(s)), None), x, None, length=50)[0], jnp.sum(jnp.sin(v))


def _cond(x: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.cond(v[0] > 0, lambda: jnp.sum(jnp.sin(x)), lambda: jnp.sum(x * x)), jnp.sum(jnp.sin(v))


@pytest.mark.parametrize("fn", [_while, _scan, _cond])
def test_collectives_around_what_communicates_are_ordered_by_data(fn: Any) -> None:
    rng = np.random.default_rng(0)
    args = tuple(rng.normal(size=(64,)).astype("f") for _ in range(2))
    plan = hapsynth.synthesize(fn, args, first_devices(4), cluster=thin_cluster((3.0, 3.0, 1.0, 1.0)), leave_out=False)
    hlo = plan.lower().compile().as_text()
    assert plan.program.collectives().get("all_reduce", 0) >= 2
    assert _unordered(hlo) == []
    assert plan.check(*args)
