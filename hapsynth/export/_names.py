"""Names in a program's text: of tensors, which the lowering marks as it makes them, and of all else."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from typing import Any

import jax.extend.core as jex

from hapsynth.graph.ir import Graph
from hapsynth.instructions.layout import format_layout
from hapsynth.instructions.program.program import Property

MARK = jex.Primitive("hapsynth_named")
"""Passes a tensor on; its parameters say which one it is."""
MARK.def_abstract_eval(lambda x, **_: x)


def marker(graph: Graph) -> Any:
    """Called by the lowering with a property and its tensor, as it makes it."""

    def mark(p: Property, x: Any) -> Any:
        value, layout = p
        producer = graph.producer.get(value)
        source = "" if producer is None else graph.ops[producer].source
        return MARK.bind(x, name=graph.values[value].name, layout=format_layout(layout), source=source)

    return mark


class Scope:
    """The names that a function of the text may not give again: its own, and those that it sees around it."""

    def __init__(self, seen: Iterable[str] = ()) -> None:
        self.taken = set(seen)

    def inner(self) -> Scope:
        return Scope(self.taken)

    def new(self, wanted: str, layout: str = "") -> str:
        """`wanted`, or where that is taken something like it."""
        base = identifier(wanted)
        name = base
        if self.is_taken(name) and layout:
            name = identifier(f"{base}_{re.sub('[^0-9A-Za-z]+', '_', layout).strip('_')}")
        n = 2
        while self.is_taken(name):
            name, n = f"{base}_{n}", n + 1
        self.taken.add(name)
        return name

    def is_taken(self, name: str) -> bool:
        return name in self.taken or keyword.iskeyword(name) or hasattr(builtins, name)


def identifier(wanted: str) -> str:
    name = re.sub(r"\W+", "_", wanted, flags=re.ASCII).strip("_") or "x"
    return f"x{name}" if name[0].isdigit() else name


def of_path(path: str) -> str:
    """`params_w` of the argument `[0]['params']['w']`."""
    steps = re.findall(r"\w+", path, flags=re.ASCII)
    return "_".join(steps[1:] if len(steps) > 1 else steps) or "x"
