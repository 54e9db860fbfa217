"""Functions whose program, where one of two devices has no rows, looks to XLA unlike that of the other: what it would
fold, drop, merge, hoist or combine there, the other keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from slow_devices import thin_cluster

import hapsynth
from hapsynth.plan import Form

APART = hapsynth.LoweringOptions(bundled_bytes=0)
"""Small collectives go one by one."""


class Case(NamedTuple):
    """A function of weights [16, 16] and rows [480, 16], and how the weights lie; the rows are cut."""

    fn: Callable[[Any, Any], Any]
    weights: str = "R"


def constant(w: Any, x: Any) -> Any:
    """A gradient: of no rows it is zero."""
    return w - 0.1 * x.T @ jnp.tanh(x @ w)


def without_use(w: Any, x: Any) -> Any:
    """Weights are gathered, which only multiply rows."""
    return jnp.tanh(x @ w)


def equal(w: Any, x: Any) -> Any:
    """Of no rows both are the same zeros."""
    return jnp.tanh(x.T @ x), w + x.T @ jnp.sin(x)


def invariant(w: Any, x: Any) -> Any:
    """What is summed in each trip is zero in all where there are no rows."""
    return lax.scan(lambda c, _: (jnp.tanh(c + 0.1 * x.T @ jnp.tanh(x @ c)), None), w, None, length=5)[0]


def independent(w: Any, x: Any) -> Any:
    """The second sum needs the first; of no rows neither needs anything."""
    first = x.T @ jnp.tanh(x @ w)
    return x.T @ jnp.tanh(x @ jnp.tanh(first)) + first


def branched(w: Any, x: Any) -> Any:
    """Both branches sum, one more than the other."""
    near = lambda: x.T @ jnp.tanh(x @ w)
    return lax.cond(w[0, 0] > 0, near, lambda: x.T @ x + jnp.tanh(near())), x.T @ jnp.sin(x)


def looped(w: Any, x: Any) -> Any:
    """A decision of each trip, and a sum before and behind."""
    scale = jnp.tanh(jnp.sum(x * x))
    smaller = lax.while_loop(lambda v: jnp.sum(v * v) > 1.0, lambda v: jnp.sin(v) * 0.5, x * scale)
    return smaller, jnp.max(smaller) + jnp.sum(w)


WAYS = {
    "a constant contribution": Case(constant),
    "a result without use": Case(without_use, "S(0)"),
    "equal operands": Case(equal),
    "invariant in a loop": Case(invariant),
    "combined as independent": Case(independent),
}
"""In which programs of each process's own came apart before they were chained (docs/design/decisions.md, D2)."""
CASES = {**WAYS, "branches": Case(branched), "a while loop": Case(looped)}


def arguments() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return tuple(draw.normal(size=(rows, 16)).astype(np.float32) for rows in (16, 480))  # type: ignore[return-value]


def planned(case: Case, mesh: Mesh, form: Form, shares: tuple[float, ...] = (1.0, 0.0)) -> hapsynth.Plan:
    return hapsynth.synthesize(
        case.fn,
        arguments(),
        mesh,
        cluster=thin_cluster((1000.0,) * mesh.size, bandwidth=1e8),
        ratios={"[1].0": shares},
        fixed={"[0]": case.weights, "[1]": "S(0)"},
        lowering=APART,
        form=form,
    )


def assert_right(case: Case, plan: hapsynth.Plan) -> None:
    """A call gives what `jax.jit` does."""
    got, want = plan.unshard(plan(*arguments())), jax.jit(case.fn)(*arguments())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
