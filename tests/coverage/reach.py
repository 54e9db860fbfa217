"""Which primitives the public functions of JAX reach: by tracing calls of them all, and their derivatives and batches.

Three sources, so that nothing is left out in silence: the primitives that JAX names in public, what is emitted when
every public function is called on examples (`calls.py`), and what is emitted when each equation found is itself
differentiated, transposed and batched, until nothing new turns up. Only abstract values are used: no backend starts.
"""

from __future__ import annotations

import importlib
import types
import typing
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from hapsynth import _jax
from tests.coverage.calls import CALLS, GENERIC, KEYED, NO_OPS

MODULES = (
    "jax.lax",
    "jax.lax.linalg",
    "jax.numpy",
    "jax.nn",
    "jax.random",
    "jax.scipy.special",
    "jax.numpy.linalg",
    "jax.numpy.fft",
)

Function = Callable[..., Any]


@dataclass
class Reached:
    """`primitives`: name -> where it was met first; `untraced`: function -> why no call of it could be traced."""

    primitives: dict[str, str] = field(default_factory=dict)
    functions: int = 0
    untraced: dict[str, str] = field(default_factory=dict)


def reached(modules: Sequence[str] = MODULES) -> Reached:
    """Every primitive that the public names of `modules` reach in the installed JAX. Takes a minute."""
    with warnings.catch_warnings(), _plain_tracebacks():
        # Deprecated functions are functions too.
        warnings.simplefilter("ignore")
        survey = _Survey()
        for where, primitive in named_primitives():
            survey.found.primitives.setdefault(primitive.name, where)
        for name, fn in public_functions(modules):
            survey.call(name, fn)
        survey.close()
    return survey.found


@contextmanager
def _plain_tracebacks() -> Generator[None]:
    """Thousands of calls are refused; to shorten what nobody reads of that took as long as all tracing."""
    before = getattr(jax.config, "jax_traceback_filtering", "auto")
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def named_primitives() -> Iterator[tuple[str, Any]]:
    """The primitives that JAX has in public namespaces, each with its place."""
    for module in (jax.lax, jax.lax.linalg, jex.primitives):
        for attribute in dir(module):
            value = getattr(module, attribute)
            if isinstance(value, jex.Primitive):
                yield f"{module.__name__}.{attribute}", value


def public_functions(modules: Sequence[str]) -> Iterator[tuple[str, Function]]:
    """Everything public that can be called and is neither a class nor a type."""
    for module_name in modules:
        module = importlib.import_module(module_name)
        for attribute in sorted(dir(module)):
            if attribute.startswith("_"):
                continue
            value = getattr(module, attribute)
            no_function = isinstance(value, (type, types.ModuleType, types.UnionType, jex.Primitive))
            # A dtype of jax.numpy converts when called, as `astype` does; a type alias does nothing.
            is_type = typing.get_origin(value) is not None or hasattr(value, "dtype")
            if callable(value) and not no_function and not is_type:
                yield f"{module_name}.{attribute}", value


class _Survey:
    def __init__(self) -> None:
        self.found = Reached()
        self.seen: set[Any] = set()
        self.todo: list[tuple[str, Any]] = []

    def call(self, name: str, fn: Function) -> None:
        """Trace the calls given for a function, or all that it takes of the generic ones.

        Derivatives of whole functions are tried where some of it brings its own, or holds a program; elsewhere
        they are made of the derivatives of its equations, which `close` tries.
        """
        self.found.functions += 1
        short = name.removeprefix("jax.")
        if short in NO_OPS:
            return
        failed: Exception | None = None
        traced = derived = False
        for example in CALLS.get(short, KEYED if short.startswith("random.") else GENERIC):
            run, arrays = example.of(fn)
            try:
                own = self.trace(name, run, arrays)
            except Exception as error:  # JAX and NumPy refuse wrong arguments in many ways
                failed = error
                continue
            traced = True
            if own and not derived and any(jnp.issubdtype(a.dtype, jnp.inexact) for a in arrays):
                derived = True
                self.derive(name, run, arrays)
        if not traced:
            text = " ".join(str(failed).split())
            self.found.untraced[name] = f"{type(failed).__name__}: {text[:100]}"

    def close(self) -> None:
        """Derivatives and batches of every equation met so far, and of those that they bring."""
        while self.todo:
            where, eqn = self.todo.pop()
            primitive, params = eqn.primitive, dict(eqn.params)
            avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
            self.derive(where, lambda *xs, p=primitive, q=params: p.bind(*xs, **q), avals)

    def derive(self, where: str, fn: Function, arrays: Sequence[Any]) -> None:
        """The tangents, the gradients and a batch of one function; what JAX has no rule for reaches nothing."""
        inexact = [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.inexact)]

        def of_inexact(xs: Sequence[Any]) -> Function:
            def run(*some: Any) -> list[Any]:
                full = list(xs)
                for i, x in zip(inexact, some):
                    full[i] = x
                leaves = jax.tree_util.tree_leaves(fn(*full))
                return [y for y in leaves if jnp.issubdtype(y.dtype, jnp.inexact)]

            return run

        def tangents(*xs: Any) -> Any:
            some = tuple(xs[i] for i in inexact)
            return jax.jvp(of_inexact(xs), some, some)

        def gradients(*xs: Any) -> Any:
            out, pull = jax.vjp(of_inexact(xs), *(xs[i] for i in inexact))
            return pull(out)

        batches = [jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in arrays]
        derived: list[tuple[str, Function, Sequence[Any]]] = []
        if inexact:
            derived += [("jvp", tangents, arrays), ("vjp", gradients, arrays)]
        if arrays:
            derived.append(("vmap", jax.vmap(fn), batches))
        for kind, run, args in derived:
            # A derivative that JAX does not define reaches nothing.
            with suppress(Exception):
                self.trace(f"{where}: {kind}", run, args)

    def trace(self, where: str, fn: Function, arrays: Sequence[Any]) -> bool:
        return self.walk(where, jax.make_jaxpr(fn)(*arrays))

    def walk(self, where: str, jaxpr: Any) -> bool:
        """Note every equation, inside others as well; whether there is one that is more than a plain call."""
        own = False
        for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
            self.found.primitives.setdefault(eqn.primitive.name, where)
            inner = list(_inner(eqn))
            own = own or eqn.primitive.name == "call_hi_primitive" or (bool(inner) and eqn.primitive.name != "jit")
            for sub in inner:
                own = self.walk(where, sub) or own
            # Not by the number of operands, of which a derivative may have twice as many, without end.
            alike = eqn.primitive.name, frozenset(np.dtype(v.aval.dtype).kind for v in eqn.invars if _is_plain(v))
            if not inner and alike not in self.seen and all(map(_is_plain, eqn.invars)):
                self.seen.add(alike)
                self.todo.append((f"{where.split(':')[0]}: {eqn.primitive.name}", eqn))
        return own


def _inner(eqn: Any) -> Iterator[Any]:
    for param in jax.tree_util.tree_leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(param):
            yield param


def _is_jaxpr(param: Any) -> bool:
    return hasattr(param, "eqns") or hasattr(getattr(param, "jaxpr", None), "eqns")


def _is_plain(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and not _jax.is_extended(dtype)
