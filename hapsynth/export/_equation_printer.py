"""One equation of a jaxpr as an expression of JAX's public functions.

Candidates are tried: an expression is taken when tracing it gives the very equation again. So no printer is
trusted, and an equation for which none is right is an error that names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import random as prng
from jax.extend.core import primitives
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from hapsynth import _jax
from hapsynth.export._literals import UnwritableError, dtype, plain_scalar, public_primitive, scalar, text

NAMESPACE = {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "primitives": primitives, "prng": prng}
"""The names that the text of an equation uses."""

_OPERATORS = {
    "add": "+", "add_any": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "eq": "==", "ne": "!=", "and": "&", "or": "|", "xor": "^", "dot_general": "@",
}  # fmt: skip
_SAME = {"add_any": "add"}
"""Primitives that are others but for differentiation."""

_UNSEEN = ("weak_type", "update_jaxpr", "update_consts", "linear")
"""Parameters that follow from the primitive, or from the operands (`found` refuses the one that has a function)."""

Params = dict[str, Any]
Printer = Callable[[Sequence[str]], str]
"""Operands, as text, to an expression."""


def _of(params: Params, *names: str) -> str:
    return ", ".join(text(params[n]) for n in names)


_AXIS = lambda p: text(p["axes"][0] if len(p["axes"]) == 1 else p["axes"])
_GROUPS = lambda p: f", axis_index_groups={text(p['axis_index_groups'])}" if p.get("axis_index_groups") else ""

_PRINTERS: dict[str, Callable[[Params, Sequence[str]], str]] = {
    "all_gather": lambda p, x: (
        f"lax.all_gather({x[0]}, {_name(p)}, axis={p['all_gather_dimension']}, tiled={p['tiled']}{_GROUPS(p)})"
    ),
    "all_to_all": lambda p, x: (
        f"lax.all_to_all({x[0]}, {_name(p)}, {p['split_axis']}, {p['concat_axis']}, tiled={p['tiled']}{_GROUPS(p)})"
    ),
    "argmax": lambda p, x: f"lax.argmax({x[0]}, {_AXIS(p)}, {dtype(p['index_dtype'])})",
    "argmin": lambda p, x: f"lax.argmin({x[0]}, {_AXIS(p)}, {dtype(p['index_dtype'])})",
    "axis_index": lambda p, x: f"lax.axis_index({_of(p, 'axis_name')})",
    "broadcast_in_dim": lambda p, x: f"lax.broadcast_in_dim({x[0]}, {_of(p, 'shape', 'broadcast_dimensions')})",
    "concatenate": lambda p, x: f"lax.concatenate([{', '.join(x)}], {p['dimension']})",
    "convert_element_type": lambda p, x: f"lax.convert_element_type({x[0]}, {dtype(p['new_dtype'])})",
    "copy": lambda p, x: f"jnp.copy({x[0]})",
    "debug_print": lambda p, x: f"jax.debug.print({', '.join((text(p['fmt']), *x))})",
    "dot_general": lambda p, x: f"lax.dot_general({', '.join(x)}, {_of(p, 'dimension_numbers')})",
    "dynamic_slice": lambda p, x: (
        f"lax.dynamic_slice({x[0]}, ({', '.join(x[1:])},), {_of(p, 'slice_sizes')}, allow_negative_indices=False)"
    ),
    "dynamic_update_slice": lambda p, x: (
        f"lax.dynamic_update_slice({x[0]}, {x[1]}, ({', '.join(x[2:])},), allow_negative_indices=False)"
    ),
    "ffi_call": lambda p, x: _ffi(p, x),
    "fft": lambda p, x: f"lax.fft({x[0]}, {_of(p, 'fft_type', 'fft_lengths')})",
    "integer_pow": lambda p, x: f"{x[0]} ** {p['y']}",
    "iota": lambda p, x: f"lax.broadcasted_iota({dtype(p['dtype'])}, {_of(p, 'shape', 'dimension')})",
    "name": lambda p, x: f"jax.ad_checkpoint.checkpoint_name({x[0]}, {_of(p, 'name')})",
    "neg": lambda p, x: f"-{x[0]}",
    "not": lambda p, x: f"~{x[0]}",
    "pmax": lambda p, x: f"lax.pmax({x[0]}, {_AXIS(p)}{_GROUPS(p)})",
    "pmin": lambda p, x: f"lax.pmin({x[0]}, {_AXIS(p)}{_GROUPS(p)})",
    "psum": lambda p, x: f"lax.psum({x[0]}, {_AXIS(p)}{_GROUPS(p)})",
    "psum_invariant": lambda p, x: f"lax.psum({x[0]}, {_AXIS(p)}{_GROUPS(p)})",
    "random_clone": lambda p, x: f"jax.random.clone({x[0]})",
    "random_bits": lambda p, x: f"jax.random.bits({x[0]}, {_of(p, 'shape')}, 'uint{p['bit_width']}')",
    "random_fold_in": lambda p, x: f"jax.random.fold_in({x[0]}, {x[1]})",
    "random_split": lambda p, x: f"jax.random.split({x[0]}, {_of(p, 'shape')})",
    "random_unwrap": lambda p, x: f"jax.random.key_data({x[0]})",
    "random_wrap": lambda p, x: f"jax.random.wrap_key_data({x[0]}, impl={text(_key_type(p['impl']))})",
    "reduce_scatter": lambda p, x: (
        f"lax.psum_scatter({x[0]}, {_name(p)}, scatter_dimension={p['scatter_dimension']}, tiled={p['tiled']}"
        f"{_GROUPS(p)})"
    ),
    "reshape": lambda p, x: f"lax.reshape({x[0]}, {_of(p, 'new_sizes')})",
    "rng_bit_generator": lambda p, x: (
        f"lax.rng_bit_generator({x[0]}, {_of(p, 'shape')}, {dtype(p['dtype'])}, {_of(p, 'algorithm')})"
    ),
    "scaled_dot": lambda p, x: (
        f"lax.scaled_dot({x[0]}, {x[1]}, lhs_scale={x[2]}, rhs_scale={x[3]}, "
        f"{', '.join(_keywords(lax.scaled_dot, p))})"
    ),
    "scaled_matmul_wrapper": lambda p, x: f"jax.nn.scaled_matmul({', '.join(x)}, {dtype(p['preferred_element_type'])})",
    "select_n": lambda p, x: f"lax.select_n({', '.join(x)})",
    "slice": lambda p, x: f"lax.slice({x[0]}, {_of(p, 'start_indices', 'limit_indices', 'strides')})",
    "sort": lambda p, x: _sort(p, x),
}  # fmt: skip


def _name(params: Params) -> str:
    """The mesh axis of a collective, which may stand in a tuple."""
    name = params["axis_name"]
    return text(name[0] if isinstance(name, tuple) and len(name) == 1 else name)


def _key_type(impl: Any) -> str:
    return getattr(impl, "name", None) or str(impl)


def _sort(p: Params, x: Sequence[str]) -> str:
    operand = _tuple(x) if len(x) > 1 else x[0]
    return f"lax.sort({operand}, dimension={p['dimension']}, is_stable={p['is_stable']}, num_keys={p['num_keys']})"


def _ffi(p: Params, x: Sequence[str]) -> str:
    results = [f"jax.ShapeDtypeStruct({a.shape}, {dtype(a.dtype)})" for a in p["result_avals"]]
    # The C types of attributes are those of NumPy's numbers.
    typed = lambda v: scalar(v, v.dtype) if isinstance(v, np.generic) else text(v)
    call_arguments = [*x, *(f"{key}={typed(value)}" for key, value in dict(p["attributes"] or ()).items())]
    # JAX turns them around.
    turned = lambda layouts: [tuple(reversed(layout)) for layout in layouts]
    more: Params = {
        "has_side_effect": p["has_side_effect"],
        "input_layouts": turned(p["input_layouts"] or ()),
        "output_layouts": turned(p["output_layouts"] or ()),
        "input_output_aliases": dict(p["input_output_aliases"] or ()),
        "legacy_backend_config": p["legacy_backend_config"],
    }
    named = "".join(f", {key}={text(value)}" for key, value in more.items() if value)
    version = f", custom_call_api_version={p['custom_call_api_version']}"
    many = f"[{', '.join(results)}]" if len(results) > 1 else results[0]
    return f"jax.ffi.ffi_call({text(p['target_name'])}, {many}{named}{version})({', '.join(call_arguments)})"


def _candidates(eqn: Any) -> Iterator[Printer]:
    """Ways to write an equation, the most readable first. Each may raise UnwritableError, or be wrong."""
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in _OPERATORS and len(eqn.invars) == 2:
        yield lambda x: f"{x[0]} {_OPERATORS[name]} {x[1]}"
    if name in _PRINTERS:
        yield lambda x: _PRINTERS[name](params, x)
    python = name.replace("-", "_")
    only = "[0]" if eqn.primitive.multiple_results and len(eqn.outvars) == 1 else ""
    for module, where in ((lax, f"lax.{python}"), (lax.linalg, f"lax.linalg.{python}")):
        fn = getattr(module, python, None)
        if callable(fn):
            yield lambda x, fn=fn, where=where: f"{where}({', '.join([*x, *_keywords(fn, params)])})"
            yield lambda x, fn=fn, where=where: f"{where}({', '.join([*x, *_keywords(fn, params)])}){only}"
            yield lambda x, fn=fn, where=where: f"{where}({', '.join([_tuple(x), *_keywords(fn, params)])})"

    def bound(x: Sequence[str]) -> str:
        named = [f"{key}={text(value)}" for key, value in params.items()]
        return f"primitives.{public_primitive(name)}.bind({', '.join([*x, *named])}){only}"

    yield bound


def _tuple(x: Sequence[str]) -> str:
    return f"({', '.join(x)})"


def _keywords(fn: Callable[..., Any], params: Params) -> list[str]:
    """The parameters that a function takes, without those at their defaults."""
    try:
        accepted = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return []
    default = lambda key: accepted[key].default if key in accepted else None
    chosen = {k: v for k, v in params.items() if k in accepted and not _equal(v, default(k))}
    return [f"{key}={text(value)}" for key, value in chosen.items()]


class Ops:
    """Writes equations that stand where the mesh has `axes`."""

    def __init__(self, axes: Sequence[tuple[str, int]]) -> None:
        names, sizes = [n for n, _ in axes], tuple(s for _, s in axes)
        self.mesh = AbstractMesh(sizes, tuple(names), axis_types=(AxisType.Auto,) * len(names))
        self.known: dict[object, tuple[Printer, bool]] = {}

    def write(self, eqn: Any, operands: Sequence[str], source: str) -> str:
        """The equation as an expression of its operands, whose literals are left out: `""`.

        One result is an array, several are a sequence. UnwritableError, which names the primitive, where there is none.
        """
        literals = tuple(scalar(a.val, a.aval.dtype) if _jax.is_literal(a) else "" for a in eqn.invars)
        avals = tuple(_described(a.aval) for a in eqn.invars)
        key = (eqn.primitive.name, str(eqn.params), avals, literals, _positions(eqn))
        if key not in self.known:
            self.known[key] = self.found(eqn, literals, source)
        printer, typed = self.known[key]
        return printer(_operands(eqn, operands, typed))

    def found(self, eqn: Any, literals: Sequence[str], source: str) -> tuple[Printer, bool]:
        """The writer of an equation, and whether its literals need their dtypes."""
        why = ""
        where = f" ({source})" if source else ""
        if eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None:
            raise UnwritableError(
                f"scatter{where} applies a function to what lies there, which has no text; write it as a value, "
                "x.at[i].set(f(x[i]))"
            )
        names = [f"x{eqn.invars.index(a)}" if not _jax.is_literal(a) else "" for a in eqn.invars]
        # Of numbers alone Python would make a number.
        ways = (False, True) if any(literals) and not all(literals) else (all(literals),)
        for printer in _candidates(eqn):
            for typed in ways:
                try:
                    if self.right(printer(_operands(eqn, names, typed)), eqn, [n for n in dict.fromkeys(names) if n]):
                        return printer, typed
                except UnwritableError as error:
                    why = f": {error}"
                except Exception as error:  # a guess that JAX refuses
                    why = why or f": {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
        raise UnwritableError(f"{eqn.primitive.name}{where} cannot be written as source{why}")

    def right(self, expression: str, eqn: Any, names: Sequence[str]) -> bool:
        """Whether an expression makes just this equation of operands `names`."""
        fn = eval(f"lambda {', '.join(names)}: {expression}", dict(NAMESPACE))
        avals = [eqn.invars[int(n[1:])].aval for n in names]
        along_axes = "axis_name" in eqn.params or any(isinstance(a, str) for a in eqn.params.get("axes") or ())
        traced = self.traced(fn, avals, along_axes)
        if traced is None:
            return False
        equations, inputs, outputs = traced
        if len(equations) != 1:
            return False
        (again,) = equations
        place = dict(zip(inputs, names))
        planned = {v: f"x{eqn.invars.index(v)}" for v in eqn.invars if not _jax.is_literal(v)}
        operands, due = [_atom(a, place) for a in again.invars], [_atom(a, planned) for a in eqn.invars]
        results = outputs == list(again.outvars)
        alike = [_described(v.aval) for v in again.outvars] == [_described(v.aval) for v in eqn.outvars]
        name = _SAME.get(eqn.primitive.name, eqn.primitive.name)
        return (
            _SAME.get(again.primitive.name, again.primitive.name) == name
            and operands == due
            and results
            and alike
            and _same_params(again.params, eqn.params)
        )

    def traced(
        self, fn: Callable[..., Any], avals: Sequence[Any], along_axes: bool
    ) -> tuple[list[Any], list[Any], list[Any]] | None:
        """(equations, inputs, outputs) of a function on each device; None where its result is no array or several."""
        shape: list[int] = []

        def run(*xs: Any) -> Any:
            out = fn(*xs)
            shape.append(-1 if isinstance(out, jax.Array) else len(out or ()))
            return out

        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        spec = PartitionSpec()
        on_mesh = jax.shard_map(run, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        # The text is to say the precision of products itself, wherever it is run.
        with jax.default_matmul_precision(None):
            closed, _ = _jax.make_jaxpr(on_mesh if along_axes else run, *structs)
        inner, consts = _jax.open_jaxpr(closed)
        if along_axes:
            if len(inner.eqns) != 1 or list(inner.eqns[0].invars) != list(inner.invars):
                return None
            inner, consts = _jax.open_jaxpr(inner.eqns[0].params["jaxpr"])
        if consts:
            return None
        if shape[0] == 1 or (shape[0] == -1 and len(inner.outvars) != 1):
            return None
        equations: list[Any] = []
        outputs = _flat(inner, equations, {})
        return equations, list(inner.invars), outputs


def _flat(jaxpr: Any, equations: list[Any], renamed: dict[Any, Any]) -> list[Any]:
    """Collect the equations of a jaxpr, calls inlined; its outputs. Only calls that pass their operands on whole."""
    for eqn in jaxpr.eqns:
        inner = _jax.called_jaxpr(eqn)
        if inner is None:
            equations.append(eqn.replace(invars=[_looked_up(renamed, a) for a in eqn.invars]))
            continue
        opened, consts = _jax.open_jaxpr(inner)
        if consts:
            equations += [eqn, eqn]
            continue
        renamed.update(zip(opened.invars, (_looked_up(renamed, a) for a in _jax.called_operands(eqn, eqn.invars))))
        renamed.update(zip(eqn.outvars, _flat(opened, equations, renamed)))
    return [_looked_up(renamed, v) for v in jaxpr.outvars]


def _looked_up(renamed: dict[Any, Any], atom: Any) -> Any:
    return atom if _jax.is_literal(atom) else renamed.get(atom, atom)


def _operands(eqn: Any, names: Sequence[str], typed: bool) -> list[str]:
    out: list[str] = []
    for atom, name in zip(eqn.invars, names, strict=True):
        if not _jax.is_literal(atom):
            out.append(name)
        else:
            value = np.asarray(atom.val, atom.aval.dtype)
            out.append(scalar(value, value.dtype) if typed else plain_scalar(value))
    return out


def _positions(eqn: Any) -> tuple[int, ...]:
    """Which operands are the same."""
    return tuple(-1 if _jax.is_literal(a) else eqn.invars.index(a) for a in eqn.invars)


def _atom(atom: Any, place: dict[Any, str]) -> object:
    if _jax.is_literal(atom):
        return np.asarray(atom.val, atom.aval.dtype).tobytes(), str(atom.aval.dtype), tuple(np.shape(atom.val))
    return place.get(atom, "?")


def _described(aval: Any) -> tuple[tuple[int, ...], str]:
    return tuple(aval.shape), str(aval.dtype)


def _same_params(a: Params, b: Params) -> bool:
    return all(_equal(a.get(k), b.get(k)) for k in {*a, *b} if k not in _UNSEEN)


def _said(param: Any) -> Any:
    """A parameter, None for a sharding that no axis cuts."""
    return None if isinstance(param, NamedSharding) and not any(param.spec) else param


def _equal(a: Any, b: Any) -> bool:
    a, b = _said(a), _said(b)
    if a is b:
        return True
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(np.asarray(a), np.asarray(b))
    if hasattr(a, "eqns") or hasattr(a, "jaxpr"):
        return str(a) == str(b)
    if isinstance(a, float) and isinstance(b, float) and np.isnan(a):
        return bool(np.isnan(b))
    if isinstance(a, np.generic) and isinstance(b, np.generic) and a.dtype != b.dtype:
        return False
    try:
        return bool(a == b)
    except Exception:  # not comparable is not known to be equal: the equation is not taken
        return False
