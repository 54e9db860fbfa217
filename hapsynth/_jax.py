"""Every access to JAX that differs between the supported versions, and nothing else.

Supported: JAX 0.10.2 to 0.12. `ClosedJaxpr` became `Jaxpr` in 0.12; the names of call primitives and the
place of their inner jaxpr moved in between. Nothing here starts a backend; `memory_first` is asked where one runs.
"""

from __future__ import annotations

import functools
import os
import sysconfig
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.source_info_util import user_context

NUMERICS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
)
"""Of JAX's configuration what decides which numbers a function computes, beside its code."""

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
    "remat_opt": ("fwd_jaxpr",),
    "linear_call": ("callee",),
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


def unused_results(jaxpr: Any, last: int) -> list[bool]:
    """Of each of the last results, whether it is computed and the others do not depend on it."""
    inner, _ = open_jaxpr(jaxpr)
    needed = {v for v in inner.outvars[:-last] if not is_literal(v)}
    for eqn in reversed(inner.eqns):
        if any(v in needed for v in eqn.outvars):
            needed.update(v for v in eqn.invars if not is_literal(v))
    return [not is_literal(v) and v not in needed and v not in inner.invars for v in inner.outvars[-last:]]


def called_jaxpr(eqn: Any) -> Any | None:
    """The jaxpr of a call that can be inlined, or None; its arguments are `called_operands`."""
    if is_foreign(eqn.primitive):
        return _defined_by(eqn)
    if eqn.primitive.name == _LINEAR_SOLVE:
        return eqn.params["jaxprs"].solve
    if eqn.primitive.name == _EXPANDED:
        primitive, avals = eqn.primitive, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        return make_jaxpr(lambda *xs: primitive.to_lojax(*xs, **eqn.params), *avals)[0]
    for key in _CALLS.get(eqn.primitive.name, ()):
        if key in eqn.params:
            return eqn.params[key]
    return None


def is_foreign(primitive: Any) -> bool:
    """Whether a library other than JAX defines the primitive, by a Python function.

    JAX's own are compiled to be run, by a function of JAX's; a kernel's primitive mostly is too, and is not foreign.
    """
    impl = primitive.impl
    while isinstance(impl, functools.partial):
        impl = impl.func
    return str(getattr(impl, "__module__", None) or "jax").partition(".")[0] not in ("jax", "jaxlib")


def _defined_by(eqn: Any) -> Any | None:
    """What a foreign primitive's function does, where that can be traced and makes the results of the equation.

    None elsewhere: it may need its operands' values, or have effects that only the primitive tells of.
    """
    if getattr(eqn, "effects", None):
        return None
    operands = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=bool(getattr(v.aval, "weak_type", False)))
        for v in eqn.invars
    ]
    many = eqn.primitive.multiple_results

    def run(*xs: Any) -> list[Any]:
        out = eqn.primitive.impl(*xs, **eqn.params)
        return list(out) if many else [out]

    try:
        closed, made = make_jaxpr(run, *operands)
    except Exception:  # whatever the library's function does without values
        return None
    due = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    return closed if [(x.shape, x.dtype) for x in made] == due else None


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


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants of its body, and how many are carried."""
    if "ft_in" in eqn.params:
        consts, carried, _ = eqn.params["ft_in"].unpack()
        return len(list(consts.vals)), len(list(carried.vals))
    return eqn.params["num_consts"], eqn.params["num_carry"]


def function_name(primitive: str, params: Mapping[str, Any]) -> str:
    """The name of the function that a primitive stands for, where it stands for many; '' where it has none."""
    match primitive:
        case "pallas_call":
            return str(params.get("name") or "")
        case "ffi_call":
            return str(params["target_name"])
        case "custom_partitioning":
            call = params["call"]
            info = getattr(call, "debug_info", None) or getattr(getattr(call, "jaxpr", None), "debug_info", None)
            return str(getattr(info, "func_name", ""))
        case _:
            return ""


def ffi_on(params: Mapping[str, Any], result_shapes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The parameters of an `ffi_call` whose results have other shapes."""
    avals = tuple(a.update(shape=s) for a, s in zip(params["result_avals"], result_shapes, strict=True))
    return {**params, "result_avals": avals}


class Partitioned(NamedTuple):
    """What a `custom_partitioning` equation carries.

    `rule` is an SdyShardingRule, or a function that makes one, or None. `partition(mesh, arguments, result)` is the
    user's callback, on flat lists of `jax.ShapeDtypeStruct`s with shardings; it gives the function to run on a shard,
    of flat arguments, and the specs of its results and arguments.
    """

    rule: Any
    partition: Callable[[Any, list[Any], list[Any]], tuple[Callable[..., list[Any]], list[Any], list[Any]]]


