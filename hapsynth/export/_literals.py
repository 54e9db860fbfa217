"""Values that stand in a program as Python text: numbers, dtypes, and the parameters of JAX's operations."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from functools import cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import random as prng
from jax.extend.core import Primitive, primitives

from hapsynth import _jax

_NUMPY = {np.dtype(code).name for code in "?bhilqBHILQefdFD"}


class UnwritableError(ValueError):
    """Something has no text that would make it again."""


def text(value: Any) -> str:
    """The value as an expression of `jnp`, `lax`, `np` and `prng`. UnwritableError for a value that has none."""
    match value:
        case enum.Enum():
            return f"{_of_lax(type(value))}.{value.name}"
        case None | bool() | str():
            return repr(value)
        case int() | np.integer():
            return repr(int(value))
        case float() if not isinstance(value, np.generic):
            number = repr(float(value))
            return number if np.isfinite(value) else number.replace("inf", "np.inf").replace("nan", "np.nan")
        case np.generic():
            return scalar(value, value.dtype)
        case np.ndarray() if value.dtype == jax.dtypes.float0:
            return f"np.zeros({value.shape}, jax.dtypes.float0)"
        case np.ndarray() if value.size <= 64:
            return array(value)
        case np.dtype():
            return dtype(value)
        case tuple() if hasattr(lax, type(value).__name__):
            named = {n: getattr(value, n) for n in getattr(value, "_fields", ())}
            return f"{_of_lax(type(value))}({_named(named)})"
        case tuple() if type(value) is tuple:
            return f"({', '.join(map(text, value))}{',' if len(value) == 1 else ''})"
        case list():
            return f"[{', '.join(map(text, value))}]"
        case dict():
            return f"{{{', '.join(f'{text(k)}: {text(v)}' for k, v in value.items())}}}"
        case type() if issubclass(value, np.generic):
            return dtype(np.dtype(value))
        case _ if dataclasses.is_dataclass(value) and hasattr(lax, type(value).__name__):
            named = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return f"{_of_lax(type(value))}({_named(named)})"
        case Primitive():
            return f"primitives.{public_primitive(value.name)}"
        case _:
            return f"prng.{_generator(value)}"


def _named(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={text(value)}" for name, value in values.items())


def _of_lax(kind: type) -> str:
    if getattr(lax, kind.__name__, None) is not kind:
        raise UnwritableError(f"a {kind.__name__} is nothing that JAX has public")
    return f"lax.{kind.__name__}"


@cache
def _public() -> dict[str, str]:
    primitives_by_name = {a: getattr(primitives, a) for a in dir(primitives) if a.endswith("_p")}
    return {p.name: a for a, p in primitives_by_name.items()}


def public_primitive(name: str) -> str:
    """A primitive's attribute of `jax.extend.core.primitives`."""
    if name not in _public():
        raise UnwritableError(f"the primitive {name} is none that JAX has public")
    return _public()[name]


def _generator(value: Any) -> str:
    """The name of a generator of random bits, for which a spec may stand."""
    for name, impl in inspect.getmembers(prng, lambda member: not inspect.isroutine(member)):
        if value is impl or getattr(value, "_impl", None) is impl:
            return name
    raise UnwritableError(f"{type(value).__name__} {str(value)[:60]!r} has no text")


def dtype(given: Any) -> str:
    """`jnp.float32`. Typed keys have none."""
    if _jax.is_extended(given):
        raise UnwritableError(f"the dtype {given} has no text")
    name = np.dtype(given).name
    return f"jnp.{'bool_' if name == 'bool' else name}"


def scalar(value: Any, given: Any) -> str:
    """A number of just this dtype: `np.float32(0.5)`."""
    given = np.dtype(given)
    number = plain_scalar(np.asarray(value, given))
    if given.name in _NUMPY:
        return f"np.{'bool_' if given.name == 'bool' else given.name}({number})"
    return f"np.asarray({number}, jnp.{given.name})"


def plain_scalar(value: Any) -> str:
    """A number as Python writes it."""
    array = np.asarray(value)
    if np.issubdtype(array.dtype, np.complexfloating):
        number = complex(array.item())
        return f"complex({text(number.real)}, {text(number.imag)})"
    if array.dtype == np.bool_ or np.issubdtype(array.dtype, np.integer):
        return repr(array.item())
    # As few digits as tell it from its neighbours.
    number = float(str(array))
    return text(number if number == array or not np.isfinite(number) else float(array))


def array(value: np.ndarray) -> str:
    """A small array, element by element."""
    if value.ndim == 0:
        return scalar(value, value.dtype)
    if np.issubdtype(value.dtype, np.complexfloating):
        # Python's own text of them has no infinities, and no zeros below zero.
        written = f"[{', '.join(map(plain_scalar, value.ravel()))}]"
        return f"np.array({written}, {dtype(value.dtype)}).reshape({value.shape})"
    listed = np.asarray(value, np.float64).tolist() if value.dtype.name not in _NUMPY else value.tolist()
    written = repr(listed).replace("nan", "np.nan").replace("inf", "np.inf")
    return (
        f"np.array({written}, {dtype(value.dtype)}).reshape({value.shape})"
        if not value.size
        else (f"np.array({written}, {dtype(value.dtype)})")
    )
