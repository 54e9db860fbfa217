"""What is read of a compiled program: on CPU programs, and on lines that XLA prints for GPUs."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from hapsynth.hlo.collectives import collectives_of, fingerprint, first_difference
from hapsynth.hlo.text import HloError, parse

RING = [(i, (i + 1) % 4) for i in range(4)]


def compiled(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    """The text of a function of rows on four devices."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile().as_text()


def of_all_kinds(x: jax.Array) -> jax.Array:
    whole = jax.lax.all_gather(x, "x", tiled=True)
    summed = jax.lax.psum_scatter(jnp.sin(whole), "x", tiled=True)
    across = jax.lax.all_to_all(jnp.cos(summed), "x", 1, 1, tiled=True)
    return across + jax.lax.pmax(across[:1].astype(jnp.int32), "x")


def test_the_collectives_of_a_program_in_order() -> None:
    found = collectives_of(compiled(of_all_kinds, (16, 8)))
    assert [str(c) for c in found] == [
        "all-gather f32[4,8] {{0,1,2,3}} dimensions={0}",
        "reduce-scatter add f32[16,8] {{0,1,2,3}} dimensions={0}",
        *[str(c) for c in found if c.op == "all-to-all"],
        "all-reduce maximum s32[1,8] {{0,1,2,3}}",
    ]
    assert found[2].op == "all-to-all"
    assert [c.wire_bytes for c in found] == [3 * 128, 3 / 4 * 512, 3 / 4 * 128, 2 * 3 / 4 * 32]
    assert not any(c.asynchronous for c in found)


def test_loops_and_branches_around_collectives() -> None:
    def fn(x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda c, _: (jax.lax.ppermute(jnp.sin(c), "x", RING), None), x, None, length=5)
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "x"), lambda x: 2 * x, x)

    permute, psum = collectives_of(compiled(fn, (16, 8)))
    assert str(permute) == "collective-permute f32[4,8] {{0,1},{1,2},{2,3},{3,0}} in loop 0 of 5 trips"
    assert (permute.trips, permute.wire_bytes) == (5, 5 * 128)
    assert str(psum) == "all-reduce add f32[4,8] {{0,1,2,3}} in branch 1 of switch 1"


def test_the_fingerprint_is_of_what_two_ends_must_agree_on() -> None:
    def fn(scale: float, rows: int) -> Callable[[jax.Array], jax.Array]:
        return lambda x: jax.lax.psum(scale * x[:rows], "x")

    texts = [compiled(fn(*args), (16, 8)) for args in ((1.0, 4), (2.0, 4), (2.0, 3))]
    same, other, third = map(collectives_of, texts)
    assert fingerprint(same) == fingerprint(other) != fingerprint(third)
    assert first_difference([same, other]) is None
    number, said = first_difference([same, third, ()]) or pytest.fail("they differ")
    assert number == 0
    assert said == ["all-reduce add f32[4,8] {{0,1,2,3}}", "all-reduce add f32[3,8] {{0,1,2,3}}", "none"]


GPU = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%async_computation (p: f32[64,2]) -> f32[8,2] {
  %p = f32[64,2]{0,1} parameter(0)
  ROOT %rs = f32[8,2]{0,1} reduce-scatter(%p), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[8], y: f32[64,2]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="a, b(c)"}
  %y = f32[64,2]{0,1} parameter(1)
  %all-reduce-start = f32[8]{0} all-reduce-start(%x), channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%add,\
 backend_config={"collective_backend_config":{"is_sync":IS_SYNC,"backend":"DEFAULT","kernel_strategy":"STRATEGY"}}
  %rs-start = ((f32[64,2]{0,1}), f32[8,2]{0,1}) async-start(%y), calls=%async_computation
  %product = f32[8]{0:T(128)} fusion(%x, /*index=1*/%y), kind=kLoop, calls=%add
  %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
  %copy = f32[8]{0} copy(%product)
  %rs-done = f32[8,2]{0,1} async-done(%rs-start)
  ROOT %sum = f32[8]{0} fusion(%all-reduce-done, %copy), kind=kLoop, calls=%add
}
"""


def gpu(sync: str = "false", strategy: str = "KERNEL_STRATEGY_DEFAULT") -> str:
    return GPU.replace("IS_SYNC", sync).replace("STRATEGY", strategy, 1)


def test_what_runs_beside_the_program_on_a_gpu() -> None:
    reduce, scatter = collectives_of(gpu())
    assert str(reduce) == "all-reduce add f32[8] {{0,1},{2,3}}"
    assert str(scatter) == "reduce-scatter add f32[64,2]{0,1} {{0,1,2,3},{4,5,6,7}} dimensions={0}"
    assert [c.asynchronous for c in (reduce, scatter)] == [True, True]
    assert [c.members for c in (reduce, scatter)] == [((0, 1), (2, 3)), ((0, 1, 2, 3), (4, 5, 6, 7))]
    assert [c.group for c in (reduce, scatter)] == [2, 4]
    waited = collectives_of(gpu(sync="true"))
    assert [c.asynchronous for c in waited] == [False, True]
    assert fingerprint(waited) == fingerprint(collectives_of(gpu()))
    assert fingerprint(waited) != fingerprint(collectives_of(gpu(strategy="KERNEL_STRATEGY_TRITON_ONE_SHOT")))


def test_collectives_that_start_as_one_are_not_taken_for_the_first() -> None:
    second = "  %other = f32[64,2]{0,1} all-gather(%p), dimensions={0}\n  ROOT %rs ="
    with pytest.raises(HloError, match="rs-start starts 2 collectives as one"):
        collectives_of(gpu().replace("  ROOT %rs =", second))


@pytest.mark.parametrize(
    ("groups", "members"),
    [
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2] {'y'}", ((0, 1), (2, 3))),
        ("mesh['x'=2,'y'=2] {'x'}", ((0, 2), (1, 3))),
        ("mesh['x'=2,'y'=2] {'x','y'}", ((0, 1, 2, 3),)),
        ("{}", (tuple(range(8)),)),
    ],
)
def test_groups_are_of_devices(groups: str, members: tuple[tuple[int, ...], ...]) -> None:
    text = gpu().replace("HloModule jit_f,", "HloModule jit_f, num_partitions=8,")
    reduce, _ = collectives_of(text.replace("{{0,1},{2,3}}", groups))
    assert reduce.members == members


@pytest.mark.parametrize("groups", ["mesh['x'=4] {'x':(1)2}", "@mesh"])
def test_groups_that_cannot_be_read_are_refused(groups: str) -> None:
    with pytest.raises(HloError, match=re.escape(groups)):
        collectives_of(gpu().replace("{{0,1},{2,3}}", groups))


@pytest.mark.parametrize("text", ["", "HloModule nothing", "ENTRY %main () -> f32[] {\n  %x = f32[] ???\n}\n"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(HloError):
        parse(text)
