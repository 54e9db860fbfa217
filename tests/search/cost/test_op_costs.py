"""What an op is taken to compute and to move, before any device."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.cluster.device_kinds import known_kinds
from hapsynth.graph.trace import trace
from hapsynth.search.cost.model import CostModel
from hapsynth.search.planning.task import Task

A100 = known_kinds()["A100-40GB"]
LEFT, RIGHT = np.ones((64, 32), np.float32), np.ones((32, 16), np.float32)
TABLE, ROWS = np.ones((5000, 64), np.float32), np.arange(8)
ROW = 64 * 4


def costs_of(fn: Callable[..., Any], *args: Any) -> CostModel:
    return Task(trace(fn, args).graph, Cluster("one", (A100,), (0,), Link(1e9, 1e-6))).costs


def moved(fn: Callable[..., Any], *args: Any) -> dict[str, float]:
    """Bytes that each op reads and writes uncut."""
    costs = costs_of(fn, *args)
    works = {op.name: costs.work(op.index, costs.table[op.index].joint(1)[0]) for op in costs.graph.ops}
    return {name: sum(nbytes for _, nbytes in work.moved) for name, work in works.items()}


@pytest.mark.parametrize(
    ("precision", "ordinary"),
    [(None, False), ("high", False), ("highest", True), (("default", "highest"), True), ("F32_F32_F32", True)],
)
def test_contractions_of_full_precision_take_the_ordinary_cores(precision: Any, *, ordinary: bool) -> None:
    both = costs_of(lambda a, b: (lax.dot(a, b), lax.dot(a, b, precision=precision)), LEFT, RIGHT)
    seconds = [float(both.speeds("", "float32", ordinary=w.ordinary).seconds(np.array([1e9]))[0]) for w in dots(both)]
    assert seconds[1] / seconds[0] == pytest.approx(156 / 19.5 if ordinary else 1)
    # Devices are compared by what they take over these very contractions.
    one = costs_of(lambda a, b: lax.dot(a, b, precision=precision), LEFT, RIGHT)
    assert one.speed[0] == pytest.approx(0.5 * (19.5e12 if ordinary else 156e12))


def dots(costs: CostModel) -> list[Any]:
    found = [op for op in costs.graph.ops if op.name == "dot_general"]
    return [costs.work(op.index, costs.table[op.index].joint(1)[0]) for op in found]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_contractions_take_tensor_cores_at_any_precision(dtype: Any) -> None:
    fn = lambda a, b: lax.dot(a, b, precision="highest")
    assert costs_of(fn, LEFT.astype(dtype), RIGHT.astype(dtype)).speed[0] == pytest.approx(0.5 * 312e12)


def test_other_ops_take_the_ordinary_cores_whatever_their_dtype() -> None:
    costs = costs_of(lambda x: (jnp.tanh(x), x @ x.T), LEFT.astype(jnp.bfloat16))
    works = [costs.work(op.index, costs.table[op.index].joint(1)[0]) for op in costs.graph.ops]
    ordinary = {op.name: work.ordinary for op, work in zip(costs.graph.ops, works, strict=True)}
    assert (ordinary["tanh"], ordinary["dot_general"]) == (True, False)


def test_complex_products_are_four_real_ones() -> None:
    flops = lambda dtype: dots(costs_of(lax.dot, LEFT.astype(dtype), RIGHT.astype(dtype)))[0].flops
    assert flops(np.complex64) == 4 * flops(np.float32)


@pytest.mark.parametrize(
    "read",
    [lambda table, rows: table[:8], lambda table, rows: lax.dynamic_slice_in_dim(table, rows[0], 8)],
)
def test_of_an_operand_that_is_sliced_only_the_slice_is_read(read: Callable[..., Any]) -> None:
    assert max(moved(read, TABLE, ROWS).values()) <= 2 * 8 * ROW + 8


def test_of_a_table_only_the_rows_are_read() -> None:
    assert moved(lambda table, rows: table[rows], TABLE, ROWS)["gather"] == 2 * 8 * ROW + 8 * 4
    # Rows that come again are in the cache.
    many = np.zeros(50_000, np.int32)
    assert moved(lambda table, rows: table[rows], TABLE, many)["gather"] == TABLE.nbytes + 50_000 * (ROW + 4)


def test_updates_are_written_in_place_where_nothing_else_reads_what_was_there() -> None:
    at = lambda table, row, i: lax.dynamic_update_slice(table, row, (i, 0))
    row = np.ones((1, 64), np.float32)
    donated = costs_of(lambda cache, row, i: (at(cache, row, i), row), TABLE, row, 3)
    assert sum(size for _, size in update_of(donated).moved) == 2 * ROW
    # Read besides: it is copied.
    both = costs_of(lambda cache, row, i: (at(cache, row, i), cache.sum()), TABLE, row, 3)
    assert sum(size for _, size in update_of(both).moved) == 2 * TABLE.nbytes + ROW
    added = moved(lambda table, rows, x: (table * 2).at[rows].add(x), TABLE, ROWS, np.ones((8, 64), np.float32))
    assert added["scatter-add"] == 3 * 8 * ROW + 8 * 4


@pytest.mark.parametrize(
    "fn",
    [
        lambda cache, i: (cache, cache.at[i].set(jnp.zeros(64))),
        lambda cache, i: lax.scan(lambda n, _: (n + 1, cache.at[n].set(jnp.zeros(64)).sum()), i, None, length=2)[1],
        lambda cache, i: cache.at[i].set(jnp.zeros(64)).sum(),
    ],
    ids=["it is a result", "it is from outside a loop", "it is an argument that is kept"],
)
def test_what_is_needed_later_is_copied(fn: Callable[..., Any]) -> None:
    assert moved(fn, TABLE, np.int32(3))["scatter"] > 2 * TABLE.nbytes


def test_a_literal_is_written_too() -> None:
    """JAX makes one of a scalar."""
    assert moved(lambda state, i: state.at[i].add(1.0), np.zeros(5000, np.float32), np.int32(3))["scatter-add"] < 64


def update_of(costs: CostModel) -> Any:
    (op,) = (op for op in costs.graph.ops if op.name == "dynamic_update_slice")
    return costs.work(op.index, costs.table[op.index].joint(1)[0])
