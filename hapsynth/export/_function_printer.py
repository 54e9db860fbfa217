"""A jaxpr as the text of a Python function: a line per equation, functions of their own for loops and branches."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from hapsynth import _jax
from hapsynth.export._equation_printer import Ops
from hapsynth.export._literals import scalar, text
from hapsynth.export._names import MARK, Scope

Atoms = dict[Any, str]
"""Variable of a jaxpr -> its text."""

WIDTH = 120
_PARTS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[][(){}]|, """)
"""Of a line: its strings, brackets, and commas between."""


class Writer:
    """Writes functions. `tables` are the arrays that they use, by name, for the module to hold."""

    def __init__(self, axes: Sequence[tuple[str, int]], reserved: Sequence[str]) -> None:
        self.ops = Ops(axes)
        self.module = Scope(reserved)
        self.tables: dict[str, Any] = {}
        self._known: dict[object, str] = {}
        self.lines: list[str] = []
        self.depth = 0

    def line(self, written: str, comment: str = "") -> None:
        self.lines += _wrapped("    " * self.depth + written)
        if comment:
            # Names are the user's, and may have line breaks.
            self.lines[-1] += f"  # {' '.join(comment.splitlines())}"

    def table(self, value: Any, wanted: str = "TABLE") -> str:
        """The name of an array that does not depend on the arguments."""
        is_key = _jax.is_extended(value.dtype)
        host = value if is_key else np.asarray(value)
        data = np.asarray(jax.random.key_data(value)) if is_key else host
        alike = str(host.dtype), data.shape, data.tobytes()
        if alike not in self._known:
            self._known[alike] = self.module.new(wanted)
            self.tables[self._known[alike]] = host
        return self._known[alike]

    # ---- functions

    def steps(self, jaxpr: Any, env: Atoms, scope: Scope, marks: dict[Any, Any] | None = None) -> list[str]:
        """Write a jaxpr's equations, its inputs being in `env`; the texts of its outputs."""
        marks = dict(marks or {})
        for eqn in jaxpr.eqns:
            if eqn.primitive is MARK and not _jax.is_literal(eqn.invars[0]):
                marks.setdefault(eqn.invars[0], eqn.params)
        for eqn in jaxpr.eqns:
            self.equation(eqn, env, scope, marks)
        return [self.atom(a, env) for a in jaxpr.outvars]

    def atom(self, atom: Any, env: Atoms) -> str:
        return scalar(atom.val, atom.aval.dtype) if _jax.is_literal(atom) else env[atom]

    def equation(self, eqn: Any, env: Atoms, scope: Scope, marks: dict[Any, Any]) -> None:
        if eqn.primitive is MARK:
            env[eqn.outvars[0]] = self.atom(eqn.invars[0], env)
            return
        if eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype:
            # Only of weak types, which no value depends on.
            env[eqn.outvars[0]] = self.atom(eqn.invars[0], env)
            if eqn.outvars[0] in marks and not _jax.is_literal(eqn.invars[0]):
                marks.setdefault(eqn.invars[0], marks[eqn.outvars[0]])
            return
        called = _jax.called_jaxpr(eqn) or (eqn.params["call"] if eqn.primitive.name == "custom_partitioning" else None)
        if called is not None:
            opened, consts = _jax.open_jaxpr(called)
            inner: Atoms = dict(zip(getattr(opened, "constvars", ()), map(self.table, consts)))
            inner |= dict(zip(opened.invars, (self.atom(a, env) for a in _jax.called_operands(eqn, eqn.invars))))
            wanted = {o: marks[v] for v, o in zip(eqn.outvars, opened.outvars) if v in marks and not _jax.is_literal(o)}
            env.update(zip(eqn.outvars, self.steps(opened, inner, scope, wanted)))
            return
        control = _OTHERS.get(eqn.primitive.name)
        if control is not None:
            text = control(self, eqn, env, scope)
        else:
            source = next((marks[v]["source"] for v in eqn.outvars if v in marks), "")
            text = self.ops.write(eqn, ["" if _jax.is_literal(a) else env[a] for a in eqn.invars], source)
        self.assign(eqn, text, env, scope, marks)

    def assign(self, eqn: Any, text: str, env: Atoms, scope: Scope, marks: dict[Any, Any]) -> None:
        """Give the results of an equation their names, and say of the marked ones how they lie."""
        names, comments = list[str](), list[str]()
        unmarked = f"{eqn.params['axis_name']}_index" if eqn.primitive.name == "axis_index" else "t"
        for v in eqn.outvars:
            mark = marks.get(v, {"name": unmarked, "layout": "", "source": ""})
            names.append(scope.new(mark["name"], mark["layout"]))
            env[v] = names[-1]
            if v in marks:
                comments.append(f"{shape_of(v.aval)} {mark['layout']}{'  ' + mark['source'] if mark['source'] else ''}")
        comment = "; ".join(dict.fromkeys(comments)) if len(comments) < 5 else ""
        target = ", ".join(names) if len(names) != 1 else names[0]
        self.line(f"{target} = {text}" if names else text, comment)

    def function(self, wanted: str, parameters: Sequence[str], scope: Scope) -> tuple[str, Scope]:
        name = scope.new(wanted)
        self.line(f"def {name}({', '.join(parameters)}):")
        self.depth += 1
        return name, scope.inner()

    def end(self, returned: str) -> None:
        self.line(f"return {returned}")
        self.depth -= 1

    # ---- control flow; a body sees the names around it

    def cond(self, eqn: Any, env: Atoms, scope: Scope) -> str:
        number, *rest = eqn.invars
        branches: list[str] = []
        for n, branch in enumerate(eqn.params["branches"]):
            name, inside = self.function(f"branch{n}", (), scope)
            opened, bound = self.bound(branch, [self.atom(a, env) for a in rest])
            self.end(_tuple(self.steps(opened, bound, inside)))
            branches.append(name)
        text = f"lax.switch({self.atom(number, env)}, [{', '.join(branches)}])"
        return text if len(eqn.outvars) != 1 else f"{text}[0]"

    def scan(self, eqn: Any, env: Atoms, scope: Scope) -> str:
        consts, carried = _jax.scan_counts(eqn)
        operands = [self.atom(a, env) for a in eqn.invars]
        opened, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
        name, inside = self.function("trip", ("carried", "parts"), scope)
        bound = self.unpacked(opened.invars[consts:][:carried], "carried", inside)
        bound |= self.unpacked(opened.invars[consts + carried :], "parts", inside)
        opened, bound = self.bound(eqn.params["jaxpr"], operands[:consts], bound)
        out = self.steps(opened, bound, inside)
        self.end(f"{_tuple(out[:carried])}, {_tuple(out[carried:])}")
        initial, xs = _tuple(operands[consts:][:carried]), _tuple(operands[consts + carried :])
        usual = {"reverse": False, "unroll": 1}
        more = "".join(f", {k}={eqn.params[k]}" for k, value in usual.items() if eqn.params[k] != value)
        targets = scope.new("final"), scope.new("stacked")
        self.line(f"{', '.join(targets)} = lax.scan({name}, {initial}, {xs}, length={eqn.params['length']}{more})")
        parts = [f"*{x}" for x, n in zip(targets, (carried, len(eqn.outvars) - carried)) if n]
        return f"({', '.join(parts)},)" + ("[0]" if len(eqn.outvars) == 1 else "")

    def loop(self, eqn: Any, env: Atoms, scope: Scope) -> str:
        operands = [self.atom(a, env) for a in eqn.invars]
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        names: list[str] = []
        for wanted, jaxpr, seen in (
            ("goes_on", eqn.params["cond_jaxpr"], operands[:n]),
            ("trip", eqn.params["body_jaxpr"], operands[n : n + m]),
        ):
            name, inside = self.function(wanted, ("carried",), scope)
            opened, _ = _jax.open_jaxpr(jaxpr)
            bound = self.unpacked(opened.invars[len(seen) :], "carried", inside)
            opened, bound = self.bound(jaxpr, seen, bound)
            out = self.steps(opened, bound, inside)
            self.end(out[0] if wanted == "goes_on" else _tuple(out))
            names.append(name)
        text = f"lax.while_loop({', '.join(names)}, {_tuple(operands[n + m :])})"
        return text if len(eqn.outvars) != 1 else f"{text}[0]"

    def reduce(self, eqn: Any, env: Atoms, scope: Scope) -> str:
        """A reduction by any function of two scalars, or of two tuples of them."""
        p, operands = eqn.params, [self.atom(a, env) for a in eqn.invars]
        half = len(operands) // 2
        opened, consts = _jax.open_jaxpr(p["jaxpr"])
        inside_of = scope.inner()
        names = [inside_of.new(f"{side}{n}") for side in "xy" for n in range(half)]
        whole = (names[0], names[1]) if half == 1 else (_tuple(names[:half]), _tuple(names[half:]))
        name, inside = self.function("combined", ("x", "y"), scope)
        inside.taken.update((*names, "x", "y"))
        self.line(f"{', '.join(whole)} = x, y")
        bound: Atoms = dict(zip(getattr(opened, "constvars", ()), map(self.table, (*consts, *p.get("consts", ())))))
        out = self.steps(opened, bound | dict(zip(opened.invars, names)), inside)
        self.end(out[0] if half == 1 else _tuple(out))
        xs, initial = (operands[0], operands[1]) if half == 1 else (_tuple(operands[:half]), _tuple(operands[half:]))
        if eqn.primitive.name == "reduce":
            return f"lax.reduce({xs}, {initial}, {name}, {text(p['dimensions'])})"
        keys = ("window_dimensions", "window_strides", "padding", "base_dilation", "window_dilation")
        return f"lax.reduce_window({xs}, {initial}, {name}, {', '.join(text(p[k]) for k in keys)})"

    def platform(self, eqn: Any, env: Atoms, scope: Scope) -> str:
        """The number of the first group of platforms that the devices' is in."""
        groups = enumerate(eqn.params["platforms"])
        cases = [f"{name}=lambda: jnp.int32({n})" for n, group in groups for name in group or ("default",)]
        return f"lax.platform_dependent({', '.join(cases)})"

    def empty(self, eqn: Any, env: Atoms, scope: Scope) -> str:
        """A number that nothing depends on, which JAX takes to be 0 as well."""
        return scalar(0, eqn.outvars[0].aval.dtype)

    def bound(self, jaxpr: Any, operands: Sequence[str], own: Atoms | None = None) -> tuple[Any, Atoms]:
        """The jaxpr of a body and its inputs' texts: those given from around it, its own."""
        opened, consts = _jax.open_jaxpr(jaxpr)
        env: Atoms = dict(zip(getattr(opened, "constvars", ()), map(self.table, consts)))
        return opened, {**env, **dict(zip(opened.invars, operands)), **(own or {})}

    def unpacked(self, variables: Sequence[Any], source: str, scope: Scope) -> Atoms:
        """Names for the members of a tuple that a body takes."""
        scope.taken.add(source)
        names = [scope.new(f"{source[0]}{n}") for n in range(len(variables))]
        if names:
            shapes = dict.fromkeys(shape_of(v.aval) for v in variables)
            self.line(f"{_tuple(names)[1:-1]} = {source}", "; ".join(shapes))
        return dict(zip(variables, names))


