"""Rules of the user's own: `register_rule`, and what `custom_partitioning` functions carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, cast

import jax

from hapsynth import _jax
from hapsynth.graph.inline import OWN
from hapsynth.graph.ir import Op
from hapsynth.instructions.factors import Dim, Factors, Local
from hapsynth.instructions.layout import Reduction
from hapsynth.instructions.rules.notation import Notation, RuleError, named_dims
from hapsynth.instructions.rules.registry import (
    DERIVED,
    MANY,
    REGISTRY,
    Entry,
    FactorsOf,
    FlopsOf,
    ParamsOf,
    bind,
    elements,
    rule_name,
)

LocalFn = Callable[..., Any]
"""(local, *shards) -> the shard of the result, or a sequence of them."""


def register_rule(
    primitive: Any,
    rule: Any,
    *,
    local: LocalFn | None = None,
    params: ParamsOf | None = None,
    flops: FlopsOf | None = None,
    reduction: Reduction | Mapping[str, Reduction] = "sum",
    need_replication: Iterable[str] = (),
    sizes: Mapping[str, int] | None = None,
    linear: Sequence[Sequence[int]] = (),
    alone: Iterable[str] = (),
    finite_only: str = "",
    replace: bool = False,
) -> None:
    """Tell hapsynth how an op may be cut.

    `primitive`: a JAX primitive or its name; a function of a primitive that stands for many by both names, as
    "pallas_call:my_kernel" (the `name` of `pl.pallas_call`), "ffi_call:target", "custom_partitioning:my_function".

    `rule`: Shardy's notation, "... i j, j k -> ... i k": factors along which all may be cut alike, "(i j)" a dimension
    that is a product of two. A factor that a result lacks leaves it partial: `reduction` is "sum", "max" or "min", or
    one per factor. `need_replication` names factors that can't be cut, `sizes` gives those that no dimension shows.
    `linear` lists groups of operands in which the op is linear together, e.g. [[0], [1]] of a product: a partial sum
    in all of a group, with the others whole, passes through. (Where an other may be infinite that is not the product of
    the sum: 0 x inf is NaN. `finite_only` says why that does not matter, and `check_rule` then tries finite operands
    alone.) Of the factors in `alone` one is cut at a time, where the
    axes of a mesh could cut several. Also an SdyShardingRule of `jax.experimental.custom_partitioning`, or a function
    that fills in the op's `Factors`, where that is not enough.

    How a device runs its shard: the primitive with the same parameters, with those that `params(local)` gives, or
    `local(local, *shards)`, which gives the results' exact shards. `local` (a `Local`) knows shapes, share and offset;
    on a mesh of several axes several factors may be cut, each with a share and an offset of its own in `local.cuts`.
    Shards may be unequal; an empty one is not run unless some result is replicated. `flops(op)`: floating-point
    operations of the whole op.

    Raises RuleError for what is no rule, and for a name that has one, unless `replace`. Whether it fits an op is seen
    when one is planned. `check_rule` tries it.
    """
    name = _name(primitive)
    if not isinstance(cast(object, finite_only), str):
        raise RuleError(f"finite_only of the rule of {name!r} is {finite_only!r}; say in words why")
    if name in REGISTRY and not replace:
        raise RuleError(f"{name!r} has a rule already; replace=True puts this one in its place")
    if callable(rule) and not hasattr(rule, "operand_mappings"):
        if reduction != "sum" or tuple(need_replication) or sizes or linear or tuple(alone):
            raise RuleError(
                f"the rule of {name!r} is a function, which says itself what reduction, need_replication, sizes, "
                "linear and alone would: leave them out"
            )
        fill, default = cast(FactorsOf, rule), elements
    else:
        notation = _notation(name, rule, reduction, need_replication, sizes, linear, alone)
        fill, default = lambda f: notation.fill(f, name), notation.flops
    for what, given in (("local", local), ("params", params), ("flops", flops)):
        if given is not None and not callable(given):
            raise RuleError(f"{what} of the rule of {name!r} is {given!r}, which can't be called")
    kind = name.partition(":")[0]
    if local is None and kind in ("pallas_call", "custom_partitioning") and params is None:
        raise RuleError(
            f"a {kind} is made for the shapes of its whole operands: give the rule of {name!r} the function to run on "
            "shards, local=lambda local, *shards: my_op(*shards)"
        )
    if local is None and params is None and kind == "ffi_call":
        params = lambda here: _jax.ffi_on(here.op.params, here.result_shapes)
    run = None if local is None else _run(name, local)

    def filled(f: Factors) -> None:
        fill(f)
        f.finite_only = f.finite_only or finite_only

    REGISTRY[name] = Entry(name, _fitted(name, filled), params, run, flops or default)
    OWN.add(name)


def _name(primitive: Any) -> str:
    name = primitive if isinstance(primitive, str) else getattr(primitive, "name", None)
    if not isinstance(name, str) or not name:
        raise RuleError(f"{primitive!r} is neither a JAX primitive nor the name of one")
    kind, _, function = name.partition(":")
    if kind in ("jit", "pjit"):
        raise RuleError(
            f"{name!r}: a jitted function is planned op by op, and its gradient has its name too; wrap it in "
            "jax.experimental.custom_partitioning to have it planned as one op"
        )
    if kind in MANY and not function:
        raise RuleError(f"{kind} stands for many functions: name the one that the rule is for, '{kind}:<name>'")
    if function and kind not in MANY:
        raise RuleError(f"{name!r}: only {', '.join(MANY)} stand for many functions; leave out ':{function}'")
    return name


def _notation(
    name: str, rule: Any, reduction: Any, held: Iterable[str], sizes: Any, linear: Any, alone: Iterable[str]
) -> Notation:
    if isinstance(rule, str):
        return Notation.parse(rule, reduction, held, sizes, linear, alone)
    if not hasattr(rule, "operand_mappings"):
        raise RuleError(
            f"the rule of {name!r} is {rule!r}; give a text such as 'i j, j k -> i k', or a function of Factors"
        )
    if tuple(held) or sizes:
        raise RuleError(f"the rule of {name!r} holds need_replication and sizes itself: leave them out")
    groups = tuple(map(tuple, linear))
    return dataclasses.replace(Notation.of_sdy(rule, reduction), linear=groups, alone=frozenset(alone))


def _fitted(name: str, fill: FactorsOf) -> FactorsOf:
    """`fill`, and then what it filled in held against the op's shapes."""

    def factors(f: Factors) -> None:
        fill(f)
        op = f.op
        who = f"the rule of {name}{f' ({op.source})' if op.source else ''}"
        for side, made, shapes in (("operand", f.operands, op.shapes), ("result", f.results, op.result_shapes)):
            if len(made) != len(shapes):
                raise RuleError(f"{who} gives factors for {len(made)} {side}s, and the op has {len(shapes)}")
            for n, (dims, shape) in enumerate(zip(made, shapes)):
                unknown = [x for dim in dims for x in dim if not 0 <= x < len(f.sizes)]
                if unknown:
                    raise RuleError(f"{who}: {side} {n} has the factor {unknown[0]}, which f.new did not make")
                if len(dims) != len(shape) or named_dims(f, dims) != shape:
                    raise RuleError(f"{who}: {side} {n} has shape {shape}, and its factors {named_dims(f, dims)}")
        if f.lost:
            raise RuleError(f"{who}: no result has the factors {f.lost} of {f}: block or reduce them")

    return factors


