"""A mesh of two axes, and a program of one product on it."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from random_programs import floats

from hapsynth.graph.trace import Traced, trace
from hapsynth.instructions.factors import Triple
from hapsynth.instructions.layout import P, R, S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, Convert, Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable

AXES = (("a", 2), ("b", 4))


def mesh(*lengths: int) -> Mesh:
    devices = np.array(jax.devices()).reshape(lengths)
    return Mesh(devices, tuple("xyz"[: len(lengths)]), axis_types=(AxisType.Auto,) * len(lengths))


# ---- a product whose contracted dimension both axes cut, reduced along one axis after the other


def product() -> tuple[Traced, Program]:
    """Reduce-scatter along the inner axis, all-reduce of the pieces along the outer one, all-gather along the inner."""
    traced = trace(lambda x, y: x @ y, (floats(8, 16), floats(16, 24)))
    x, y = traced.graph.inputs
    (z,) = traced.graph.ops[0].results
    (contracted,) = FactorTable(traced.graph)[0].reductions
    cut = Triple((S(1), S(0)), (P("sum"),), contracted)
    steps = [(P("sum"), P("sum")), (P("sum"), S(0)), (R, S(0)), (R, R)]
    converts = [Convert(z, axis, *steps[n : n + 2]) for n, axis in enumerate((1, 0, 1))]
    inputs = {x: (S(1), S(1, 1)), y: (S(0), S(0, 1))}
    return traced, Program(AXES, inputs, (Compute(0, (cut, cut.at(1))), *converts), ((R, R),))


def sized(traced: Traced, program: Program, *shares: tuple[int, ...]) -> Sizes:
    sizes = Sizes(traced.graph, Classes.build(traced.graph, program), shares)
    check(traced.graph, program, sizes)
    return sizes


# ---- a matrix that is taken with its columns cut along one axis, and compared to zero with them cut along both


def cut_again() -> tuple[Traced, Program]:
    traced = trace(lambda x: x > 0, (floats(4, 12),))
    (x,) = traced.graph.inputs
    once, twice = (S(1), S(0)), (S(1), S(1, 1))
    compare = Compute(0, (Triple((S(1), R), (S(1),), 1), Triple((S(1, 1), R), (S(1, 1),), 1)))
    return traced, Program((("a", 2), ("b", 2)), {x: once}, (Convert(x, 1, once, twice), compare), (twice,))
