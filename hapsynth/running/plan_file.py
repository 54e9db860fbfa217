"""Plan files: JSON, written in one piece, trusted only after the checker has replayed their program."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args

import jax

from hapsynth._files import write_text
from hapsynth.cluster.cluster import Cluster, ClusterError
from hapsynth.graph.ir import Rematerialized
from hapsynth.graph.rematerialize import recomputed
from hapsynth.graph.trace import FUNCTION, Traced, check_call, trace
from hapsynth.graph.trip_counts import with_counts
from hapsynth.instructions.program.checker import check_program, check_sizes
from hapsynth.instructions.program.program import Program, ProgramError
from hapsynth.instructions.program.sizes import Classes, Sizes
from hapsynth.instructions.rules.factor_table import FactorTable
from hapsynth.instructions.rules.replicated_ops import unpriced
from hapsynth.instructions.staging.options import DEFAULT, LoweringOptions
from hapsynth.search.cost.network import mesh_axes
from hapsynth.search.result import Result, Status, qualified

SCHEMA = "hapsynth-plan-1"
SEVERAL = "hapsynth-plans-1"
_AGAIN = "synthesize again and save the new plan"


_LONGEST, _HEAD, _TAIL = 900, 400, 250
"""Of messages, in characters: the contents of a file may be as large as whoever wrote it likes."""


class PlanError(ValueError):
    """A plan file cannot be read, is of another function, or does not pass the checker."""

    def __init__(self, message: str) -> None:
        if len(message) > _LONGEST:
            left_out = len(message) - _HEAD - _TAIL
            message = f"{message[:_HEAD]} ... ({left_out} characters left out) ... {message[-_TAIL:]}"
        super().__init__(message)


def write_plan(path: str | os.PathLike[str], traced: Traced, result: Result, cluster: Cluster) -> None:
    """Write a plan; the file is there whole or not at all."""
    write_object(path, plan_to_dict(traced, result, cluster))


def write_object(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write JSON; the file is there whole or not at all."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


_OF_OTHERS = ("inexact_inputs", "selecting_outputs", "strong_inputs")
"""The fields of a graph that come from other functions with the same state."""


def function_to_dict(traced: Traced) -> dict[str, Any]:
    """The description of its function in a plan file."""
    graph = traced.graph
    return {
        "jax": jax.__version__,
        "fingerprint": graph.fingerprint,
        "inputs": _inputs(traced),
        "outputs": list(traced.out_paths),
        "ops": [op.name for op in graph.ops],
        "carry": [list(pair) for pair in graph.carry],
        "kept": list(graph.kept),
        **{name: list(told) for name in _OF_OTHERS if (told := getattr(graph, name))},
        "runs": [r.count for r in graph.regions[1:]],
        **({} if graph.again is None else {"again": {"at": graph.again.at, "ops": list(graph.again.ops)}}),
    }


def plan_to_dict(traced: Traced, result: Result, cluster: Cluster) -> dict[str, Any]:
    """A plan as plain strings, numbers, lists and dicts. Infinite numbers are strings. Nothing in it is of the run that
    made it, so that the same plan is the same file."""
    return {
        "schema": SCHEMA,
        "function": function_to_dict(traced),
        "cluster": cluster.to_dict(defaults=result.overlap),
        "devices": list(range(cluster.n) if result.devices is None else result.devices),
        "program": result.program.to_dict(),
        "classes": [cls.name for cls in result.sizes.classes.all],
        "shares": [list(shares) for shares in result.sizes.shares],
        "certificate": {
            "cost_s": number_of(result.cost_s),
            "lower_bound_s": number_of(result.lower_bound_s),
            "joint_lower_bound_s": number_of(result.joint_lower_bound_s),
            "status": result.status,
            "unpriced_primitives": list(result.unpriced_primitives),
            "expanded": result.expanded,
            **({} if result.with_all_s is None else {"with_all_s": number_of(result.with_all_s)}),
            "ratio_bound_s": number_of(result.ratio_bound_s),
            **(_overlap(result) if result.overlap else {}),
        },
        "memory_of": "exact" if result.exact else "padded",
        "memory_bytes": [number_of(x) for x in result.memory_bytes],
        "memory_limit_bytes": [number_of(x) for x in result.memory_limit_bytes],
        "replicated_primitives": list(result.replicated_primitives),
        **({} if result.lowering == DEFAULT else {"lowering": result.lowering.to_dict()}),
    }


def _overlap(result: Result) -> dict[str, Any]:
    clocks = {name: number_of(seconds) for name, seconds in result.clocks_s.items()}
    return {"overlap": True, "exposed_communication_s": number_of(result.exposed_communication_s), "clocks": clocks}


def read_plan(
    path: str | os.PathLike[str],
    fn: Callable[..., Any],
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Traced, Result, Cluster]:
    """Read a plan of `fn`: traced again, compared, and put through the checker.

    Raises PlanError with the file's name, the reason and the way out; TypeError where the function or its arguments are
    none.
    """
    return plan_from(str(path), read_object(path, SCHEMA), fn, example_args, example_kwargs)


def read_object(path: str | os.PathLike[str], schema: str) -> dict[str, Any]:
    """The object in a file of a schema; PlanError as `read_plan`."""
    file = Path(path)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{file}: cannot be read: {error.strerror}; give the path of a plan file") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file}: is cut short or no JSON ({error}); {_AGAIN}") from None
    if not isinstance(data, dict):
        raise PlanError(f"{file}: holds no plan; {_AGAIN}")
    document = cast(dict[str, Any], data)
    if document.get("schema") != schema:
        other = {
            SCHEMA: "holds one plan: read it with hapsynth.load",
            SEVERAL: "holds several plans: load_plans reads it, and on the command line --function picks one",
        }
        has = f"has schema {document.get('schema')!r}, and this version reads {schema!r}; {_AGAIN}"
        raise PlanError(f"{file}: {other.get(str(document.get('schema')), has)}")
    return document


def holds_several(path: str | os.PathLike[str]) -> bool:
    """Whether a file says that it holds several plans; reading it explains where it can't be read."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and cast(dict[str, Any], data).get("schema") == SEVERAL


