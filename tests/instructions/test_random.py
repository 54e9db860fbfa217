"""Random numbers in shards: the bits of one device, drawn without a message."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_draws import dropout_step, large_draws
from slow_devices import SPEEDS, first_devices, slow_cluster, thin_cluster

import hapsynth
from hapsynth.graph.ir import Op
from hapsynth.graph.trace import trace
from hapsynth.instructions.factors import Cut, Local
from hapsynth.instructions.layout import S
from hapsynth.instructions.program.program import Compute, Convert
from hapsynth.instructions.rules import execute, factors_of
from hapsynth.instructions.rules.random import bits_on_shard
from hapsynth.instructions.testing import simulate
from hapsynth.plan import Plan


def draw(fn: Callable[..., Any], *args: Any) -> Op:
    """The one draw in `fn`."""
    (op,) = (op for op in trace(fn, args).graph.ops if op.name in ("random_bits", "random_gamma"))
    return op


def drawn(shape: tuple[int, ...], dtype: Any = np.uint32, batch: int = 0) -> Callable[..., Any]:
    fn = lambda key: jax.random.bits(key, shape, dtype)
    for _ in range(batch):
        fn = jax.vmap(fn)
    return fn


def key_array(*batch: int) -> jax.Array:
    return jax.random.split(jax.random.key(7), batch) if batch else jax.random.key(7)


# ---- every width, shape, batch of keys and cut, in equal, skewed and empty shares


@pytest.mark.few(2)
@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_shards_have_the_bits_of_the_whole(width: int) -> None:
    with jax.enable_x64(width == 64):
        tried: list[simulate.Trial] = []
        for batch, shape in (((), (7,)), ((), (2, 1, 3, 4)), ((5,), ()), ((3,), (5, 4)), ((2, 4), (3,))):
            keys = key_array(*batch)
            op = draw(drawn(shape, f"uint{width}", len(batch)), keys)
            assert op.params["bit_width"] == width
            f = factors_of(op)
            long = [d for d, n in enumerate(op.result_shapes[0]) if n > 1]
            assert [t.results[0] for t in f.triples[1:]] == [S(d) for d in long]
            assert all(not p.is_sharded for t in f.triples for p in t.operands)
            tried += simulate.trials(op, f, [keys])
        simulate.check(tried, samples=1)


# ---- draws of more elements than 32 bits count, against the formula in NumPy


def threefry(key: np.ndarray, count: int) -> tuple[int, int]:
    """Threefry-2x32 in 20 rounds of one 64-bit counter (Salmon et al., SC'11)."""
    k = [int(key[0]), int(key[1])]
    k.append(k[0] ^ k[1] ^ 0x1BD11BDA)
    word = 0xFFFFFFFF
    x, y = (count >> 32) + k[0] & word, (count & word) + k[1] & word
    for block in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x = x + y & word
            y = (y << r | y >> 32 - r) & word ^ x
        x, y = x + k[(block + 1) % 3] & word, y + k[(block + 2) % 3] + block + 1 & word
    return x, y


def test_the_formula_is_the_one_of_jax() -> None:
    key = key_array()
    want = [a ^ b for a, b in (threefry(np.asarray(jax.random.key_data(key)), i) for i in range(9))]
    assert jax.random.bits(key, (3, 3)).ravel().tolist() == want


def part(op: Op, cut: int, start: int, here: tuple[int, ...]) -> Local:
    """A device that holds `here` of a draw, from `start` of dimension `cut` on; the rest of `here` may be short too."""
    f = factors_of(op)
    (triple,) = (t for t in f.triples if t.results[0] == S(cut))
    (factor,) = f.results[0][cut]
    cuts = {factor: Cut(here[cut], lambda: jnp.int32(start))}
    return Local(op, f, (triple,), op.shapes, (here,), cuts, lambda axis: jnp.int32(1))


@pytest.mark.parametrize("width", [8, 32, 64])
@pytest.mark.parametrize(
    ("shape", "cut", "start", "here"),
    [
        ((1 << 20, 1 << 16), 0, (1 << 20) - 3, (3, 4)),  # 36 bits
        ((1 << 20, 1 << 16), 1, (1 << 16) - 5, (3, 5)),
        ((1 << 16, 1 << 16), 0, (1 << 16) - 2, (2, 3)),  # exactly 32: no high word
        ((3, 1 << 30, 5), 1, (1 << 30) - 4, (3, 4, 5)),  # carries within a row
        ((7, (1 << 31) - 1, 11), 1, (1 << 31) - 3, (7, 2, 11)),
        ((1 << 24, 1 << 20, 1 << 19), 0, (1 << 24) - 1, (1, 2, 3)),  # 63 bits, strides of more than 32
        ((1 << 24, 1 << 20, 1 << 20), 0, (1 << 24) - 2, (2, 2, 3)),  # 64 bits, the most there are
    ],
)
def test_counters_beyond_32_bits(width: int, shape: Any, cut: int, start: int, here: tuple[int, ...]) -> None:
    with jax.enable_x64(width == 64):
        key = key_array()
        op = draw(drawn(shape, f"uint{width}"), key)
        run = jax.jit(lambda key: execute(part(op, cut, start, here), [key])[0])
        got = np.asarray(run(key))
    words = np.asarray(jax.random.key_data(key))
    want = np.empty(here, np.uint64)
    for index in np.ndindex(*here):
        flat = sum((i + start * (d == cut)) * prod(shape[d + 1 :]) for d, i in enumerate(index))
        x, y = threefry(words, flat)
        want[index] = x << 32 | y if width == 64 else (x ^ y) & ((1 << width) - 1)
    assert got.dtype == f"uint{width}"
    assert np.array_equal(got, want.astype(got.dtype))


# ---- large draws in blocks, on CPUs


def loops(fn: Callable[..., Any], *args: Any) -> int:
    """How often blocks are drawn, 0 where the draw is one."""
    eqns = jax.make_jaxpr(fn)(*args).jaxpr.eqns
    return sum(eqn.params["length"] for eqn in eqns if eqn.primitive.name == "scan")


@pytest.mark.few(8)
@pytest.mark.parametrize("width", [8, 32, 64])
@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((40,), 5),
        ((42,), 6),  # the last block begins early
        ((1, 40), 5),
        ((7, 5), 7),
        ((3, 3, 4, 5), 36),
        ((2, 3, 20), 18),
        ((50, 1, 3), 25),
        ((16,), 0),  # not large
    ],
)
def test_blocks_have_the_bits_of_the_whole(width: int, shape: tuple[int, ...], blocks: int) -> None:
    with jax.enable_x64(width == 64):
        key = key_array()
        want = drawn(shape, f"uint{width}")(key)
        op = draw(drawn(shape, f"uint{width}"), key)
        f = factors_of(op)
        on = lambda platform: Local(op, f, f.triples[:1], op.shapes, (shape,), {}, lambda _: jnp.int32(0), platform)
        run = lambda key: bits_on_shard(on("cpu"), [key], 8)[0]
        assert loops(run, key) == blocks
        assert loops(lambda key: bits_on_shard(on("gpu"), [key], 8)[0], key) == 0
        assert run(key).dtype == want.dtype
        np.testing.assert_array_equal(jax.jit(run)(key), want)
        # A shard of a draw that is longer along the dimension, from the middle on.
        for cut in (d for d, n in enumerate(shape) if n > 1):
            longer = tuple(2 * n + 1 if d == cut else n for d, n in enumerate(shape))
            op = draw(drawn(longer, f"uint{width}"), key)
            local = dataclasses.replace(part(op, cut, shape[cut], shape), platform="cpu")
            run = lambda key, local=local: bits_on_shard(local, [key], 8)[0]
            assert loops(run, key) == blocks
            whole = drawn(longer, f"uint{width}")(key)
            np.testing.assert_array_equal(
                jax.jit(run)(key), jax.lax.slice_in_dim(whole, shape[cut], 2 * shape[cut], axis=cut)
            )


