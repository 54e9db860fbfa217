"""User arguments to stored arrays: the calling convention of `jax.jit`, checked leaf by leaf."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_structure,
    treedef_children,
)

from hapsynth import _jax
from hapsynth._pytrees import skeleton
from hapsynth.graph.trace import Traced, TraceError, abstract
from hapsynth.lower import Lowered, Shards, Staged, Storage
from hapsynth.running.sharded_array import ShardedArray, plain
from hapsynth.running.transfer import exchange

logger = logging.getLogger(__name__)


class Arguments:
    """Checks and places the arguments of one traced function."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.values = [traced.graph.values[v] for v in traced.graph.inputs]
        self.input_of = {leaf: i for i, leaf in enumerate(traced.array_leaves)}
        """Position among all leaves -> position among the graph's inputs."""
        self._moved = set[int]()
        """The graph's inputs that calls had to move; each is logged once."""

    def flatten(self, args: Sequence[Any], kwargs: dict[str, Any], *, structs: bool = False) -> list[Any]:
        """All leaves of a call, checked: structure, leaves that are no arrays, shapes, dtypes, deleted arrays.

        Raises TypeError (structure, dtype, a leaf that is no array, `wrong_setting`), ValueError
        (shape, a static leaf) or RuntimeError (an array that an earlier call consumed), naming the leaf's path, before
        anything is run or consumed. With `structs` a leaf may be a ShapeDtypeStruct.
        """
        leaves, tree = tree_flatten((tuple(args), kwargs))
        if tree != self.traced.in_tree:
            raise TypeError(self.structure_error(args, kwargs))
        if structs:
            leaves = [_Struct(x) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        self.check(leaves, 0, self.path_from(0))
        if wrong := self.wrong_setting():
            raise TypeError(wrong)
        return leaves

    def wrong_setting(self) -> str:
        """Which of JAX's settings has to be as it was when the plan was made, and is not; '' where none."""
        if self.computes_wide and not _jax.is_available(np.float64):
            return "the plan computes in 64 bits: set jax_enable_x64, as it was when it was planned"
        if (drawn := self.traced.graph.partitionable) not in (None, _jax.partitionable()):
            was = "on" if drawn else "off"
            return f"the plan draws random numbers with jax_threefry_partitionable {was}, as it was planned: set it so"
        return ""

    @cached_property
    def computes_wide(self) -> bool:
        """Whether anything that is computed has 64 bits, for which JAX needs `jax_enable_x64`."""
        with jax.enable_x64(False):
            return not all(_jax.is_available(v.dtype) for v in self.traced.graph.values)

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
                        f"argument {path(i)}, {leaf.dtype}{list(leaf.shape)}, has been deleted: a call of a plan "
                        "consumes carried state (it is donated) and returns its successor; pass that, or plan.shard a "
                        "copy before the call, or plan with carry=[] where this is no state"
                    )
                shape, dtype = leaf.shape, leaf.dtype
            else:
                shape, dtype = described(leaf, path(i))
            if shape != value.shape:
                raise ValueError(
                    f"argument {path(i)} has shape {shape}, and the plan is for {value.shape}: pass that shape, or "
                    "synthesize again for this one"
                )
            if dtype != value.dtype:
                way_out = "convert it" if _jax.is_available(value.dtype) else "set jax_enable_x64, as it was then"
                raise TypeError(
                    f"argument {path(i)} is {dtype}{list(shape)}, and the plan is for {value}: {way_out}, or "
                    "synthesize again for this dtype"
                )

    def place(self, lowered: Lowered | Staged, leaves: Sequence[Any]) -> list[Any]:
        """The stored inputs of a checked call. Those stored right are passed as they are and may be consumed."""
        arrays = [leaves[leaf] for leaf in self.traced.array_leaves]
        stored: list[Any] = [_as_stored(leaf, storage) for leaf, storage in zip(arrays, lowered.inputs, strict=True)]
        consumed = {id(x) for x, donated in zip(stored, lowered.donated, strict=True) if donated and x is not None}
        moved: list[int] = []
        for i, (leaf, storage, donated) in enumerate(zip(arrays, lowered.inputs, lowered.donated, strict=True)):
            if stored[i] is None:
                if i not in self._moved and _is_divided(leaf, storage):
                    moved.append(i)
                # A shard may be the memory of an array that the call consumes as another argument.
                stored[i] = storage.put(plain(leaf), copy=donated or id(leaf) in consumed)
        if moved:
            self._moved.update(moved)
            said = ", ".join(self.traced.in_paths[i] for i in moved)
            logger.info("each call moves %s, which the plan keeps otherwise: plan.adopt moves an argument once", said)
        # What the function closes over may be the very array that is given.
        seen = set(map(id, lowered.placed_constants))
        if len(set(map(id, stored))) < len(stored) or not seen.isdisjoint(consumed):
            # The same array given twice cannot be consumed and used, nor consumed twice.
            for i, (x, storage) in enumerate(zip(stored, lowered.inputs)):
                if id(x) in seen and id(x) in consumed:
                    stored[i] = storage.duplicate(x)
                seen.add(id(x))
        return stored

    def place_copies(self, lowered: Lowered | Staged, leaves: Sequence[Any], first: int) -> list[Any]:
        """Leaves that begin at position `first`, as a plan stores them, sharing nothing with the user's."""
        out: list[Any] = []
        for i, leaf in enumerate(leaves):
            position = self.input_of.get(first + i)
            if position is None:
                out.append(leaf)
            else:
                storage = lowered.inputs[position]
                stored = _as_stored(leaf, storage)
                # A stored array is copied shard by shard; anything else through its logical value.
                data = storage.put(plain(leaf), copy=True) if stored is None else storage.duplicate(stored)
                out.append(wrap(storage, data))
        return out

    def held(
        self, lowered: Lowered | Staged, argument: Any, arg: int | str
    ) -> Iterator[tuple[int, str, Storage, jax.Array | Shards]]:
        """(position among the graph's inputs, path, storage, stored array) of an argument's arrays, checked.

        Raises ValueError for one that does not lie as the plan keeps it.
        """
        leaves, first = self.leaves_of(arg, argument)
        self.check(leaves, first, self.path_from(first))
        for i, leaf in enumerate(leaves):
            position = self.input_of.get(first + i)
            if position is None:
                continue
            storage, path = lowered.inputs[position], self.paths[first + i]
            stored = _as_stored(leaf, storage)
            if stored is None and isinstance(leaf, jax.Array) and storage.lies(leaf):
                # A constant that a call returned, of a type that is weak unlike the argument's.
                stored = leaf
            if stored is None:
                raise ValueError(f"{path} does not lie as the plan keeps it: pass what plan.shard or a call returned")
            yield position, path, storage, stored

    def storages(self, lowered: Lowered | Staged, argument: Any, arg: int | str) -> list[Storage | None]:
        """How each leaf of an argument is kept; None for one that is no array."""
        leaves, first = self.leaves_of(arg, argument)
        positions = map(self.input_of.get, range(first, first + len(leaves)))
        return [None if position is None else lowered.inputs[position] for position in positions]

    def move(
        self,
        lowered: Lowered | Staged,
        old: Sequence[Storage | None],
        leaves: Sequence[Any],
        first: int,
        *,
        free: bool,
    ) -> list[Any]:
        """Checked leaves as `lowered` keeps them; `old`: how each was kept. With `free` those that moved from there are
        freed."""
        out, freed, uses = list(leaves), list[str](), Counter(map(id, leaves))
        try:
            for i, leaf in enumerate(leaves):
                position = self.input_of.get(first + i)
                if position is None:
                    continue
                source, target = old[i], lowered.inputs[position]
                stored = None if source is None else _as_stored(leaf, source)
                moved = None if source is None or stored is None else exchange(source, target, stored)
                if moved is None:
                    moved = target.put(plain(leaf), copy=True)
                out[i] = wrap(target, moved)
                if free and stored is not None and moved is not stored and uses[id(leaf)] == 1:
                    jax.block_until_ready(moved)
                    leaf.delete()
                    freed.append(self.paths[first + i])
        except Exception as error:
            if freed:
                error.add_note(f"hapsynth: these arguments had been moved and are lost: {', '.join(freed)}")
            raise
        return out

    def split(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any, int]]:
        """(path, tree, position of its first leaf) of the first arguments, or of some keyword ones; checked."""
        trees = self._trees
        if len(args) > sum(isinstance(key, int) for key in trees) or not set(kwargs) <= set(trees):
            raise TypeError(self.structure_error(args, kwargs))
        for key, argument in (*enumerate(args), *kwargs.items()):
            leaves, first = self.leaves_of(key, argument)
            self.check(leaves, first, self.path_from(first))
            yield f"[{key!r}]", argument, first

    @cached_property
    def _trees(self) -> dict[int | str, tuple[Any, int]]:
        """Position or name of an argument -> its tree, and the position of its first leaf among all."""
        positional, keyword = treedef_children(self.traced.in_tree)
        names = skeleton(keyword)
        trees = {**dict(enumerate(treedef_children(positional))), **dict(zip(names, treedef_children(keyword)))}
        starts = accumulate((t.num_leaves for t in trees.values()), initial=0)
        return {key: (tree, first) for (key, tree), first in zip(trees.items(), starts)}

    @cached_property
    def paths(self) -> list[str]:
        """The paths of all leaves, as in `Plan.layouts`."""
        return [keystr(path[1:]) for path, _ in tree_flatten_with_path(skeleton(self.traced.in_tree))[0]]

    def path_from(self, first: int) -> Callable[[int], str]:
        """Names the i-th of some leaves that begin at position `first` of a whole call."""
        return lambda i: self.paths[first + i]

    def tree_of(self, arg: Any) -> tuple[Any, int]:
        """The tree of an argument, given by its position or name, or of a leaf, by its path; the position of its first
        leaf among all. Raises ValueError for an unknown argument, TypeError for a name of nothing."""
        if isinstance(arg, bool) or not isinstance(arg, (int, str)):
            raise TypeError(f"{arg!r} names no argument; give a position, the name of a keyword or the path of a leaf")
        if arg in self._trees:
            return self._trees[arg]
        if arg in self.paths:
            return tree_structure(0), self.paths.index(arg)
        names = ", ".join(map(repr, (*self._trees, *self.paths)))
        raise ValueError(f"{arg!r} is no argument of the function and no leaf of one; there are {names}")

    def leaves_of(self, arg: int | str, argument: Any) -> tuple[list[Any], int]:
        """The leaves of the value given for `arg`, not checked, and the position of the first among all.

        TypeError where it has another structure.
        """
        tree, first = self.tree_of(arg)
        leaves, tree_given = tree_flatten(argument)
        if tree_given != tree:
            raise TypeError(_difference(skeleton(tree), argument, f"[{arg!r}]" if arg in self._trees else str(arg)))
        return leaves, first

    def structure_error(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """How a call's arguments, whose tree is not the planned one, differ from that."""
        planned_args, planned_kwargs = skeleton(self.traced.in_tree)
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


def described(leaf: Any, path: str) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of the value given for an array leaf. Raises TypeError where it is no array."""
    if isinstance(leaf, Tracer):
        raise _jax.InsideTraceError(f"argument {path} is being traced: {_jax.NOT_INSIDE}")
    is_array = hasattr(leaf, "__array__") and not isinstance(leaf, type)
    if not isinstance(leaf, (bool, int, float, complex)) and not is_array:
        raise TypeError(f"argument {path} is {leaf!r}; the plan wants an array there")
    try:
        struct = abstract(leaf, path)
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


def _is_divided(leaf: Any, storage: Storage) -> bool:
    """Whether an array lies on several devices already, otherwise than it is stored."""
    if not isinstance(leaf, jax.Array):
        return isinstance(leaf, ShardedArray)
    return len(leaf.sharding.device_set) > 1 and not storage.shards_fit(leaf)


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
