"""Which elements are read is told by one device for all where devices round differently."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from slow_devices import SPEEDS, first_devices, thin_cluster

import hapsynth
from hapsynth.graph.trace import trace
from hapsynth.instructions.layout import P, R
from hapsynth.instructions.program.program import Compute

ROWS = 8


def argmax(table: Any, scores: Any) -> Any:
    return table[jnp.argmax(scores)]


def top_k(table: Any, scores: Any) -> Any:
    return table[lax.top_k(scores, 2)[1]]


def sort(table: Any, scores: Any) -> Any:
    return table[jnp.argsort(-scores)[:2]]


def one_hot(table: Any, scores: Any) -> Any:
    return jax.nn.one_hot(jnp.argmax(scores), ROWS) @ table


def mask(table: Any, scores: Any) -> Any:
    """The rows whose scores are high, packed to the front."""
    high = scores > 0.5
    return jnp.zeros_like(table).at[jnp.where(high, jnp.cumsum(high) - 1, ROWS)].set(table, mode="drop")


def rounded(table: Any, scores: Any) -> Any:
    return table[jnp.round(scores[0] * (ROWS - 1)).astype(int) * jnp.ones(2, int)]


def in_a_loop(table: Any, scores: Any) -> Any:
    """Each row that is read leads to the next."""

    def step(at: Any, _: Any) -> Any:
        row = table[at]
        return jnp.argmax(scores * (1 + 0 * row[0])), row

    return lax.scan(step, jnp.argmax(scores), None, 3)[1]


def sliced(table: Any, scores: Any) -> Any:
    return lax.dynamic_slice(table, (jnp.argmax(scores), 0), (1, table.shape[1]))


def sorted_along(table: Any, scores: Any) -> Any:
    """The first column in the order of the scores."""
    return lax.sort((scores, table[:, 0]), num_keys=1)[1] @ table


def sorted_by_rounded(table: Any, scores: Any) -> Any:
    """The first column, in reverse where the first score is rounded to 1."""
    places = -jnp.floor(scores[0]).astype(int) * jnp.arange(ROWS)
    return lax.sort((places, table[:, 0]), num_keys=1)[1] @ table


def drawn(table: Any, scores: Any) -> Any:
    """By a key that the scores choose."""
    return table * jax.random.normal(jax.random.fold_in(jax.random.key(0), jnp.argmax(scores)), (ROWS, 8))


def basis(table: Any, scores: Any) -> Any:
    """Rows of one device's basis are none of another's."""
    return jnp.linalg.eigh(jnp.diag(scores), symmetrize_input=False)[1].T @ table


def thirds(table: Any, _: Any) -> Any:
    """Every third is a whole number, or less by a rounding."""
    return table[jnp.floor(jnp.arange(ROWS) / 3).astype(int)]


SELECTING: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "argmax": (argmax, {"argmax"}),
    "top_k": (top_k, {"top_k"}),
    "sort": (sort, {"sort"}),
    "one_hot": (one_hot, {"argmax"}),
    "mask": (mask, {"gt"}),
    "rounded": (rounded, {"convert_element_type"}),
    "in a loop": (in_a_loop, {"argmax"}),
    "sliced": (sliced, {"argmax"}),
    "sorted along": (sorted_along, {"sort"}),
    "sorted by rounded": (sorted_by_rounded, {"convert_element_type"}),
    "drawn": (drawn, {"argmax"}),
    "basis": (basis, {"eigh"}),
    "thirds": (thirds, {"convert_element_type"}),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "relu": lambda table, scores: jax.nn.relu(table) @ jnp.outer(scores, scores),
    "sorted": lambda table, scores: jnp.sort(scores) @ table,
    "given indices": lambda table, scores: table[jnp.arange(3) % 2] * scores,
    "upsampled": lambda table, scores: jax.image.resize(table, (ROWS * 3, 24), "nearest").sum(0)[:8] * scores,
    "sorted integers": lambda table, scores: jnp.sort((scores * 127).astype(int)) * table,
    "quantized": lambda table, scores: (table * 127).astype(jnp.int8).astype(float) @ jnp.outer(scores, scores),
    "finite": lambda table, scores: jnp.where(jnp.isfinite(table).sum() > 3, table, 0.0) * scores,
    "dropout": lambda table, scores: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, table.shape), table, 0.0),
}


def given() -> tuple[jax.Array, jax.Array]:
    table = jnp.arange(1.0, 1 + ROWS * 8).reshape(ROWS, 8)
    return table, jnp.zeros(ROWS).at[0].set(1.0).at[ROWS - 1].set(1.0 - 2**-20)


@pytest.mark.parametrize("name", SELECTING)
def test_selections_are_found(name: str) -> None:
    fn, names = SELECTING[name]
    graph = trace(fn, given()).graph
    assert {graph.ops[op].name for op in graph.selections} == names


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not_select(name: str) -> None:
    assert not trace(OTHERS[name], given()).graph.selections


def decode(token: Any, table: Any, scores: Any) -> Any:
    """The row that the call before selected."""
    return jnp.argmax(scores), table[token]


def plateau(count: Any, x: Any) -> Any:
    """The call before counted what floats tell."""
    x = lax.cond(count > 0, jnp.sin, jnp.cos, x)
    return jnp.where(x.sum() > 3, 0, count + 1), x


def test_through_the_call_before() -> None:
    token, count = np.int32(0), jnp.int32(0)
    for carry, names in (None, {"argmax"}), ((), set[str]()):
        graph = trace(decode, (token, *given()), carry=carry).graph
        assert {graph.ops[op].name for op in graph.selections} == names
    assert trace(plateau, (count, jnp.ones(4))).graph.unsure
    assert not trace(plateau, (count, jnp.ones(4)), carry=()).graph.unsure
    assert not trace(lambda n, x: (n + 1, plateau(n, x)[1]), (count, jnp.ones(4))).graph.unsure


def test_of_a_long_chain() -> None:
    """Longer than Python lets functions call one another."""

    def fn(table: Any, scores: Any) -> Any:
        for _ in range(sys.getrecursionlimit()):
            scores = -scores
        return rounded(table, scores)

    assert trace(fn, given()).graph.selections


def rounded_apart(x: jax.Array) -> jax.Array:
    """A replicated array of which the last device has another highest element."""
    pieces = [np.asarray(s.data) for s in x.addressable_shards]
    pieces[-1] = pieces[-1][::-1]
    arrays = [jax.device_put(p, s.device) for p, s in zip(pieces, x.addressable_shards)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)


@pytest.mark.few(6)
@pytest.mark.parametrize("form", ["switch", "staged"])
@pytest.mark.parametrize("name", SELECTING)
def test_unlike_devices_select_the_same(name: str, form: Any) -> None:
    """Of a table that is cut, by scores that all devices have, each its own."""
    fn, args = SELECTING[name][0], given()
    fixed = {"[0]": "S(0)", "[1]": "R"}
    plan = hapsynth.synthesize(
        fn, args, first_devices(4), cluster=thin_cluster(SPEEDS["3:1"]), fixed=fixed, form=form, carry=()
    )
    table, scores = plan.shard(*args)
    got = np.asarray(plan.unshard(plan(table, rounded_apart(scores))))
    other = fn(args[0], args[1][::-1])
    assert any(np.array_equal(got, want) for want in (fn(*args), other)), got
    assert plan.check(*args).ok


def test_what_the_call_before_selected_is_the_same() -> None:
    args = np.int32(0), *given()
    fixed = {"[0]": "R", "[1]": "S(0)", "[2]": "R"}
    plan = hapsynth.synthesize(decode, args, first_devices(4), cluster=thin_cluster(SPEEDS["3:1"]), fixed=fixed)
    token, table, scores = plan.shard(*args)
    token, _ = plan(token, table, rounded_apart(scores))
    got = np.asarray(plan.unshard(plan(token, table, scores)[1]))
    assert any(np.array_equal(got, args[1][at]) for at in (0, ROWS - 1)), got


def test_like_devices_select_each_for_itself() -> None:
    fixed = {"[0]": "S(0)", "[1]": "R"}
    made: dict[str, set[Any]] = {}
    for speeds in ("equal", "3:1"):
        plan = hapsynth.synthesize(argmax, given(), thin_cluster(SPEEDS[speeds], 1e6), fixed=fixed)
        computes = (i for i in plan.program.instructions if isinstance(i, Compute))
        made[speeds] = {i.result_layout(0) for i in computes if plan.traced.graph.ops[i.op].name == "argmax"}
    assert made == {"equal": {(R,)}, "3:1": {(P("sum"),)}}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SELECTING)
def test_along_one_of_two_axes(name: str) -> None:
    """Hosts are unlike, devices within one alike."""
    fn, names = SELECTING[name]
    cluster = replace(thin_cluster(SPEEDS["3:1"], 1e6), axes=(("host", 2), ("device", 2)))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("host", "device"))
    plan = hapsynth.synthesize(fn, given(), mesh, cluster=cluster, leave_out=False)
    ops = plan.traced.graph.ops
    selecting = [i for i in plan.program.instructions if isinstance(i, Compute) and ops[i.op].name in names]
    assert all(i.result_layout(n)[0] != R for i in selecting for n in range(len(ops[i.op].results)))
    assert plan.check(*given()).ok
