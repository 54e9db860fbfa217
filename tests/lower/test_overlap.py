"""The staged form with overlap: collectives on a thread of their own, the same values as one after another."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest
from control_cases import CASES, floats
from example_models import TINY, example, start
from lowered_programs import MODES, SEEDS, assert_close, chain
from random_programs import RandomProgram, mlp_args, mlp_step
from slow_devices import SPEEDS, first_devices, thin_cluster

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.instructions.program.checker import check
from hapsynth.lower import Staged, lower_staged
from hapsynth.lower._host_schedule import CollectiveStage, HostLoop, LocalStage


def overlapping(plan: hapsynth.Plan, *, overlap: bool = True) -> Staged:
    return lower_staged(plan.traced.graph, plan.program, plan.sizes, plan.mesh, overlap=overlap)


def results(staged: Staged, leaves: Any) -> list[Any]:
    stored = [s.put(x, copy=True) for s, x in zip(staged.inputs, leaves, strict=True)]
    return [x if s is None else s.fetch(x) for s, x in zip(staged.outputs, staged(stored), strict=True)]


def planned(fn: Any, args: Any, on: str, **options: Any) -> hapsynth.Plan:
    cluster = thin_cluster(SPEEDS[on])
    return hapsynth.synthesize(
        fn, args, first_devices(cluster.n), cluster=cluster, leave_out=False, form="staged", **options
    )


def layers(ws: Any, x: Any) -> Any:
    """Two layers; the gradients of both are partial sums, in whole numbers."""
    forward = lambda ws: (((x @ ws[0]) @ ws[1]) ** 2).sum()
    return [w - g for w, g in zip(ws, jax.grad(forward)(ws), strict=True)], forward(ws)


LAYERS = [np.eye(8, dtype=np.float32), np.ones((8, 8), np.float32)], np.arange(96, dtype=np.float32).reshape(12, 8)


def data_parallel() -> hapsynth.Plan:
    return planned(layers, LAYERS, "two", fixed={"[0][0]": "R", "[0][1]": "R", "[1]": "S(0)"})


@pytest.mark.parametrize("on", ["equal", "3:1"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n != "mlp" else n for n in TINY])
def test_examples(name: str, on: str) -> None:
    module = example(name)
    config = module.Config(**TINY[name] | ({"layers": 1} if name == "transformer" else {}))
    fn, _ = module.target_for(config)
    args = start(module, config)
    plan = planned(fn, args, on)
    leaves = jax.tree.leaves(args)
    assert_close(results(overlapping(plan), leaves), results(overlapping(plan, overlap=False), leaves))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("axes", [4, (("a", 2), ("b", 2))])
def test_random_programs(axes: Any, seed: int, mode: str) -> None:
    for fn, args in ((chain, (floats(8, 5), floats(5, 3))), (mlp_step, mlp_args())):
        traced = trace(fn, args)
        maker = RandomProgram(traced.graph, axes, random.Random(seed))
        program = maker.build()
        sizes = maker.sizes(program, mode)
        check(traced.graph, program, sizes)
        staged = lower_staged(traced.graph, program, sizes, first_devices(4), overlap=True)
        assert_close(results(staged, jax.tree.leaves(args)), jax.jit(fn)(*args))


@pytest.mark.parametrize("name", ["nested", "while", "invariant", "swapped", "literals"])
def test_loops_are_barriers(name: str) -> None:
    fn, args = CASES[name]
    plan = planned(fn, args, "two")
    staged = overlapping(plan)
    assert any(isinstance(item, HostLoop) for item in staged.items) or name in ("swapped", "literals")
    assert_close(results(staged, jax.tree.leaves(args)), jax.jit(fn)(*args))
    under_way = set[int]()
    for item in staged.items:
        if isinstance(item, CollectiveStage):
            under_way.add(id(item))
        elif isinstance(item, LocalStage):
            under_way -= set(map(id, item.arrives))
        else:
            assert not under_way
    assert not under_way


def test_a_gradient_is_sent_before_the_next_is_computed() -> None:
    staged = overlapping(data_parallel())
    kinds = ["".join(type(s).__name__[0] for s in [item]) for item in staged.items]
    sent = [n for n, kind in enumerate(kinds) if kind == "C"]
    arrives = [n for n, item in enumerate(staged.items) if isinstance(item, LocalStage) and item.arrives]
    assert len(sent) >= 2
    # Something is computed between the start of the first and where it is needed.
    first = staged.items[sent[0]]
    needed = next(n for n in arrives if first in staged.items[n].arrives)
    assert any(isinstance(item, LocalStage) and item.steps for item in staged.items[sent[0] + 1 : needed])
