"""A step whose ops are measured by themselves, and how tests name them."""

from typing import Any

import jax
import jax.numpy as jnp

from hapsynth.graph.ir import Graph, Op
from hapsynth.graph.trace import trace
from hapsynth.profile.measured_ops import Ops
from hapsynth.search.analysis.op_signature import described

F32 = jnp.float32


def struct(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def only(fn: Any, *args: Any) -> Op:
    """The only op of a function."""
    (op,) = trace(fn, args).graph.ops
    return op


def step(w: Any, x: Any) -> Any:
    loss = lambda w: jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"])
    value, grad = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, w, grad), value


STEP = {"a": struct(256, 128), "b": struct(128, 64)}, struct(4096, 256)


def named(graph: Graph) -> dict[str, str]:
    """Signatures by the ops' names for a person."""
    return {described(op): s for s, op in Ops(graph).by_signature.items()}
