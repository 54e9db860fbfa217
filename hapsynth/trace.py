"""A JAX function to a `Graph`: traced, calls inlined, dead code dropped, carried state found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np

from hapsynth import _jax
from hapsynth.graph import Graph, Literal, Op, Operand, Value

# They run on a mesh of their own, which can't be inside hapsynth's.
_DISTRIBUTED = ("pmap", "shard_map", "xla_pmap")
REFUSED = {
    "rng_uniform": "draws from a state that each device has for itself, so that no two agree; use jax.random",
    "after_all": "orders effects by tokens, which are no arrays; remove it",
    "create_token": "orders effects by tokens, which are no arrays; remove it",
}
"""Primitives that have no distributed form, and why."""


class TraceError(ValueError):
    """The function or its example arguments cannot be planned."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph and how the user's arguments and results map to its inputs and outputs."""

    graph: Graph
    in_tree: Any
    out_tree: Any
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    array_leaves: tuple[int, ...]
    """Positions, among the flattened arguments, of the leaves that are graph inputs, in order."""
    static_leaves: dict[int, Any]
    """Leaves that are no arrays (functions, strings): the plan holds for these values only."""
    out_array_leaves: tuple[int, ...]
    out_static_leaves: dict[int, Any]


def is_array_like(leaf: Any) -> bool:
    """What `jax.jit` would trace: arrays, NumPy and Python numbers, ShapeDtypeStructs."""
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex))


