"""A closed jaxpr as a flat `Graph`: calls inlined, control flow as regions, ops that no output needs dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from hapsynth import _jax
from hapsynth.graph.ir import (
    COND_JOIN,
    LOOP_CARRY,
    LOOP_TEST,
    SCAN_SLICE,
    SCAN_STACK,
    Graph,
    HostCallback,
    Literal,
    Op,
    Operand,
    Region,
    RegionKind,
    Value,
)

# They run on a mesh of their own, which can't be inside hapsynth's.
_DISTRIBUTED = ("pmap", "shard_map", "xla_pmap")
REFUSED = {
    "rng_uniform": "draws from a state that each device has for itself, so that no two agree; use jax.random",
    "after_all": "orders effects by tokens, which are no arrays; remove it",
    "create_token": "orders effects by tokens, which are no arrays; remove it",
}
"""Primitives that have no distributed form, and why."""

OWN: set[str] = set()
"""Names of primitives with a rule that `register_rule` registered: they stay ops, whatever they do inside."""

_OVER_VMAP: dict[str, Any] = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}
"""Collectives over an axis that `vmap` names: its batching leaves the collective, over a dimension of the array."""

TRIPS = 10.0
"""How often a while loop is taken to run where nothing says so."""


class TraceError(ValueError):
    """The function or its example arguments cannot be planned."""


def inline(closed: Any) -> Graph:
    """The graph of a closed jaxpr. Raises TraceError for effects that cannot be distributed."""
    _refuse_effects(closed)
    return _Inliner().run(closed)


def _refuse_effects(jaxpr: Any, inlined: bool = True) -> None:
    """`inlined`: the jaxpr becomes part of the graph, outside of loops and branches."""
    effects = _jax.effects_of(jaxpr, inlined)
    if effects:
        raise TraceError(
            f"the function has effects that cannot be distributed: {', '.join(effects)}; remove them, or keep them "
            "outside the planned function"
        )


def _kept_or_new(alive: Any, old: Any, new: Any) -> Any:
    wide = lax.broadcast_in_dim(alive, old.shape, tuple(range(alive.ndim)))
    return lax.select_n(wide, old, new)


class _Raw(NamedTuple):
    """An op before it is known whether anything needs it; operands and results are keys of `avals`."""

    primitive: Any
    operands: Sequence[Any]
    results: Sequence[int]
    params: dict[str, Any]
    source: str
    scope: str
    region: int
    traceback: Any


class _Inliner:
    def __init__(self) -> None:
        self.raw: list[_Raw] = []
        self.counter = 0
        self.avals: dict[int, Any] = {}
        self.constants: dict[int, Any] = {}
        self.regions: list[Region] = [Region(0, "program", -1, 1.0)]
        self.region = 0
        self.scope, self.traceback = "", None
        """Of the equation that is walked, with those that call it."""
        self.ties: dict[int, Any] = {}
        """Key of a carried value -> its successor in the next iteration."""
        self.shown: list[tuple[Any, list[Any], dict[str, Any], str, str]] = []
        """Prints and debug callbacks: primitive, operands, parameters, source line, scope."""

    def fresh(self, aval: Any) -> int:
        self.counter += 1
        self.avals[self.counter] = aval
        return self.counter

    def run(self, closed: Any) -> Graph:
        jaxpr, consts = _jax.open_jaxpr(closed)
        env: dict[Any, Any] = {}
        inputs = [self.bind_var(env, v) for v in jaxpr.invars]
        self.bind_constants(env, jaxpr, consts)
        outputs = self.tie(self.walk(jaxpr, env, ""))
        return self.finish(inputs, outputs)

    def tie(self, outputs: list[Any]) -> list[Any]:
        """Have what only shows values made on the way to the first output, since nothing else needs it."""
        for primitive, operands, params, source, scope in self.shown:
            arrays = [n for n, o in enumerate(outputs) if isinstance(o, int)]
            at = next((n for n in arrays if not _jax.is_extended(self.avals[outputs[n]].dtype)), None)
            if at is None:
                raise TraceError(f"{primitive.name} ({source}) is in a function that returns no array: return one")
            avals = [self.avals[outputs[at]], _jax.integer_scalar()]
            outputs[at] = self.add(HostCallback(primitive), [outputs[at], *operands], avals, source, params, scope)[0]
        return outputs

    def bind_var(self, env: dict[Any, Any], var: Any) -> int:
        env[var] = self.fresh(var.aval)
        return env[var]

    def bind_constants(self, env: dict[Any, Any], jaxpr: Any, values: Sequence[Any]) -> None:
        """An array that several calls close over is one constant."""
        known = {id(value): n for n, value in self.constants.items()}
        for var, value in zip(getattr(jaxpr, "constvars", ()), values):
            if id(value) in known:
                env[var] = known[id(value)]
            else:
                self.constants[self.bind_var(env, var)] = value

    def read(self, env: dict[Any, Any], atom: Any) -> Any:
        if _jax.is_literal(atom):
            return Literal(atom.val, tuple(atom.aval.shape), atom.aval.dtype)
        return env[atom]

    def add(
        self,
        primitive: Any,
        operands: Sequence[Any],
        avals: Sequence[Any],
        source: str,
        params: dict[str, Any] | None = None,
        scope: str | None = None,
    ) -> list[int]:
        """Append an op of the current region; the keys of its results."""
        results = [self.fresh(a) for a in avals]
        scope = self.scope if scope is None else scope
        self.raw.append(_Raw(primitive, operands, results, params or {}, source, scope, self.region, self.traceback))
        return results

    def walk(self, jaxpr: Any, env: dict[Any, Any], outer: str) -> list[Any]:
        for eqn in jaxpr.eqns:
            operands = [self.read(env, a) for a in eqn.invars]
            source = _jax.source_line(eqn) or outer
            around = self.scope, self.traceback
            self.scope = "/".join(filter(None, (self.scope, _jax.scope_name(eqn))))
            self.traceback = _jax.traceback_of(eqn) or self.traceback
            for var, result in zip(eqn.outvars, self.equation(eqn, operands, source)):
                env[var] = result
            self.scope, self.traceback = around
        return [self.read(env, a) for a in jaxpr.outvars]

    def equation(self, eqn: Any, operands: list[Any], source: str) -> list[Any]:
        foreign = _jax.is_foreign(eqn.primitive)
        # One that has a rule of the user's is an op.
        inner = None if foreign and eqn.primitive.name in OWN else _jax.called_jaxpr(eqn)
        if foreign and inner is not None:
            # The equation does not tell of them.
            _refuse_effects(inner, inlined=self.region == 0)
        remat = _jax.remat_jaxpr(eqn)
        if remat is not None:
            inner, apart = remat
            if apart:
                # Without it XLA would merge the recomputation with the forward pass and keep the activations.
                operands = [self.barrier(o, source) for o in operands]
        if inner is not None:
            return self.inline(inner, _jax.called_operands(eqn, operands), source)
        name = eqn.primitive.name
        if name in _DISTRIBUTED:
            raise TraceError(
                f"the function distributes work itself, by {name} ({source}): hapsynth chooses how; "
                "give it the function for one device"
            )
        if name in REFUSED:
            raise TraceError(f"{name} ({source}) {REFUSED[name]}")
        if name in _jax.DRAWS and _jax.was_partitionable(eqn) != _jax.partitionable():
            now = "on" if _jax.partitionable() else "off"
            raise TraceError(
                f"{name} ({source}) is under another jax_threefry_partitionable than the planning, where it is {now}: "
                "a plan draws all its random numbers with one; set it around the planning and the calls instead"
            )
        control = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(name)
        if control is not None:
            return control(eqn, operands, source)
        if name in _OVER_VMAP and all(isinstance(a, int) for a in eqn.params["axes"]):
            over = partial(_OVER_VMAP[name], axes=eqn.params["axes"])
            return [self.call(over, [operand], source) for operand in operands]
        if _jax.shows(eqn):
            self.shown.append((eqn.primitive, operands, dict(eqn.params), source, self.scope))
            return []
        avals = [v.aval for v in eqn.outvars]
        return self.add(eqn.primitive, operands, avals, source, dict(eqn.params))

    def barrier(self, operand: Any, source: str) -> Any:
        if isinstance(operand, Literal):
            return operand
        return self.add(_jax.barrier_primitive(), [operand], [self.avals[operand]], source)[0]

    def inline(self, inner: Any, operands: Sequence[Any], source: str) -> list[Any]:
        jaxpr, consts = _jax.open_jaxpr(inner)
        env: dict[Any, Any] = {}
        self.bind_constants(env, jaxpr, consts)
        for var, operand in zip(jaxpr.invars, operands):
            env[var] = operand
        return self.walk(jaxpr, env, source)

    # ---- control flow

    def enter(self, kind: RegionKind, count: float, source: str, **more: Any) -> int:
        """Open a region inside the current one; the one to go back to."""
        outside = self.region
        self.regions.append(Region(len(self.regions), kind, outside, count, source, **more))
        self.region = len(self.regions) - 1
        return outside

    def carry(self, initial: Sequence[Any], source: str, *seen: Sequence[Any]) -> tuple[list[int], ...]:
        """The values that a loop carries, as its body, what comes after it and a while loop's test see them: variables
        of jaxprs, which may differ in weak types."""
        views = [
            self.add(LOOP_CARRY, [x], [v.aval for v in views], source) for x, *views in zip(initial, *seen, strict=True)
        ]
        return tuple([view[n] for view in views] for n in range(len(seen)))

    def made(self, operand: Any, aval: Any, source: str) -> int:
        """A literal that leaves a region as a value of it."""
        if not isinstance(operand, Literal):
            return operand
        params = {"shape": tuple(aval.shape), "broadcast_dimensions": (), "sharding": None}
        return self.add(_jax.fill_primitive(), [operand], [aval], source, params)[0]

    def call(self, fn: Callable[..., Any], operands: Sequence[Any], source: str) -> Any:
        """The values that a function of JAX computes."""
        closed, _ = _jax.make_jaxpr(fn, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(self.aval, operands)))
        return self.inline(closed, operands, source)[0]

    def aval(self, operand: Any) -> Any:
        return operand if isinstance(operand, Literal) else self.avals[operand]

    def scan(self, eqn: Any, operands: list[Any], source: str) -> list[Any]:
        params = eqn.params
        n, m = _jax.scan_counts(eqn)
        jaxpr, _ = _jax.open_jaxpr(params["jaxpr"])
        flags = {"reverse": bool(params["reverse"]), "unroll": int(params["unroll"])}
        outside = self.enter("scan", float(params["length"]), source, **flags)
        carried, final = self.carry(operands[n : n + m], source, jaxpr.invars[n : n + m], eqn.outvars[:m])
        parts = [
            self.add(SCAN_SLICE, [xs], [v.aval], source)[0] for xs, v in zip(operands[n + m :], jaxpr.invars[n + m :])
        ]
        out = self.inline(params["jaxpr"], [*operands[:n], *carried, *parts], source)
        out = [self.made(x, v.aval, source) for x, v in zip(out, jaxpr.outvars)]
        self.ties.update(zip(carried, out[:m]))
        stacked = [self.add(SCAN_STACK, [y], [v.aval], source)[0] for y, v in zip(out[m:], eqn.outvars[m:])]
        self.region = outside
        return [*final, *stacked]

    def while_loop(self, eqn: Any, operands: list[Any], source: str) -> list[Any]:
        params = eqn.params
        n, m = params["cond_nconsts"], params["body_nconsts"]
        jaxpr, _ = _jax.open_jaxpr(params["body_jaxpr"])
        outside = self.enter("while", TRIPS, source)
        test_jaxpr, _ = _jax.open_jaxpr(params["cond_jaxpr"])
        views = jaxpr.invars[m:], eqn.outvars, test_jaxpr.invars[n:]
        carried, final, tested = self.carry(operands[n + m :], source, *views)
        loop = self.enter("test", 1.0, source)
        aval = test_jaxpr.outvars[0].aval
        rank = len(aval.shape)
        test = lambda state: self.made(
            self.inline(params["cond_jaxpr"], [*operands[:n], *state], source)[0], aval, source
        )
        goes_on = test(tested)
        if rank:
            goes_on = self.call(lambda x: lax.reduce_or(x, axes=tuple(range(rank))), [goes_on], source)
        self.add(LOOP_TEST, [goes_on], [], source)
        self.region = loop
        out = self.inline(params["body_jaxpr"], [*operands[n : n + m], *carried], source)
        out = [self.made(x, v.aval, source) for x, v in zip(out, jaxpr.outvars)]
        if rank:
            # The loop of a vmap: each goes on by itself, and stays as it is once its own test fails.
            alive = test(carried)
            out = [self.call(_kept_or_new, [alive, old, new], source) for old, new in zip(carried, out)]
        self.ties.update(zip(carried, out))
        self.region = outside
        return final

    def cond(self, eqn: Any, operands: list[Any], source: str) -> list[Any]:
        number, *rest = operands
        branches = eqn.params["branches"]
        outside = self.enter("cond", 1.0, source)
        out: list[list[Any]] = []
        for branch in branches:
            around = self.enter("branch", 1.0 / len(branches), source)
            outs = self.inline(branch, rest, source)
            out.append([self.made(x, v.aval, source) for x, v in zip(outs, eqn.outvars)])
            self.region = around
        results = [self.add(COND_JOIN, [number, *xs], [v.aval], source)[0] for xs, v in zip(zip(*out), eqn.outvars)]
        self.region = outside
        return results

    # ---- the graph

    def live(self, outputs: Sequence[Any]) -> list[_Raw]:
        """The ops that the outputs need; a carried value needs its predecessor's ops in the iteration before."""
        needed = {o for o in outputs if isinstance(o, int)}
        live: set[int] = set()
        loops: set[int] = set()
        settled = False
        while not settled:
            settled = True
            for n in reversed(range(len(self.raw))):
                raw = self.raw[n]
                tests = raw.primitive == LOOP_TEST and self.regions[raw.region].parent in loops
                if n in live or not (tests or needed.intersection(raw.results)):
                    continue
                live.add(n)
                needed.update(o for o in raw.operands if isinstance(o, int))
                if raw.primitive == LOOP_CARRY:
                    carried = self.ties[raw.results[0]]
                    settled = settled and carried in needed and raw.region in loops
                    loops.add(raw.region)
                    needed.add(carried)
        return [self.raw[n] for n in sorted(live)]

    def finish(self, inputs: list[int], outputs: list[Any]) -> Graph:
        needed = self.live(outputs)
        used = {o for raw in needed for o in raw.operands if isinstance(o, int)}
        used.update(o for o in outputs if isinstance(o, int))
        used.update(self.ties[raw.results[0]] for raw in needed if raw.primitive == LOOP_CARRY)
        constants = {k: v for k, v in self.constants.items() if k in used}
        number: dict[int, int] = {}
        values: list[Value] = []

        def define(key: int, name: str) -> int:
            number[key] = len(values)
            aval = self.avals[key]
            weak = bool(getattr(aval, "weak_type", False))
            values.append(Value(number[key], tuple(aval.shape), aval.dtype, weak, name or f"v{number[key]}"))
            return number[key]

        new_inputs = tuple(define(k, f"in{i}") for i, k in enumerate(inputs))
        new_constants = {define(k, f"const{i}"): v for i, (k, v) in enumerate(constants.items())}
        renamed: Callable[[Any], Operand] = lambda o: o if isinstance(o, Literal) else number[o]
        ops: list[Op] = []
        loop_carries: dict[int, Any] = {}
        regions = self.kept_regions(needed)
        for raw in needed:
            operands = tuple(renamed(o) for o in raw.operands)
            arguments = [o if isinstance(o, Literal) else values[o] for o in operands]
            results = tuple(define(r, "") for r in raw.results)
            made_values = [values[r] for r in results]
            if raw.primitive == LOOP_CARRY:
                loop_carries[len(ops)] = self.ties[raw.results[0]]
            ops.append(
                Op(
                    index=len(ops),
                    primitive=raw.primitive,
                    operands=operands,
                    results=results,
                    params=raw.params,
                    shapes=tuple(g.shape for g in arguments),
                    dtypes=tuple(g.dtype for g in arguments),
                    result_shapes=tuple(v.shape for v in made_values),
                    result_dtypes=tuple(v.dtype for v in made_values),
                    source=raw.source,
                    scope=raw.scope,
                    region=regions[raw.region].index,
                    traceback=raw.traceback,
                )
            )
        return Graph(
            tuple(values),
            tuple(ops),
            new_inputs,
            tuple(renamed(o) for o in outputs),
            new_constants,
            regions=tuple(regions.values()),
            ties={op: number[key] for op, key in loop_carries.items()},
            partitionable=_jax.partitionable() if any(op.name in _jax.DRAWS for op in ops) else None,
        )

    def kept_regions(self, needed: Sequence[_Raw]) -> dict[int, Region]:
        """Old number -> region, without those in which nothing happens; every branch of a cond stays."""
        used = {0}
        for raw in needed:
            r = raw.region
            while r not in used:
                used.add(r)
                r = self.regions[r].parent
        regions: dict[int, Region] = {}
        for r in self.regions:
            if r.index in used or (r.kind == "branch" and r.parent in used):
                parent = regions[r.parent].index if r.parent >= 0 else -1
                regions[r.index] = Region(len(regions), r.kind, parent, r.count, r.source, r.reverse, r.unroll)
        return regions