_OTHERS: dict[str, Callable[[Writer, Any, Atoms, Scope], str]] = {
    "cond": Writer.cond,
    "empty2": Writer.empty,
    "platform_index": Writer.platform,
    "reduce": Writer.reduce,
    "reduce_window": Writer.reduce,
    "scan": Writer.scan,
    "while": Writer.loop,
}
"""Primitives that take functions, which are written out, and those that a trace does not give again."""


def _tuple(members: Sequence[str]) -> str:
    return f"({', '.join(members)}{',' if len(members) == 1 else ''})"


def shape_of(aval: Any) -> str:
    """`f32[256, 512]`"""
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int32": "i32"}
    return f"{short.get(str(aval.dtype), str(aval.dtype))}{list(aval.shape)}"


def _wrapped(line: str) -> list[str]:
    """A line, broken inside its brackets, and in no string, where it is too long."""
    if len(line) <= WIDTH:
        return [line]
    breaks, depth = list[int](), 0
    for part in _PARTS.finditer(line):
        depth += (part[0] in "([{") - (part[0] in ")]}")
        if part[0] == ", " and depth:
            breaks.append(part.end())
    out, rest, at = list[str](), line, 0
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    while len(rest) > WIDTH:
        # What begins at `at` of the line is `rest`, after its indent.
        shift = at - (len(indent) if out else 0)
        n = bisect_left(breaks, shift + WIDTH - 3) - 1
        if n < 0 or breaks[n] <= at:
            break
        out.append(rest[: breaks[n] - shift - 1])
        at = breaks[n]
        rest = indent + line[at:]
    return [*out, rest]