def _run(name: str, local_fn: LocalFn) -> Callable[[Local, Sequence[Any]], list[Any]]:
    """The user's local execution where something is cut, held against the shapes that it must give."""

    def run(local: Local, operands: Sequence[Any]) -> list[Any]:
        op = local.op
        if not local.cuts:
            return bind(op.primitive, operands, op.params)
        where = f"the local execution of {name}{f' ({op.source})' if op.source else ''} on shards of {local.shapes}"
        try:
            made = jax.tree_util.tree_leaves(local_fn(local, *operands))
        except Exception as error:
            error.add_note(f"hapsynth: in {where}")
            raise
        due = list(zip(local.result_shapes, op.result_dtypes))
        got = [(jax.numpy.shape(x), jax.numpy.result_type(x)) for x in made]
        if got != due:
            listed = lambda pairs: ", ".join(f"{d}{list(s)}" for s, d in pairs) or "nothing"
            raise RuleError(f"{where} made {listed(got)}, not {listed(due)}")
        return made

    return run


# ---- functions that carry a rule of Shardy's

_AXIS = "hapsynth_shards_{}"
"""Not a name of the mesh that runs: a function that communicates for itself fails to find it."""


def _carried(op: Op) -> Entry | None:
    """The entry of a `custom_partitioning` function that has a sharding rule to read: its own partition runs shards.

    A factor that is reduced stays replicated, since that partition may add up over the devices, and so does one for
    which it wants other shardings than the rule gives.
    """
    carried = _jax.partitioned(op.params)
    if not hasattr(carried.rule, "operand_mappings"):
        return None
    name, notation = rule_name(op), Notation.of_sdy(carried.rule)

    def fill(f: Factors) -> None:
        notation.fill(f, name)
        for factor in f.reductions:
            f.blocked.setdefault(factor, "its own partition may add up over the devices")
        f.reductions.clear()
        for factor, size in enumerate(f.sizes):
            minor = -1 in (f.position(t, factor) for t in (*f.operands, *f.results))
            if size > 1 and factor not in f.blocked and not minor and (why := refused(f, factor)):
                f.blocked[factor] = f"its own partition refuses: {why}"
        for pair in combinations(f.shardable, 2):
            if refused(f, *pair):
                f.alone.update(pair)

    def refused(f: Factors, *cut: int) -> str:
        """Why the user's code, asked whether it can do this, can't; empty where it can."""
        try:
            _partition(f, carried, cut, op.shapes, op.result_shapes)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def local_fn(local: Local, *shards: Any) -> Any:
        return _partition(local.factors, carried, sorted(local.cuts), local.shapes, local.result_shapes)(*shards)

    return Entry(name, _fitted(name, fill), local=_run(name, local_fn), flops=notation.flops)


