"""What gloo's collectives are lowered to: what JAX's give, bit for bit on small integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from slow_devices import first_devices

from hapsynth.instructions.collectives import STEPS, Hosts
from hapsynth.instructions.layout import O, P, R
from hapsynth.instructions.staging.gloo import exchanges
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.lower import _gloo
from hapsynth.lower._collective_order import as_it_is
from hapsynth.lower._collectives import exchange_first

SHAPE = (12, 24, 12)
Collective = Callable[[Any, LoweringOptions | None], Any]
COLLECTIVES: dict[str, Collective] = {
    **{r: lambda x, gloo, r=r: _gloo.all_reduce(x, "d", r, gloo) for r in ("sum", "max", "min")},
    # No number of devices divides it.
    "sum of a part": lambda x, gloo: _gloo.all_reduce(x[:7, :11, :11], "d", "sum", gloo),
    **{f"psum_scatter {d}": lambda x, gloo, d=d: _gloo.psum_scatter(x, "d", d, gloo) for d in range(3)},
    **{f"all_gather {d}": lambda x, gloo, d=d: _gloo.all_gather(x, "d", d, gloo) for d in range(3)},
    **{
        f"all_to_all {a}-{b}": lambda x, gloo, a=a, b=b: _gloo.all_to_all(x, "d", a, b, gloo)
        for a in range(3)
        for b in range(3)
    },
}

AT_ONCE = LoweringOptions(gloo_gathered_bytes=0)
# What is small goes as what is large does.
LARGE = LoweringOptions(gloo_at_once_bytes=0, gloo_gathered_bytes=0)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("options", [DEFAULT, AT_ONCE, LARGE], ids=["small", "at once", "large"])
def test_as_jax(n: int, options: LoweringOptions) -> None:
    """Of windows that are taken too far: XLA folds slices of those without clamping (openxla/xla#49121)."""
    x = np.random.default_rng(0).integers(-9, 9, (n, SHAPE[0] + 2, *SHAPE[1:])).astype(np.float32)

    def both(x: jax.Array, at: jax.Array) -> Any:
        window = lax.dynamic_slice(x[0], (at, 0, 0), SHAPE)
        return {k: [f(window, gloo)[None] for gloo in (options, None)] for k, f in COLLECTIVES.items()}

    spec = PartitionSpec("d")
    run = jax.shard_map(both, mesh=first_devices(n), in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
    for name, (got, wanted) in jax.jit(run)(x, np.int32(5)).items():
        np.testing.assert_array_equal(got, wanted, err_msg=name)


def collectives(collective: Collective, n: int, nbytes: int) -> list[Any]:
    """XLA's collectives for one of so many bytes on each of `n` devices."""
    struct = jax.ShapeDtypeStruct((n, nbytes // 4), np.float32)
    spec = PartitionSpec("d")
    run = lambda x: collective(x, DEFAULT)
    mapped = jax.shard_map(run, mesh=first_devices(n), in_specs=spec, out_specs=spec, check_vma=False)
    inner = jax.make_jaxpr(mapped)(struct).eqns[0].params["jaxpr"]
    names = ("ppermute", "all_gather", "all_to_all", "psum", "reduce_scatter")
    return [e for e in inner.eqns if e.primitive.name in names]


def sent(collective: Collective, n: int, nbytes: int) -> list[tuple[str, int]]:
    """Their names, with the bytes that each takes."""
    return [(e.primitive.name, e.invars[0].aval.size * 4) for e in collectives(collective, n, nbytes)]


DTYPES = [bool, np.uint8, ml_dtypes.float8_e4m3fn, np.float16, ml_dtypes.bfloat16, np.int16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", [*DTYPES, np.complex64])
def test_swapped_blocks_have_all_their_bits(dtype: Any) -> None:
    """The sign of zero too, and of a size that no word divides."""
    x = np.random.default_rng(0).integers(0, 100, (2, 15)) / 7
    x = (1j * x - x if dtype is np.complex64 else -x if dtype not in (bool, np.uint8) else x).astype(dtype)
    x[0, :2] = 0
    x[1, :2] = -x[0, :2] if dtype is not bool else True
    with jax.enable_x64(dtype is np.float64):
        got, wanted = map(np.asarray, gathered(x))
    assert got.tobytes() == wanted.tobytes() == np.tile(x.reshape(-1), 2).tobytes()


def test_random_keys_are_not_swapped() -> None:
    keys = jax.random.split(jax.random.key(0), (2, 5))
    got, wanted = map(jax.random.key_data, gathered(keys))
    np.testing.assert_array_equal(got, wanted)


def gathered(x: Any) -> tuple[Any, Any]:
    """The rows of two devices, by gloo's algorithm for what is large and by JAX's own."""
    run = lambda x: (_gloo.all_gather(x[0], "d", 0, LARGE), lax.all_gather(x[0], "d", axis=0, tiled=True))
    spec = PartitionSpec("d")
    mapped = jax.shard_map(run, mesh=first_devices(2), in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped)(x)


def test_two_devices_swap_large_blocks_by_their_sum() -> None:
    """gloo's all-reduce alone has both directions at once."""
    assert sent(lambda x, g: _gloo.psum_scatter(x, "d", 1, g), 2, 1 << 20) == [("psum", 1 << 19)]
    assert sent(lambda x, g: _gloo.all_to_all(x, "d", 1, 1, g), 2, 1 << 20) == [("psum", 1 << 19)]
    assert sent(lambda x, g: _gloo.all_gather(x, "d", 0, g), 2, 1 << 20) == [("psum", 1 << 20)]
    ways = [name for name, _ in sent(lambda x, g: _gloo.all_to_all(x, "d", 1, 1, g), 4, 1 << 20)]
    assert ways == ["ppermute", "psum", "ppermute"]


def test_small_blocks_go_to_all_at_once() -> None:
    """Among more than two devices: around a ring all wait for the slowest as many times as there are devices."""
    block = DEFAULT.gloo_at_once_bytes
    reduced = lambda x, g: _gloo.all_reduce(x, "d", "sum", g)
    gathered = lambda x, g: _gloo.all_gather(x, "d", 0, g)
    assert sent(reduced, 4, 256) == [("all_to_all", 4 * 256)]
    assert sent(reduced, 4, 4 * block) == [("all_to_all", 4 * block)] * 2
    assert sent(gathered, 4, block) == [("all_to_all", 4 * block)]
    assert [name for name, _ in sent(reduced, 4, 5 * block) + sent(gathered, 4, 2 * block)] == ["psum", "all_gather"]
    assert [name for name, _ in sent(reduced, 2, block) + sent(gathered, 2, block)] == ["psum", "all_gather"]


ALL_HOSTS = {2: [()], 4: [(), ((0, 1), (2, 3)), ((0, 1, 2), (3,))]}


@pytest.mark.parametrize(("n", "hosts"), [(n, hosts) for n, every in ALL_HOSTS.items() for hosts in every])
def test_exchanges_are_counted_as_they_are_lowered(n: int, hosts: Hosts) -> None:
    def exchanges_of(e: Any) -> int:
        size = max(map(len, e.params.get("axis_index_groups") or [range(n)]))
        return {"psum": size, "all_gather": size - 1}.get(e.primitive.name, 1)

    for name, step in STEPS.items():
        if not step.communicates or step.recuts or step.balances or step.in_rounds or not step.goes_over(hosts):
            continue
        if bool(hosts) != (step.over != "positions"):
            continue
        source, target = O(1) if name == "broadcast" else P("sum"), O(1) if name == "reduce" else R
        run = lambda x, gloo, step=step, source=source, target=target: exchange_first(
            step, "d", x[0], source, target, gloo, as_it_is, hosts
        )[None]
        for nbytes in (1 << 8, 1 << 17, 1 << 19, 5 << 17, 1 << 21):
            made = collectives(run, n, nbytes)
            assert exchanges(name, nbytes, n, hosts, DEFAULT) == sum(map(exchanges_of, made)), (name, nbytes, made)


def test_in_one_process_nothing_is_gloos() -> None:
    assert not _gloo.joins(first_devices(2))
