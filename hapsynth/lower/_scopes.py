"""The user's names and lines in what is compiled: profilers show `mlp/hap/dot_general_3`, made at train.py:40."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

import jax

from hapsynth import _jax
from hapsynth.graph.ir import Graph, Op
from hapsynth.instructions.program.program import Convert


@contextmanager
def scope_of(op: Op | None, what: str) -> Generator[None]:
    """What is traced inside is `what` of an op: named after the user's scopes, then `hap`, with the user's lines."""
    name = "/".join(filter(None, ("" if op is None else op.scope, "hap", what)))
    with _jax.made_at(None if op is None else op.traceback), jax.named_scope(name):
        yield


def scope_of_step(graph: Graph, step: Convert) -> AbstractContextManager[None]:
    """The same of a step between layouts, as part of the op that makes what it moves, or else uses it."""
    return scope_of(graph.op_behind(step.value), f"{step.step}_{graph.values[step.value].name}")