def partitioned(params: Mapping[str, Any]) -> Partitioned:
    """The rule and the callback of a `custom_partitioning` equation."""
    in_tree, out_tree = params["in_tree"], params["out_tree"]

    def partition(mesh: Any, arguments: list[Any], result: list[Any]) -> Any:
        made = params["partition"](
            *params["static_args"], mesh, in_tree.unflatten(arguments), out_tree.unflatten(result)
        )
        _, lower, out, given = made
        run = lambda *xs: jax.tree_util.tree_leaves(lower(*in_tree.unflatten(xs)))
        specs = lambda tree: [getattr(s, "spec", s) for s in jax.tree_util.tree_leaves(tree)]
        return run, specs(out), specs(given)

    return Partitioned(params.get("sharding_rule"), partition)


def gpus_schedule_around_barriers() -> bool:
    """Whether XLA's compiler for GPUs keeps `lax.optimization_barrier` until it has scheduled, as that of 0.10 does;
    that of 0.12 drops them before, and may schedule in any order what only they order. 0.11 is taken to."""
    return tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)


@functools.cache
def barrier_primitive() -> Any:
    """`lax.optimization_barrier`'s primitive, which `jax.extend` does not list."""
    return _primitive_of(jax.lax.optimization_barrier)


@functools.cache
def fill_primitive() -> Any:
    """`broadcast_in_dim`'s primitive."""
    return _primitive_of(lambda x: jax.lax.broadcast_in_dim(x, (2,), ()))


def _primitive_of(fn: Callable[[Any], Any]) -> Any:
    jaxpr, _ = open_jaxpr(jax.make_jaxpr(fn)(jax.ShapeDtypeStruct((), np.float32)))
    return jaxpr.eqns[0].primitive


def is_literal(atom: Any) -> bool:
    return isinstance(atom, jex.Literal)


def effects_of(jaxpr: Any, inlined: bool = True) -> list[str]:
    """The equations with effects that can't be distributed, innermost: primitive, source line and why.

    `inlined`: the jaxpr becomes part of the graph, where what only shows values can be run on one device.
    """
    found: list[str] = []
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        if not getattr(eqn, "effects", None):
            continue
        call = inlined and (called_jaxpr(eqn) is not None or remat_jaxpr(eqn) is not None)
        params = [q for p in eqn.params.values() for q in (p if isinstance(p, (tuple, list)) else (p,))]
        inner = [q for q in params if hasattr(q, "eqns") or hasattr(q, "jaxpr")]
        inside = [e for q in inner for e in effects_of(q, call)]
        if call or inside:
            found += inside
        elif not (inlined and shows(eqn)):
            why = "a loop or branch" if shows(eqn) else "ordered" if _ordered(eqn) else ""
            found.append(f"{eqn.primitive.name} ({source_line(eqn)})" + (f", {_WHY[why]}" if why else ""))
    return list(dict.fromkeys(found))


_WHY = {
    "a loop or branch": "which is in a loop or branch: print what that returns",
    "ordered": "which is ordered: without ordered=True, jax.debug.print and jax.debug.callback run on the first device",
}


def shows(eqn: Any) -> bool:
    """Whether the equation only shows values to the host, in any order: `jax.debug.print`, `jax.debug.callback`."""
    return eqn.primitive.name in ("debug_print", "debug_callback") and not _ordered(eqn)


def _ordered(eqn: Any) -> bool:
    return any(type(e).__name__.startswith("Ordered") for e in eqn.effects)


def integer_scalar() -> Any:
    """The abstract value of an int32."""
    return ShapedArray((), np.dtype(np.int32))


_LIBRARIES = (
    "/jax/",
    "/jaxlib/",
    "/optax/",
    "/flax/",
    "/equinox/",
    "/haiku/",
    "/lineax/",
    "/optimistix/",
    "/diffrax/",
    "/hapsynth/graph/trace.py",
    "/hapsynth/_jax.py",
)


def source_line(eqn: Any) -> str:
    """`file:line` of the user's code that made the equation, or '' when it is not known."""
    return _line_of(getattr(eqn.source_info, "traceback", None))


# Many equations are made by one line, and tracebacks compare by what they hold.
@functools.lru_cache(4096)
def _line_of(where: Any) -> str:
    frames: Sequence[Any] = getattr(where, "frames", None) or ()
    for frame in frames:
        name = frame.file_name.replace("\\", "/")
        if not any(part in name for part in _LIBRARIES):
            return f"{name.rsplit('/', 1)[-1]}:{frame.line_num}"
    return ""


def raised_at(error: BaseException) -> str:
    """`file:line` of the user's code, innermost, that an exception came through; of an installed package where it came
    through no other; '' when it is not known."""
    own, installed = "", ""
    library = sysconfig.get_path("stdlib").replace("\\", "/")
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename.replace("\\", "/")
        hapsynth = str(frame.f_globals.get("__name__", "")).startswith("hapsynth.")
        if hapsynth or name.startswith("<frozen ") or any(part in name for part in _LIBRARIES):
            continue
        at = f"{name.rsplit('/', 1)[-1]}:{line}"
        if "/site-packages/" in name:
            installed = at
        elif not name.startswith(library):
            own = at
    return own or installed


DRAWS = ("random_bits", "random_split", "random_gamma")
"""Names of the primitives whose results depend on `jax_threefry_partitionable`."""


