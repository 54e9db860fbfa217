"""Collectives that go as one give what each alone gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from lowering_options import SWITCHED, SWITCHED_ALONE
from slow_devices import first_devices, slow_cluster

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.instructions.collectives import STEPS, Hosts
from hapsynth.instructions.layout import Layout, P, R, S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Convert, Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.gathered import gathered
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.lower._bundles import Bundle, bundles
from hapsynth.plan import Form

KINDS: dict[str, tuple[tuple[Layout, Layout], ...]] = {
    "all_reduce": (((P("sum"),), (R,)),),
    "max": (((P("max"),), (R,)),),
    "min": (((P("min"),), (R,)),),
    "reduce_scatter": (((P("sum"),), (S(0),)), ((P("sum"),), (S(1),))),
    "all_gather": (((S(0),), (R,)), ((S(1),), (R,))),
    "all_to_all": (((S(0),), (S(1),)), ((S(1),), (S(0),))),
    "hierarchical_all_reduce": (((P("sum"),), (R,)),),
    "hierarchical_reduce_scatter": (((P("sum"),), (S(0),)), ((P("sum"),), (S(1),))),
    "hierarchical_all_gather": (((S(0),), (R,)), ((S(1),), (R,))),
}
SHAPES = ((4, 8), (12, 4), (8, 8, 3))
F32 = jnp.float32
HOSTS: dict[str, Hosts] = {"equal": ((0, 2), (1, 3)), "unequal": ((0, 1, 3), (2,))}


def sizes_of(hosts: str) -> Any:
    """All that is asked of sizes but by reshares."""
    return SimpleNamespace(classes=SimpleNamespace(hosts_along=lambda axis: HOSTS[hosts]))


def steps_of(kind: str) -> list[tuple[Convert, jax.ShapeDtypeStruct]]:
    """Several of a kind, over every dimension and of unlike shapes."""
    layouts = [pair for pair in KINDS[kind] for _ in SHAPES]
    shapes = SHAPES * len(KINDS[kind])
    by = kind if kind in STEPS and STEPS[kind].over != "positions" else ""
    return [
        (Convert(v, 0, *pair, by=by), jax.ShapeDtypeStruct(s, F32)) for v, (pair, s) in enumerate(zip(layouts, shapes))
    ]


def on_mesh(
    found: list[Bundle], arrays: list[np.ndarray], gloo: LoweringOptions | None = None, hosts: str = "equal"
) -> list[np.ndarray]:
    """Every device's results, stacked; each device has its own shard of [devices, ...]."""

    def body(*xs: jax.Array) -> list[jax.Array]:
        made: dict[int, jax.Array] = {}
        for bundle in found:
            sent = [xs[step.value][0] for step in bundle.steps]
            whole = bundle.exchange(sizes_of(hosts), ("d",), bundle.pack(sent, (4,)), gloo)
            made |= dict(zip((s.value for s in bundle.steps), bundle.unpack(whole, (4,)), strict=True))
        return [made[i][None] for i in range(len(xs))]

    spec = PartitionSpec("d")
    run = jax.jit(jax.shard_map(body, mesh=first_devices(4), in_specs=spec, out_specs=spec, check_vma=False))
    return [np.asarray(x) for x in run(*arrays)]


LARGE = LoweringOptions(gloo_at_once_bytes=0, gloo_gathered_bytes=0)
"""What is small goes as what is large does."""


class Several(NamedTuple):
    """Steps of a kind, what they send, and what becomes of it where XLA sends each alone."""

    steps: tuple[Convert, ...]
    sent: tuple[jax.ShapeDtypeStruct, ...]
    arrays: list[np.ndarray]
    wanted: list[np.ndarray]


