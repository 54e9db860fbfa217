"""The classes of ops that devices are measured by: which ops are of one, and how much of it an op comes to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

POSITION_FLOPS = 6000.0
"""FLOPs that a convolution could do in the time that it takes to bring one position's neighbours together. Over few
channels that is most of its time: 3 x 3 from 8 to 8, and from 3 to 8, run at a fifth and a sixteenth of the rate of 64
to 64 on one XLA CPU device (JAX 0.10.2, one core), where the figures below were measured, too."""
_LANES = 48.0
"""Elements of the minor dimension below which a reduction, with the elementwise ops that are fused into it, is the
slower the fewer there are: with 8 it takes 1.5 to 2.2 ns an element, with 16 0.8 to 1.0, with 64 and more 0.25 to 0.5,
whichever dimensions are reduced."""
_VECTOR = 16
"""Elements of the minor dimension below which the gradient of a maximum over windows goes one by one: 16 ns an element
for 2 to 15 of them, 3.0 for 16, 1.9 for 64."""
_SINGLY = 8.0
"""How much slower it is then."""


class OpLike(Protocol):
    """What is read of an op (`hapsynth.graph.ir.Op`)."""

    @property
    def name(self) -> str: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]: ...


def _flops(op: OpLike, flops: float) -> float:
    return flops


@dataclass(frozen=True)
class OpClass:
    """`holds`: whether an op is of the class, given what it costs as an elementwise op (`registry.Entry.cost`, "" for
    any other op); no op is of two. `counts_as`: the classes whose curves stand for it where it was not measured, in
    order. `amount`: what an op comes to in the class's curve, from its FLOPs."""

    holds: Callable[[OpLike, str], bool]
    counts_as: tuple[str, ...] = ()
    amount: Callable[[OpLike, float], float] = _flops


def _batched(op: OpLike) -> bool:
    (_, _), (batch, _) = op.params["dimension_numbers"]
    return prod(op.shapes[0][d] for d in batch) > 1


def _convolved(op: OpLike, flops: float) -> float:
    """More for each position of the result."""
    out = op.params["dimension_numbers"].out_spec
    return flops + POSITION_FLOPS * prod(size for d, size in enumerate(op.result_shapes[0]) if d != out[1])


_COMBINING = ("reduce_", "arg", "cum", "scatter", "select_and_", "sort", "top_k")
"""How the names begin of ops that combine or move single elements: slow as reductions are, where contractions are fast.
"""
_POOLING = ("select_and_scatter_add", "select_and_scatter")


def _combines(op: OpLike, cost: str) -> bool:
    return not cost and op.name not in _POOLING and op.name.startswith(_COMBINING)


def _reduced(op: OpLike, flops: float) -> float:
    """More where the minor dimension is short."""
    if op.name.startswith("reduce_") and "window" not in op.name and op.shapes[0]:
        return flops * max(1.0, _LANES / max(op.shapes[0][-1], 1))
    return flops


def _pooled(op: OpLike, flops: float) -> float:
    """As often as the window has positions, and more where the minor dimension is short."""
    flops *= prod(op.params["window_dimensions"])
    return flops * (_SINGLY if op.shapes[0][-1] < _VECTOR else 1.0)


OP_CLASSES: Mapping[str, OpClass] = {
    "matmul": OpClass(lambda op, cost: op.name == "dot_general" and not _batched(op)),
    "batch_matmul": OpClass(lambda op, cost: op.name == "dot_general" and _batched(op), ("matmul",)),
    "convolution": OpClass(lambda op, cost: op.name == "conv_general_dilated", (), _convolved),
    "elementwise": OpClass(lambda op, cost: cost in ("cheap", "costly")),
    "reduction": OpClass(_combines, ("elementwise",), _reduced),
    "pooling": OpClass(lambda op, cost: op.name in _POOLING, ("reduction", "elementwise"), _pooled),
    "transcendental": OpClass(lambda op, cost: cost == "transcendental", ("elementwise",)),
}