@contextmanager
def blamed_on(where: str) -> Generator[None]:
    """Errors in the contents of a file, as PlanErrors that name it."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from None
    except (ProgramError, ClusterError) as error:
        raise PlanError(f"{where}: was edited, or made by another version: {error}; {_AGAIN}") from _brief(error)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        reason = f"has no {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{where}: was edited, or made by another version: it {reason}; {_AGAIN}") from _brief(error)


def _brief(error: Exception) -> Exception | None:
    """The cause, unless a traceback would print too much of it."""
    return error if len(str(error)) <= _LONGEST else None


def plan_from(
    where: str,
    data: Mapping[str, Any],
    fn: Callable[..., Any],
    example_args: Sequence[Any],
    example_kwargs: Mapping[str, Any] | None = None,
    names: tuple[str, str] = FUNCTION,
) -> tuple[Traced, Result, Cluster]:
    """As `read_plan`, of the contents of a file `where`; the function and its arguments are called by `names`."""
    check_call(fn, example_args, example_kwargs, names)
    return plan_from_dict(where, data, trace(fn, example_args, dict(example_kwargs or {})))


def plan_from_dict(where: str, data: Mapping[str, Any], traced: Traced) -> tuple[Traced, Result, Cluster]:
    """As `plan_from`, of a function that is traced already."""
    with blamed_on(where):
        return _plan_from_dict(data, traced)


@contextmanager
def _naming_jax_versions(function: Mapping[str, Any]) -> Generator[None]:
    """JAX versions trace one function to unlike ops: an error says so where a plan's version is not this one."""
    try:
        yield
    except PlanError as error:
        if function.get("jax", jax.__version__) == jax.__version__:
            raise
        raise PlanError(
            f"{error}; the plan was made with JAX {function['jax']} and this is JAX {jax.__version__}, which may trace "
            f"the same function otherwise: {_AGAIN}, or use JAX {function['jax']}"
        ) from None


