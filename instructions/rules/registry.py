"""One entry per primitive: its factors, how it runs on a shard, what it costs.

An entry is written once; the triples (`factors.py`), the local execution (`execute`) and the cost derive from it.
A primitive without an entry is replicated and reported by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from typing import Literal as OneOf

import jax.numpy as jnp
import numpy as np
from jax import lax

from hapsynth import _jax
from hapsynth.graph.ir import Op
from hapsynth.instructions.factors import Factors, Local, Triple
from hapsynth.instructions.layout import Layout, R, reduction_of

FactorsOf = Callable[[Factors], None]
ParamsOf = Callable[[Local], dict[str, Any]]
LocalOf = Callable[[Local, Sequence[Any]], list[Any]]
FlopsOf = Callable[[Op], float]
Cost = OneOf["cheap", "costly", "transcendental"]
"""What an elementwise op takes: so little that each kernel that reads the result makes it again; more; or many
instructions, so that it is of a class of its own to a profile."""


def elements(op: Op) -> float:
    """One operation per element of the largest tensor that the op touches."""
    return float(max((prod(s) for s in (*op.shapes, *op.result_shapes)), default=0))


def unknown(op: Op) -> float:
    """As `elements`, of an op of which nothing says what it takes: it may hide a loop."""
    return elements(op)


def no_flops(op: Op) -> float:
    """The op only moves elements."""
    return 0.0


@dataclass(frozen=True)
class Entry:
    """How one primitive is distributed.

    `factors` fills in the op's factors; `params` adapts the parameters to the local shapes; `local` replaces the
    execution on a shard as a whole (only where parameters are not enough); `flops` counts the whole op's
    floating-point operations; `fusible` ops form one kernel with their neighbours and move no memory between, and are
    as dear as `cost` says.
    `typed_keys`: the factors are right for typed keys too; without it an op on keys is replicated.
    `replicated` is why the op needs replication, in words; some ops do not in their batch dimensions.
    """

    name: str
    factors: FactorsOf
    params: ParamsOf | None = None
    local: LocalOf | None = None
    flops: FlopsOf = elements
    fusible: bool = False
    typed_keys: bool = False
    replicated: str = ""
    cost: Cost = "cheap"


REGISTRY: dict[str, Entry] = {}
"""By primitive, or by primitive and function where one primitive stands for many (`pallas_call:my_kernel`)."""

DERIVED: dict[str, Callable[[Op], Entry | None]] = {}
"""Primitives that may carry their rule with them."""

MANY: dict[str, str] = {
    "custom_partitioning": "it has no sharding rule that can be read",
    "ffi_call": "what it computes is not known",
    "pallas_call": "its grid is made for the whole operands",
}
"""Primitives that stand for many functions, and why there is no rule for all of them."""


def register(
    *names: str,
    params: ParamsOf | None = None,
    local: LocalOf | None = None,
    flops: FlopsOf = elements,
    fusible: bool = False,
    typed_keys: bool = False,
    replicated: str = "",
    cost: Cost = "cheap",
) -> Callable[[FactorsOf], FactorsOf]:
    """Decorator: register the factor function under each primitive name."""

    def add(factors: FactorsOf) -> FactorsOf:
        for name in names:
            if name in REGISTRY:
                raise ValueError(f"primitive {name!r} has two entries")
            REGISTRY[name] = Entry(name, factors, params, local, flops, fusible, typed_keys, replicated, cost)
        return factors

    return add


KEYS_ARE_WHOLE = "typed keys are held whole: they have hidden dimensions, and are a few words each"


def replicated(f: Factors, reason: str) -> None:
    """Nothing of the op can be cut."""
    for i in range(len(f.op.operands)):
        f.block(f.operand(i), reason)
    for shape in f.op.result_shapes:
        dims = f.dims(shape)
        f.block(dims, reason)
        f.results.append(dims)


def _no_rule(op: Op) -> str:
    """Why an op without an entry is replicated."""
    if op.name in MANY:
        return f"no rule for {rule_name(op)}, and {MANY[op.name]}: hapsynth.register_rule gives it one"
    return "no sharding rule for this primitive"


def replicate(*names: str, why: str, flops: FlopsOf = elements) -> None:
    """Register primitives that every device runs as a whole, and why."""
    register(*names, flops=flops, replicated=why)(lambda f: replicated(f, why))


def rule_name(op: Op) -> str:
    """What a rule for the op is registered under: its primitive, and the function's name where it stands for many."""
    function = _jax.function_name(op.name, op.params)
    return f"{op.name}:{function}" if function else op.name


def entry_of(op: Op) -> Entry | None:
    """The op's entry: that of its function, of its primitive, or what it carries; None where it has none."""
    name = op.name
    entry = REGISTRY.get(rule_name(op)) or REGISTRY.get(name) if name in MANY else REGISTRY.get(name)
    return DERIVED[name](op) if entry is None and name in DERIVED else entry


def factors_of(op: Op) -> Factors:
    """The factors of an op; those of an unknown primitive all need replication."""
    entry = entry_of(op)
    f = Factors(op)
    if entry is None:
        replicated(f, _no_rule(op))
    elif not entry.typed_keys and any(_jax.is_extended(d) for d in (*op.dtypes, *op.result_dtypes)):
        replicated(f, KEYS_ARE_WHOLE)
    else:
        entry.factors(f)
    assert (len(f.operands), len(f.results)) == (len(op.operands), len(op.results)), op
    f.whole = f.new(1)
    if f.lost:
        raise ValueError(f"the rule of {op.name!r} loses the factors {f.lost} of {f}: block or reduce them")
    return f


