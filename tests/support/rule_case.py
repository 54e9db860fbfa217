"""A case to try rules on, a function of small arrays that is traced to ops; and the arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hapsynth.graph.ir import Boundary, Graph, Literal, Op
from hapsynth.graph.trace import trace
from hapsynth.instructions.rules.registry import bind


@dataclass(frozen=True)
class Case:
    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]

    @functools.cached_property
    def graph(self) -> Graph:
        return trace(self.fn, self.args).graph

    def ops(self) -> list[tuple[Op, list[Any]]]:
        """Every op with its operands' values, but for boundaries of regions and what lies behind them
        (`control_cases.py` has those)."""
        graph = self.graph
        known = {*graph.inputs, *graph.constants}
        tried: list[Op] = []
        for op in graph.ops:
            if not isinstance(op.primitive, Boundary) and all(
                isinstance(o, Literal) or o in known for o in op.operands
            ):
                tried.append(op)
                known.update(op.results)

        def run(inputs: Any) -> list[list[Any]]:
            env: dict[int, Any] = dict(zip(graph.inputs, inputs)) | dict(graph.constants)
            found: list[list[Any]] = []
            for op in tried:
                read = [jnp.asarray(o.value, o.dtype) if isinstance(o, Literal) else env[o] for o in op.operands]
                found.append(read)
                env.update(zip(op.results, bind(op.primitive, read, op.params)))
            return found

        if all(o in graph.inputs or isinstance(o, Literal) for op in tried for o in op.operands):
            env = dict(zip(graph.inputs, self.args))
            return [(op, [o.value if isinstance(o, Literal) else env[o] for o in op.operands]) for op in tried]
        return list(zip(tried, jax.device_get(jax.jit(run)(self.args))))


CASES: list[Case] = []


def case(name: str, fn: Callable[..., Any], *args: Any) -> None:
    CASES.append(Case(name, fn, args))


def ints(*shape: int, dtype: Any = np.float32, low: int = -4, high: int = 5) -> np.ndarray:
    """Small integers, no two cases alike: sums of them are exact in every type."""
    if np.dtype(dtype).kind == "u":
        low = max(low, 0)
    rng = np.random.default_rng([len(CASES), *shape])
    return rng.integers(low, high, shape).astype(dtype)


def floats(*shape: int, low: float = 0.1, high: float = 0.9, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng([len(CASES), *shape]).uniform(low, high, shape).astype(dtype)


def distinct(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng([len(CASES), *shape])
    return rng.permutation(int(np.prod(shape))).reshape(shape).astype(dtype)


def bools(*shape: int) -> np.ndarray:
    return ints(*shape) > 0


bf16 = jnp.bfloat16.dtype
i8, i32, u8, u32, f32, f16 = np.int8, np.int32, np.uint8, np.uint32, np.float32, np.float16