def _plan_from_dict(data: Mapping[str, Any], traced: Traced) -> tuple[Traced, Result, Cluster]:
    with _naming_jax_versions(data["function"]):
        traced = _same_function(data["function"], traced)
    graph = traced.graph
    cluster = Cluster.from_dict(data["cluster"])
    program = Program.from_dict(data["program"])
    devices = _devices(data, cluster, program)
    table = FactorTable(graph)
    check_program(graph, program, table)
    classes = Classes.build(graph, program, table)
    if list(data["classes"]) != [c.name for c in classes.all]:
        raise PlanError(f"the dimension classes are not those of the program; {_AGAIN}")
    shares = tuple(tuple(_integer(s) for s in row) for row in data["shares"])
    sizes = Sizes(graph, classes, shares)
    check_sizes(graph, program, sizes, table)
    certificate = data["certificate"]
    if certificate["status"] not in get_args(Status):
        raise PlanError(f"{certificate['status']!r} is no status; {_AGAIN}")
    unknown = tuple(unpriced(graph))
    result = Result(
        program=program,
        sizes=sizes,
        cost_s=read_number(certificate["cost_s"]),
        lower_bound_s=read_number(certificate["lower_bound_s"]),
        joint_lower_bound_s=read_number(certificate["joint_lower_bound_s"]),
        status=qualified(certificate["status"], unknown),
        expanded=_integer(certificate["expanded"]),
        memory_bytes=_per_device(data, "memory_bytes", cluster.n),
        memory_limit_bytes=_per_device(data, "memory_limit_bytes", cluster.n),
        replicated_primitives=tuple(map(str, data["replicated_primitives"])),
        devices=devices,
        unpriced_primitives=unknown,
        with_all_s=read_number(certificate["with_all_s"]) if "with_all_s" in certificate else None,
        ratio_bound_s=read_number(certificate.get("ratio_bound_s", 0.0)),
        overlap=_boolean(certificate.get("overlap", False)),
        exposed_communication_s=read_number(certificate.get("exposed_communication_s", 0.0)),
        clocks_s={str(name): read_number(s) for name, s in certificate.get("clocks", {}).items()},
        exact=_exact(data),
        lowering=LoweringOptions.from_dict(data.get("lowering", {})),
    )
    return traced, result, cluster


def _devices(data: Mapping[str, Any], cluster: Cluster, program: Program) -> tuple[int, ...] | None:
    """The devices that the program is for, None for all; files of versions that left none out don't name them."""
    devices = tuple(_integer(d) for d in data.get("devices", range(cluster.n)))
    used = cluster.subset(devices)
    n = math.prod(size for _, size in program.axes)
    if n != used.n:
        of = "and the cluster has" if used is cluster else "and the file names"
        raise PlanError(f"the program is for {n} devices {of} {used.n}; {_AGAIN}")
    if used is cluster:
        return None
    if program.axes != mesh_axes(used):
        raise PlanError(
            f"the program is for a mesh {dict(program.axes)}, and its devices are {dict(used.axes)}; {_AGAIN}"
        )
    return devices


def _exact(data: Mapping[str, Any]) -> bool:
    """Whether its memory is of exact shards; files of versions that knew only padded ones don't say."""
    stored = data.get("memory_of", "padded")
    if stored not in ("exact", "padded"):
        raise PlanError(f"its memory is of {stored!r} shards, not of exact or padded ones; {_AGAIN}")
    return stored == "exact"