def test_what_is_no_threefry_draw_is_not_drawn_in_blocks() -> None:
    for key, partitionable in ((jax.random.key(7, impl="rbg"), True), (key_array(), False)):
        with jax.threefry_partitionable(partitionable):
            op = draw(drawn((40,)), key)
            f = factors_of(op)
            local = Local(op, f, f.triples[:1], op.shapes, ((40,),), {}, lambda _: jnp.int32(0), "cpu")
            np.testing.assert_array_equal(bits_on_shard(local, [key], 8)[0], drawn((40,))(key))


@pytest.mark.parametrize("on", ["one", "3:1"])
def test_a_plan_draws_in_blocks(on: str) -> None:
    cluster, key = slow_cluster(SPEEDS[on]), key_array()
    plan = hapsynth.synthesize(large_draws, (key,), first_devices(cluster.n), cluster=cluster, leave_out=False)
    assert "dynamic_update_slice" in plan.lower().as_text()
    assert plan.check(key)
    np.testing.assert_array_equal(plan.unshard(plan(key))[1], large_draws(key)[1])


def test_a_dimension_beyond_32_bits_is_not_cut() -> None:
    f = factors_of(draw(drawn((1 << 33, 4), np.uint8), key_array()))
    assert [t.results for t in f.triples[1:]] == [(S(1),)]
    assert "too long for 32-bit offsets" in f.blocked.values()


