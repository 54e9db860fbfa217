"""XLA folds dynamic slices of dynamic slices without clamping (openxla/xla#49121): shards must not fall to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from lowered_programs import run
from slow_devices import first_devices

from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import R, S
from hapsynth.instructions.program.checker import check
from hapsynth.instructions.program.program import Compute, Convert, Instruction, Program
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.lower import Lowered

X = np.arange(8, dtype=np.float32)
AT = np.array([3, 9, 0, 5])
"""One index a device."""


ALONG = lax.ScatterDimensionNumbers((0,), (), (0,))


def window(x: jax.Array, i: Any) -> jax.Array:
    return lax.dynamic_slice(x, (i,), (6,), allow_negative_indices=False)


def updated(x: jax.Array, update: jax.Array, i: Any) -> jax.Array:
    return lax.dynamic_update_slice(x, update, (i,), allow_negative_indices=False)


WIDE = np.arange(24, dtype=np.float32).reshape(3, 8)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "one update": (lambda x, i: x.at[i].set(-1.0), (X, np.array([1]))),
    "one update at the last": (lambda x, i: x.at[i].add(5.0, mode="drop"), (X, np.array([7]))),
    "a window taken too far": (lambda x, i: lax.dynamic_slice(x, (i,), (6,)), (X, 5)),
    "a window reversed twice": (lambda x, i: window(x, i)[::-1][::-1], (X, 5)),
    "a window updated and put back": (
        lambda x, i: updated(x, updated(window(x, i), -x[:2], i), i),
        (X, 3),
    ),
    "a window reshaped": (lambda x, i: lax.dynamic_slice(x, (i,), (6,)).reshape(6, 1).T, (X, 5)),
    "a whole dimension from beyond": (lambda x, i: lax.dynamic_slice(x, (i, i), (2, 8)), (WIDE, 3)),
    "a whole dimension updated from beyond": (
        lambda x, i: lax.dynamic_update_slice(x, -x[:2], (i, i)),
        (WIDE, 3),
    ),
    "one each of a window": (lambda x, i, at: jnp.take(window(x, i), at, mode="clip"), (X, 5, AT)),
    "one each of a window, or nothing": (lambda x, i, at: window(x, i).at[at].get(mode="fill"), (X, 5, AT)),
    "one each of a window that is not too far": (lambda x, i, at: jnp.take(window(x, i), at, mode="clip"), (X, 1, AT)),
    "a window each": (lambda x, i, at: jax.vmap(lambda j: window(x, j)[i])(at), (X, 1, AT)),
    "an update each of a window": (
        lambda x, i, at: jax.vmap(lambda j: lax.scatter_max(window(x, i), j, -x[:2], ALONG))(at[:, None]),
        (X, 1, AT),
    ),
    "one gathered": (lambda x, i: jnp.take(x, i, axis=1, mode="clip"), (WIDE, np.array([9]))),
}


def cut_program(fn: Callable[..., Any], args: Any, n: int) -> Any:
    """Everything comes whole, is cut where it is used along the last dimension that can be, and ends as it lies."""
    graph = trace(fn, args, carry=[]).graph
    table = FactorTable(graph)
    inputs = dict.fromkeys(graph.sources, (R,))
    held = {v: {R} for v in graph.sources}
    instructions: list[Instruction] = []

    def want(value: int, target: Any) -> None:
        if target in held[value]:
            return
        for source in sorted(held[value]):
            if source != R:
                instructions.append(Convert(value, 0, (source,), (R,)))
                held[value].add(R)
        if target != R:
            instructions.append(Convert(value, 0, (R,), (target,)))
            held[value].add(target)

    for op in graph.ops:
        fits = lambda t: not any(p.is_partial for p in (*t.operands, *t.results)) and t.factor is not None
        triple = next((t for t in reversed(table[op.index].triples) if fits(t)), table[op.index].triples[0])
        for position, v in op.value_operands:
            want(v, triple.operands[position])
        instructions.append(Compute(op.index, (triple,)))
        for v, p in zip(op.results, triple.results, strict=True):
            held[v] = {p}
    outputs: list[Any] = []
    for v in graph.outputs:
        assert isinstance(v, int)
        shape = graph.values[v].shape
        target = S(len(shape) - 1)
        want(v, target)
        outputs.append((target,))
    program = Program((("hap", n),), inputs, tuple(instructions), tuple(outputs))
    classes = Classes.build(graph, program, table)
    shares = [tuple(np.bincount(np.arange(c.units) * n // c.units, minlength=n).tolist()) for c in classes.all]
    sizes = Sizes(graph, classes, tuple(shares))
    check(graph, program, sizes)
    return Lowered(graph, program, sizes, first_devices(n))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_shards_are_cut_where_they_should(name: str, n: int) -> None:
    fn, args = CASES[name]
    (got,) = run(cut_program(fn, args, n), args)
    with jax.disable_jit():
        np.testing.assert_array_equal(got, np.asarray(fn(*map(jnp.asarray, args))))


@pytest.mark.parametrize("n", [2, 4])
def test_pieces_of_a_window_are_cut_where_they_should(n: int) -> None:
    """Of what was taken too far, for an all-to-all in rounds."""
    args = np.arange(80, dtype=np.float32).reshape(10, 8), np.int32(9)
    fn = lambda x, i: lax.dynamic_slice(x, (i, 0), (8, 8), allow_negative_indices=False)
    graph = trace(fn, args, carry=[]).graph
    table, (x, i), (op,), (out,) = FactorTable(graph), graph.inputs, graph.ops, graph.outputs
    triple = next(t for t in table[op.index].triples if t.results == (S(1),))
    instructions = Compute(op.index, (triple,)), Convert(out, 0, (S(1),), (S(0),), by="pairwise_all_to_all")
    program = Program((("hap", n),), {x: (S(1),), i: (R,)}, instructions, ((S(0),),))
    classes = Classes.build(graph, program, table)
    sizes = Sizes(graph, classes, ((8 // n,) * n,) * len(classes.all))
    check(graph, program, sizes)
    (got,) = run(Lowered(graph, program, sizes, first_devices(n)), args)
    np.testing.assert_array_equal(got, args[0][2:])
