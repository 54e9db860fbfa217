"""Random programs against plain JAX: every rule and collective that occurs, on equal, skewed, empty and lone shards."""

from __future__ import annotations

import random
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowered_programs import CASES, MODES, SEEDS, assert_close, random_lowered, run, some_hosts
from lowering_options import SWITCHED
from random_programs import RandomProgram

from hapsynth.graph.trace import trace
from hapsynth.instructions.collectives import STEPS
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions

N = 4

TWO_AXES = ((("a", 2), ("b", 3)), (("a", 3), ("b", 2)))
THREE_AXES = (("a", 2), ("b", 2), ("c", 2))


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "mode"), [*product(CASES, MODES)])
def test_random_programs_compute_what_jax_computes(name: str, mode: str) -> None:
    of_random_programs(name, mode, SWITCHED)


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "mode"), [*product(CASES, MODES)])
def test_random_programs_on_padded_shards(name: str, mode: str) -> None:
    of_random_programs(name, mode, DEFAULT)


def of_random_programs(name: str, mode: str, options: LoweringOptions) -> None:
    fn, make = CASES[name]
    args = make()
    traced = trace(fn, args)
    want = jax.jit(fn)(*args)
    for seed in SEEDS if len(traced.graph.ops) >= 50 else range(2 * SEEDS.start, 2 * SEEDS.stop):
        lowered = random_lowered(traced, N, seed * len(MODES) + MODES.index(mode), mode, options)
        assert_close(run(lowered, args), want)


@pytest.mark.parametrize("mode", ["equal", "skewed"])
@pytest.mark.parametrize("dtype", ["int2", "uint2", "int4"])
def test_integers_of_few_bits(dtype: str, mode: str) -> None:
    """XLA's collectives have no integers of 2 bits on CPUs, and NCCL none of 4."""

    def fn(x: jax.Array) -> list[jax.Array]:
        few = x.astype(dtype)
        made = few.T, jnp.sum(few, 0, dtype=dtype), jnp.max(few, 1), few[::-1]
        return [y.astype(jnp.int8) for y in made]

    # One of each column, as XLA also adds such integers without wrapping around.
    x = (np.eye(8, 12) * np.random.default_rng(0).integers(-8, 8, 12)).astype(np.int8)
    traced, want = trace(fn, (x,)), jax.jit(fn)(x)
    for seed in range(3):
        lowered = random_lowered(traced, N, seed, mode)
        for got, wanted in zip(run(lowered, (x,)), want, strict=True):
            np.testing.assert_array_equal(got, wanted)


# Of what takes long to compile, the modes with the most unlike shards.
ON_TWO_AXES = [(n, m) for n in CASES for m in MODES if n not in ("mlp", "embedding") or m in ("skewed", "zeros")]


@pytest.mark.few(6)
@pytest.mark.parametrize(("name", "mode"), ON_TWO_AXES)
def test_random_programs_of_two_axes(name: str, mode: str) -> None:
    fn, make = CASES[name]
    args = make()
    traced = trace(fn, args)
    want = jax.jit(fn)(*args)
    for seed in SEEDS:
        seed = seed * len(MODES) + MODES.index(mode)
        lowered = random_lowered(traced, TWO_AXES[seed % 2], seed, mode)
        assert_close(run(lowered, args), want)


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "mode"), [(n, MODES[k % len(MODES)]) for k, n in enumerate(CASES, 1)])
def test_random_programs_of_three_axes(name: str, mode: str) -> None:
    fn, make = CASES[name]
    args = make()
    traced = trace(fn, args)
    for seed in SEEDS:
        lowered = random_lowered(traced, THREE_AXES, seed, mode)
        assert_close(run(lowered, args), jax.jit(fn)(*args))


def test_the_random_programs_hold_every_collective() -> None:
    found: dict[str, int] = {}
    for name, (fn, make) in CASES.items():
        graph = trace(fn, make()).graph
        for seed in range(3 if name != "chain" else 8):
            hosts = (some_hosts(N, equal=True),)
            program = RandomProgram(graph, N, random.Random(seed), hosts=hosts, owned=seed % 2 == 1).build()
            for step, count in program.collectives().items():
                found[step] = found.get(step, 0) + count
    # All but a reshare: there dimensions are cut one way.
    assert set(found) == {name for name, step in STEPS.items() if step.communicates and not step.recuts}
