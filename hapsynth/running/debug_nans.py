"""`jax_debug_nans` and `jax_debug_infs` of a plan: its results are looked at, as `jax.jit` does with a function's.

Others are not: stages' results, and padding. As `jax.jit` does, the function is run op by op then, which
names the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hapsynth import _jax
from hapsynth.lower import parts
from hapsynth.running.allgather import allgather_json
from hapsynth.running.base import Planned
from hapsynth.running.sharded_array import whole

_IS = {"nan": jnp.isnan, "inf": jnp.isinf}


def strange_results(
    mesh: Mesh, paths: Sequence[str], stored: Sequence[Any], kinds: Sequence[str]
) -> tuple[str, str] | None:
    """A result of which a process of the mesh holds a value that was looked for: its path, and "nan" or "inf". All
    processes must call, and get the same: where one alone raised, the others would go on with the new state."""
    found = allgather_json(mesh, _strange_here(paths, stored, kinds), "looking for NaN and infinities")
    return next(((path, kind) for path, kind in filter(None, found)), None)


def _strange_here(paths: Sequence[str], stored: Sequence[Any], kinds: Sequence[str]) -> tuple[str, str] | None:
    """The path of the first result in which this process holds such a value, and the kind of the value."""
    with _jax.unlooked():
        for path, x in zip(paths, stored, strict=True):
            for part in parts(x):
                present = [k for k in kinds if _jax.is_inexact(part.dtype) and bool(np.any(_IS[k](part)))]
                if present:
                    return path, present[0]
    return None


def raise_strange(plan: Planned, strange: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """FloatingPointError for a result's path and the kind of its value; one that names the op, where one process has
    all devices and room for the whole function on one."""
    path, kind = strange
    where = f"the plan's result{path}"
    if plan.fn is not None and not plan.lowered.mesh.is_multi_process:
        with _jax.unlooked():
            args, kwargs = jax.tree_util.tree_map(_on_one_device, (args, kwargs))
        try:
            plan.fn(*args, **kwargs)
        except FloatingPointError as error:
            error.add_note(f"hapsynth: found in {where}, and then in the function run op by op on one device")
            raise error from None
        except jax.errors.JaxRuntimeError:
            pass
    raise FloatingPointError(
        f"invalid value ({kind}) encountered in {where}. The function, run op by op on one device under "
        "jax.debug_nans(True), names the op that makes it"
    )


def _on_one_device(leaf: Any) -> Any:
    x = whole(leaf)
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x
