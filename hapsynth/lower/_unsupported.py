"""Which op a device can't run, where XLA says no more than that it can't."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hapsynth import _jax
from hapsynth.graph.ir import Graph, Literal, Op
from hapsynth.instructions.rules.registry import bind, rule_name

_REFUSED = ("UNIMPLEMENTED", "NOT_FOUND", "INVALID_ARGUMENT", "INTERNAL")
"""How an error of XLA's begins that is no lack of memory and no fault of the run."""
_OF_THE_RUN = re.compile("NCCL|CUDA[ _]error|rendezvous|clique", re.IGNORECASE)
"""What it names where the devices, or those of other processes, failed in running: after that no op runs there."""
_LAYOUTS = "compiled for input layouts that disagree"
"""JAX 0.10.2: arrays of less than a byte an element say that they are of none, and such programs ask for their bits."""


class UnsupportedError(RuntimeError):
    """The devices can't run an op of the function."""


def unsupported(graph: Graph, device: Any, error: Exception) -> UnsupportedError | None:
    """The error with the op and its line, where an op alone fails like the whole; None where none does.

    Every distinct op is lowered for the device, and compiled where the error is the compiler's.
    """
    compiles = isinstance(error, jax.errors.JaxRuntimeError)
    if isinstance(error, _jax.InsideTraceError):
        return None
    if isinstance(error, ValueError) and _LAYOUTS in str(error) and (small := _sub_byte_dtypes(graph)):
        return UnsupportedError(
            f"JAX {jax.__version__} can't pass {' and '.join(small)} to a program that is compiled ahead of time: keep "
            "such values as int8 between calls, or give form='switch' where one process holds all devices"
        )
    if not (isinstance(error, (NotImplementedError, TypeError, ValueError)) or str(error).startswith(_REFUSED)):
        return None
    if compiles and _OF_THE_RUN.search(str(error)):
        return None
    tried: set[str] = set()
    for op in graph.ops:
        key = f"{rule_name(op)} {op.shapes} {op.dtypes} {op.params}"
        if key in tried:
            continue
        tried.add(key)
        try:
            _compile(*_alone(op), device, compiles)
        except Exception as alone:
            if type(alone) is not type(error) or (compiles and _status(alone) != _status(error)):
                continue
            if compiles and not _compiles_anything(device):
                return None
            operands = ", ".join(f"{d}{list(s)}" for d, s in zip(op.dtypes, op.shapes))
            where = f" ({op.source})" if op.source else ""
            kind = f"{device.platform} ({device.device_kind})"
            said = str(alone).splitlines()[0]
            return UnsupportedError(
                f"{rule_name(op)}{where} of {operands} can't run on {kind}: {said}; compute it in another dtype or form"
            )
    return None


def _sub_byte_dtypes(graph: Graph) -> list[str]:
    """The names of those that values of a graph have."""
    each = {value.dtype for value in graph.values}
    integers = [d for d in each if jnp.issubdtype(d, jnp.integer) and jnp.iinfo(d).bits < 8]
    floats = [d for d in each if jnp.issubdtype(d, jnp.floating) and jnp.finfo(d).bits < 8]
    return sorted(map(str, integers + floats))


def _status(error: Exception) -> str:
    """Of an error of XLA's, such as INTERNAL."""
    return str(error).partition(":")[0]


def _alone(op: Op) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """A function that is one op, and its arguments."""

    def alone(*values: Any) -> list[Any]:
        rest = iter(values)
        return bind(op.primitive, [o.value if isinstance(o, Literal) else next(rest) for o in op.operands], op.params)

    return alone, [jax.ShapeDtypeStruct(op.shapes[i], op.dtypes[i]) for i, _ in op.value_operands]


def _compile(fn: Callable[..., Any], structs: Sequence[Any], device: Any, compiles: bool) -> None:
    with _jax.no_mesh(), jax.default_device(device):
        lowered = jax.jit(fn).lower(*structs)
        if compiles:
            lowered.compile()


def _compiles_anything(device: Any) -> bool:
    """Whether the device still does: one that an earlier kernel broke refuses all."""
    try:
        # A function of its own, which JAX has not compiled before.
        _compile(lambda x: -x, [jax.ShapeDtypeStruct((), "float32")], device, True)
    except jax.errors.JaxRuntimeError:
        return False
    return True