@cache
def several(kind: str) -> Several:
    steps, sent = zip(*steps_of(kind))
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-9, 9, (4, *s.shape)).astype(np.float32) for s in sent]
    return Several(steps, sent, arrays, on_mesh(bundles(steps, sent, "tpu", DEFAULT), arrays))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bundle_gives_what_each_alone_gives(kind: str) -> None:
    steps, sent, arrays, wanted = several(kind)
    (flat,) = bundles(steps, sent, "gpu", DEFAULT, flat=True)
    assert len(flat.steps) == len(steps)
    each_flat = [Bundle((step,), (struct,), flat=True) for step, struct in zip(steps, sent, strict=True)]
    for pinned in ([flat], each_flat):
        for got, want in zip(on_mesh(pinned, arrays), wanted, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.few(16)
@pytest.mark.parametrize("gloo", [None, DEFAULT, LARGE], ids=["by XLA", "small", "large"])
@pytest.mark.parametrize("kind", KINDS)
def test_so_it_does_by_gloo(kind: str, gloo: LoweringOptions | None) -> None:
    steps, sent, arrays, wanted = several(kind)
    (one,) = bundles(steps, sent, "cpu", DEFAULT)
    alone = bundles(steps, sent, "tpu", DEFAULT)
    assert (len(one.steps), len(alone)) == (len(steps), len(steps))
    for found in ([one], alone) if gloo else ([one],):
        for got, want in zip(on_mesh(found, arrays, gloo), wanted, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.few(10)
@pytest.mark.parametrize("gloo", [None, DEFAULT, LARGE], ids=["by XLA", "small", "large"])
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "hierarchical" in kind])
def test_over_hosts_it_is_the_same(kind: str, hosts: str, gloo: LoweringOptions | None) -> None:
    """As the collective that goes over all devices alike."""
    if not STEPS[kind].goes_over(HOSTS[hosts]):
        assert (hosts, STEPS[kind].over) == ("unequal", "equal hosts")
        return
    steps, sent, arrays, _ = several(kind)
    usual, _, same, wanted = several(kind.removeprefix("hierarchical_"))
    assert usual == tuple(step._replace(by="") for step in steps)
    for array, other in zip(arrays, same, strict=True):
        np.testing.assert_array_equal(array, other)
    for found in (bundles(steps, sent, "cpu", DEFAULT), bundles(steps, sent, "gpu", DEFAULT, flat=True)):
        for got, want in zip(on_mesh(found, arrays, gloo, hosts), wanted, strict=True):
            np.testing.assert_array_equal(got, want)


def test_what_goes_together() -> None:
    kinds = ["all_reduce", "max", "all_reduce", "all_reduce", "all_gather"]
    steps = [Convert(v, 0, *KINDS[kind][0]) for v, kind in enumerate(kinds)]
    sent = [jax.ShapeDtypeStruct((4, 4), d) for d in (F32, F32, jnp.bfloat16, F32, F32)]
    values = lambda found: [[s.value for s in b.steps] for b in found]
    assert values(bundles(steps, sent, "cpu", DEFAULT)) == [[0, 3], [1], [2], [4]]
    # Neither what is large, nor more than a bundle holds.
    large = jax.ShapeDtypeStruct((1 << 18, 2), F32)
    assert values(bundles(steps[:1] * 2, [large] * 2, "cpu", DEFAULT)) == [[0], [0]]
    full = jax.ShapeDtypeStruct((1 << 18,), F32)
    many = bundles([steps[0]] * 20, [full] * 20, "cpu", DEFAULT)
    assert [len(b.steps) for b in many] == [16, 4]


