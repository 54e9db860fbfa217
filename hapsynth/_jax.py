"""Every access to JAX that differs between the supported versions, and nothing else.

Supported: JAX 0.10.2 to 0.12. `ClosedJaxpr` became `Jaxpr` in 0.12; the names of call primitives and the
place of their inner jaxpr moved in between. Nothing here starts a backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

# Primitives that only wrap a jaxpr: name -> where that jaxpr is kept, newest spelling first.
_CALLS: dict[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr", "jaxpr"),
    "call": ("call_jaxpr", "jaxpr"),
    "core_call": ("call_jaxpr", "jaxpr"),
    "eval_jaxpr": ("jaxpr", "call_jaxpr"),
    "composite": ("call_jaxpr", "jaxpr"),
    "custom_vmap_call": ("call",),
    "custom_jvp_call": ("call_jaxpr", "jaxpr"),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr", "jaxpr"),
    "custom_vjp_call_jaxpr": ("fun_jaxpr", "call_jaxpr"),
}
_REMAT = ("checkpoint", "remat", "remat2")
_LINEAR_SOLVE = "custom_linear_solve"
"""It holds jaxprs for differentiation too, which is over when a function has been traced."""
_EXPANDED = "call_hi_primitive"
"""From JAX 0.12 on: what it does is a function, to be traced."""


def make_jaxpr(fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Trace `fn` on arrays or ShapeDtypeStructs: the closed jaxpr and the pytree of output shapes.

    Without the mesh of `jax.set_mesh`, whose shardings would be written into the equations.
    """
    with no_mesh():
        return jax.make_jaxpr(fn, return_shape=True)(*args)


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A jaxpr with `invars, outvars, eqns`, and the values of its constants."""
    consts = list(getattr(jaxpr, "consts", ()))
    inner = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    return inner, consts


def called_jaxpr(eqn: Any) -> Any | None:
    """The jaxpr of a call that can be inlined, or None; its arguments are `called_operands`."""
    if eqn.primitive.name == _LINEAR_SOLVE:
        return eqn.params["jaxprs"].solve
    if eqn.primitive.name == _EXPANDED:
        primitive, avals = eqn.primitive, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        return make_jaxpr(lambda *xs: primitive.to_lojax(*xs, **eqn.params), *avals)[0]
    for key in _CALLS.get(eqn.primitive.name, ()):
        if key in eqn.params:
            return eqn.params[key]
    return None


def called_operands(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """The operands of `called_jaxpr`: all; of a linear solve its own constants and the right-hand sides."""
    if eqn.primitive.name != _LINEAR_SOLVE:
        return operands
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return [*operands[first : first + lengths.solve], *operands[sum(lengths) :]]


def inlined() -> tuple[str, ...]:
    """Names of the primitives that the trace replaces by the jaxpr that they call."""
    return (*_CALLS, *_REMAT, _LINEAR_SOLVE, _EXPANDED)


def remat_jaxpr(eqn: Any) -> tuple[Any, bool] | None:
    """The jaxpr of a rematerialised region and whether it must be kept apart from the forward pass."""
    if eqn.primitive.name not in _REMAT:
        return None
    apart = bool(eqn.params.get("prevent_cse", True)) and bool(eqn.params.get("differentiated", True))
    return eqn.params["jaxpr"], apart


@functools.cache
def barrier_primitive() -> Any:
    """`lax.optimization_barrier`'s primitive, which `jax.extend` does not list."""
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(jax.lax.optimization_barrier)(jax.ShapeDtypeStruct((), np.float32)))
    return jaxpr.eqns[0].primitive


def is_literal(atom: Any) -> bool:
    return isinstance(atom, jex.Literal)


def is_dropped(var: Any) -> bool:
    return type(var).__name__ == "DropVar"


def effects_of(jaxpr: Any) -> list[str]:
    """Names of the primitives with effects, innermost, with their source line."""
    found: list[str] = []
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        if getattr(eqn, "effects", None):
            params = [q for p in eqn.params.values() for q in (p if isinstance(p, (tuple, list)) else (p,))]
            inside = [e for q in params if hasattr(q, "eqns") or hasattr(q, "jaxpr") for e in effects_of(q)]
            found += inside or [f"{eqn.primitive.name} ({source_line(eqn)})"]
    return list(dict.fromkeys(found))


_LIBRARIES = (
    "/jax/",
    "/jaxlib/",
    "/optax/",
    "/flax/",
    "/equinox/",
    "/haiku/",
    "/hapsynth/trace.py",
    "/hapsynth/_jax.py",
)


def source_line(eqn: Any) -> str:
    """`file:line` of the user's code that made the equation, or '' when it is not known."""
    traceback = getattr(eqn.source_info, "traceback", None)
    frames: Sequence[Any] = getattr(traceback, "frames", None) or ()
    for frame in frames:
        name = frame.file_name.replace("\\", "/")
        if not any(part in name for part in _LIBRARIES):
            return f"{name.rsplit('/', 1)[-1]}:{frame.line_num}"
    return ""


def scope_name(eqn: Any) -> str:
    return str(getattr(eqn.source_info, "name_stack", "") or "")


def no_mesh() -> Any:
    """A context without the mesh of `jax.set_mesh`, under which JAX refuses arrays that lie on other devices."""
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def one_device_sharding() -> Any:
    """Replication over an abstract mesh of one device."""
    mesh = jax.sharding.AbstractMesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def is_extended(dtype: Any) -> bool:
    """Typed PRNG keys and their like, which no NumPy dtype describes."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def itemsize(dtype: Any) -> int:
    """Bytes per element; a typed key counts as 16."""
    if is_extended(dtype):
        return 16
    return int(np.dtype(dtype).itemsize)