def partitionable() -> bool:
    """Whether an element's random bits depend on its index alone; `jax.threefry_partitionable` may change it for a
    while."""
    return jax.threefry_partitionable.value


def was_partitionable(eqn: Any) -> bool:
    """As `partitionable`, where the equation was traced: there JAX remembers it."""
    return eqn.ctx.threefry_partitionable


def scope_name(eqn: Any) -> str:
    """The scopes of `jax.named_scope` and the transformations around an equation, within its own jaxpr."""
    return str(getattr(eqn.source_info, "name_stack", "") or "")


def traceback_of(eqn: Any) -> Any:
    """Where the user's code made an equation, for `made_at`; None where that is not known."""
    return getattr(eqn.source_info, "traceback", None) if source_line(eqn) else None


def made_at(where: Any) -> AbstractContextManager[None]:
    """What is traced inside has the source lines of `where`, a `traceback_of`, if there is one."""
    return nullcontext() if where is None else user_context(where)


NOT_INSIDE = (
    "a plan is a compiled program of its own and cannot be called inside jit, grad or vmap; put the outer "
    "function into hapsynth.synthesize instead"
)


class InsideTraceError(TypeError):
    """What runs by itself was called while JAX traces a function, even with arguments that are not traced."""


def on_mesh(mesh: jax.sharding.Mesh) -> Any:
    """The context of `jax.set_mesh`. Raises InsideTraceError where JAX is tracing and lets no mesh be set."""
    try:
        return jax.set_mesh(mesh)
    except ValueError as error:
        raise InsideTraceError(f"JAX is tracing a function: {NOT_INSIDE}") from error


def no_mesh() -> Any:
    """A context without the mesh of `jax.set_mesh`, under which JAX refuses arrays that lie on other devices."""
    return on_mesh(jax.sharding.Mesh(np.empty((), object), ()))


def is_available(dtype: Any) -> bool:
    """Whether arrays of a dtype can be made: of 64 bits under `jax_enable_x64` only."""
    return is_extended(dtype) or jax.dtypes.canonicalize_dtype(dtype) == dtype


def wide_floats() -> Any:
    """A context in which floats of 64 bits are to be had."""
    return jax.enable_x64(True)


def looked_for() -> tuple[str, ...]:
    """What JAX was asked to raise of in results: "nan" by `jax_debug_nans`, "inf" by `jax_debug_infs`."""
    asked = {"nan": jax.debug_nans.value, "inf": jax.debug_infs.value}
    return tuple(kind for kind, is_asked in asked.items() if is_asked)


@contextmanager
def unlooked() -> Generator[None]:
    """A context in which JAX looks for nothing in what is no function's result: a stage's, a padded shard."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


_SCHEDULER = MappingProxyType({"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"})
_ASKED = ("xla_cpu_scheduler_type", "xla_cpu_enable_concurrency_optimized_scheduler")


def memory_first(platform: str) -> dict[str, str]:
    """`compiler_options` of `jax.jit` by which a program on `platform` holds little at once, as plans count on.

    XLA's CPU backend begins everything as early as it can: all random arrays of an init, all clipped gradients before
    the first is used. Other backends order by memory themselves. Empty there, where XLA_FLAGS say what order the user
    wants, and where XLA has no such option.
    """
    if platform != "cpu" or any(name in xla_flags() for name in _ASKED):
        return {}
    return dict(_SCHEDULER) if _accepts(tuple(_SCHEDULER.items())) else {}


@functools.cache
def _accepts(options: tuple[tuple[str, str], ...]) -> bool:
    """Whether XLA's CPU backend has these options: its flags come and go."""
    on = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    try:
        with no_mesh():
            jax.jit(lambda: 0, out_shardings=on, compiler_options=dict(options)).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def xla_flags() -> str:
    """What XLA_FLAGS say, or the file that they name."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    if not flags or flags.startswith("-"):
        return flags
    try:
        return Path(flags).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def is_gpu(platform: str) -> bool:
    """Whether XLA's compiler for GPUs makes the programs of a platform."""
    return platform in ("gpu", "cuda", "rocm")


def runs_beside() -> bool:
    """Whether XLA's CPU backend runs two programs of this process at once: on the threads that call them, or on its
    pool."""
    return not jax.config.read("jax_cpu_enable_async_dispatch") or cpu_threads() > 1


def cpu_threads() -> int:
    """Threads of the pool on which XLA's CPU backend runs what is ready of a program, one that waits for a collective
    among them: as many as the process has cores, NPROC or devices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("NPROC", "")
    return max(int(threads) if threads.isdecimal() else cores, jax.local_device_count("cpu"))


def is_extended(dtype: Any) -> bool:
    """Typed PRNG keys and their like, which no NumPy dtype describes."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def is_inexact(dtype: Any) -> bool:
    """Floating-point and complex numbers."""
    return jnp.issubdtype(dtype, jnp.inexact)


def itemsize(dtype: Any) -> int:
    """Bytes per element; a typed key counts as 16."""
    if is_extended(dtype):
        return 16
    return int(np.dtype(dtype).itemsize)
