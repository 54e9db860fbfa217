"""Shardy's notation for rules, `... i j, j k -> ... i k`: parsed, and fitted to an op.

As in `jax.experimental.custom_partitioning`: a dimension is a factor or a product of factors, major to minor, `(i j)`;
`...` (or `...0`, `...1`, ...) stands for any number of leading dimensions, the same wherever it occurs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

from hapsynth.graph.ir import Op
from hapsynth.instructions.factors import Dim, Factors
from hapsynth.instructions.layout import Reduction

Named = tuple[str, ...]
"""The factors of one dimension by name; an ellipsis is `("...",)`, with its digits."""
Tensors = tuple[tuple[Named, ...], ...]

_TOKEN = re.compile(r"\s*(?:(\.\.\.\d*)|([A-Za-z][A-Za-z0-9_]*)|(.))")
_KINDS = ("sum", "max", "min")


class RuleError(ValueError):
    """A user's sharding rule is no rule, does not fit its op, or is not sound."""


@dataclass(frozen=True)
class Notation:
    """A parsed rule: the dimensions of every operand and result, and what is said of their factors."""

    text: str
    operands: Tensors
    results: Tensors
    reductions: Mapping[str, Reduction] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = field(default_factory=dict)
    linear: tuple[tuple[int, ...], ...] = ()
    alone: frozenset[str] = frozenset()

    @staticmethod
    def parse(
        text: str,
        reduction: Reduction | Mapping[str, Reduction] = "sum",
        need_replication: Iterable[str] = (),
        sizes: Mapping[str, int] | None = None,
        linear: Sequence[Sequence[int]] = (),
        alone: Iterable[str] = (),
    ) -> Notation:
        """Read `text`; `linear` names groups of operands by position. Raises RuleError for what cannot be read."""
        sides = text.split("->")
        if len(sides) != 2:
            raise RuleError(
                f"the rule {text!r} has {len(sides) - 1} arrows; write 'operands -> results', as 'i j -> i'"
            )
        operands, results = (tuple(_tensor(text, t) for t in side.split(",")) for side in sides)
        if not sides[0].strip():
            operands = ()
        return Notation._of(text, operands, results, reduction, need_replication, sizes or {}, linear, alone)

    @staticmethod
    def of_sdy(rule: Any, reduction: Reduction | Mapping[str, Reduction] = "sum") -> Notation:
        """What a `jax.experimental.custom_partitioning.SdyShardingRule` says."""

        def tensors(mappings: Any) -> Tensors:
            one = lambda d: tuple(d) if isinstance(d, tuple) else (d.replace("…", "..."),)
            return tuple(tuple(one(d) for d in m) for m in mappings)

        held = (*rule.need_replication_factors, *rule.permutation_factors)
        return Notation._of(
            str(rule), tensors(rule.operand_mappings), tensors(rule.result_mappings), reduction, held, rule.factor_sizes
        )

    @staticmethod
    def _of(
        text: str,
        operands: Tensors,
        results: Tensors,
        reduction: Any,
        replicated: Iterable[str],
        sizes: Mapping[str, int],
        linear: Sequence[Sequence[int]] = (),
        alone: Iterable[str] = (),
    ) -> Notation:
        known = _names(operands + results)
        replicated = (replicated,) if isinstance(replicated, str) else tuple(replicated)
        alone = (alone,) if isinstance(alone, str) else tuple(alone)
        # Only of what an operand has is there something to reduce.
        reduced = [f for f in _names(operands) if any(f not in _names([t]) for t in results)]
        same = dict.fromkeys(reduced, reduction)
        kinds = dict(cast("Mapping[str, Reduction]", reduction if isinstance(reduction, Mapping) else same))
        named = (("need_replication", replicated), ("sizes", sizes), ("reduction", kinds), ("alone", alone))
        for what, names in named:
            for name in names:
                if name not in known:
                    raise RuleError(
                        f"the rule {text!r}: {what} names {name!r}, but the factors are {', '.join(known) or 'none'}"
                    )
        for name, kind in kinds.items():
            if kind not in _KINDS:
                raise RuleError(f"the rule {text!r}: reduction is {kind!r}; it is one of {', '.join(_KINDS)}")
            if name not in reduced:
                raise RuleError(f"the rule {text!r}: {name!r} is in every result, so nothing of it is reduced")
        for name, size in sizes.items():
            if not isinstance(cast(object, size), int) or size < 1:
                raise RuleError(f"the rule {text!r}: sizes gives {name!r} the size {size!r}; give a positive integer")
        for side, tensors in (("operand", operands), ("result", results)):
            for n, t in enumerate(tensors):
                twice = [f for f in _names([t]) if [f for d in t for f in d].count(f) > 1]
                if twice:
                    raise RuleError(f"the rule {text!r}: {side} {n} has {twice[0]!r} twice; a diagonal can't be cut")
                if any(d[0].startswith("...") for d in t[1:]):
                    raise RuleError(f"the rule {text!r}: in {side} {n} an ellipsis stands behind a dimension")
        groups = tuple(tuple(g) for g in linear)
        for position in (p for g in groups for p in g):
            if not 0 <= position < len(operands):
                raise RuleError(f"the rule {text!r}: linear names operand {position} of {len(operands)}")
        filled: dict[str, Reduction] = {f: kinds.get(f, "sum") for f in reduced}
        return Notation(text, operands, results, filled, frozenset(replicated), sizes, groups, frozenset(alone))

    def fill(self, f: Factors, name: str) -> None:
        """Give an op's `Factors` those of the rule. Raises RuleError naming the op and what does not fit."""
        op = f.op
        who = f"the rule {self.text!r} of {name}{f' ({op.source})' if op.source else ''}"
        for side, tensors, shapes in (
            ("operand", self.operands, op.shapes),
            ("result", self.results, op.result_shapes),
        ):
            if len(tensors) != len(shapes):
                raise RuleError(
                    f"{who} has {_plural(len(tensors), side)}, and the op {len(shapes)}, of shapes {_shapes(shapes)}"
                )
        operands, results = self._expanded(op, who)
        sizes = self._sized(op, operands, results, who)
        number = {n: f.new(size) for n, size in sizes.items() if size != 1}
        dims = lambda t: tuple(tuple(number[n] for n in d if n in number) for d in t)
        f.operands += map(dims, operands)
        f.results += map(dims, results)
        used = _names(operands)
        for n, factor in number.items():
            root = n.partition("[")[0]
            if root in self.reductions and root not in self.replicated:
                f.reductions[factor] = self.reductions[root]
            if root in self.alone:
                f.alone.add(factor)
            if root in self.replicated:
                f.blocked[factor] = f"the rule of {name} needs {root} replicated"
            elif n not in used:
                f.blocked[factor] = "no operand has it, so a device could not tell its share"
        f.linear = self.linear

    def _expanded(self, op: Op, who: str) -> tuple[Tensors, Tensors]:
        """Every ellipsis replaced by as many factors as the op has dimensions there."""
        ranks: dict[str, int] = {}

        def expand(side: str, n: int, dims: tuple[Named, ...], shape: tuple[int, ...]) -> tuple[Named, ...]:
            dots = dims[0][0] if dims and dims[0][0].startswith("...") else ""
            rank = len(dims) - bool(dots)
            if len(shape) < rank or (not dots and len(shape) > rank):
                has = f"at least {rank}" if dots else rank
                raise RuleError(f"{who}: {side} {n} has shape {shape}, and the rule gives it {has} dimensions")
            if not dots:
                return dims
            extra = len(shape) - rank
            if ranks.setdefault(dots, extra) != extra:
                raise RuleError(f"{who}: {dots} is {extra} dimensions in {side} {n} and {ranks[dots]} before it")
            return (*((f"{dots}[{i}]",) for i in range(extra)), *dims[1:])

        operands = tuple(expand("operand", n, t, s) for n, (t, s) in enumerate(zip(self.operands, op.shapes)))
        results = tuple(expand("result", n, t, s) for n, (t, s) in enumerate(zip(self.results, op.result_shapes)))
        return operands, results

    def _sized(self, op: Op, operands: Tensors, results: Tensors, who: str) -> dict[str, int]:
        """The size of every factor: given, read off a dimension, or what a product leaves for it."""
        sizes = dict(self.sizes)
        places = [
            (side, n, d, dim, size)
            for side, tensors, shapes in (("operand", operands, op.shapes), ("result", results, op.result_shapes))
            for n, (t, shape) in enumerate(zip(tensors, shapes))
            for d, (dim, size) in enumerate(zip(t, shape))
        ]
        settled = True
        while settled:
            settled = False
            for side, n, d, dim, size in places:
                missing = [x for x in dim if x not in sizes]
                rest = prod(sizes[x] for x in dim if x in sizes)
                if len(missing) == 1 and rest and size % rest == 0:
                    sizes[missing[0]] = size // rest
                    settled = True
                elif len(missing) <= 1 and size != rest:
                    have = " x ".join(f"{x}={sizes[x]}" for x in dim if x in sizes)
                    raise RuleError(
                        f"{who}: dimension {d} of {side} {n} has {size} elements, which does not fit {have}"
                    )
        for *_, dim, size in places:
            missing = [x for x in dim if x not in sizes]
            if missing:
                raise RuleError(
                    f"{who}: the size of factor {missing[0]!r} in ({' '.join(dim)}), of {size} elements, is not known: "
                    f"give sizes={{{missing[0]!r}: ...}}"
                )
        return sizes

    def flops(self, op: Op) -> float:
        """A multiplication and an addition per point of a contraction, else one operation per element."""
        f = Factors(op)
        self.fill(f, op.name)
        if any(factor in f.reductions for factor in range(len(f.sizes))) and len(op.operands) > 1:
            return 2.0 * prod(f.sizes)
        return float(max(map(prod, (*op.shapes, *op.result_shapes)), default=0))


def _tensor(rule: str, text: str) -> tuple[Named, ...]:
    """`... i (j k)` as dimensions."""
    dims: list[Named] = []
    group: list[str] | None = None
    for dots, name, other in _TOKEN.findall(text.rstrip()):
        if name and group is not None:
            group.append(name)
        elif (name or dots) and group is None:
            dims.append((name or dots,))
        elif other == "(" and group is None:
            group = []
        elif other == ")" and group:
            dims.append(tuple(group))
            group = None
        else:
            raise RuleError(f"the rule {rule!r} can't be read at {dots or other!r} of {text.strip()!r}")
    if group is not None:
        raise RuleError(f"the rule {rule!r} does not close the bracket of {text.strip()!r}")
    return tuple(dims)


def _names(tensors: Iterable[tuple[Named, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f for t in tensors for d in t for f in d))


def _plural(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes)) or "none"


def named_dims(f: Factors, dims: tuple[Dim, ...]) -> tuple[int, ...]:
    """The length of every dimension, as its factors have it."""
    return tuple(prod(f.sizes[factor] for factor in dim) for dim in dims)
