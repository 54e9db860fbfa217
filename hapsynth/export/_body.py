"""A jaxpr as the text of a Python function: a line per equation, functions of their own for loops and branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hapsynth import _jax
from hapsynth.export._literals import UnwritableError, array, scalar, text
from hapsynth.export._names import MARK, Scope
from hapsynth.export._ops import Ops

Atoms = dict[Any, str]
"""Variable of a jaxpr -> its text."""

WIDTH = 120


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
            self.lines[-1] += f"  # {comment}"

    def table(self, value: Any, wanted: str = "TABLE") -> str:
        """The name of an array that does not depend on the arguments."""
        host = value if _jax.is_extended(value.dtype) else np.asarray(value)
        key = None if host is value and not isinstance(value, np.ndarray) else (str(host.dtype), host.shape, host.tobytes())
        if key is None or key not in self._known:
            name = self.module.new(wanted if not self.module.is_taken(wanted) else f"{wanted}_{len(self.tables)}")
            self.tables[name] = host
            if key is None:
                return name
            self._known[key] = name
        return self._known[key]

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
        called = _jax.called_jaxpr(eqn) or (eqn.params["call"] if eqn.primitive.name == "custom_partitioning" else None)
        if called is not None:
            opened, consts = _jax.open_jaxpr(called)
            inner: Atoms = dict(zip(getattr(opened, "constvars", ()), map(self.table, consts)))
            inner |= dict(zip(opened.invars, (self.atom(a, env) for a in _jax.called_operands(eqn, eqn.invars))))
            wanted = {o: marks[v] for v, o in zip(eqn.outvars, opened.outvars) if v in marks and not _jax.is_literal(o)}
            env.update(zip(eqn.outvars, self.steps(opened, inner, scope, wanted)))
            return
        control = {"cond": self.cond, "scan": self.scan, "while": self.loop}.get(eqn.primitive.name)
        if control is not None:
            made, source = control(eqn, env, scope), ""
        else:
            source = _jax.source_line(eqn)
            made = self.ops.write(eqn, ["" if _jax.is_literal(a) else env[a] for a in eqn.invars], source)
        unmarked = f"{eqn.params['axis_name']}_index" if eqn.primitive.name == "axis_index" else "t"
        self.assign(eqn.outvars, made, env, scope, marks, unmarked)

    def assign(self, outvars: Sequence[Any], made: str, env: Atoms, scope: Scope, marks: dict[Any, Any], unmarked: str) -> None:
        names, said = list[str](), list[str]()
        for v in outvars:
            mark = marks.get(v, {"name": unmarked, "layout": "", "source": ""})
            names.append(scope.new(mark["name"], mark["layout"]))
            env[v] = names[-1]
            if v in marks:
                said.append(f"{shape_of(v.aval)} {mark['layout']}{'  ' + mark['source'] if mark['source'] else ''}")
        comment = "; ".join(dict.fromkeys(said)) if len(said) < 5 else ""
        target = ", ".join(names) if len(names) != 1 else names[0]
        self.line(f"{target} = {made}" if names else made, comment)

    def function(self, wanted: str, parameters: Sequence[str], scope: Scope) -> tuple[str, Scope]:
        name = scope.new(wanted)
        self.line(f"def {name}({', '.join(parameters)}):")
        self.depth += 1
        return name, scope.inner()

    def end(self, returned: str) -> None:
        self.line(f"return {returned}")
        self.depth -= 1

    # ---- control flow; what a body takes from around it, it sees

    def cond(self, eqn: Any, env: Atoms, scope: Scope) -> str:
        number, *rest = eqn.invars
        branches: list[str] = []
        for n, branch in enumerate(eqn.params["branches"]):
            name, inside = self.function(f"branch{n}", (), scope)
            opened, bound = self.bound(branch, [self.atom(a, env) for a in rest])
            self.end(_tuple(self.steps(opened, bound, inside)))
            branches.append(name)
        made = f"lax.switch({self.atom(number, env)}, [{', '.join(branches)}])"
        return made if len(eqn.outvars) != 1 else f"{made}[0]"

    def scan(self, eqn: Any, env: Atoms, scope: Scope) -> str:
        consts, carried = _jax.scan_counts(eqn)
        given = [self.atom(a, env) for a in eqn.invars]
        opened, _ = _jax.open_jaxpr(eqn.params["jaxpr"])
        name, inside = self.function("trip", ("carried", "parts"), scope)
        bound = self.unpacked(opened.invars[consts:][:carried], "carried", inside)
        bound |= self.unpacked(opened.invars[consts + carried :], "parts", inside)
        opened, bound = self.bound(eqn.params["jaxpr"], given[:consts], bound)
        out = self.steps(opened, bound, inside)
        self.end(f"{_tuple(out[:carried])}, {_tuple(out[carried:])}")
        initial, xs = _tuple(given[consts:][:carried]), _tuple(given[consts + carried :])
        more = "".join(f", {k}={eqn.params[k]}" for k, usual in (("reverse", False), ("unroll", 1)) if eqn.params[k] != usual)
        made = scope.new("final"), scope.new("stacked")
        self.line(f"{', '.join(made)} = lax.scan({name}, {initial}, {xs}, length={eqn.params['length']}{more})")
        parts = [f"*{x}" for x, n in zip(made, (carried, len(eqn.outvars) - carried)) if n]
        return f"({', '.join(parts)},)" + ("[0]" if len(eqn.outvars) == 1 else "")

    def loop(self, eqn: Any, env: Atoms, scope: Scope) -> str:
        given = [self.atom(a, env) for a in eqn.invars]
        n, m = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        names: list[str] = []
        for wanted, jaxpr, seen in (
            ("goes_on", eqn.params["cond_jaxpr"], given[:n]),
            ("trip", eqn.params["body_jaxpr"], given[n : n + m]),
        ):
            name, inside = self.function(wanted, ("carried",), scope)
            opened, _ = _jax.open_jaxpr(jaxpr)
            bound = self.unpacked(opened.invars[len(seen) :], "carried", inside)
            opened, bound = self.bound(jaxpr, seen, bound)
            out = self.steps(opened, bound, inside)
            self.end(out[0] if wanted == "goes_on" else _tuple(out))
            names.append(name)
        made = f"lax.while_loop({', '.join(names)}, {_tuple(given[n + m :])})"
        return made if len(eqn.outvars) != 1 else f"{made}[0]"

    def bound(self, jaxpr: Any, given: Sequence[str], own: Atoms | None = None) -> tuple[Any, Atoms]:
        """The jaxpr of a body and its inputs' texts: what is given of around it, its own."""
        opened, consts = _jax.open_jaxpr(jaxpr)
        env: Atoms = dict(zip(getattr(opened, "constvars", ()), map(self.table, consts)))
        return opened, {**env, **dict(zip(opened.invars, given)), **(own or {})}

    def unpacked(self, variables: Sequence[Any], source: str, scope: Scope) -> Atoms:
        """Names for the members of a tuple that a body takes."""
        scope.taken.add(source)
        names = [scope.new(f"{source[0]}{n}") for n in range(len(variables))]
        if names:
            self.line(f"{_tuple(names)[1:-1]} = {source}", "; ".join(dict.fromkeys(shape_of(v.aval) for v in variables)))
        return dict(zip(variables, names))


def _tuple(members: Sequence[str]) -> str:
    return f"({', '.join(members)}{',' if len(members) == 1 else ''})"


def shape_of(aval: Any) -> str:
    """`f32[256, 512]`"""
    short = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "int32": "i32"}
    return f"{short.get(str(aval.dtype), str(aval.dtype))}{list(aval.shape)}"


def _wrapped(line: str) -> list[str]:
    """A line, broken inside its first brackets where it is too long."""
    if len(line) <= WIDTH or "(" not in line:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    out, rest = list[str](), line
    while len(rest) > WIDTH:
        depth, cut = 0, 0
        for n, char in enumerate(rest[: WIDTH - 4]):
            depth += (char in "([{") - (char in ")]}")
            # Within brackets only, and in no string.
            if char == " " and rest[n - 1] == "," and (depth or out) and rest[:n].count("'") % 2 == 0:
                cut = n
        if cut <= len(indent):
            break
        out.append(rest[:cut])
        rest = indent + rest[cut + 1 :]
    return [*out, rest]
