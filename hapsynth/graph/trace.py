"""A JAX function to a `Graph`: traced, calls inlined, dead code dropped, carried state found."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, cast

import jax
import numpy as np

from hapsynth import _jax
from hapsynth.graph.inline import TraceError, inline
from hapsynth.graph.ir import Graph, Literal
from hapsynth.graph.tracing_advice import advice

logger = logging.getLogger(__name__)


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

    def example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keyword arguments for which this is the trace, arrays as ShapeDtypeStructs."""
        leaves: list[Any] = [None] * self.in_tree.num_leaves
        for at, value in zip(self.array_leaves, map(self.graph.values.__getitem__, self.graph.inputs), strict=True):
            leaves[at] = jax.ShapeDtypeStruct(value.shape, value.dtype, weak_type=value.weak_type)
        for at, leaf in self.static_leaves.items():
            leaves[at] = leaf
        return jax.tree_util.tree_unflatten(self.in_tree, leaves)


def is_array_like(leaf: Any) -> bool:
    """The leaves that `jax.jit` would trace: arrays, NumPy and Python numbers, ShapeDtypeStructs."""
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic, bool, int, float, complex))


def abstract(leaf: Any, path: str) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one argument leaf; a leaf that has none is an error naming its path."""
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        # As `jax.jit` sees it: a weakly typed scalar, but for NumPy's, some of which are Python's too.
        try:
            aval = jax.eval_shape(lambda: jax.numpy.asarray(leaf))
        except OverflowError as error:
            raise TraceError(f"argument {path} is {leaf!r}: {error}; enable jax_enable_x64, or pass a float") from None
        return jax.ShapeDtypeStruct((), aval.dtype, weak_type=not isinstance(leaf, bool))
    if isinstance(leaf, np.ma.MaskedArray):
        raise TraceError(
            f"argument {path} is a masked array, and JAX has no masks: pass its filled(), or data and mask"
        )
    shape: Any = getattr(leaf, "shape", None)
    dtype = getattr(leaf, "dtype", None)
    numbers = isinstance(shape, (tuple, list)) and all(isinstance(d, (int, np.integer)) for d in shape)
    if not numbers or dtype is None:
        raise TraceError(
            f"argument {path} has shape {shape} and dtype {dtype}; every array leaf needs both as plain integers "
            "and a dtype: pass an array or a jax.ShapeDtypeStruct((..., ...), dtype), or close over this "
            f"{type(leaf).__name__} if it is no array"
        )
    weak = bool(getattr(leaf, "weak_type", False))
    try:
        if not _jax.is_extended(dtype):
            if not any(jax.numpy.issubdtype(dtype, kind) for kind in (jax.numpy.number, np.bool_)):
                raise TraceError(f"argument {path} has dtype {dtype}, which JAX does not have; pass numbers or bools")
            dtype = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        kind = f"{type(leaf).__module__}.{type(leaf).__name__}"
        raise TraceError(
            f"argument {path} is a {kind} of dtype {dtype}, which JAX does not know; pass it as a NumPy or JAX array"
        ) from None
    return jax.ShapeDtypeStruct(tuple(int(d) for d in shape), dtype, weak_type=weak)


FUNCTION = "fn", "example_args"
"""What a function and its arguments are called, where there is one."""


def check_dict(name: str, value: Any, of: str = "") -> None:
    """TypeError where an option, of a function that is called so, is given and no dict."""
    if value is not None and not isinstance(value, Mapping):
        where = f" of {of}" if of not in ("", FUNCTION[0]) else ""
        raise TypeError(f"{name}{where} is {value!r}; give a dict")


def check_call(fn: Any, args: Any, kwargs: Any, names: tuple[str, str] = FUNCTION) -> None:
    """TypeError where a function or its arguments are none, which are called by `names`."""
    if not callable(fn):
        raise TypeError(f"{names[0]} is {fn!r}, which can't be called")
    if not isinstance(args, (tuple, list)):
        kind = type(args).__name__
        raise TypeError(f"{names[1]} is a {kind}; give a tuple of the arguments, (x,) where there is one")
    check_dict("example_kwargs", kwargs, names[0])


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
    Warns in the log of a function that returns no array.
    Raises TraceError for leaves without shape, effects, a carry that names nothing, or an object among the arguments
    that the function changes in place without returning what it became.
    """
    kwargs = kwargs or {}
    flat, in_tree = jax.tree_util.tree_flatten((tuple(args), kwargs))
    in_paths = tuple(_argument_path(p) for p, _ in jax.tree_util.tree_flatten_with_path((tuple(args), kwargs))[0])
    arrays: list[int] = []
    static: dict[int, Any] = {}
    structs: list[jax.ShapeDtypeStruct] = []
    for i, leaf in enumerate(flat):
        # Types, such as dtypes, have these as descriptions of their instances.
        described = hasattr(leaf, "shape") or hasattr(leaf, "dtype")
        if is_array_like(leaf) or (described and not isinstance(leaf, (type, np.dtype))):
            arrays.append(i)
            structs.append(abstract(leaf, in_paths[i]))
        else:
            _refuse_arrays_in(leaf, f"argument {in_paths[i]}")
            static[i] = leaf
    out_info: dict[str, Any] = {}
    changed: dict[str, Any] = {}
    """What the function left in objects among its arguments, by path."""

    def flat_fn(*leaves: Any) -> list[Any]:
        full: list[Any] = [None] * len(flat)
        for i, leaf in zip(arrays, leaves):
            full[i] = leaf
        for i, leaf in static.items():
            full[i] = leaf
        call_args, call_kwargs = jax.tree_util.tree_unflatten(in_tree, full)
        given = _in_objects((call_args, call_kwargs))
        out = fn(*call_args, **call_kwargs)
        changed.clear()
        changed.update(
            (path, x)
            for path, x in _in_objects((call_args, call_kwargs)).items()
            if path in given and x is not given[path] and is_array_like(x)
        )
        # JAX warns of an iterator that it takes for a leaf.
        once = lambda leaf: isinstance(leaf, Iterator)
        out_flat, out_tree = jax.tree_util.tree_flatten(out, is_leaf=once)
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(out, is_leaf=once)[0]]
        for path, leaf in zip(paths, out_flat, strict=True):
            if once(leaf):
                what = f"output {path} is" if path else "the function returns"
                raise TraceError(
                    f"{what} a {type(leaf).__name__}, which jax.jit refuses too: what it gives is computed after the "
                    "function has returned; return a list or tuple of it"
                )
            if not is_array_like(leaf):
                _refuse_arrays_in(leaf, f"output {path}" if path else "what the function returns")
        # A gradient of integers is no number, and always the same.
        none = jax.dtypes.float0
        out_flat = [np.zeros(x.shape, none) if getattr(x, "dtype", None) == none else x for x in out_flat]
        keep = [i for i, x in enumerate(out_flat) if is_array_like(x) and getattr(x, "dtype", None) != none]
        out_info.update(
            tree=out_tree, paths=paths, keep=keep, static={i: x for i, x in enumerate(out_flat) if i not in set(keep)}
        )
        return [out_flat[i] for i in keep]

    try:
        closed, _ = _jax.make_jaxpr(flat_fn, *structs)
        if changed:
            # Once more, with what it left as further results: it may be returned in another form.
            both, _ = _jax.make_jaxpr(lambda *leaves: [*flat_fn(*leaves), *changed.values()], *structs)
            lost = [path for path, is_lost in zip(changed, _jax.unused_results(both, len(changed))) if is_lost]
            if lost:
                raise TraceError(_changed_in_place(lost))
    except Exception as error:
        # An error of the function's own goes on as it is.
        if (text := advice(error)) is None:
            raise
        raise TraceError(text) from error
    graph = inline(closed)
    if not graph.outputs:
        logger.warning("the function returns no array: nothing is computed; is its return missing?")
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
    return replace(traced, graph=replace(graph, carry=tuple(pairs)))


