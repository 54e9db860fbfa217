"""A plan's program as a Python module that runs without hapsynth."""

from __future__ import annotations

import base64
import inspect
import zlib
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from hapsynth import _jax
from hapsynth._quantities import plural
from hapsynth.export import _runtime
from hapsynth.export._equation_printer import NAMESPACE
from hapsynth.export._function_printer import Writer, shape_of
from hapsynth.export._literals import UnwritableError, array
from hapsynth.export._names import marker, of_path
from hapsynth.export._pytree_printer import results_text
from hapsynth.instructions.layout import format_layout
from hapsynth.lower import Lowered, Storage
from hapsynth.running.base import Planned
from hapsynth.running.form import only_exact

_MARK = "# ---- copied from here on\n"
_LINE = 110
"""Characters of a line of data."""
_HEAD = '''"""A program that hapsynth planned for the cluster '{cluster}', on {sizes}. It needs nothing but JAX.

To run it, here as a training step:

    mesh = make_mesh()                          # of the first {devices}
    step = make_step(mesh)
    state, batch = shard(mesh, state, batch)    # whole arrays to shards, as the program keeps them
    state, loss = step(state, batch)            # again and again: carried state is consumed, and its successor returned
    whole = unshard(state, at="[0]")            # NumPy arrays of the first result; `unshard(results)` of all

`body` is the program: each device's work on its own shards. Beside a tensor stand its shape on the device, its
layout (`S(0)`: sharded along dimension 0, `R`: replicated, `P(sum)`: to be added up), one per mesh axis, and the line
of the source program.
"""
'''


class SourceError(ValueError):
    """A plan cannot be written as a program's text."""


def source_of(plan: Planned) -> str:
    """The module's text. Raises SourceError naming the op that cannot be written, or why the plan has no such form."""
    too_large = only_exact(plan.traced.graph, plan.result, plan.cluster)
    if too_large:
        raise SourceError(f"the plan has no single program that could be written: {too_large}")
    if wrong := plan.arguments.wrong_setting():
        raise SourceError(wrong)
    try:
        # Names of files may have characters that no text has.
        text = _Module(plan).text().encode("utf-8", "backslashreplace").decode()
    except UnwritableError as error:
        raise SourceError(f"to_source: {error}") from error
    try:
        compile(text, "program", "exec", dont_inherit=True)
    except SyntaxError as error:
        where = f"line {error.lineno}, {(error.text or '').strip()!r}"
        raise SourceError(
            f"to_source: the program would be no Python, by a fault of hapsynth: {error.msg}: {where}"
        ) from error
    return text