@pytest.mark.parametrize("cut", [0, 1])
def test_a_shard_costs_what_its_elements_cost(cut: int) -> None:
    """One hash per element of the shard, in the same kind of loops as JAX's own: nothing of the whole draw."""
    key = key_array()
    op = draw(drawn((1024, 4096)), key)
    here = (128, 4096) if cut == 0 else (1024, 512)
    local = jax.jit(lambda key: execute(part(op, cut, 64, here), [key])[0])
    own = jax.jit(lambda key: jax.random.bits(key, here))
    flops, most = (fn.lower(key).compile().cost_analysis()["flops"] for fn in (local, own))
    assert prod(here) <= flops <= 1.1 * most


# ---- what is not cut says why


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_keys_are_drawn_whole(impl: str) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), 4)
    for op in (draw(drawn((6,), batch=1), keys), draw(jax.vmap(jax.random.gamma), keys, np.ones((4, 2), np.float32))):
        f = factors_of(op)
        assert len(f.triples) == 1
        reasons = {f.blocked[factor] for dim in f.results[0] for factor in dim}
        assert [str(keys.dtype) in reason and "drawn whole" in reason for reason in reasons] == [True]


def test_without_partitionable_bits_only_keys_are_cut() -> None:
    keys = key_array(4)
    with jax.threefry_partitionable(False):
        op = draw(drawn((6, 2), batch=1), keys)
        f = factors_of(op)
        assert [t.results for t in f.triples[1:]] == [(S(0),)]
        assert {f.blocked[factor] for dim in f.results[0][1:] for factor in dim} == {
            "each bit depends on the whole shape while jax_threefry_partitionable is off"
        }
        simulate.check(simulate.trials(op, f, [keys]), samples=1)
        assert len(factors_of(draw(drawn((6, 2)), keys[0])).triples) == 1


def test_gamma_is_cut_along_its_keys() -> None:
    f = factors_of(draw(jax.vmap(jax.random.gamma), key_array(4), np.ones((4, 6), np.float32)))
    assert [t.results for t in f.triples[1:]] == [(S(0),)]
    assert list(f.blocked.values())[-1] == "random_gamma splits its key for all elements at once"


def test_ops_on_keys_say_that_keys_are_whole() -> None:
    def fn(keys: Any, i: Any) -> Any:
        made = jax.vmap(jax.random.fold_in)(jnp.concatenate([keys[i], keys.reshape(2, 3).T.ravel()]), jnp.arange(9))
        return jnp.where(i[0] > 0, made, jax.vmap(lambda k: jax.random.split(k)[0])(made))

    for op in trace(fn, (key_array(6), np.arange(3))).graph.ops:
        if any(jnp.issubdtype(d, jax.dtypes.prng_key) for d in (*op.dtypes, *op.result_dtypes)):
            f = factors_of(op)
            assert len(f.triples) == 1
            assert all("typed keys are held whole" in reason for reason in f.blocked.values())


