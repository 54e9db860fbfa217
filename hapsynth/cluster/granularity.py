"""How coarse a kind of device is: below which sizes it works for nothing.

The defaults were measured on one XLA CPU device (JAX 0.10.2, one core), and every kind has them that says nothing else.
In a cluster file a kind gives those of its own as `granularity = { tile = 8, line = "32 B" }`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

from hapsynth.cluster import _units
from hapsynth.cluster.toml_reader import ClusterError, Table


@dataclass(frozen=True)
class Granularity:
    """Raises ClusterError for a figure that is not finite and positive.

    A field's `units`: what it is written in (`_units`); a plain number without.
    """

    tile: int = 16
    """Rows, columns or terms that a contraction works on at once: thinner shards take as long. A convolution cut to 4,
    8 and 16 output channels takes 9.7, 2.7 and 1.3 x its share, a matmul cut to 4 and 16 columns 3.3 and 0.9 x; tensor
    cores' smallest tiles are 8 and 16 wide."""
    line: float = field(default=64.0, metadata={"units": "MEMORY"})
    """Bytes that the memory gives at once."""
    position: float = field(default=6000.0, metadata={"units": "WORK"})
    """FLOPs that a convolution could do in the time that it takes to bring one position's neighbours together. Over few
    channels that is most of its time: 3 x 3 from 8 to 8, and from 3 to 8, run at a fifth and a sixteenth of the rate of
    64 to 64."""
    lanes: float = 48.0
    """Elements of the minor dimension below which a reduction, with the elementwise ops that are fused into it, is the
    slower the fewer there are: with 8 it takes 1.5 to 2.2 ns an element, with 16 0.8 to 1.0, with 64 and more 0.25 to
    0.5, whichever dimensions are reduced."""
    vector: int = 16
    """Elements of the minor dimension below which the gradient of a maximum over windows goes one by one: 16 ns an
    element for 2 to 15 of them, 3.0 for 16, 1.9 for 64."""
    singly: float = 8.0
    """How much slower it is then."""
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
    found: dict[str, float] = {}
    for f in fields(Granularity):
        if f.name not in given:
            continue
        if units := f.metadata.get("units"):
            found[f.name] = given.quantity(f.name, units)
        else:
            found[f.name] = given.count(f.name) if isinstance(f.default, int) else given.number(f.name)
    return replace(base, **found)


def write_granularity(granularity: Granularity, base: Granularity) -> dict[str, object]:
    """The table that `read_granularity` reads back on a base: what differs from that."""
    found: dict[str, object] = {}
    for f in fields(Granularity):
        value = getattr(granularity, f.name)
        if value != getattr(base, f.name):
            units = f.metadata.get("units")
            found[f.name] = _units.format(value, cast(Mapping[str, Any], getattr(_units, units))) if units else value
    return found
