"""Programs of several mesh axes: what the checker refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from random_programs import floats
from two_axes import AXES, product, sized

from hapsynth.graph.trace import Traced, trace
from hapsynth.instructions.factors import Triple
from hapsynth.instructions.layout import P, R, S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, Convert, Program, ProgramError


def with_step(change: Callable[[Convert], Convert], position: int = 1) -> Callable[[Program], Program]:
    def changed(program: Program) -> Program:
        steps = list(program.instructions)
        step = steps[position]
        assert isinstance(step, Convert)
        steps[position] = change(step)
        return replace(program, instructions=tuple(steps))

    return changed


def with_triples(*triples: Triple) -> Callable[[Program], Program]:
    return lambda p: replace(p, instructions=(Compute(0, triples), *p.instructions[1:]))


def with_input(*layout: Any) -> Callable[[Program], Program]:
    return lambda p: replace(p, inputs={**p.inputs, min(p.inputs): layout})


CUT = next(i.triples[0] for i in product()[1].instructions if isinstance(i, Compute))
WRONG: dict[str, tuple[Callable[[Program], Program], str]] = {
    "no order of two axes": (with_input(S(1), S(1)), "no value can lie as S(1),S(1)"),
    "an order of one axis": (with_input(S(1, 1), R), "no value can lie as S(1)/1,R"),
    "an order with a gap": (with_input(S(1), S(1, 2)), "no value can lie as S(1),S(1)/2"),
    "the other order": (with_input(S(1, 1), S(1)), "needs"),
    "one axis only": (with_input(S(1)), "a layout of 1 placements on a mesh of 2 axes"),
    "two reductions": (
        with_step(lambda s: s._replace(source=(P("max"), P("sum")))),
        "no value can lie as P(max),P(sum)",
    ),
    "a step along another axis": (with_step(lambda s: s._replace(axis=0)), "no single step"),
    "an axis that is not there": (with_step(lambda s: s._replace(axis=2)), "the mesh has no axis 2"),
    "both axes at once": (with_step(lambda s: s._replace(target=(R, R))), "no single step"),
    "a factor twice without an order": (with_triples(CUT, CUT), "has no rule"),
    "a factor once with an order": (with_triples(CUT, Triple((R, R), (R,))), "needs|not available"),
    "an order that its tensors do not share": (
        with_triples(CUT, Triple((S(1, 1), S(0)), (P("sum"),), CUT.factor)),
        "has no rule",
    ),
    "one triple": (with_triples(CUT), "1 triples on a mesh of 2 axes"),
}


@pytest.mark.parametrize(("change", "why"), WRONG.values(), ids=WRONG)
def test_what_the_checker_refuses(change: Callable[[Program], Program], why: str) -> None:
    traced, program = product()
    check(traced.graph, program)
    why = why if "|" in why else re.escape(why)
    with pytest.raises(ProgramError, match=why):
        check(traced.graph, change(program))


@pytest.mark.parametrize(
    ("source", "target", "axis"),
    [
        ((S(0), S(0, 1)), (R, S(0, 1)), 0),  # the major axis gathered under the minor one
        ((S(0), S(0, 1)), (R, S(0)), 0),
        ((S(0), S(0, 1)), (S(1), S(0)), 0),
        ((R, S(0)), (S(0), S(0)), 0),
        ((R, S(0)), (S(0), S(0, 1)), 0),  # a major axis slipped under the shards that are there
        ((P("sum"), S(0)), (S(0), S(0, 1)), 0),
    ],
)
def test_only_the_minor_axis_of_a_dimension_comes_and_goes(source: Any, target: Any, axis: int) -> None:
    traced = trace(lambda x: x * 2, (floats(8, 8),))
    (x,) = traced.graph.inputs
    program = Program(AXES, {x: (R, R)}, (Convert(x, axis, source, target),), ((R, R),))
    with pytest.raises(ProgramError, match=r"no single step|no value can lie"):
        check(traced.graph, program)


@pytest.mark.parametrize(
    "shares", [((2,) * 4, (2,) * 4), ((2,) * 8, (2,) * 8), ((2,) * 7 + (3,), (2,) * 4), ((4,) * 4, (2,) * 4)]
)
def test_shares_that_do_not_cut_a_class(shares: Any) -> None:
    traced, program = product()
    with pytest.raises(ProgramError, match=r"units for . devices; its sizes are"):
        sized(traced, program, *shares)


# ---- three axes

THREE = (("a", 2), ("b", 2), ("c", 2))


def product_of_three() -> tuple[Traced, Program]:
    """Reduce-scatter along the last axis, all-reduce along both others, all-gather along the last."""
    traced = trace(lambda x, y: x @ y, (floats(8, 16), floats(16, 24)))
    x, y = traced.graph.inputs
    (z,) = traced.graph.ops[0].results
    partial = P("sum")
    ways = [(partial,) * 3, (partial, partial, S(0)), (partial, R, S(0)), (R, R, S(0)), (R, R, R)]
    converts = [Convert(z, axis, *ways[n : n + 2]) for n, axis in enumerate((2, 1, 0, 2))]
    nested = lambda dim: (S(dim), S(dim, 2), S(dim, 1))
    compute = Compute(0, (CUT, CUT.at(2), CUT.at(1)))
    return traced, Program(THREE, {x: nested(1), y: nested(0)}, (compute, *converts), (ways[-1],))


WRONG_OF_THREE: dict[str, tuple[Callable[[Program], Program], str]] = {
    "two axes in one place": (with_input(S(1), S(1, 1), S(1, 1)), "no value can lie as S(1),S(1)/1,S(1)/1"),
    "an order with a gap": (with_input(S(1), S(1, 3), S(1, 1)), "no value can lie as S(1),S(1)/3,S(1)/1"),
    "the minor axes the other way": (with_input(S(1), S(1, 1), S(1, 2)), "needs"),
    "the triples' minor axes the other way": (with_triples(CUT, CUT.at(1), CUT.at(2)), "needs"),
    "two axes only": (with_triples(CUT, CUT.at(1)), "2 triples on a mesh of 3 axes"),
    "a factor twice in one place": (with_triples(CUT, CUT.at(1), CUT.at(1)), "has no rule"),
    "one axis left out": (lambda p: replace(p, instructions=(*p.instructions[:2], *p.instructions[3:])), "needs"),
    "two axes at once": (with_step(lambda s: s._replace(target=(R, R, S(0))), 2), "no single step"),
    "along another axis": (with_step(lambda s: s._replace(axis=0), 2), "no single step"),
    "the last axis gathered before its sum": (
        with_step(lambda s: s._replace(source=(P("sum"), R, S(0)), target=(P("sum"), R, R)), 3),
        "needs|no single step",
    ),
}


@pytest.mark.parametrize(("change", "why"), WRONG_OF_THREE.values(), ids=WRONG_OF_THREE)
def test_what_the_checker_refuses_on_three_axes(change: Callable[[Program], Program], why: str) -> None:
    traced, program = product_of_three()
    check(traced.graph, program)
    with pytest.raises(ProgramError, match=why if "|" in why else re.escape(why)):
        check(traced.graph, change(program))


@pytest.mark.parametrize("shares", [((2,) * 8, (4, 4)), ((1, 0, 5, 2, 3, 0, 4, 1), (8, 0))])
def test_shares_along_three_axes(shares: Any) -> None:
    traced, program = product_of_three()
    sized(traced, program, *shares)
    with pytest.raises(ProgramError, match=r"units for . devices; its sizes are"):
        sized(traced, program, shares[0], (1, *shares[1]))
    with pytest.raises(ProgramError, match=r"units for . devices; its sizes are"):
        sized(traced, program, (shares[0][0] + 1, *shares[0][1:]), shares[1])


def test_only_the_minor_axis_of_three_comes_and_goes() -> None:
    """The one in the middle of a nest is gathered."""
    traced = trace(lambda x: x * 2, (floats(8, 8),))
    (x,) = traced.graph.inputs
    source = (S(0), S(0, 2), S(0, 1))
    program = Program(THREE, {x: source}, (Convert(x, 2, source, (S(0), S(0, 1), R)),), (source,))
    with pytest.raises(ProgramError, match=r"no single step"):
        check(traced.graph, program)