def test_a_wrong_offset_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device drawing the first elements is what a forgotten offset does."""
    key = key_array()
    tried = simulate.trials(op := draw(drawn((6, 2)), key), factors_of(op), [key])
    whole = simulate.Trial.local

    def wrong(self: simulate.Trial, device: int) -> Local:
        local = whole(self, device)
        return dataclasses.replace(local, cuts={f: Cut(c.share, lambda: jnp.int32(0)) for f, c in local.cuts.items()})

    monkeypatch.setattr(simulate.Trial, "local", wrong)
    with pytest.raises(simulate.Unsound):
        simulate.check(tried)


# ---- in plans


def planned(fn: Callable[..., Any], args: Any, on: str, **options: Any) -> Plan:
    cluster, mesh = thin_cluster(SPEEDS[on]), first_devices(len(SPEEDS[on]))
    return hapsynth.synthesize(fn, args, mesh, cluster=cluster, leave_out=False, **options)


def draws(plan: Plan) -> list[tuple[Op, Compute]]:
    graph = plan.traced.graph
    computed = [i for i in plan.program.instructions if isinstance(i, Compute)]
    return [(graph.ops[i.op], i) for i in computed if graph.ops[i.op].name == "random_bits"]


def assert_drawn_in_shards(plan: Plan) -> None:
    """Every draw is cut, and neither its key nor its bits are sent."""
    found = draws(plan)
    assert found
    assert all(i.triples[0].results[0].is_sharded for _, i in found)
    drawn = {v for op, _ in found for v in (*op.operands, *op.results)}
    sent = {i.value for i in plan.program.instructions if isinstance(i, Convert) and i.is_collective}
    assert drawn.isdisjoint(sent)


@pytest.mark.few(4)
@pytest.mark.parametrize("raw", [False, True], ids=["typed", "raw"])
@pytest.mark.parametrize("on", ["3:1", "odd", "hopeless"])
def test_dropout_in_training(on: str, raw: bool) -> None:
    rng = np.random.default_rng(0)
    params = [rng.normal(size=(16, 32)).astype(np.float32), rng.normal(size=(32, 8)).astype(np.float32)]
    key = jax.random.PRNGKey(5) if raw else jax.random.key(5)
    x = rng.normal(size=(240, 16)).astype(np.float32)
    args = (params, key, x)
    plan = planned(dropout_step, args, on)
    assert_drawn_in_shards(plan)
    assert any(len(set(shares)) > 1 for shares in plan.sizes.shares), plan.sizes.shares
    report = plan.check(*args)
    assert report.ok, report
    state, want = plan.shard(*args), args
    for _ in range(2):
        *state, _, mask = plan(*state[:2], x)
        *want, _, one_device = jax.jit(dropout_step)(*want[:2], x)
        assert np.array_equal(plan.unshard(mask), one_device)
        assert 0.6 < np.mean(one_device) < 0.8


def test_one_key_per_example() -> None:
    def fn(key: Any, x: Any) -> Any:
        keys = jax.random.split(key, len(x))
        bits = jax.vmap(lambda k: jax.random.bits(k, x.shape[1:]))(keys)
        noise = jax.vmap(lambda k, row: jax.random.gamma(k, row))(keys, x)
        return bits, (jnp.exp(x) * noise).sum(1)

    args = (jax.random.key(1), np.random.default_rng(1).uniform(1, 2, (48, 64)).astype(np.float32))
    plan = planned(fn, args, "3:1")
    assert_drawn_in_shards(plan)
    assert np.array_equal(plan.unshard(plan(*args))[0], jax.jit(fn)(*args)[0])
    assert plan.check(*args).ok


def test_rbg_in_a_plan_is_right_and_whole() -> None:
    def fn(key: Any, x: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.exp(x), 0.0)

    args = (jax.random.key(1, impl="rbg"), np.ones((48, 64), np.float32))
    plan = planned(fn, args, "3:1")
    assert all(not i.triples[0].results[0].is_sharded for _, i in draws(plan))
    assert np.array_equal(plan.unshard(plan(*args)), jax.jit(fn)(*args))


@pytest.mark.parametrize(
    "sampler",
    [
        lambda k, n: jax.random.normal(k, n),
        lambda k, n: jax.random.truncated_normal(k, -2.0, 2.0, n),
        lambda k, n: jax.random.randint(k, n, 0, 10),
        lambda k, n: jax.random.exponential(k, n),
        lambda k, n: jax.random.categorical(k, jnp.zeros((*n, 5))),
        lambda k, n: jax.random.choice(k, 64, n),
        lambda k, n: jax.random.multivariate_normal(k, jnp.zeros(4), jnp.eye(4), n[:1]),
        lambda k, n: jax.random.laplace(k, n, jnp.bfloat16),
    ],
    ids=["normal", "truncated", "randint", "exponential", "categorical", "choice", "multivariate", "bfloat16"],
)
def test_the_bulk_of_a_sampler_can_be_cut(sampler: Callable[..., Any]) -> None:
    ops = trace(lambda key: sampler(key, (32, 16)), (jax.random.key(0),)).graph.ops
    bulk = [op for op in ops if op.name != "cholesky" and max(map(prod, op.result_shapes)) >= 64]
    assert any(op.name == "random_bits" for op in bulk)
    assert [op for op in bulk if len(factors_of(op).triples) == 1] == []