def abstract(leaf: Any, path: str) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one argument leaf; a leaf that has none is an error naming its path."""
    if isinstance(leaf, (bool, int, float, complex)):
        # As `jax.jit` sees it: a weakly typed scalar.
        try:
            aval = jax.eval_shape(lambda: jax.numpy.asarray(leaf))
        except OverflowError as error:
            raise TraceError(f"argument {path} is {leaf!r}: {error}; enable jax_enable_x64, or pass a float") from None
        return jax.ShapeDtypeStruct((), aval.dtype, weak_type=not isinstance(leaf, bool))
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None or any(not isinstance(d, (int, np.integer)) for d in shape):
        raise TraceError(
            f"argument {path} has shape {shape} and dtype {dtype}; every array leaf needs both as plain integers "
            "and a dtype: pass an array or a jax.ShapeDtypeStruct((..., ...), dtype)"
        )
    weak = bool(getattr(leaf, "weak_type", False))
    if not _jax.is_extended(dtype):
        if not any(jax.numpy.issubdtype(dtype, kind) for kind in (jax.numpy.number, np.bool_)):
            raise TraceError(f"argument {path} has dtype {dtype}, which JAX does not have; pass numbers or bools")
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(int(d) for d in shape), dtype, weak_type=weak)


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    carry: Sequence[tuple[str, str]] | None = None,
) -> Traced:
    """Trace `fn(*args, **kwargs)`.

    `carry`: pairs (argument path, output path) as `jax.tree_util.keystr` prints them, e.g. `("[0]", "[0]")`; a
    pair of prefixes ties every leaf below. None finds them by matching tree structure, shapes and dtypes.
    Raises TraceError for leaves without shape, effects, or a carry that names nothing.
    """
    kwargs = kwargs or {}
    flat, in_tree = jax.tree_util.tree_flatten((tuple(args), kwargs))
    in_paths = tuple(_argument_path(p) for p, _ in jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))[0])
    arrays: list[int] = []
    static: dict[int, Any] = {}
    structs: list[jax.ShapeDtypeStruct] = []
    for i, leaf in enumerate(flat):
        if is_array_like(leaf) or (hasattr(leaf, "shape") or hasattr(leaf, "dtype")):
            arrays.append(i)
            structs.append(abstract(leaf, in_paths[i]))
        else:
            static[i] = leaf
    out_info: dict[str, Any] = {}

    def flat_fn(*leaves: Any) -> list[Any]:
        full: list[Any] = [None] * len(flat)
        for i, leaf in zip(arrays, leaves):
            full[i] = leaf
        for i, leaf in static.items():
            full[i] = leaf
        call_args, call_kwargs = jax.tree_util.tree_unflatten(in_tree, full)
        out = fn(*call_args, **call_kwargs)
        out_flat, out_tree = jax.tree_util.tree_flatten(out)
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(out)[0]]
        keep = [i for i, leaf in enumerate(out_flat) if is_array_like(leaf)]
        out_info.update(
            tree=out_tree, paths=paths, keep=keep, static={i: x for i, x in enumerate(out_flat) if i not in set(keep)}
        )
        return [out_flat[i] for i in keep]

    try:
        closed, _ = _jax.make_jaxpr(flat_fn, *structs)
    except RuntimeError as error:
        if "mesh" not in str(error):
            raise
        raise TraceError(
            "the function needs the mesh of jax.set_mesh, and hapsynth traces it without one, since it chooses all "
            f"shardings itself: remove the constraint, or give it a NamedSharding ({error})"
        ) from error
    effects = _jax.effects_of(closed)
    if effects:
        raise TraceError(
            f"the function has effects that cannot be distributed: {', '.join(effects)}; remove them, or keep them "
            "outside the planned function"
        )
    graph = _Inliner().run(closed)
    out_paths = tuple(out_info["paths"][i] for i in out_info["keep"])
    array_paths = tuple(in_paths[i] for i in arrays)
    traced = Traced(
        graph,
        in_tree,
        out_info["tree"],
        array_paths,
        out_paths,
        tuple(arrays),
        static,
        tuple(out_info["keep"]),
        out_info["static"],
    )
    pairs = _given_carry(traced, carry) if carry is not None else _find_carry(traced)
    graph = Graph(graph.values, graph.ops, graph.inputs, graph.outputs, graph.constants, tuple(pairs))
    return replace(traced, graph=graph)


def _argument_path(path: Any) -> str:
    """`[0]['w']` for a positional argument, `['name']` for a keyword."""
    return jax.tree_util.keystr(path[1:])


class _Inliner:
    """Flattens a closed jaxpr into values and ops; only what the outputs need is kept."""

    def __init__(self) -> None:
        self.raw: list[tuple[Any, list[Any], list[Any], dict[str, Any], str, str]] = []
        self.counter = 0
        self.avals: dict[int, Any] = {}

    def fresh(self, aval: Any) -> int:
        self.counter += 1
        self.avals[self.counter] = aval
        return self.counter

    def run(self, closed: Any) -> Graph:
        jaxpr, consts = _jax.open_jaxpr(closed)
        env: dict[Any, Any] = {}
        inputs = [self.bind_var(env, v) for v in jaxpr.invars]
        constants: dict[int, Any] = {}
        for var, value in zip(getattr(jaxpr, "constvars", ()), consts):
            constants[self.bind_var(env, var)] = value
        self.constants = constants
        outputs = self.walk(jaxpr, env, "")
        return self.finish(inputs, outputs)

    def bind_var(self, env: dict[Any, Any], var: Any) -> int:
        env[var] = self.fresh(var.aval)
        return env[var]

    def read(self, env: dict[Any, Any], atom: Any) -> Any:
        if _jax.is_literal(atom):
            return Literal(atom.val, tuple(atom.aval.shape), atom.aval.dtype)
        return env[atom]

    def walk(self, jaxpr: Any, env: dict[Any, Any], outer: str) -> list[Any]:
        for eqn in jaxpr.eqns:
            operands = [self.read(env, a) for a in eqn.invars]
            source = _jax.source_line(eqn) or outer
            inner = _jax.called_jaxpr(eqn)
            remat = _jax.remat_jaxpr(eqn)
            if remat is not None:
                inner, apart = remat
                if apart:
                    # Without it XLA would merge the recomputation with the forward pass and keep the activations.
                    operands = [self.barrier(o, source) for o in operands]
            if inner is not None:
                results = self.inline(inner, _jax.called_operands(eqn, operands), source)
                for var, result in zip(eqn.outvars, results):
                    env[var] = result
                continue
            if eqn.primitive.name in _DISTRIBUTED:
                raise TraceError(
                    f"the function distributes work itself, by {eqn.primitive.name} ({source}): hapsynth chooses how; "
                    "give it the function for one device"
                )
            if eqn.primitive.name in REFUSED:
                raise TraceError(f"{eqn.primitive.name} ({source}) {REFUSED[eqn.primitive.name]}")
            results = [self.fresh(v.aval) for v in eqn.outvars]
            for var, result in zip(eqn.outvars, results):
                env[var] = result
            self.raw.append((eqn.primitive, operands, results, dict(eqn.params), source, _jax.scope_name(eqn)))
        return [self.read(env, a) for a in jaxpr.outvars]

    def barrier(self, operand: Any, source: str) -> Any:
        if isinstance(operand, Literal):
            return operand
        result = self.fresh(self.avals[operand])
        self.raw.append((_jax.barrier_primitive(), [operand], [result], {}, source, ""))
        return result

    def inline(self, inner: Any, operands: Sequence[Any], source: str) -> list[Any]:
        jaxpr, consts = _jax.open_jaxpr(inner)
        env: dict[Any, Any] = {}
        for var, value in zip(getattr(jaxpr, "constvars", ()), consts):
            self.constants[self.bind_var(env, var)] = value
        for var, operand in zip(jaxpr.invars, operands):
            env[var] = operand
        return self.walk(jaxpr, env, source)

    def finish(self, inputs: list[int], outputs: list[Any]) -> Graph:
        live = {o for o in outputs if isinstance(o, int)}
        kept: list[Any] = []
        for entry in reversed(self.raw):
            if any(r in live for r in entry[2]):
                kept.append(entry)
                live.update(o for o in entry[1] if isinstance(o, int))
        kept.reverse()
        constants = {k: v for k, v in self.constants.items() if k in live}
        number: dict[int, int] = {}
        values: list[Value] = []

        def define(key: int, name: str) -> int:
            number[key] = len(values)
            aval = self.avals[key]
            weak = bool(getattr(aval, "weak_type", False))
            values.append(Value(number[key], tuple(aval.shape), aval.dtype, weak, name))
            return number[key]

        new_inputs = tuple(define(k, f"in{i}") for i, k in enumerate(inputs))
        new_constants = {define(k, f"const{i}"): v for i, (k, v) in enumerate(constants.items())}
        ops: list[Op] = []
        for primitive, operands, results, params, source, scope in kept:
            renamed: tuple[Operand, ...] = tuple(o if isinstance(o, Literal) else number[o] for o in operands)
            shapes = tuple(o.shape if isinstance(o, Literal) else values[o].shape for o in renamed)
            dtypes = tuple(o.dtype if isinstance(o, Literal) else values[o].dtype for o in renamed)
            made = tuple(define(r, f"v{r}") for r in results)
            result_shapes = tuple(values[r].shape for r in made)
            result_dtypes = tuple(values[r].dtype for r in made)
            ops.append(
                Op(
                    len(ops),
                    primitive,
                    renamed,
                    made,
                    params,
                    shapes,
                    dtypes,
                    result_shapes,
                    result_dtypes,
                    source,
                    scope,
                )
            )
        # Numbering follows the order of definition, so a name needs no more than the number.
        values = [
            Value(v.index, v.shape, v.dtype, v.weak_type, v.name if v.name[0] != "v" else f"v{v.index}") for v in values
        ]
        new_outputs: tuple[Operand, ...] = tuple(o if isinstance(o, Literal) else number[o] for o in outputs)
        return Graph(tuple(values), tuple(ops), new_inputs, new_outputs, new_constants)


def _find_carry(traced: Traced) -> list[tuple[int, int]]:
    """Pair each argument subtree with the first output subtree of equal structure, shapes and dtypes.

    Only whole top-level arguments and top-level outputs are matched, so that a step `state, batch -> state, loss`
    ties its state and never a batch to a like-shaped result by chance.
    """
    graph = traced.graph
    ins = _by_head(traced.in_paths)
    whole = list(range(len(traced.out_paths)))
    for members in ins.values():
        # The function returns the state itself, not a tuple with it.
        if _same(traced, graph, members, whole):
            return list(zip(members, whole))
    outs = _by_head(traced.out_paths)
    pairs: list[tuple[int, int]] = []
    taken: set[str] = set()
    for members in ins.values():
        for head, candidates in outs.items():
            if head not in taken and _same(traced, graph, members, candidates):
                taken.add(head)
                pairs += list(zip(members, candidates))
                break
    return pairs


def _by_head(paths: Sequence[str]) -> dict[str, list[int]]:
    """Leaves grouped by the first step of their path."""
    groups: dict[str, list[int]] = {}
    for i, path in enumerate(paths):
        head = path[: path.index("]") + 1] if path.startswith("[") else path.split("[")[0].split(".", 2)[-1]
        groups.setdefault(head, []).append(i)
    return groups


def _tail(path: str) -> str:
    return path[path.index("]") + 1 :] if path.startswith("[") else path


def _same(traced: Traced, graph: Graph, members: list[int], candidates: list[int]) -> bool:
    if len(members) != len(candidates):
        return False
    for i, o in zip(members, candidates):
        out = graph.outputs[o]
        if not isinstance(out, int):
            return False
        a, b = graph.values[graph.inputs[i]], graph.values[out]
        whole = traced.out_paths[o]
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if _tail(traced.in_paths[i]) not in (_tail(whole), whole):
            return False
    return True


def _given_carry(traced: Traced, carry: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    graph = traced.graph
    pairs: list[tuple[int, int]] = []
    for pair in cast(Sequence[Any], carry):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
            raise TraceError(f"carry holds {pair!r}; it is a list of pairs such as ('[0]', '[0]')")
        source, target = pair
        ins = [i for i, p in enumerate(traced.in_paths) if p.startswith(source)]
        outs = {p[len(target) :]: o for o, p in enumerate(traced.out_paths) if p.startswith(target)}
        if not ins:
            raise TraceError(f"carry names argument {source!r}, but the arguments are {', '.join(traced.in_paths)}")
        for i in ins:
            rest = traced.in_paths[i][len(source) :]
            if rest not in outs:
                raise TraceError(f"carry ties {source!r} to {target!r}, but no output is at {target + rest!r}")
            path, o = traced.in_paths[i], outs[rest]
            out, a = graph.outputs[o], graph.values[graph.inputs[i]]
            b = out if isinstance(out, Literal) else graph.values[out]
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise TraceError(
                    f"carry ties {path} of {a.dtype} and shape {a.shape} to an output of shape {b.shape} and {b.dtype}"
                )
            if any(i == known or o == taken for known, taken in pairs):
                raise TraceError(f"carry ties {path} to the output {traced.out_paths[o]!r}, and one of them again")
            pairs.append((i, o))
    return pairs
