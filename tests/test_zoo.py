"""Training steps from the libraries' own layers: nothing of note is computed whole, and the plans are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from slow_devices import first_devices, thin_cluster
from thoroughness import THOROUGH
from zoo import functional, language, solvers, vision
from zoo.kinds import Model

import hapsynth
from hapsynth.graph.ir import Graph, Op
from hapsynth.graph.trace import trace
from hapsynth.instructions.rules import entry_of
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.rules.registry import flops_of
from hapsynth.instructions.rules.replicated_ops import uncovered, why_whole
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import Task

MIXED = Path(__file__).resolve().parent.parent / "examples" / "clusters" / "mixed8.toml"
SPEEDS = (3.0,) * 4 + (1.0,) * 4
FUNCTIONS: tuple[Callable[[], Model], ...] = (
    vision.vit,
    language.gpt,
    language.gpt_scanned,
    vision.mixer,
    vision.resnet,
    vision.unet,
    vision.convolutional,
    language.gru,
    language.greedy_decoding,
    language.experts_einsum,
    language.experts_scatter,
    functional.mlp_accumulated,
    functional.diffusion,
    functional.hessian,
    functional.jvp,
    solvers.lineax_lu,
    solvers.lineax_qr,
    solvers.lineax_auto,
    solvers.lineax_cg,
    solvers.optimistix_newton,
    solvers.optimistix_fixed_point,
    solvers.optimistix_levenberg_marquardt,
    solvers.optimistix_bfgs,
    solvers.diffrax_kvaerno3,
    solvers.diffrax_tsit5,
)
MODELS = {fn.__name__: fn for fn in FUNCTIONS}
# A GPT runs in examples/test_gpt.py and running/test_mixed_precision.py, loops of a solver in the other one.
CUT_UNEVENLY = tuple(MODELS) if THOROUGH else ("diffusion", "hessian", "greedy_decoding", "optimistix_newton")
AXES = (("data", 2), ("model", 4))
ON_TWO_AXES = tuple(MODELS) if THOROUGH else ("mlp_accumulated",)
"""With HAPSYNTH_THOROUGH=1 all of them: five minutes."""


@cache
def graph_of(name: str) -> Graph:
    return trace(*MODELS[name]()).graph


def is_elementwise(op: Op) -> bool:
    """By its shapes: operands and results all alike, but for scalars."""
    shapes = {s for s in (*op.shapes, *op.result_shapes) if s}
    return len(shapes) == 1 and any(op.shapes) and all(op.result_shapes)


@pytest.mark.parametrize("name", MODELS)
def test_hardly_anything_is_computed_whole(name: str) -> None:
    graph = graph_of(name)
    rows = uncovered(graph)
    table, flops = FactorTable(graph), [graph.runs[op.region] * flops_of(op) for op in graph.ops]
    assert sum(flops[op.index] for op in graph.ops if why_whole(op, table[op.index])) <= 0.01 * sum(flops), rows
    assert sum(r.bytes_share for r in rows) <= 0.01, rows
    without = [op for op in graph.ops if entry_of(op) is None]
    assert not [op for op in without if is_elementwise(op) or op.name in ("dot_general", "conv_general_dilated")]


@pytest.mark.few(5)
@pytest.mark.parametrize("name", MODELS)
def test_planned_for_the_everyday_cluster(name: str) -> None:
    """Such small steps are mostly not worth cutting there, but always planned to the end."""
    result = Planner(Task(graph_of(name), hapsynth.Cluster.load(MIXED))).run()
    assert result.gap <= 1e-4
    assert result.joint_lower_bound_s <= result.lower_bound_s <= result.cost_s


@pytest.mark.parametrize("name", CUT_UNEVENLY)
def test_right_where_it_is_cut_unevenly(name: str) -> None:
    """On devices so slow that even this much work is worth dividing, and each slice of a contraction counts."""
    fn, args = MODELS[name]()
    plan = hapsynth.synthesize(fn, args, first_devices(8), cluster=thin_cluster(SPEEDS), leave_out=False)
    assert any(len(set(shares)) > 1 for shares in plan.sizes.shares)
    report = plan.check()
    assert report.ok, report


@pytest.mark.parametrize("name", ON_TWO_AXES)
def test_right_where_two_axes_cut_it(name: str) -> None:
    """The same devices as 2 x 4. Planning may take longer than the budget: then with a gap, and no less right."""
    fn, args = MODELS[name]()
    mesh = Mesh(np.array(jax.devices()).reshape([n for _, n in AXES]), [name for name, _ in AXES])
    cluster = replace(thin_cluster(SPEEDS), axes=AXES)
    plan = hapsynth.synthesize(fn, args, mesh, cluster=cluster, leave_out=False, time_budget_s=20)
    assert plan.program.axes == AXES
    assert {axis for cls in plan.sizes.classes.all for axis in cls.axes} == {0, 1}
    assert any(len(set(shares)) > 1 for shares in plan.sizes.shares)
    assert plan.joint_lower_bound <= plan.lower_bound <= plan.cost
    report = plan.check()
    assert report.ok, report


def test_every_argument_is_abstract() -> None:
    """So that the check's own data is tried: tokens, labels, keys, moments and counts."""
    leaves: list[Any] = jax.tree.leaves([fn()[1] for fn in FUNCTIONS])
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
