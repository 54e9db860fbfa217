"""User arguments to stored arrays: the calling convention of `jax.jit`, checked leaf by leaf."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten, treedef_children

from hapsynth.lower import Lowered, Shards, Staged, Storage
from hapsynth.sharded_array import ShardedArray
from hapsynth.trace import Traced, TraceError, abstract


class Arguments:
    """Checks and places the arguments of one traced function."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.values = [traced.graph.values[v] for v in traced.graph.inputs]
        self.input_of = {leaf: i for i, leaf in enumerate(traced.array_leaves)}
        """Position among all leaves -> position among the graph's inputs."""

    def flatten(self, args: Sequence[Any], kwargs: dict[str, Any], *, structs: bool = False) -> list[Any]:
        """All leaves of a call, checked: structure, leaves that are no arrays, shapes, dtypes, deleted arrays.

        Raises TypeError (structure, dtype, a leaf that is no array), ValueError (shape, a static leaf) or RuntimeError
        (an array that an earlier call consumed), naming the leaf's path, before anything is run or consumed. With
        `structs` a leaf may be a ShapeDtypeStruct.
        """
        leaves, tree = tree_flatten((tuple(args), kwargs))
        if tree != self.traced.in_tree:
            raise TypeError(self._tree_error(args, kwargs))
        paths = lambda i: keystr(tree_flatten_with_path((tuple(args), kwargs))[0][i][0][1:])
        if structs:
            leaves = [_Struct(x) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        self.check(leaves, 0, paths)
        return leaves

    def check(self, leaves: Sequence[Any], first: int, path: Any) -> None:
        """Check leaves that begin at position `first` of a whole call; `path(i)` names the i-th."""
        for i, leaf in enumerate(leaves):
            position = self.input_of.get(first + i)
            if position is None:
                planned = self.traced.static_leaves[first + i]
                if not _same(leaf, planned):
                    raise ValueError(
                        f"argument {path(i)} is {leaf!r}, and the plan holds for {planned!r} only: it is no array, so "
                        "it decides what was planned; synthesize again for this one"
                    )
                continue
            value = self.values[position]
            if isinstance(leaf, (jax.Array, ShardedArray)) and not isinstance(leaf, Tracer):
                if leaf.is_deleted():
                    raise RuntimeError(
                        f"argument {path(i)}, {leaf.dtype}{list(leaf.shape)}, has been deleted: an earlier call of a "
                        "plan consumed it (carried state is donated) and returned its successor; pass that, or "
                        "plan.shard a copy before the call"
                    )
                shape, dtype = leaf.shape, leaf.dtype
            else:
                shape, dtype = _aval(leaf, path, i)
            if shape != value.shape:
                raise ValueError(
                    f"argument {path(i)} has shape {shape}, and the plan is for {value.shape}: pass that shape, or "
                    "synthesize again for this one"
                )
            if dtype != value.dtype:
                raise TypeError(
                    f"argument {path(i)} is {dtype}{list(shape)}, and the plan is for {value}: convert it, or "
                    "synthesize again for this dtype"
                )

    def place(self, lowered: Lowered | Staged, leaves: Sequence[Any]) -> list[Any]:
        """The stored inputs of a checked call. What already lies right is passed as it is and may be consumed."""
        stored: list[Any] = []
        consumed: set[int] = set()
        given = [leaves[leaf] for leaf in self.traced.array_leaves]
        for leaf, storage, donated in zip(given, lowered.inputs, lowered.donated, strict=True):
            x = _as_stored(leaf, storage)
            if x is None:
                x = storage.put(_plain(leaf), copy=donated)
            if donated:
                consumed.add(id(x))
            stored.append(x)
        if len(set(map(id, stored))) < len(stored):
            # The same array given twice cannot be consumed and used, nor consumed twice.
            seen: set[int] = set()
            for i, (x, storage) in enumerate(zip(stored, lowered.inputs)):
                if id(x) in seen and id(x) in consumed:
                    stored[i] = storage.duplicate(x)
                seen.add(id(x))
        return stored

    def place_copies(self, lowered: Lowered | Staged, leaves: Sequence[Any], first: int) -> list[Any]:
        """Leaves that begin at position `first`, as a plan keeps them, sharing nothing with what was given."""
        out: list[Any] = []
        for i, leaf in enumerate(leaves):
            position = self.input_of.get(first + i)
            if position is None:
                out.append(leaf)
            else:
                storage = lowered.inputs[position]
                held = _as_stored(leaf, storage)
                # A stored array is copied shard by shard; anything else through its logical value.
                data = storage.put(_plain(leaf), copy=True) if held is None else storage.duplicate(held)
                out.append(wrap(storage, data))
        return out

    def split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
        """(path, tree, position of its first leaf) of the first arguments, or of some keyword ones; checked."""
        positional, keyword = treedef_children(self.traced.in_tree)
        trees = treedef_children(positional)
        names = list(tree_unflatten(keyword, range(keyword.num_leaves)))
        known = dict(zip(names, treedef_children(keyword)))
        if len(args) > len(trees) or not set(kwargs) <= set(names):
            raise TypeError(self._tree_error(args, kwargs))
        first = 0
        starts: dict[Any, tuple[Any, int]] = {}
        for key, tree in (*enumerate(trees), *known.items()):
            starts[key] = tree, first
            first += tree.num_leaves
        for key, argument in (*enumerate(args), *kwargs.items()):
            tree, first = starts[key]
            leaves, given = tree_flatten(argument)
            head = f"[{key!r}]"
            if given != tree:
                planned = tree_unflatten(tree, range(tree.num_leaves))
                raise TypeError(_difference(planned, argument, head))
            paths = lambda i, argument=argument, head=head: head + keystr(tree_flatten_with_path(argument)[0][i][0])
            self.check(leaves, first, paths)
            yield head, argument, first

    def _tree_error(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        planned_args, planned_kwargs = tree_unflatten(self.traced.in_tree, range(self.traced.in_tree.num_leaves))
        if len(args) != len(planned_args) or set(kwargs) != set(planned_kwargs):
            return (
                f"the plan takes {_call(planned_args, planned_kwargs)} and was given {_call(args, kwargs)}: call it as "
                "it was planned, positional arguments by position and keyword arguments by name"
            )
        return _difference((planned_args, planned_kwargs), (tuple(args), kwargs), "", drop=1)


class _Struct:
    """A ShapeDtypeStruct where one may stand for an array."""

    def __init__(self, struct: jax.ShapeDtypeStruct) -> None:
        self.shape, self.dtype = struct.shape, struct.dtype

    __array__ = None


def wrap(storage: Storage | None, stored: Any) -> Any:
    """A stored array as users see it: plain where it is one."""
    return stored if storage is None or storage.is_even else ShardedArray(storage, stored)


def _aval(leaf: Any, path: Any, i: int) -> tuple[tuple[int, ...], Any]:
    if isinstance(leaf, Tracer):
        raise TypeError(
            f"argument {path(i)} is being traced: a plan is a compiled program of its own and cannot be called inside "
            "jit, grad or vmap; put the outer function into hapsynth.synthesize instead"
        )
    if not isinstance(leaf, (bool, int, float, complex)) and not hasattr(leaf, "__array__"):
        raise TypeError(f"argument {path(i)} is {leaf!r}; the plan wants an array there")
    try:
        struct = abstract(leaf, path(i))
    except TraceError as error:
        raise TypeError(str(error)) from None
    return struct.shape, struct.dtype


def _as_stored(leaf: Any, storage: Storage) -> jax.Array | Shards | None:
    """The stored array that a leaf already is, or None."""
    if isinstance(leaf, ShardedArray):
        s = leaf.storage
        same = type(s) is type(storage) and s.cuts == storage.cuts and s.sharding == storage.sharding
        return leaf.data if same else None
    return leaf if isinstance(leaf, jax.Array) and storage.holds(leaf) else None


def _plain(leaf: Any) -> Any:
    return leaf.storage.fetch(leaf.data) if isinstance(leaf, ShardedArray) else leaf


def _same(a: Any, b: Any) -> bool:
    """Static leaves: identical, or equal as `jax.jit` compares static arguments."""
    try:
        return a is b or bool(type(a) is type(b) and a == b)
    except Exception:
        return False


def _call(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    names = f" and {', '.join(sorted(kwargs))} by name" if kwargs else ""
    return f"{len(args)} positional argument{'' if len(args) == 1 else 's'}{names}"


def _difference(planned: Any, given: Any, head: str, drop: int = 0) -> str:
    """The first place in which two trees differ."""
    paths = lambda tree: [head + keystr(p[drop:]) for p, _ in tree_flatten_with_path(tree)[0]]
    want, have = paths(planned), paths(given)
    missing = [p for p in want if p not in set(have)]
    unknown = [p for p in have if p not in set(want)]
    parts = [f"the plan has {missing[0]!r}, which is missing"] if missing else []
    parts += [f"{unknown[0]!r} is not in the plan"] if unknown else []
    text = "; ".join(parts) or (
        f"the containers differ: planned {jax.tree_util.tree_structure(planned)}, given "
        f"{jax.tree_util.tree_structure(given)}"
    )
    return f"argument structure: {text}. Pass the pytree that was planned, or synthesize again for this one"