_NO_STATE = (type, ModuleType, FunctionType, jax.sharding.Mesh, jax.sharding.Sharding)
"""What is looked into for no arrays: those that it has there are of its own, some only once it was asked for them."""


def _refuse_arrays_in(leaf: Any, what: str) -> None:
    """Raise TraceError for an object that is no array and holds some, which would stay what they are while it is
    traced."""
    seen: set[int] = set()
    objects: list[Any] = [leaf]
    while objects:
        x = objects.pop()
        if isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.ndarray)):
            if x.dtype != object:
                kind = type(leaf).__name__
                raise TraceError(
                    f"{what} is a {kind}, which holds arrays and is no pytree, so a plan, as jax.jit, does not find "
                    f"them: register {kind}, a dataclass by jax.tree_util.register_dataclass"
                )
        elif id(x) not in seen and not isinstance(x, _NO_STATE):
            seen.add(id(x))
            objects += getattr(x, "__dict__", {}).values()
            slots = (s for c in type(x).__mro__ if "__slots__" in vars(c) for s in vars(c).values())
            for slot in (s for s in slots if isinstance(s, MemberDescriptorType)):
                # One that was never set has no value.
                with suppress(AttributeError):
                    objects.append(slot.__get__(x))
            objects += x.values() if isinstance(x, dict) else x if isinstance(x, (list, tuple)) else ()


