"""The results' structure as text."""

from __future__ import annotations

from typing import Any

from jax.tree_util import tree_structure, treedef_children

from hapsynth._pytrees import skeleton
from hapsynth.export._literals import UnwritableError, scalar, text
from hapsynth.graph.trace import Traced


def results_text(traced: Traced) -> str:
    """An expression of the results, of the arguments' `structure` and `leaves` and of the arrays `made`."""
    return _Results(traced).subtree(traced.out_tree, 0, "")


class _Results:
    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.places = dict(_places(traced.in_tree, ()))
        """Structure of a part of the arguments -> where it is."""
        computed = [i for i, o in zip(traced.out_array_leaves, traced.graph.outputs) if isinstance(o, int)]
        self.made = {leaf: n for n, leaf in enumerate(computed)}

    def subtree(self, tree: Any, first: int, path: str) -> str:
        """A part of the results whose leaves begin at `first`."""
        if tree == tree_structure(0):
            return self.leaf(first)
        if tree.num_leaves > 1 and tree in self.places:
            return self.like(tree, first)
        node = skeleton(tree)
        members: list[str] = []
        for child in treedef_children(tree):
            members.append("" if type(node) not in (tuple, list, dict) else self.subtree(child, first, path))
            first += child.num_leaves
        match node:
            case None:
                return "None"
            case tuple() if type(node) is tuple:
                return f"({', '.join(members)}{',' if len(members) == 1 else ''})"
            case list() if type(node) is list:
                return f"[{', '.join(members)}]"
            case dict() if type(node) is dict:
                return f"{{{', '.join(f'{text(k)}: {m}' for k, m in zip(sorted(node), members))}}}"
            case _ if tree in self.places:
                return self.like(tree, first - tree.num_leaves)
            case _:
                raise UnwritableError(
                    f"the function returns a {type(node).__name__}, which is none of Python's containers, and no "
                    "argument has one of the same structure: return tuples, lists or dicts"
                )

    def like(self, tree: Any, first: int) -> str:
        numbers = [self.made.get(first + n) for n in range(tree.num_leaves)]
        start = numbers[0] if numbers else None
        if start is not None and numbers == list(range(start, start + len(numbers))):
            leaves = f"made[{start}:{start + len(numbers)}]"
        else:
            leaves = f"[{', '.join(self.leaf(first + n) for n in range(tree.num_leaves))}]"
        return f"like(structure, {self.places[tree]}, {leaves})"

    def leaf(self, position: int) -> str:
        traced = self.traced
        if position in self.made:
            return f"made[{self.made[position]}]"
        if position in traced.out_array_leaves:
            literal: Any = traced.graph.outputs[traced.out_array_leaves.index(position)]
            return f"jnp.asarray({scalar(literal.value, literal.dtype)})"
        static = traced.out_static_leaves[position]
        same = next((n for n, static_leaf in traced.static_leaves.items() if static_leaf is static), None)
        return text(static) if same is None else f"leaves[{same}]"


def _places(tree: Any, place: tuple[int, ...]) -> list[tuple[Any, tuple[int, ...]]]:
    """Every part of a structure, the outermost last."""
    inner = [p for n, child in enumerate(treedef_children(tree)) for p in _places(child, (*place, n))]
    return [*inner, (tree, place)]
