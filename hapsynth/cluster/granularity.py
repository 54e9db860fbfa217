"""How coarse a kind of device is: below which sizes it works for nothing.

The defaults were measured on one XLA CPU device (JAX 0.10.2, one core), and every kind has them that says nothing else.
In a cluster file a kind gives those of its own as `granularity = { tile = 8, outputs = 96 }`.
"""

from dataclasses import dataclass, fields, replace

from hapsynth.cluster import _units
from hapsynth.cluster.toml_reader import ClusterError, Table


@dataclass(frozen=True)
class Granularity:
    """Raises ClusterError for a figure that is not finite and positive."""

    tile: int = 16
    """Rows, columns or terms that a contraction works on at once: thinner shards take as long. A convolution cut to 4,
    8 and 16 output channels takes 9.7, 2.7 and 1.3 x its share, a matmul cut to 4 and 16 columns 3.3 and 0.9 x; tensor
    cores' smallest tiles are 8 and 16 wide."""
    outputs: int = 1
    """Results that one kernel may write: what stores several of one size, as an optimizer's update of a parameter, is
    launched once."""

    def __post_init__(self) -> None:
        for f in fields(self):
            try:
                _units.check(getattr(self, f.name))
            except ValueError as error:
                raise ClusterError(f"granularity.{f.name} = {getattr(self, f.name)!r} {error}") from None


DEFAULT_GRANULARITY = Granularity()
GPU_GRANULARITY = Granularity(outputs=96)
"""Of GPUs by XLA: what a kernel of its GPU backend takes and gives at most (`MaxOperandsAndOutputsPerFusion`)."""


def read_granularity(table: Table, base: Granularity) -> Granularity:
    """That of a kind's table: what it does not give is `base`'s."""
    if "granularity" not in table:
        return base
    given = table.table("granularity", [f.name for f in fields(Granularity)])
    return replace(base, **{f.name: given.count(f.name) for f in fields(Granularity) if f.name in given})


def write_granularity(granularity: Granularity, base: Granularity) -> dict[str, object]:
    """The table that `read_granularity` reads back on a base: what differs from that."""
    named = {f.name: (getattr(granularity, f.name), getattr(base, f.name)) for f in fields(Granularity)}
    return {name: value for name, (value, usual) in named.items() if value != usual}
