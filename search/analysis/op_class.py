"""The class of ops that a device's measured curves count an op to, and how much of it an op does."""

from __future__ import annotations

from hapsynth.cluster.op_classes import OP_CLASSES
from hapsynth.graph.ir import Op
from hapsynth.instructions.rules.registry import cost_of, flops_of


def class_of(op: Op) -> str:
    """The class of ops that a profile counts an op to (`hapsynth.cluster.op_classes`); "" for what it knows none of."""
    cost = cost_of(op)
    return next((name for name, known in OP_CLASSES.items() if known.holds(op, cost)), "")


def amount_of(op: Op) -> float:
    """What an op comes to on a device, in what its class's curve counts."""
    op_class, flops = class_of(op), flops_of(op)
    return OP_CLASSES[op_class].amount(op, flops) if op_class else flops
