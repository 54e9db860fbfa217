"""Thresholds of the lowering under which small tensors stand for large ones, and a plan lowered by other thresholds."""

from __future__ import annotations

from dataclasses import replace

from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.plan import Form, Plan

ALONE = LoweringOptions(bundled_bytes=0)
"""Collectives have a latency each, and are compiled one by one."""
SWITCHED = LoweringOptions(small_stage_elements=0, small_op_elements=0, gathered_bytes=0)
"""Stages run on exact shards, with collectives as the program has them."""
SWITCHED_ALONE = replace(SWITCHED, bundled_bytes=ALONE.bundled_bytes)


def lowered_by(plan: Plan, options: LoweringOptions, form: Form = "auto") -> Plan:
    """The plan's very program and sizes, lowered by other options than it was planned with."""
    return Plan(plan.traced, replace(plan.result, lowering=options), plan.cluster, plan.mesh, plan.fn, form=form)