DERIVED["custom_partitioning"] = _carried


def _partition(
    f: Factors,
    carried: _jax.Partitioned,
    cut: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    result_shapes: Sequence[tuple[int, ...]],
) -> Callable[..., Any]:
    """The function that the user's partition gives for shards of these shapes where some factors are cut, told that
    two devices have such along each.

    Raises RuleError where it wants other shardings than the rule's.
    """
    names = {factor: _AXIS.format(n) for n, factor in enumerate(cut)}
    mesh = jax.sharding.AbstractMesh((2,) * len(cut), tuple(names.values()))

    def spec(dims: Sequence[Dim]) -> tuple[str | None, ...]:
        return tuple(names.get(dim[0]) if dim else None for dim in dims)

    def struct(dims: Sequence[Dim], shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        whole = tuple(2 * n if name else n for n, name in zip(shape, spec(dims)))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec(dims)))
        return jax.ShapeDtypeStruct(whole, dtype, sharding=sharding)

    sides = ((f.operands, shapes, f.op.dtypes), (f.results, result_shapes, f.op.result_dtypes))
    structs = [[struct(*x) for x in zip(*side, strict=True)] for side in sides]
    fn, out, given = carried.partition(mesh, *structs)
    for what, wanted, tensors in (("arguments", given, f.operands), ("result", out, f.results)):
        asked = list(map(spec, tensors))
        if len(wanted) != len(asked) or any(_plain(w, len(a)) != a for w, a in zip(wanted, asked)):
            rule = ", ".join(str(f.triple(factor)) for factor in cut)
            raise RuleError(f"of the {what} it wants {', '.join(map(str, wanted))}, and the rule {rule}")
    return fn


def _plain(spec: Any, rank: int) -> Any:
    """A PartitionSpec with one entry per dimension; what is none, as it is."""
    if not isinstance(spec, jax.sharding.PartitionSpec):
        return spec
    names = [n[0] if isinstance(n, tuple) and len(n) == 1 else (n or None) for n in spec]
    return (*names, *[None] * (rank - len(names)))


def is_users(op: Op) -> bool:
    """Whether the op's rule is the user's own."""
    if rule_name(op) in REGISTRY or op.name in REGISTRY:
        return bool(OWN & {rule_name(op), op.name})
    return op.name in DERIVED and DERIVED[op.name](op) is not None
