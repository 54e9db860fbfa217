"""The `ratios` option: fractions that all or some dimension classes are to be cut by."""

from __future__ import annotations

import difflib
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from hapsynth.instructions.sizes import Node
from hapsynth.search.costs import Floats
from hapsynth.search.pins import Pins, RatioError, check_granule
from hapsynth.trace import Traced

Ratios = Sequence[float] | Mapping[str, Sequence[float]]
"""One fraction per device, in mesh order, for every class; or class name -> one per shard, as in `Plan.ratios`."""

_SUM = 1e-6


def pins_of(traced: Traced, ratios: Ratios, axes: tuple[tuple[str, int], ...]) -> Pins:
    """What `ratios` ask for on a mesh of `axes`; TypeError or RatioError names the class, the fault and the way out."""
    if not isinstance(ratios, Mapping):
        n = int(np.prod([size for _, size in axes]))
        return Pins(weights=_fractions("ratios", ratios, n, "one for each device, in mesh order"))
    if not ratios:
        raise RatioError("ratios name no class; give class name -> fractions as in Plan.ratios, or None")
    named: dict[Node, Floats] = {}
    for name, fractions in ratios.items():
        value, dim, cut, _ = node = _node(traced, name, axes)
        positions = int(np.prod([axes[a][1] for a in cut]))
        vector = _fractions(f"ratios[{name!r}]", fractions, positions, "one for each of its shards")
        units = traced.graph.values[value].shape[dim]
        check_granule(name, vector, units)
        rounded = np.round(vector * units) / units
        if not np.array_equal(named.setdefault(node, rounded), rounded):
            raise RatioError(f"ratios name {name!r}, whose fractions another of its names gives unlike: name it once")
    return Pins(named=named)


def _fractions(what: str, given: Any, count: int, each: str) -> Floats:
    if isinstance(given, str) or not isinstance(given, (Sequence, np.ndarray)):
        raise TypeError(f"{what} is {given!r}; give {count} fractions that sum to 1, {each}")
    fractions = list(cast(Sequence[Any], given))
    if any(isinstance(x, bool) or not isinstance(x, numbers.Real) for x in fractions):
        raise TypeError(f"{what} holds something that is no number: {fractions}; give {count} fractions, {each}")
    if len(fractions) != count:
        raise RatioError(f"{what} holds {len(fractions)} fractions; give {count}, {each}")
    vector = np.array(fractions, dtype=np.float64)
    for place in np.flatnonzero(~(vector >= 0) | ~np.isfinite(vector)):
        raise RatioError(f"{what} is {fractions[place]!r} at position {place}; give fractions of at least 0")
    if abs(vector.sum() - 1.0) > _SUM:
        total = float(vector.sum())
        hint = f"; divided by their sum they are {[round(x, 9) for x in (vector / total).tolist()]}" if total else ""
        raise RatioError(f"{what} sum to {total:.9g}, not to 1{hint}")
    return vector / vector.sum()


def _node(traced: Traced, name: Any, axes: tuple[tuple[str, int], ...]) -> Node:
    """The dimension and mesh axes that a class's name tells, as in `Plan.ratios`; arguments also by their paths."""
    graph = traced.graph
    paths = dict(zip(traced.in_paths, graph.inputs, strict=True))
    known = {**{v.name: v.index for v in graph.values}, **paths}
    cut, _, along = str(name).partition("@")
    tensor, _, dim = cut.rpartition(".")
    form = "give <argument path or value name>.<dimension>, as in Plan.ratios"
    if tensor not in known or not dim.isdecimal():
        near = difflib.get_close_matches(tensor, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RatioError(f"ratios name {name!r}, which is no class{hint}; {form}")
    value = graph.values[known[tensor]]
    if int(dim) >= len(value.shape) or value.shape[int(dim)] == 0:
        raise RatioError(f"ratios name {name!r}, but {value} has no dimension {dim} to cut; {form}")
    numbered = {axis: a for a, (axis, _) in enumerate(axes)}
    chosen = along.split(",") if along else list(numbered) if len(axes) == 1 else []
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(numbered):
        raise RatioError(
            f"ratios name {name!r} on a mesh of the axes {', '.join(numbered)}; say along which of them the dimension "
            f"is cut, e.g. {cut}@{axes[0][0]}"
        )
    return value.index, int(dim), tuple(numbered[a] for a in chosen), 0
