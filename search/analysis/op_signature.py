"""What tells an op from others to a profile: the same text in every process, and wherever the function is planned."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from hapsynth.graph.ir import Op
from hapsynth.instructions.rules.registry import is_fusible
from hapsynth.search.analysis.op_class import class_of

_FLOATS = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def signature_of(op: Op) -> str:
    """The class of an op and a digest of all that decides how long it takes: `matmul:0123456789ab`.

    "" for an op that no profile measures by itself: what fuses with its neighbours, has no class, more than one result,
    operands of other than one floating dtype, or a parameter that only its own process can name.
    """
    if not _is_measured(op):
        return ""
    try:
        # What a later version of JAX adds is None by default.
        params = _canonical({k: p for k, p in op.params.items() if p is not None})
    except ValueError:
        return ""
    text = f"{described(op)} {op.result_dtypes[0]} {params}"
    return f"{class_of(op)}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def described(op: Op) -> str:
    """What a person knows an op by: `dot_general f32[4096,256] f32[256,1024]`."""
    tensor = lambda shape, dtype: f"{_FLOATS.get(str(dtype), str(dtype))}[{','.join(map(str, shape))}]"
    return " ".join([op.name, *map(tensor, op.shapes, op.dtypes)])


def _is_measured(op: Op) -> bool:
    dtypes = {str(dtype) for dtype in op.dtypes}
    alike = len(dtypes) == 1 and not dtypes - _FLOATS.keys()
    return alike and len(op.results) == 1 and not is_fusible(op) and class_of(op) != ""


def _canonical(param: Any) -> str:
    """A parameter as text that depends on no process and no version of Python; ValueError where there is none."""
    match param:
        case enum.Enum():
            return f"{type(param).__name__}.{param.name}"
        case str():
            return repr(param)
        case bool() | int() | float() | np.generic():
            return repr(param.item() if isinstance(param, np.generic) else param)
        case Mapping():
            items = cast(Mapping[Any, Any], param).items()
            return f"{{{', '.join(sorted(f'{_canonical(k)}: {_canonical(p)}' for k, p in items))}}}"
        case tuple() | list():
            return f"({', '.join(map(_canonical, cast(Iterable[Any], param)))})"
        case set() | frozenset():
            return f"{{{', '.join(sorted(map(_canonical, cast(Iterable[Any], param))))}}}"
        case _ if " at 0x" in (text := str(param)):
            raise ValueError(text)
        case _:
            return text