def _in_objects(arguments: Any) -> dict[str, Any]:
    """The leaves that are held by an object of a class of its own, such as an nnx module's variables, by path.

    Not those of dicts and lists: a function may use one of these, given to it, as it likes.
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(arguments)[0]:
        if not isinstance(path[-1], (jax.tree_util.DictKey, jax.tree_util.SequenceKey)):
            found[_argument_path(path)] = leaf
    return found


def _changed_in_place(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return (
        f"the function changes {paths[0]}{more} in place and does not return what became of it, so a plan, as jax.jit, "
        "would lose it and train nothing: return it. With flax nnx: graph, state = nnx.split((model, optimizer)) "
        "before, model, optimizer = nnx.merge(graph, state) first and nnx.state((model, optimizer)) as a result in the "
        "function of state (examples/gallery/flax_nnx.py)"
    )


def _argument_path(path: Any) -> str:
    """`[0]['w']` for a positional argument, `['name']` for a keyword."""
    return jax.tree_util.keystr(path[1:])


def _find_carry(traced: Traced) -> list[tuple[int, int]]:
    """Pair each argument subtree with the first output subtree of equal structure, shapes and dtypes.

    Only whole top-level arguments and top-level outputs are matched, so that a step `state, batch -> state, loss`
    ties its state and never a batch to a like-shaped result by chance.
    """
    ins = by_head(traced.in_paths)
    whole = list(range(len(traced.out_paths)))
    for members in ins.values():
        # The function returns the state itself, not a tuple with it.
        if _same(traced, members, whole):
            return list(zip(members, whole))
    outs = by_head(traced.out_paths)
    pairs: list[tuple[int, int]] = []
    taken: set[str] = set()
    for members in ins.values():
        for head, candidates in outs.items():
            if head not in taken and _same(traced, members, candidates):
                taken.add(head)
                pairs += list(zip(members, candidates))
                break
    return pairs


_STEP = re.compile(r"\['(?:[^'\\]|\\.)*'\]|\[[^\]]*\]|\.[^.\[]*")
"""One step of a path, as `jax.tree_util.keystr` prints it."""


def _head_of(path: str) -> str:
    step = _STEP.match(path)
    return step[0] if step else ""


def by_head(paths: Sequence[str]) -> dict[str, list[int]]:
    """Leaves grouped by the first step of their path."""
    groups: dict[str, list[int]] = {}
    for i, path in enumerate(paths):
        groups.setdefault(_head_of(path), []).append(i)
    return groups


def tail_of(path: str) -> str:
    """The rest of a path after its first step."""
    return path[len(_head_of(path)) :]


def under(prefix: str, paths: Sequence[str]) -> dict[str, int]:
    """The leaves at a path or below it: the rest of their path -> position."""
    rests = ((path[len(prefix) :], i) for i, path in enumerate(paths) if path.startswith(prefix))
    return {rest: i for rest, i in rests if not rest or not prefix or rest[0] in "[."}


def _same(traced: Traced, members: list[int], candidates: list[int]) -> bool:
    graph = traced.graph
    # Constants alone succeed nothing; some leaves of a state may become constants.
    if len(members) != len(candidates) or all(isinstance(graph.outputs[o], Literal) for o in candidates):
        return False
    for i, o in zip(members, candidates):
        a, b, whole = graph.values[graph.inputs[i]], graph.output(o), traced.out_paths[o]
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if tail_of(traced.in_paths[i]) not in (tail_of(whole), whole):
            return False
    return True


def _given_carry(traced: Traced, carry: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    graph = traced.graph
    pairs: list[tuple[int, int]] = []
    for pair in cast(Sequence[Any], carry):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
            raise TraceError(f"carry holds {pair!r}; it is a list of pairs such as ('[0]', '[0]')")
        source, target = pair
        ins, outs = under(source, traced.in_paths), under(target, traced.out_paths)
        if not ins:
            raise TraceError(f"carry names argument {source!r}, but the arguments are {', '.join(traced.in_paths)}")
        for rest, i in ins.items():
            if rest not in outs:
                raise TraceError(f"carry ties {source!r} to {target!r}, but no output is at {target + rest!r}")
            path, o = traced.in_paths[i], outs[rest]
            a, b = graph.values[graph.inputs[i]], graph.output(o)
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise TraceError(
                    f"carry ties {path} of {a.dtype} and shape {a.shape} to an output of shape {b.shape} and {b.dtype}"
                )
            if any(i == known or o == taken for known, taken in pairs):
                raise TraceError(f"carry ties {path} to the output {traced.out_paths[o]!r}, and one of them again")
            pairs.append((i, o))
    return pairs