def flops_of(op: Op) -> float:
    entry = entry_of(op)
    return (entry.flops if entry else unknown)(op)


def is_priced(op: Op) -> bool:
    """Whether anything says what the op takes."""
    entry = entry_of(op)
    return entry is not None and entry.flops is not unknown


def is_fusible(op: Op) -> bool:
    entry = entry_of(op)
    return entry is not None and entry.fusible


def cost_of(op: Op) -> Cost | OneOf[""]:
    """What an elementwise op, or another that fuses, takes; "" for one that does not fuse."""
    entry = entry_of(op)
    return entry.cost if entry is not None and entry.fusible else ""


def is_costly(op: Op) -> bool:
    """Whether the result of a fusible op is kept rather than computed again by each kernel that reads it."""
    return cost_of(op) not in ("", "cheap")


def bind(primitive: Any, operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Apply a primitive that is no call (those are inlined by the trace); always a list of results."""
    out = primitive.bind(*operands, **params)
    return list(out) if primitive.multiple_results else [out]


def clamped(starts: Sequence[Any], room: Sequence[int]) -> list[Any]:
    """The starts of a window as XLA clamps them, `room`: the last it may have along each dimension.

    XLA folds a dynamic slice of a dynamic slice, and what it turns into one (a gather of a single index), into one that
    starts at the sum of their starts as these are, not as clamped, and in their type, if it overflows too
    (openxla/xla#49121, jax-ml/jax#40849). Shards are dynamic slices, and one of many indices may be all that a device
    has, so a program that is right in plain JAX would go wrong here. Written out, the clamp is part of the sum.
    """
    fits = max(room, default=0) <= jnp.iinfo(jnp.int32).max
    found: list[Any] = []
    for start, last in zip(starts, room, strict=True):
        zero, last = np.array([0, min(last, jnp.iinfo(start.dtype).max)], start.dtype)
        inside = lax.clamp(zero, start, last) if last else jnp.zeros_like(start)
        found.append(inside.astype(jnp.int32) if fits else inside)
    return found


def apart(x: Any) -> Any:
    """`x` behind an optimization barrier: XLA must not fold a dynamic slice that makes it, whose start may not be
    `clamped`, into one that reads it."""
    return lax.optimization_barrier(x)


def identity(reduction: str, dtype: Any) -> Any:
    """The scalar that `reduction` leaves unchanged; zero where there is none."""
    if reduction in ("", "sum"):
        return np.zeros((), dtype)
    sign = -1 if reduction == "max" else 1
    if dtype == np.bool_:
        return sign > 0
    if not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.iinfo(dtype).min if sign < 0 else jnp.iinfo(dtype).max
    infinite = np.asarray(sign * np.inf).astype(dtype)
    # Some 8-bit types have no infinity: it becomes a NaN.
    return infinite if np.isinf(infinite.astype(np.float32)) else sign * float(jnp.finfo(dtype).max)


def execute(local: Local, operands: Sequence[Any]) -> list[Any]:
    """Run the op on one device's exact shards.

    An empty share is never handed to the primitive (gather, argmax and grouped convolution refuse it): it yields
    empty shards, and the identity of each partial. (Where some result is replicated the op is run all the same.)
    """
    f, results = local.factors, _executed(local, operands)
    for axis, t in enumerate(local.triples):
        # A zero is a sum of zeros anyway.
        if t == f.one_to_all and t not in f.triples:
            counts = local.axis_index(axis) == 0
            results = [jnp.where(counts, x, identity(p.reduction, x.dtype)) for x, p in zip(results, t.results)]
    return results


def _executed(local: Local, operands: Sequence[Any]) -> list[Any]:
    """As if along no axis one device's result were everyone's."""
    op, f = local.op, local.factors
    empty = [t.factor for t in local.triples if t.factor is not None and R not in t.results]
    empty = [factor for factor in empty if local.cuts[factor].share == 0]
    if empty:
        # With no share of the updates, an accumulating op returns its accumulator as it is.
        accumulated = next((f.accumulators[factor] for factor in empty if factor in f.accumulators), None)
        return [
            _nothing(shape, dtype, local.result_layout(r)) if accumulated is None else operands[accumulated]
            for r, (shape, dtype) in enumerate(zip(local.result_shapes, op.result_dtypes))
        ]
    if any(map(f.is_whole, local.triples)):
        # The owner has all of it: as if no axis had cut anything.
        alone = Triple((R,) * len(op.operands), (R,) * len(op.result_shapes))
        triples = tuple(alone if f.is_whole(t) else t for t in local.triples)
        local = replace(local, triples=triples, cuts={k: cut for k, cut in local.cuts.items() if k != f.whole})
    entry = entry_of(op)
    if entry is not None and entry.local is not None:
        return entry.local(local, operands)
    params = entry.params(local) if entry is not None and entry.params is not None else op.params
    return bind(op.primitive, operands, params)


def _nothing(shape: tuple[int, ...], dtype: Any, layout: Layout) -> Any:
    """A device's part where it computes nothing: the identity of what the value is partial by."""
    return jnp.full(shape, identity(reduction_of(layout), dtype), dtype)