@pytest.mark.parametrize("form", ["switch", "staged"])
def test_plans_of_many_small_collectives(form: Form) -> None:
    """The very bits of the program whose collectives are alone; fewer of them are compiled."""
    rng = np.random.default_rng(1)
    weights = [rng.integers(-2, 3, (8, 8)).astype(np.float32) for _ in range(6)]
    x = rng.integers(-2, 3, (64, 8)).astype(np.float32)

    def step(weights: Any, x: Any) -> Any:
        grads = jax.grad(lambda ws: sum(jnp.sum((x @ w) ** 2) for w in ws))(weights)
        return [w - g for w, g in zip(weights, grads)]

    cluster = slow_cluster((3.0, 3.0, 1.0, 1.0))
    # By hand, as these devices would reshare what a network as fast as this one moves.
    ratios = (0.375, 0.375, 0.125, 0.125)
    fixed = {**{f"[0][{i}]": "R" for i in range(6)}, "[1]": "S(0)"}
    counts, results = [], []
    for lowering in (SWITCHED, SWITCHED_ALONE):
        plan = hapsynth.synthesize(
            step,
            (weights, x),
            first_devices(4),
            cluster=cluster,
            fixed=fixed,
            form=form,
            ratios=ratios,
            leave_out=False,
            lowering=lowering,
        )
        text, planned = plan.lower().as_text(), plan.program.collectives()
        counts.append(sum(text.count(f"stablehlo.{kind}") for kind in planned))
        results.append(plan.unshard(plan(*plan.shard(weights, x))))
    assert counts == [len(planned), sum(planned.values())]
    assert counts[1] >= 6 * counts[0]
    jax.tree.map(np.testing.assert_array_equal, *results)
    jax.tree.map(np.testing.assert_array_equal, results[0], jax.jit(step)(weights, x))


def test_uneven_parts_joined_by_a_gather() -> None:
    """The very bits that slices and concatenations give, of several weights at once and of one alone."""
    rng = np.random.default_rng(2)
    weights = [rng.integers(-2, 3, (8, 8)).astype(np.float32) for _ in range(3)]
    weights[0][3, 5], weights[1][0, 7] = -0.0, np.inf
    x, number = rng.integers(-2, 3, (64, 8)).astype(np.float32), np.arange(16, dtype=np.int32)

    def step(weights: Any, x: Any, number: Any) -> Any:
        return [jnp.sum(jnp.abs(x @ w), 1) for w in weights], number[::-1] * jnp.arange(16)

    cluster = slow_cluster((3.0, 3.0, 1.0, 1.0))
    layouts = {"[0][0]": "S(0)", "[0][1]": "S(1)", "[0][2]": "S(1)", "[1]": "S(0)", "[2]": "S(0)"}
    ratios = (0.375, 0.375, 0.125, 0.125)
    texts, results = [], []
    for lowering in (DEFAULT, LoweringOptions(indexed_bytes=0)):
        plan = hapsynth.synthesize(
            step,
            (weights, x, number),
            first_devices(4),
            cluster=cluster,
            fixed=layouts,
            form="switch",
            ratios=ratios,
            leave_out=False,
            lowering=lowering,
        )
        texts.append(plan.lower().as_text())
        results.append(plan.unshard(plan(*plan.shard(weights, x, number))))
    gathers = [text.count("stablehlo.gather") for text in texts]
    assert gathers[0] >= gathers[1] + 4
    jax.tree.map(np.testing.assert_array_equal, *results)
    jax.tree.map(np.testing.assert_array_equal, results[0], jax.jit(step)(weights, x, number))


def test_what_is_gathered_leaves_its_bundle() -> None:
    """A small all-to-all between unlike shares becomes a gather, which can't go with the other all-to-all."""
    large, small = (16, 16), (8, 8)
    graph = trace(lambda x, y: (x, y), (np.zeros(large, F32), np.zeros(small, F32)), carry=[]).graph
    exchanged = tuple(Convert(v, 0, (S(0),), (S(1),), bundle=1) for v in graph.inputs)
    program = Program((("d", 2),), dict.fromkeys(graph.inputs, (S(0),)), exchanged, ((S(1),),) * 2)
    classes = Classes.build(graph, program, FactorTable(graph))
    sizes = Sizes(graph, classes, tuple((c.units // 4 * 3, c.units // 4) for c in classes.all))
    check(graph, program, sizes)
    found = gathered(graph, program, sizes, most=512)
    assert [i.step for i in found if isinstance(i, Convert)] == ["all_to_all", "all_gather", "slice"]
    check(graph, replace(program, instructions=tuple(found)))
