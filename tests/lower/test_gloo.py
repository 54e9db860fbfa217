"""What gloo's collectives are lowered to: what JAX's give, bit for bit on small integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from slow_devices import first_devices

from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.lower import _gloo

SHAPE = (12, 24, 12)
Collective = Callable[[Any, LoweringOptions | None], Any]
COLLECTIVES: dict[str, Collective] = {
    **{r: lambda x, gloo, r=r: _gloo.all_reduce(x, "d", r, gloo) for r in ("sum", "max", "min")},
    **{f"psum_scatter {d}": lambda x, gloo, d=d: _gloo.psum_scatter(x, "d", d, gloo) for d in range(3)},
    **{f"all_gather {d}": lambda x, gloo, d=d: _gloo.all_gather(x, "d", d, gloo) for d in range(3)},
    **{
        f"all_to_all {a}-{b}": lambda x, gloo, a=a, b=b: _gloo.all_to_all(x, "d", a, b, gloo)
        for a in range(3)
        for b in range(3)
    },
}

# What is small goes as what is large does; no message is a multiple of a segment.
LARGE = LoweringOptions(gloo_ring_bytes=0, gloo_gathered_bytes=0, gloo_segment_bytes=700)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("options", [DEFAULT, LARGE], ids=["small", "large"])
def test_as_jax(n: int, options: LoweringOptions) -> None:
    x = np.random.default_rng(0).integers(-9, 9, (n, *SHAPE)).astype(np.float32)

    def both(x: jax.Array) -> Any:
        return {k: [f(x[0], gloo)[None] for gloo in (options, None)] for k, f in COLLECTIVES.items()}

    spec = PartitionSpec("d")
    run = jax.shard_map(both, mesh=first_devices(n), in_specs=spec, out_specs=spec, check_vma=False)
    for name, (got, wanted) in jax.jit(run)(x).items():
        np.testing.assert_array_equal(got, wanted, err_msg=name)


def test_segments() -> None:
    """A large message goes in several, none of which is larger than a segment."""

    def sent(collective: Collective) -> list[int]:
        struct = jax.ShapeDtypeStruct((2, 1 << 18), np.float32)
        run = lambda x: collective(x, DEFAULT)
        mapped = jax.shard_map(
            run, mesh=first_devices(2), in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"), check_vma=False
        )
        inner = jax.make_jaxpr(mapped)(struct).eqns[0].params["jaxpr"]
        names = ("ppermute", "all_gather", "all_to_all", "psum", "reduce_scatter")
        return [e.invars[0].aval.size * 4 for e in inner.eqns if e.primitive.name in names]

    segment = DEFAULT.gloo_segment_bytes
    assert sent(lambda x, g: _gloo.psum_scatter(x, "d", 1, g)) == [segment] * 2
    assert sent(lambda x, g: _gloo.all_to_all(x, "d", 1, 1, g)) == [segment] * 2
    assert sent(lambda x, g: _gloo.all_gather(x, "d", 0, g)) == [segment] * 4


def test_in_one_process_nothing_is_gloos() -> None:
    assert not _gloo.joins(first_devices(2))
