"""A function as if its floats were wide: the same jaxpr, its float16, bfloat16 and float32 values kept as float64.

The yardstick of `hapsynth.running.check` where a function rounds coarsely. Casts to a narrower float round nothing
here, but numbers beyond the narrow range are infinite, so that loss scaling meets its overflows. Casts to floats
of 8 bits and fewer are quantisation, which is meant, and stay. Ops that read a float's bits, kernels and foreign
primitives run as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from hapsynth import _jax

_BITS = ("bitcast_convert_type", "nextafter", "random_gamma", "rng_uniform")
"""They ask for a float of just that width."""
_SAME = ("sharding_constraint", "mesh_cast", "optimization_barrier", "device_put", "copy", "copy_p", "reduce_precision")
"""Of no effect on values that are not rounded; a `reduce_precision` to fewer than 16 bits rounds all the same."""
_NEVER_LARGER = (
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "squeeze",
    "slice",
    "dynamic_slice",
    "dynamic_update_slice",
    "gather",
    "concatenate",
    "select_n",
    "max",
    "min",
    "neg",
    "abs",
    "sign",
    "rev",
    "pad",
    "clamp",
    "sort",
    "reduce_max",
    "reduce_min",
    "top_k",
    "tanh",
    "logistic",
    "copy",
    "iota",
    "split",
)
_SPECIAL = ("scan", "while", "cond", "convert_element_type", "reduce")


class Widening:
    """The function of a closed jaxpr, to be traced where 64 bits are enabled.

    After a trace `kept` names the primitives that ran as they are for want of a wide form, and `epsilon` is the largest
    unit in the last place of 1 of any float that was widened.
    """

    def __init__(self, closed: Any) -> None:
        self.closed = closed
        self.kept: set[str] = set()
        self.epsilon = 0.0

    def __call__(self, *arrays: Any) -> list[Any]:
        return self._run(self.closed, arrays)

    def _run(self, closed: Any, operands: Sequence[Any]) -> list[Any]:
        jaxpr, consts = _jax.open_jaxpr(closed)
        env: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            if _jax.is_literal(atom):
                return self._wide(np.asarray(atom.val, atom.aval.dtype), atom.aval.dtype)
            return env[atom]

        for v, x in (*zip(jaxpr.constvars, consts, strict=True), *zip(jaxpr.invars, operands, strict=True)):
            env[v] = self._wide(x, v.aval.dtype)
        for eqn in jaxpr.eqns:
            if not _jax.shows(eqn):
                env.update(zip(eqn.outvars, self._equation(eqn, [read(v) for v in eqn.invars]), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if (remat := _jax.remat_jaxpr(eqn)) is not None:
            return self._run(remat[0], operands)
        if (called := _jax.called_jaxpr(eqn)) is not None:
            return self._run(called, _jax.called_operands(eqn, operands))
        if not any(_jax.is_inexact(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)):
            # Control flow over whole numbers alone may hold floats inside.
            if name not in _SPECIAL:
                return self._bound(eqn, operands, eqn.params)
        elif name in _BITS:
            return self._as_it_is(eqn, operands)
        match name:
            case "scan":
                out = self._scan(eqn, operands)
            case "while":
                out = self._while(eqn, operands)
            case "cond":
                out = lax.switch(operands[0], [partial(self._flat, b) for b in eqn.params["branches"]], *operands[1:])
            case "convert_element_type":
                dtype = eqn.params["new_dtype"]
                out = [operands[0] if is_widened(dtype) else lax.convert_element_type(operands[0], dtype)]
                out = [x.astype(_wide_dtype(dtype)) if is_widened(dtype) else x for x in out]
            case "reduce":
                out = self._reduce(eqn, operands)
            case _ if name.startswith("scatter"):
                out = self._scatter(eqn, operands)
            case "reduce_precision" if eqn.params["exponent_bits"] + eqn.params["mantissa_bits"] < 15:
                out = self._bound(eqn, operands, eqn.params)
            case _ if name in _SAME:
                out = operands
            case _:
                out = self._widely(eqn, operands)
        grows = name not in _NEVER_LARGER
        return [self._held(x, v.aval.dtype, grows) for x, v in zip(out, eqn.outvars, strict=True)]

    def _widely(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """The primitive on wide operands, or as it is where it has no such form. A jaxpr inside is of narrow floats."""
        if not any(hasattr(q, "eqns") or hasattr(q, "jaxpr") for q in _flat_values(eqn.params)):
            try:
                out = self._bound(eqn, operands, _wide_params(eqn.params))
            except Exception:  # Foreign primitives refuse in ways of their own.
                out = []
            due = [(v.aval.shape, _wide_dtype(v.aval.dtype)) for v in eqn.outvars]
            if [(x.shape, x.dtype) for x in out] == due:
                return out
        return self._kept_as_it_is(eqn, operands)

    def _kept_as_it_is(self, eqn: Any, operands: list[Any]) -> list[Any]:
        self.kept.add(_jax.function_name(eqn.primitive.name, eqn.params) or eqn.primitive.name)
        return self._as_it_is(eqn, operands)

    def _as_it_is(self, eqn: Any, operands: list[Any]) -> list[Any]:
        narrow = [x.astype(v.aval.dtype) if _jax.is_inexact(v.aval.dtype) else x for x, v in zip(operands, eqn.invars)]
        out = self._bound(eqn, narrow, eqn.params)
        return [self._wide(x, v.aval.dtype) for x, v in zip(out, eqn.outvars, strict=True)]

    def _bound(self, eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        out = eqn.primitive.bind(*operands, **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    def _flat(self, closed: Any, *operands: Any) -> list[Any]:
        return self._run(closed, operands)

    def _scan(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params = eqn.params
        n, m = _jax.scan_counts(eqn)
        consts, carried, parts = operands[:n], operands[n : n + m], operands[n + m :]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            out = self._run(params["jaxpr"], [*consts, *carry, *xs])
            return out[:m], out[m:]

        length, reverse = params["length"], bool(params["reverse"])
        final, stacked = lax.scan(body, carried, parts, length=length, reverse=reverse)
        return [*final, *stacked]

    def _while(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params = eqn.params
        n, m = params["cond_nconsts"], params["body_nconsts"]
        of_test, of_body = operands[:n], operands[n : n + m]
        goes_on = lambda state: self._run(params["cond_jaxpr"], [*of_test, *state])[0]

        def body(state: list[Any]) -> list[Any]:
            alive, out = goes_on(state), self._run(params["body_jaxpr"], [*of_body, *state])
            if not alive.shape:
                return out
            # The loop of a vmap: each goes on by itself, and stays as it is once its own test fails.
            rows = lambda x: jnp.reshape(alive, alive.shape + (1,) * (x.ndim - alive.ndim))
            return [jnp.where(rows(new), new, old) for old, new in zip(state, out)]

        return lax.while_loop(lambda state: jnp.any(goes_on(state)), body, operands[n + m :])

    def _reduce(self, eqn: Any, operands: list[Any]) -> list[Any]:
        half = len(operands) // 2
        values, starts = tuple(operands[:half]), tuple(operands[half:])
        step = lambda a, b: tuple(self._run(eqn.params["jaxpr"], [*a, *b]))
        return list(lax.reduce(values, starts, step, eqn.params["dimensions"]))

    def _scatter(self, eqn: Any, operands: list[Any]) -> list[Any]:
        params = eqn.params
        fn = getattr(lax, eqn.primitive.name.replace("-", "_"), None)
        jaxpr = params.get("update_jaxpr")
        if fn is None or (fn is lax.scatter and jaxpr is not None and _jax.open_jaxpr(jaxpr)[0].eqns):
            return self._kept_as_it_is(eqn, operands)
        named = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [fn(*operands, **{key: params[key] for key in named})]

    def _wide(self, x: Any, dtype: Any) -> Any:
        """A value of the declared dtype, widened."""
        if _jax.is_extended(dtype):
            return x
        if not _jax.is_inexact(dtype):
            return jnp.asarray(x, dtype)
        if is_widened(dtype):
            self.epsilon = max(self.epsilon, float(jnp.finfo(dtype).eps))
        return jnp.asarray(x).astype(_wide_dtype(dtype))

    def _held(self, x: Any, dtype: Any, grows: bool) -> Any:
        """A wide value where one of `dtype` is declared: infinite beyond its range."""
        if not _jax.is_inexact(dtype):
            return x
        if not is_widened(dtype):
            return x.astype(dtype).astype(_wide_dtype(dtype))
        info = jnp.finfo(dtype)
        self.epsilon = max(self.epsilon, float(info.eps))
        if not grows or info.bits == 64 or jnp.issubdtype(dtype, jnp.complexfloating):
            return x
        limit = float(info.max) * (1.0 + float(info.eps) / 4)
        return jnp.where(jnp.abs(x) >= limit, jnp.sign(x) * jnp.inf, x)


def is_widened(dtype: Any) -> bool:
    """Whether floats of this dtype are widened: those of at least 16 bits."""
    return _jax.is_inexact(dtype) and np.dtype(dtype).itemsize >= 2


def _wide_dtype(dtype: Any) -> Any:
    if not _jax.is_inexact(dtype):
        return dtype
    return np.dtype(np.complex128 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float64)


def _wide_params(params: dict[str, Any]) -> dict[str, Any]:
    wide = dict(params)
    for key in ("preferred_element_type", "dtype"):
        if wide.get(key) is not None:
            wide[key] = _wide_dtype(wide[key])
    if "precision" in wide:
        # It may name an algorithm for narrow operands.
        wide["precision"] = None
    return wide


def _flat_values(params: dict[str, Any]) -> list[Any]:
    return [q for p in params.values() for q in (p if isinstance(p, (tuple, list)) else (p,))]