class _Module:
    def __init__(self, plan: Planned) -> None:
        self.plan, self.traced, self.graph = plan, plan.traced, plan.traced.graph
        self.axes = plan.program.axes
        names, sizes = [n for n, _ in self.axes], tuple(s for _, s in self.axes)
        # Nothing runs here, so no devices are needed.
        mesh: Any = AbstractMesh(sizes, tuple(names), axis_types=(AxisType.Auto,) * len(names))
        platform = "" if plan.mesh is None else plan.mesh.devices.flat[0].platform
        self.lowered = Lowered(
            self.graph, plan.program, plan.sizes, mesh, plan.donate, platform, options=plan.result.lowering
        )
        self.lowered.local.named = marker(self.graph)
        reserved = {*NAMESPACE, *vars(_runtime), "body"}
        self.writer = Writer(self.axes, sorted(reserved))

    def text(self) -> str:
        body = self.body()
        lowered, graph = self.lowered, self.graph
        outputs = [(p, s) for p, s in zip(self.traced.out_paths, lowered.outputs) if s is not None]
        arguments = zip(self.traced.in_paths, lowered.inputs, lowered.donated, strict=True)
        constants = [(graph.values[v].name, s) for v, s in zip(graph.constants, lowered.constants)]
        parts = [
            self.head(),
            "\n".join(_imports()),
            body,
            f"def results(structure, leaves, made):\n    return {results_text(self.traced)}",
            _copied(),
            f"AXES = {dict(self.axes)!r}",
            f"DEVICES = {self.plan.devices!r}",
            f"ALL_DEVICES = {self.plan.cluster.n}",
            _tuple_of("ARGUMENTS", [_array(p, s, donated) for p, s, donated in arguments]),
            _tuple_of("RESULTS", [_array(p, s) for p, s in outputs]),
            _tuple_of("CONSTANTS", [_array(p, s) for p, s in constants]),
            _tuple_of("CONSTANT_VALUES", [_whole(x) for x in graph.constants.values()]),
            self.static(),
            f"X64 = {self.plan.arguments.computes_wide}",
            f"PARTITIONABLE = {graph.partitionable}",
            *(f"{name} = {_whole(x)}" for name, x in self.writer.tables.items()),
        ]
        return "\n\n\n".join(p for p in parts if p) + "\n"

    def head(self) -> str:
        sizes = ", ".join(f"{_in_docstring(name)}={n}" for name, n in self.axes)
        cluster = _in_docstring(self.plan.cluster.name)
        all_devices = self.plan.cluster.n
        some = " those at DEVICES" if len(self.plan.devices) < all_devices else ""
        devices = plural(all_devices, "device") + some
        return _HEAD.format(cluster=cluster, devices=devices, sizes=sizes).rstrip()

    def static(self) -> str:
        """The leaves that are no arrays: the program is for these, as far as text can tell them."""
        paths = self.plan.argument_paths
        names: list[str] = []
        for position, leaf in self.traced.static_leaves.items():
            plain = leaf is None or isinstance(leaf, str | bytes)
            names.append(f"{paths[position]!r}: {leaf!r}" if plain else f"{paths[position]!r}: ...")
        return f"STATIC = {{{', '.join(names)}}}"

    def body(self) -> str:
        """The text of `body`."""
        lowered, writer = self.lowered, self.writer
        sources = (*lowered.inputs, *lowered.constants)
        structs = [jax.ShapeDtypeStruct(s.stored_shape, s.dtype, weak_type=s.weak_type) for s in sources]
        closed, _ = _jax.make_jaxpr(lowered.on_mesh, *structs)
        outer, consts = _jax.open_jaxpr(closed)
        (mapped,) = outer.eqns
        inner, inside = _jax.open_jaxpr(mapped.params["jaxpr"])
        tables = dict(zip(getattr(outer, "constvars", ()), consts))
        env = dict(zip(getattr(inner, "constvars", ()), map(writer.table, inside)))
        scope = writer.module.inner()
        names: dict[Any, str] = {}
        paths = (*self.traced.in_paths, *(self.graph.values[v].name for v in self.graph.constants))
        writer.line("def body(")
        writer.depth += 1
        for var, path, s in zip(outer.invars, paths, sources, strict=True):
            names[var] = scope.new(of_path(path))
            uneven = "" if s.is_even else ", stored as long as the longest shard"
            writer.line(f"{names[var]},", f"{_short(s)} {format_layout(s.layout)}  {path}{uneven}")
        writer.depth -= 1
        writer.line("):")
        writer.depth += 1
        for given, var in zip(mapped.invars, inner.invars, strict=True):
            env[var] = writer.table(tables[given]) if given in tables else names[given]
        writer.end(f"({', '.join(writer.steps(inner, env, scope))},)")
        return "\n".join(writer.lines)


def _short(s: Storage) -> str:
    return shape_of(jax.ShapeDtypeStruct(s.stored_shape, s.dtype))


def _in_docstring(name: str) -> str:
    """A name, of whatever characters, as text between three quotes."""
    return repr(name)[1:-1].replace('"', '\\"')


def _imports() -> list[str]:
    """Sorted as a formatter would."""
    return [
        "import base64",
        "import zlib",
        "from collections.abc import Callable, Sequence",
        "from dataclasses import dataclass, field",
        "from typing import Any",
        "",
        "import jax",
        "import jax.numpy as jnp",
        "import numpy as np",
        "from jax import lax",
        "from jax.extend import random as prng",
        "from jax.extend.core import primitives",
        "from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec",
    ]


def _copied() -> str:
    return inspect.getsource(_runtime).partition(_MARK)[2].strip()


def _tuple_of(name: str, members: list[str]) -> str:
    return f"{name} = (\n" + "".join(f"    {m},\n" for m in members) + ")" if members else f"{name} = ()"


def _array(path: str, s: Storage, donated: bool = False) -> str:
    cuts = {d: lengths for d, (_, lengths) in s.cuts.items() if len(set(lengths)) > 1}
    spec = ", ".join(map(repr, s.spec))
    more = f", {cuts!r}" if cuts or donated else ""
    return f"Array({path!r}, {s.shape!r}, {str(s.dtype)!r}, PartitionSpec({spec}){more}{', True' if donated else ''})"


def _whole(x: Any) -> str:
    """An array as an expression, however large."""
    if isinstance(x, jax.Array) and _jax.is_extended(x.dtype):
        return f"jax.random.wrap_key_data({_whole(jax.random.key_data(x))}, impl={str(jax.random.key_impl(x))!r})"
    host = np.asarray(x)
    if host.size <= 64:
        return array(host)
    packed = base64.b64encode(zlib.compress(np.ascontiguousarray(host).tobytes(), 9)).decode()
    lines = "\n".join(f'    "{packed[at : at + _LINE]}"' for at in range(0, len(packed), _LINE))
    return f"array(\n    {host.shape!r},\n    {host.dtype.name!r},\n{lines},\n)"
