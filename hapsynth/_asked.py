"""Options of `synthesize` that are checked before any work."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from hapsynth import _units
from hapsynth._forms import Form
from hapsynth._jax import is_extended
from hapsynth._warn import warn_user
from hapsynth.cluster import Cluster, ClusterWarning
from hapsynth.frequency import Expectation, expecting
from hapsynth.graph import Value
from hapsynth.instructions.layout import Layout, is_consistent, parse_layout
from hapsynth.search.collecting import seldom
from hapsynth.trace import Traced, trace


def devices_of(mesh: Any, cluster: Any) -> tuple[jax.sharding.Mesh | None, Cluster]:
    """The mesh to run on, if there is one, and what its devices can do."""
    if not isinstance(mesh, (jax.sharding.Mesh, Cluster)):
        raise TypeError(f"mesh is a {type(mesh).__name__}; give a jax.sharding.Mesh, or a hapsynth.Cluster")
    if not isinstance(cluster, (Cluster, type(None))):
        raise TypeError(f"cluster is a {type(cluster).__name__}; give a hapsynth.Cluster, e.g. Cluster.load(path)")
    if isinstance(mesh, Cluster):
        if cluster is not None:
            raise TypeError("two clusters are given, one as mesh; with cluster=, mesh is the jax.sharding.Mesh")
        return None, mesh
    cluster = cluster or Cluster.from_mesh(mesh)
    if mesh.size != cluster.n:
        raise ValueError(
            f"the mesh has {mesh.size} devices and cluster {cluster.name!r} {cluster.n}; give a mesh over "
            f"{cluster.n} devices, or a cluster that describes these {mesh.size}"
        )
    return mesh, cluster


def check_positive(name: str, value: Any, unit: str) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; give a number of {unit}")
    if not float(value) > 0:
        raise ValueError(f"{name} is {value!r}; give a positive number of {unit}")


def tell_lesser_memory(cluster: Cluster, limit: float | None) -> None:
    """Warn where a limit is beyond what devices have, which holds then: `Room.of`."""
    less = [k for k in cluster.devices if limit is not None and k.memory < limit]
    if limit is None or not less:
        return
    kinds = {k.name: _units.format(float(k.memory), _units.MEMORY) for k in less}
    has = ", ".join(f"{name}: {memory}" for name, memory in kinds.items())
    warn_user(
        f"memory_limit is {_units.format(float(limit), _units.MEMORY)}, and {len(less)} of {cluster.n} devices have "
        f"less ({has}): these keep to what they have; what a device has is said by the cluster (kinds.NAME.memory)",
        ClusterWarning,
    )


def check_dict(name: str, value: Any, of: str = "") -> None:
    """TypeError where an option, of a function that is called so, is given and no dict."""
    if value is not None and not isinstance(value, Mapping):
        where = f" of {of}" if of not in ("", "fn") else ""
        raise TypeError(f"{name}{where} is {value!r}; give a dict")


def holds_exact(form: Form, devices: jax.sharding.Mesh | None) -> bool:
    """Whether a plan is made for shards of exact size in memory (`synthesize`)."""
    return form == "staged" or (form == "auto" and devices is not None and devices.is_multi_process)


def traced_as_asked(
    fn: Any,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    carry: Sequence[tuple[str, str]] | None,
    expect: Mapping[str, Expectation] | None,
    names: tuple[str, str] = ("fn", "example_args"),
) -> Traced:
    """A function, traced; TypeError where it or its arguments are none, which are called by `names`."""
    if not callable(fn):
        raise TypeError(f"{names[0]} is {fn!r}, which can't be called")
    if not isinstance(args, (tuple, list)):
        kind = type(args).__name__
        raise TypeError(f"{names[1]} is a {kind}; give a tuple of the arguments, (x,) where there is one")
    for option, given in (("example_kwargs", kwargs), ("expect", expect)):
        check_dict(option, given, names[0])
    with seldom():
        traced = trace(fn, args, dict(kwargs or {}), carry=carry)
    return replace(traced, graph=expecting(traced.graph, expect)) if expect else traced


def layouts_of(arguments: Mapping[str, Value], fixed: Mapping[str, str], axes: int, what: str) -> dict[int, Layout]:
    """The stored layouts that `fixed` asks for, by value, on a mesh of so many axes; ValueError names a path or layout
    that cannot be met, and `what` the paths are of."""
    check_dict("fixed", fixed)
    stored: dict[int, Layout] = {}
    for path, text in fixed.items():
        if path not in arguments:
            raise ValueError(f"fixed names {what} {path!r}, but the {what}s are {', '.join(arguments)}")
        value = arguments[path]
        each = " for each mesh axis, e.g. S(0),R" if axes > 1 else ""
        why = f"fixed asks for {text!r} of {path}, whose shape is {value.shape}; expected R or S(<dim>){each}"
        try:
            layout = parse_layout(text)
        except (AttributeError, ValueError):
            raise ValueError(why) from None
        partial = any(p.is_partial or p.way or p.dim >= len(value.shape) for p in layout)
        if len(layout) != axes or partial or not is_consistent(layout):
            raise ValueError(why)
        if any(p.is_sharded and (value.shape[p.dim] == 0 or is_extended(value.dtype)) for p in layout):
            raise ValueError(f"fixed asks for {text!r} of {path}, but {value} cannot be cut there; expected R")
        stored[value.index] = layout
    return stored
