"""`check_rule`: a user's own sharding rules tried on simulated devices before they are trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hapsynth.graph.ir import Graph, Literal, Op
from hapsynth.graph.trace import trace
from hapsynth.instructions.rules.extension import is_users
from hapsynth.instructions.rules.notation import RuleError
from hapsynth.instructions.rules.registry import bind, factors_of, rule_name
from hapsynth.instructions.testing import simulate
from hapsynth.instructions.testing.example_arguments import example_arguments

_JOINT = 24
"""How many ways of cutting an op along two mesh axes are tried."""


@dataclass(frozen=True)
class RuleReport:
    """What was tried: per op its name, its rule with the triples that hold of it, and how many runs agreed."""

    ops: tuple[tuple[str, str, int], ...]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {trials} runs agree\n  {rule}" for name, rule, trials in self.ops)


def check_rule(fn: Any, *example_args: Any) -> RuleReport:
    """Try the rule of every op in `fn(*example_args)` that has one of the user's own.

    `fn`: a function, or a JAX primitive without parameters. `example_args`: arrays, or `jax.ShapeDtypeStruct`s for
    random values; small ones, since each op is run a few dozen times, alone. Every way of cutting the op that the
    rule allows, and some of two such ways at once on two mesh axes, is run on simulated devices with equal, unequal
    and empty shards, and put together again it must be what the op gives on the whole operands, up to rounding.

    Raises RuleError for a rule that does not fit or is not sound, and where `fn` has no op with a rule of the user's.
    """
    fn = getattr(fn, "bind", fn)
    traced = trace(fn, example_args)
    args, _ = example_arguments(traced, example_args, {})
    leaves = jax.tree_util.tree_leaves(args)
    found = [(op, x) for op, x in _run(traced.graph, [leaves[i] for i in traced.array_leaves]) if is_users(op)]
    if not found:
        names = sorted({rule_name(op) for op in traced.graph.ops})
        raise RuleError(f"no op has a rule registered by register_rule; the function's ops are {', '.join(names)}")
    tried: list[tuple[str, str, int]] = []
    for op, operands in found:
        name, f = rule_name(op), factors_of(op)
        lines = [str(f), *map(str, f.triples[1:])]
        try:
            runs = simulate.check(simulate.trials(op, f, operands))
            runs += simulate.check(simulate.joint_trials(op, f, operands, _JOINT))
        except simulate.NotFinite as error:
            raise RuleError(
                f"the rule of {name} is not sound of operands that are not finite: {error}\nLeave out what does not "
                "hold of them (mostly `linear`), or say finite_only='...' why it does not matter"
            ) from error
        except simulate.Unsound as error:
            raise RuleError(f"the rule of {name} is not sound: {error}") from error
        except RuleError:
            raise
        except Exception as error:
            raise RuleError(
                f"the rule of {rule_name(op)}, {f}, does not run: {type(error).__name__}: {error}"
            ) from error
        tried.append((rule_name(op), "\n  ".join(lines), runs))
    return RuleReport(tuple(tried))


def _run(graph: Graph, inputs: list[Any]) -> list[tuple[Op, list[Any]]]:
    """Every op of the graph with the values of its operands."""

    def run(inputs: list[Any], constants: list[Any]) -> list[list[Any]]:
        env: dict[int, Any] = dict(zip(graph.inputs, inputs)) | dict(zip(graph.constants, constants))
        found: list[list[Any]] = []
        for op in graph.ops:
            read = [jnp.asarray(o.value, o.dtype) if isinstance(o, Literal) else env[o] for o in op.operands]
            found.append(read)
            env.update(zip(op.results, bind(op.primitive, read, op.params)))
        return found

    return list(zip(graph.ops, jax.device_get(jax.jit(run)(inputs, list(graph.constants.values())))))
