"""Ratios that are asked for: classes that are cut by these, whatever the linear program would choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from hapsynth.instructions.layout import cut_alone, format_layout
from hapsynth.instructions.program.sizes import Classes, DimensionClass, Node, Sizes, node_name
from hapsynth.search.cost.model import Floats
from hapsynth.search.cost.network import devices_of
from hapsynth.search.sizing.ratios import nested_shares

_NEAR = 1e-6
"""How far a ratio may be from whole units: that of one written with six digits."""


class RatioError(ValueError):
    """Ratios that are asked for cannot be had. `cuts`: the dimensions of which they were asked, where a plan can't be
    cut so: (value, dimension)."""

    def __init__(self, text: str, cuts: Iterable[tuple[int, int]] = ()) -> None:
        super().__init__(text)
        self.cuts = frozenset(cuts)


@dataclass(frozen=True, eq=False)
class FixedRatios:
    """What is asked for: `weights`, a fraction per device that every class is cut by (along some of the mesh axes, by
    the sums of its positions), or `named`, a fraction per position of single classes, by one of their members; shards
    that further axes cut again are cut by the devices' speed. None of the fractions is negative, and they sum to 1.
    What has an owner is not cut.
    """

    weights: Floats | None = None
    named: Mapping[Node, Floats] = field(default_factory=dict[Node, Floats])

    def shares(self, classes: Classes, speeds: Floats) -> dict[int, tuple[int, ...]]:
        """Class -> whole units nearest to what is asked for it, of the classes for which something is. `speeds`: of
        the devices."""
        lengths, found = classes.lengths, dict[int, tuple[int, ...]]()
        for cls in classes.all:
            asked = self._asked(cls, lengths)
            if not asked or cls.owner is not None:
                continue
            axes = max(asked, key=len)
            speed = _along(lengths, cls.axes, speeds).reshape([*asked[axes].shape, -1])
            weights = asked[axes][:, None] * speed / speed.sum(axis=-1, keepdims=True)
            found[cls.index] = nested_shares(weights.reshape([lengths[a] for a in cls.axes]), cls.units)
        return found

    def check(self, sizes: Sizes) -> None:
        """RatioError where a plan's classes cannot be cut by what is asked, a named one is none of its classes, or two
        names of one class ask for unlike fractions."""
        graph, of, mesh = sizes.graph, sizes.classes.of, sizes.classes.axes
        for node in self.named:
            if node not in of:
                _, dim, axes, _ = node
                name, layout = node_name(graph, node, mesh), cut_alone((dim, axes, 0), len(mesh))
                raise RatioError(
                    f"ratios are given for {name}, which the best program at them does not cut so; keep it cut with "
                    f"fixed={{...: {format_layout(layout)!r}}} where it is an argument, or leave it out of the ratios"
                )
        for cls in sizes.classes.all:
            asked = [m for m in cls.members if m in self.named]
            first = {m[2]: m for m in reversed(asked)}
            unlike = [m for m in asked if not np.array_equal(self.named[m], self.named[first[m[2]]])]
            if unlike:
                one, two = (node_name(graph, node, mesh) for node in (first[unlike[0][2]], unlike[0]))
                raise RatioError(
                    f"ratios are given for {one} and, unlike these, for {two}, and the best program at them cuts both "
                    "by the same: give those of one of them",
                    [(value, dim) for value, dim, *_ in asked],
                )
        cut = [c for c in sizes.classes.all if c.owner is None]
        everywhere = gcd(*(c.units for c in cut))
        for cls in cut:
            broken = [v for v in self._asked(cls, sizes.classes.lengths).values() if not _is_whole(v, cls.units)]
            if not broken:
                continue
            if self.weights is not None:
                # What suits this class may not suit the next.
                common = self.weights.reshape(sizes.classes.lengths)
                raise _broken(cls.name, cls.units, self.weights, nested_shares(common, everywhere))
            asked = [m[:2] for m in cls.members if m in self.named]
            raise _broken(cls.name, cls.units, broken[0], nested_shares(broken[0], cls.units), asked)

    def _asked(self, cls: DimensionClass, lengths: tuple[int, ...]) -> dict[tuple[int, ...], Floats]:
        """By the axes that cut it, all of the class's or the major ones, what is asked: a fraction per position."""
        if self.weights is not None:
            return {cls.axes: _along(lengths, cls.axes, self.weights)}
        named = {m[2]: self.named[m] for m in reversed(cls.members) if m in self.named}
        return {axes: v for axes, v in named.items() if axes and cls.axes[: len(axes)] == axes}


def _along(lengths: tuple[int, ...], axes: tuple[int, ...], of_devices: Floats) -> Floats:
    """Sums over the devices at each position along some axes, row-major."""
    return np.bincount(devices_of(lengths, axes), of_devices).astype(np.float64)


def check_granule(name: str, vector: Floats, units: int) -> None:
    """RatioError unless a dimension of so many units can be cut by the fractions."""
    if not _is_whole(vector, units):
        raise _broken(name, units, vector, nested_shares(vector, units))


def _is_whole(vector: Floats, units: int) -> bool:
    return units == 0 or bool(np.abs(vector - np.round(vector * units) / units).max() <= _NEAR)


def _broken(
    name: str, units: int, vector: Floats, nearest: tuple[int, ...], cuts: Iterable[tuple[int, int]] = ()
) -> RatioError:
    text = lambda fractions: "(" + ", ".join(f"{x:.9g}" for x in fractions) + ")"
    by_name = "ratios by name for those classes alone that yours suit"
    near = f"the nearest that break none are {text(np.array(nearest) / max(sum(nearest), 1))}; give these, or {by_name}"
    lone = f"the only ones that break none give all to one position; give {by_name}"
    said = lone if sum(nearest) == 1 else near
    return RatioError(f"ratios {text(vector)} break the granule of {name}, which is cut in {units} units: {said}", cuts)
