"""The class of ops that a device's measured curves count an op to, and how much of it an op does."""

from __future__ import annotations

from math import prod

from hapsynth.graph.ir import Op
from hapsynth.instructions.rules.registry import flops_of, is_fusible

TRANSCENDENTAL = frozenset(
    (
        *("tanh", "exp", "exp2", "expm1", "log", "log1p", "logistic", "cbrt", "pow", "erf", "erfc", "erf_inv"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "lgamma"),
    )
)
"""Elementwise ops of many instructions."""


POSITION = 6000.0
"""FLOPs that a convolution could do in the time that it takes to bring one position's neighbours together. Over few
channels that is most of its time: 3 x 3 from 8 to 8, and from 3 to 8, run at a fifth and a sixteenth of the rate of 64
to 64 (XLA's CPU backend, one core, JAX 0.10.2)."""
LANES = 48.0
"""Elements of the minor dimension below which a reduction, with the elementwise ops that are fused into it, is the
slower the fewer there are: with 8 it takes 1.5 to 2.2 ns an element, with 16 0.8 to 1.0, with 64 and more 0.25 to 0.5,
whichever dimensions are reduced (same machine)."""
VECTOR, SINGLY = 16, 8.0
"""Elements of the minor dimension below which the gradient of a maximum over windows goes one by one, and how much
slower that is: 16 ns an element for 2 to 15 of them, 3.0 for 16, 1.9 for 64 (same machine)."""
_COMBINING = ("reduce_", "arg", "cum", "scatter", "select_and_", "sort", "top_k")
"""How the names begin of ops that combine or move single elements: slow as reductions are, where contractions are fast.
"""


def class_of(op: Op) -> str:
    """The class of ops that a profile counts an op to (`hapsynth.cluster.device_kinds.OP_CLASSES`); "" for what it
    knows none of."""
    match op.name:
        case "dot_general":
            (_, _), (batch, _) = op.params["dimension_numbers"]
            return "batch_matmul" if prod(op.shapes[0][d] for d in batch) > 1 else "matmul"
        case "conv_general_dilated":
            return "convolution"
        case "select_and_scatter_add" | "select_and_scatter":
            return "pooling"
        case name if is_fusible(op):
            return "transcendental" if name in TRANSCENDENTAL else "elementwise"
        case name if name.startswith(_COMBINING):
            return "reduction"
        case _:
            return ""


def amount_of(op: Op) -> float:
    """What an op comes to, in what its class's curve counts: its FLOPs, `POSITION` more for each position of a
    convolution's result, more where a reduction's minor dimension is below `LANES` or pooling's below `VECTOR`, and of
    pooling as often as its window has positions."""
    flops = flops_of(op)
    if class_of(op) == "pooling":
        flops *= prod(op.params["window_dimensions"])
        flops *= SINGLY if op.shapes[0][-1] < VECTOR else 1.0
    if class_of(op) == "reduction" and op.name.startswith("reduce_") and "window" not in op.name and op.shapes[0]:
        flops *= max(1.0, LANES / max(op.shapes[0][-1], 1))
    if op.name == "conv_general_dilated":
        out = op.params["dimension_numbers"].out_spec
        flops += POSITION * prod(size for d, size in enumerate(op.result_shapes[0]) if d != out[1])
    return flops
