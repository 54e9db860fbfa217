"""Programs in which values and ops have owners: what they compute, in every form, and what is no such program."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from lowered_programs import CASES, MODES, SEEDS, assert_close, mesh_of, run
from random_programs import RandomProgram
from thoroughness import THOROUGH

from hapsynth.graph.trace import Traced, trace
from hapsynth.instructions.layout import O, P, R, S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, Convert, Program, ProgramError
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.staging.options import DEFAULT
from hapsynth.lower import Lowered, Staged

SENT = replace(DEFAULT, gathered_bytes=0)
"""Small values too go to their owners, where all would have them as quickly."""
AXES = {"one": (("hap", 4),), "two": (("a", 2), ("b", 2))}


def drawn(traced: Traced, axes: tuple[tuple[str, int], ...], seed: int, mode: str) -> tuple[Program, Sizes]:
    maker = RandomProgram(traced.graph, axes, random.Random(seed), 0.9, owned=True)
    program = maker.build()
    sizes = maker.sizes(program, mode)
    check(traced.graph, program, sizes)
    assert Program.from_dict(program.to_dict()).instructions == program.instructions
    return program, sizes


SEED = SEEDS.start
FEW = 200
CHOSEN = [(name, MODES[(k + SEED) % len(MODES)], axes) for k, name in enumerate(CASES) for axes in AXES]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "mode", "axes"), CHOSEN)
def test_random_programs_with_owners(name: str, mode: str, axes: str) -> None:
    """In one program on padded shards, and in stages on exact ones: but in a thorough run not in hundreds of them, each
    of which compiles for each shape."""
    fn, make = CASES[name]
    args = make()
    traced = trace(fn, args)
    program, sizes = drawn(traced, AXES[axes], SEED, mode)
    want, mesh = jax.jit(fn)(*args), mesh_of(prod(n for _, n in AXES[axes]))
    assert_close(run(Lowered(traced.graph, program, sizes, mesh, options=SENT), args), want)
    if len(program.instructions) > FEW and not THOROUGH:
        return
    staged = Staged(traced.graph, program, sizes, mesh, donate=False)
    stored = staged([s.put(x, copy=True) for s, x in zip(staged.inputs, jax.tree.leaves(args), strict=True)])
    assert_close([x if s is None else s.fetch(x) for s, x in zip(staged.outputs, stored, strict=True)], want)


def halved(x: Any) -> Any:
    return x * 0.5


X = np.arange(12, dtype=np.float32).reshape(6, 2)


def at(owner: int) -> tuple[Traced, Program]:
    """Summed up on one device, which multiplies, and sends what it has to all."""
    traced = trace(halved, (X,))
    graph = replace(traced.graph, carry=())
    (x,), (op,) = graph.inputs, graph.ops
    (y,) = op.results
    factors = FactorTable(graph)[0]
    assert factors.owned is not None
    steps = (
        Convert(x, 0, (R,), (P("sum"),)),
        Convert(x, 0, (P("sum"),), (O(owner),)),
        Compute(0, factors.owned_by((factors.owned,), owner)),
        Convert(y, 0, (O(owner),), (R,)),
    )
    return replace(traced, graph=graph), Program((("hap", 4),), {x: (R,)}, steps, ((R,),))


@pytest.mark.parametrize("owner", range(4))
def test_one_device_computes_for_all(owner: int) -> None:
    traced, program = at(owner)
    classes = Classes.build(traced.graph, program)
    sizes = Sizes(traced.graph, classes, tuple(classes.owned[c.index] for c in classes.all))
    check(traced.graph, program, sizes)
    assert program.collectives() == {"broadcast": 1, "reduce": 1}
    assert f"O({owner})" in program.text(traced.graph)
    lowered = Lowered(traced.graph, program, sizes, mesh_of(4), options=SENT)
    assert_close(run(lowered, (X,)), (X * 0.5,))
    text = lowered.lower().as_text()
    # Two rounds up and two down.
    assert text.count("stablehlo.collective_permute") == 4
    assert "all_reduce" not in text


def test_it_is_lowered_where_types_are_not_promoted() -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        traced, program = at(1)
        classes = Classes.build(traced.graph, program)
        sizes = Sizes(traced.graph, classes, tuple(classes.owned[c.index] for c in classes.all))
        Lowered(traced.graph, program, sizes, mesh_of(4), options=SENT).lower()


def test_nothing_empty_has_an_owner() -> None:
    """Whose part is the first dimension."""
    owned = lambda x: FactorTable(trace(halved, (x,)).graph)[0].owned
    assert owned(X[:0]) is None
    assert owned(X[:, :0]) == owned(X)


def test_what_is_no_program_with_owners_is_refused() -> None:
    traced, program = at(1)
    graph, (_, up, compute, down) = traced.graph, program.instructions
    assert isinstance(up, Convert)
    assert isinstance(compute, Compute)
    assert isinstance(down, Convert)
    (t,) = compute.triples
    mutants: dict[int, list[Any]] = {
        1: [up._replace(target=(O(4),)), up._replace(target=(O(2),)), up._replace(source=(R,), by="reduce")],
        2: [
            compute._replace(triples=(t.along(O(2).way),)),
            compute._replace(triples=(t.along(0),)),
            compute._replace(triples=(t._replace(results=(O(2),)),)),
            compute._replace(triples=(t._replace(results=(R,)),)),
            compute._replace(triples=(t._replace(operands=(R, R)),)),
        ],
        3: [down._replace(source=(O(2),)), down._replace(target=(S(0),)), down._replace(by="all_gather")],
    }
    for place, instead in mutants.items():
        for mutant in instead:
            steps = [*program.instructions]
            steps[place] = mutant
            with pytest.raises(ProgramError):
                check(graph, replace(program, instructions=tuple(steps)))
    classes = Classes.build(graph, program)
    for shares in ((1, 0, 0, 0), (0, 1, 1, 0), (0, 0, 0, 0)):
        with pytest.raises(ProgramError, match=r"class .* (is owned by|has 1 units)"):
            check(graph, program, Sizes(graph, classes, (shares,) * len(classes.all)))
