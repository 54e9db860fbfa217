"""States with every kind of leaf, plans that keep them, and the payload of a checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from random_plans import floats, make_plan

from hapsynth.checkpoint import manifest
from hapsynth.plan import Form, Plan


def logical(plan: Plan, state: Any) -> str:
    """A hash of a state: every leaf's path, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for path, x in jax.tree_util.tree_flatten_with_path(plan.unshard(state))[0]:
        said = f"{jax.tree_util.keystr(path)} {getattr(x, 'dtype', x)} {np.shape(x)}"
        x = jax.random.key_data(x) if jnp.issubdtype(getattr(x, "dtype", np.int8), jax.dtypes.prng_key) else x
        digest.update(said.encode() + (x.encode() if isinstance(x, str) else np.asarray(x).tobytes()))
    return digest.hexdigest()


def payload(folder: Path) -> Path:
    return folder / manifest.read_manifest(folder).folder / "0.bin"


def keep(state: Any, x: Any) -> Any:
    """State of every kind, some of which is computed with, so that it is cut."""
    out = {**state, "x": state["x"] * 2, "n": state["n"] + 1, "key": jax.random.split(state["key"])[0]}
    return out, (state["x"] @ x).sum() * state["rate"]


def kinds() -> Any:
    draw = np.random.default_rng(1)
    # All bits, so that there are NaNs with payloads.
    bits = lambda dtype, *shape: draw.integers(0, 1 << 16, shape, np.uint16).view(dtype).reshape(*shape, -1)[..., 0]
    return {
        "x": floats(13, 7),
        "bf16": bits(ml_dtypes.bfloat16, 37, 5),
        "f16": bits(np.float16, 12, 5),
        "f8": bits(ml_dtypes.float8_e4m3fn, 16, 3),
        "i4": np.arange(-8, 8).astype(ml_dtypes.int4).reshape(4, 4),
        "bool": np.array([True, False, True, True, False]),
        "complex": (floats(9, 2) + 1j).astype(np.complex64),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 6),
        "n": np.int32(4),
        "rate": 0.5,
        "name": "run",
    }


BATCH = floats(7, 2)

ON: dict[str, Any] = {
    "4 skewed": {"n": 4, "seed": 0},
    "4 skewed, staged": {"n": 4, "seed": 1},
    "2 even": {"n": 2, "seed": 2, "mode": "even"},
    "1": {"n": 1, "seed": 3},
    "8 skewed": {"n": 8, "seed": 4},
    "8 skewed, staged": {"n": 8, "seed": 5},
}


def in_form(plan: Plan, form: Form) -> Plan:
    return Plan(plan.traced, plan.result, plan.cluster, plan.mesh, plan.fn, form=form)


def plan_on(name: str) -> Plan:
    plan = make_plan(keep, (kinds(), BATCH), **ON[name])
    return in_form(plan, "staged" if "staged" in name else "switch")
