"""The checker refuses every program that its search would never make."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import cluster, random_graph

from hapsynth.instructions.factors import Triple
from hapsynth.instructions.layout import P, R, S, parse_layout, parse_placement
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, Convert, Program, ProgramError
from hapsynth.instructions.program.sizes import Sizes
from hapsynth.search.planning.planner import Planner
from hapsynth.search.planning.task import Task


@pytest.fixture(scope="module")
def planned():
    graph = random_graph(3, ops=7).graph
    result = Planner(Task(graph, cluster([2.0, 1.0, 1.0], bandwidth=1e11))).run()
    assert any(isinstance(i, Convert) for i in result.program.instructions)
    return graph, result.program, result.sizes


def test_a_plan_passes(planned):
    check(*planned)


def test_json_and_text_are_deterministic_and_complete(planned):
    graph, program, _ = planned
    again = Program.from_dict(program.to_dict())
    assert again.text(graph) == program.text(graph)
    assert again.to_dict() == program.to_dict()
    check(graph, again)


def test_leaving_out_any_instruction_is_noticed(planned):
    graph, program, _ = planned
    for i in range(len(program.instructions)):
        shorter = replace(program, instructions=program.instructions[:i] + program.instructions[i + 1 :])
        with pytest.raises(ProgramError):
            check(graph, shorter)


def test_every_other_triple_is_noticed(planned):
    """A triple that the registry does not have, or whose operands do not hold."""
    graph, program, _ = planned
    for i, instruction in enumerate(program.instructions):
        if not isinstance(instruction, Compute):
            continue
        triple = instruction.triples[0]
        for wrong in (
            triple._replace(results=tuple(P("max") for _ in triple.results)),
            Triple((S(1),) * len(triple.operands), (R,), triple.factor),
            triple._replace(factor=17),
        ):
            changed = list(program.instructions)
            changed[i] = Compute(instruction.op, (wrong,))
            with pytest.raises(ProgramError):
                check(graph, replace(program, instructions=tuple(changed)))


def test_wrong_conversions_are_noticed(planned):
    graph, program, _ = planned
    for wrong in (
        Convert(0, 0, (R,), (R,)),
        Convert(0, 0, (P("max"),), (S(0),)),
        Convert(0, 0, (R,), (S(7),)),
        Convert(999, 0, (R,), (S(0),)),
        Convert(0, 3, (R,), (S(0),)),
        Convert(0, 0, (R, R), (S(0), R)),
    ):
        with pytest.raises(ProgramError):
            check(graph, replace(program, instructions=(*program.instructions, wrong)))


def test_outputs_inputs_and_sizes_are_held_to(planned):
    graph, program, sizes = planned
    with pytest.raises(ProgramError, match="not available"):
        check(graph, replace(program, outputs=tuple((P("min"),) for _ in program.outputs)))
    with pytest.raises(ProgramError, match="not those of the function"):
        check(graph, replace(program, inputs={}))
    with pytest.raises(ProgramError, match="cannot be partial"):
        check(graph, replace(program, inputs=dict.fromkeys(program.inputs, (P("sum"),))))
    for wrong in (
        tuple((s[0] + 1, *s[1:]) for s in sizes.shares),
        tuple((*s, 0) for s in sizes.shares),
        tuple((-1, s[0] + s[1] + 1, *s[2:]) for s in sizes.shares),
        sizes.shares[:-1],
    ):
        with pytest.raises(ProgramError):
            check(graph, program, Sizes(graph, sizes.classes, wrong))


@pytest.mark.parametrize("text", ["Q", "S(-1)", "S(x)", "P(mean)", "", "S(99)", "R,"])
def test_bad_placements_are_named(text):
    with pytest.raises(ValueError, match="is no placement"):
        parse_layout(text)


def test_placements_round_trip():
    for p in (R, S(0), S(12), P("sum"), P("max"), P("min")):
        assert parse_placement(str(p)) == p
