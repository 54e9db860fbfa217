"""Tracing: calls inlined, dead code dropped, carried state found, bad leaves named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hapsynth.graph.trace import TraceError, trace

F32 = jnp.float32


def struct(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def names(traced):
    return [op.name for op in traced.graph.ops]


def test_calls_are_inlined():
    @jax.custom_jvp
    def relu(x):
        return jnp.maximum(x, 0)

    relu.defjvp(lambda p, t: (relu(*p), t[0] * (p[0] > 0)))

    @jax.jit
    def inner(x):
        return jax.jit(jnp.sin)(relu(x))

    assert names(trace(lambda x: inner(x) + 1, (struct(4),))) == ["max", "sin", "add"]


def test_calls_with_a_derivative_of_their_own_are_inlined():
    twice = lambda _, x: 2 * x
    both = lambda x: jax.custom_derivatives.linear_call(twice, twice, 3.0, x)
    assert names(trace(both, (struct(4),))) == ["mul"]
    assert names(trace(jax.vjp(both, jnp.ones(4))[1], (struct(4),))) == ["mul"]

    @jax.custom_vjp
    def sin(x):
        return jnp.sin(x)

    sin.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (g * cos,), optimize_remat=True)
    assert names(trace(lambda x: jax.vjp(sin, x)[0], (struct(4),))) == ["sin"]
    assert sorted(names(trace(lambda x: jax.vjp(sin, x)[1](x), (struct(4),)))) == ["cos", "mul"]


def test_dead_code_is_dropped_and_inputs_are_kept():
    def fn(x, unused):
        jnp.exp(x @ x)
        return x + 1

    traced = trace(fn, (struct(4, 4), struct(3)))
    assert names(traced) == ["add"]
    assert len(traced.graph.inputs) == 2


def test_a_rematerialised_region_stays_apart_from_the_forward_pass():
    def loss(w, x):
        return jax.checkpoint(lambda v: jnp.sin(jnp.sin(v @ w)))(x).sum()

    traced = trace(jax.grad(loss), (struct(4, 4), struct(8, 4)))
    assert "optimization_barrier" in names(traced)
    assert names(traced).count("dot_general") == 2  # forward again, and the gradient's


def test_collectives_over_an_axis_of_vmap_are_reductions():
    def centred(x, y):
        return jax.vmap(lambda a, b: (a - lax.pmean(a, "i"), lax.pmax(b, "i")), axis_name="i")(x, y)

    assert names(trace(centred, (struct(5, 3), struct(5)))) == [
        *("reduce_sum", "div", "broadcast_in_dim", "sub"),
        *("reduce_max", "broadcast_in_dim"),
    ]
    both = jax.vmap(jax.vmap(lambda a: lax.pmin(a, ("i", "j")), axis_name="i"), axis_name="j")
    reduction = trace(both, (struct(5, 3),)).graph.ops[0]
    assert (reduction.name, reduction.result_shapes) == ("reduce_min", ((),))


def test_every_op_knows_the_line_that_made_it():
    traced = trace(lambda x: jnp.tanh(x) @ x, (struct(4, 4),))
    assert all(op.source.startswith("test_trace.py:") for op in traced.graph.ops)


@pytest.mark.parametrize("seedless", [True, False])
def test_carry_is_found_by_structure(seedless):
    def step(state, batch):
        new = {"w": state["w"] + batch.sum(), "n": state["n"] + 1}
        return (new, batch.mean()) if seedless else (batch.mean(), new)

    state = {"w": struct(3, 2), "n": struct(dtype=jnp.int32)}
    traced = trace(step, (state, struct(8)))
    pairs = {(traced.in_paths[i], traced.out_paths[o]) for i, o in traced.graph.carry}
    out = "[0]" if seedless else "[1]"
    assert pairs == {("[0]['w']", f"{out}['w']"), ("[0]['n']", f"{out}['n']")}


def test_carry_is_found_when_the_state_is_all_that_is_returned():
    traced = trace(lambda s, b: {"w": s["w"] * b, "v": s["v"] + b}, ({"w": struct(3), "v": struct(3)}, struct(3)))
    assert len(traced.graph.carry) == 2


def test_state_is_carried_where_a_leaf_of_it_becomes_a_constant():
    step = lambda state, rate: ({"w": state["w"] * rate, "n": np.int32(0)}, np.float32(0))
    traced = trace(step, ({"w": struct(3), "n": struct(dtype=jnp.int32)}, struct()))
    assert traced.graph.carry == ((0, 0), (1, 1))


class Results(NamedTuple):
    loss: Any
    step: Any
    steps: Any


def test_carry_is_found_among_fields():
    def step(state, batch):
        return Results(batch.sum(), state["w"] * 2, {"w": state["w"] + 1})

    traced = trace(step, ({"w": struct(3)}, struct(8)))
    assert traced.out_paths == (".loss", ".step", ".steps['w']")
    assert traced.graph.carry == ((0, 2),)


def test_a_name_that_begins_another_is_not_tied_with_it():
    state = Results(struct(2), struct(3), struct(3))
    traced = trace(lambda s: Results(s.loss, s.steps, s.step), (state,), carry=[("[0].step", ".steps")])
    assert traced.graph.carry == ((1, 2),)
    with pytest.raises(TraceError, match=r"carry names argument '\[0\]\.ste'"):
        trace(lambda s: s, (state,), carry=[("[0].ste", ".ste")])


def test_carry_given_by_hand():
    traced = trace(lambda a, b: (b, a + 1), (struct(3), struct(3)), carry=[("[0]", "[1]")])
    assert traced.graph.carry == ((0, 1),)
    assert trace(lambda a: a + 1, (struct(3),), carry=[]).graph.carry == ()


def test_constants_are_values_and_functions_are_static():
    table = jnp.arange(1000.0)
    kinds = [np.float32, jnp.float32, np.dtype(np.float32)]
    traced = trace(lambda f, x, kinds: f(x).astype(kinds[0]) + table[:3], (jnp.sin, struct(3), kinds))
    assert len(traced.graph.inputs) == 1
    assert list(traced.static_leaves.values()) == [jnp.sin, *kinds]
    assert [v.shape for v in traced.graph.constants.values()] == [(1000,)]


@dataclass
class State:
    w: Any
    config: Any = None


@dataclass(slots=True)
class Slim:
    inner: Any


class Slimmer(Slim):
    __slots__ = "__own"

    def __init__(self, own: Any = None) -> None:
        self.__own = own


class Lazy(State):
    @property
    def made(self) -> Any:
        raise AssertionError("a property is run")


def test_arrays_in_what_is_no_pytree_are_refused():
    with pytest.raises(TraceError, match=r"argument \[0\] is a State, .* by jax.tree_util.register_dataclass"):
        trace(lambda state, x: (State(state.w - x), x), (State(np.ones(3)), struct(3)))
    with pytest.raises(TraceError, match=r"argument \['state'\] is a Slim, which holds arrays"):
        trace(lambda state: state, (), {"state": Slim([State(struct(3))])})
    with pytest.raises(TraceError, match=r"output \[0\]\['new'\] is a Slim, which holds arrays"):
        trace(lambda x: ({"new": Slim({"w": x})}, x), (struct(3),))
    inherited = Slimmer()
    inherited.inner = struct(3)
    for slim in (inherited, Slimmer(struct(3))):
        with pytest.raises(TraceError, match=r"argument \[0\] is a Slimmer, which holds arrays"):
            trace(lambda state: state, (slim,))
    with pytest.raises(TraceError, match="what the function returns is a State, which holds arrays"):
        trace(lambda x: State(2, State(x)), (struct(3),))
    # Without arrays it is a constant.
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("d",))
    # Shown once, it holds an array of their numbers.
    assert repr(mesh)
    assert mesh.device_ids.size
    given = Lazy(2, [mesh, jax.sharding.NamedSharding(mesh, jax.P())])
    vars(given)["made"] = None
    traced = trace(lambda state, x: (x * state.w, state, State(jnp.tanh, "a")), (given, struct(3)))
    assert traced.static_leaves == {0: given}
    assert traced.out_static_leaves == {1: given, 2: State(jnp.tanh, "a")}


def test_the_fingerprint_follows_the_function():
    one = trace(lambda x: jnp.sin(x) * 2, (struct(3),)).graph.fingerprint
    assert one == trace(lambda x: jnp.sin(x) * 2, (struct(3),)).graph.fingerprint
    assert one != trace(lambda x: jnp.sin(x) * 3, (struct(3),)).graph.fingerprint
    assert one != trace(lambda x: jnp.sin(x) * 2, (struct(4),)).graph.fingerprint
    draw = lambda key: jax.random.uniform(key, (3,))
    with jax.threefry_partitionable(False):
        whole = trace(draw, (jax.random.key(0),)).graph.fingerprint
    assert whole != trace(draw, (jax.random.key(0),)).graph.fingerprint


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda key: jax.random.uniform(key, (3,)), "random_bits"),
        (jax.jit(jax.random.split), "random_split"),
        (lambda key: jax.random.gamma(key, 2.0), "random_gamma"),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_random_numbers_of_another_setting_are_refused(draw, name, inside):
    def fn(key):
        with jax.threefry_partitionable(inside):
            return draw(key)

    now = "on" if not inside else "off"
    with jax.threefry_partitionable(not inside):
        with pytest.raises(TraceError, match=rf"{name} \(test_trace.py:\d+\) .*, where it is {now}: "):
            trace(fn, (jax.random.key(0),))
        assert trace(draw, (jax.random.key(0),)).graph.partitionable is not inside