def _same_function(saved: Mapping[str, Any], traced: Traced) -> Traced:
    """The traced function with the saved carry; PlanError names the first difference."""
    graph = traced.graph
    inputs = _inputs(traced)
    for have, want in zip(inputs, saved["inputs"]):
        if have != want:
            raise PlanError(f"this plan is of another function: it takes {_leaf(want)}, and this one {_leaf(have)}")
    if "again" in saved:
        again = Rematerialized(_integer(saved["again"]["at"]), tuple(_integer(o) for o in saved["again"]["ops"]))
        try:
            graph = recomputed(graph, again)
        except ValueError as error:
            raise PlanError(f"this plan is of another function: {error}") from None
    ops = [op.name for op in graph.ops]
    for what, have, want in (("inputs", inputs, saved["inputs"]), ("ops", ops, saved["ops"])):
        if len(have) != len(want):
            raise PlanError(f"this plan is of another function: it has {len(want)} {what}, and this one {len(have)}")
    for i, (have, want) in enumerate(zip(ops, saved["ops"])):
        if have != want:
            raise PlanError(f"this plan is of another function: its op {i} is {want}, and this one's is {have}")
    if list(traced.out_paths) != saved["outputs"]:
        raise PlanError(f"this plan is of another function: its outputs are {saved['outputs']}")
    carry = tuple((_integer(i), _integer(o)) for i, o in saved["carry"])
    for i, o in carry:
        if not (0 <= i < len(graph.inputs) and 0 <= o < len(graph.outputs)):
            raise PlanError(f"the carry {[i, o]} names no input and output; {_AGAIN}")
    told: dict[str, tuple[int, ...]] = {}
    for name in ("kept", *_OF_OTHERS):
        there = len(graph.outputs if name == "selecting_outputs" else graph.inputs)
        told[name] = tuple(_integer(i) for i in saved.get(name, ()))
        for i in told[name]:
            if not 0 <= i < there:
                raise PlanError(f"its {name} names {i}, and there are {there}; {_AGAIN}")
    if carry != graph.carry or any(told[name] != getattr(graph, name) for name in told):
        graph = dataclasses.replace(graph, carry=carry, **told)
    if graph.fingerprint != saved["fingerprint"]:
        raise PlanError(
            f"this plan is of another function: fingerprint {saved['fingerprint']}, and this one's is "
            f"{graph.fingerprint}: the ops have the same names, but other operands, shapes or parameters, or draw "
            "random numbers with another jax_threefry_partitionable"
        )
    runs = [abs(read_number(x)) for x in saved["runs"]]
    bodies = len(graph.regions) - 1
    if len(runs) != bodies:
        raise PlanError(f"the plan says how often {len(runs)} loops and branches run, and there are {bodies}; {_AGAIN}")
    lengths = [r.count if r.kind == "scan" else x for r, x in zip(graph.regions[1:], runs)]
    return dataclasses.replace(traced, graph=with_counts(graph, [1.0, *lengths]))


def _inputs(traced: Traced) -> list[list[Any]]:
    values = [traced.graph.values[v] for v in traced.graph.inputs]
    return [[path, list(v.shape), str(v.dtype)] for path, v in zip(traced.in_paths, values, strict=True)]


def _leaf(entry: Any) -> str:
    path, shape, dtype = entry
    return f"{path} of {dtype}{shape}"


def number_of(x: float) -> float | str:
    return float(x) if math.isfinite(x) else str(float(x))


def read_number(x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, (int, float, str)):
        raise PlanError(f"{x!r} is no number; {_AGAIN}")
    number = float(x)
    if math.isnan(number):
        raise PlanError(f"{x!r} is no number; {_AGAIN}")
    return number


def _integer(x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, int):
        raise PlanError(f"{x!r} is no integer; {_AGAIN}")
    return x


def _boolean(x: Any) -> bool:
    if not isinstance(x, bool):
        raise PlanError(f"{x!r} is neither true nor false; {_AGAIN}")
    return x


def _per_device(data: Mapping[str, Any], key: str, devices: int) -> tuple[float, ...]:
    numbers = tuple(read_number(x) for x in data[key])
    if len(numbers) != devices:
        raise PlanError(f"{key} has {len(numbers)} entries for {devices} devices; {_AGAIN}")
    return numbers
