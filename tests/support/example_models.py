"""The examples at tiny sizes."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import jax

TINY: dict[str, dict[str, Any]] = {
    "mlp": {"batch": 64, "features": 16, "hidden": (32,), "classes": 4},
    "transformer": {"batch": 8, "seq": 16, "vocab": 32, "layers": 2, "width": 32, "heads": 4, "ff": 64},
    "cnn": {"batch": 16, "size": 8, "channels": (8, 16)},
}


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


@cache
def start(module: ModuleType, config: Any) -> tuple[Any, Any]:
    """Real arguments of a step; jitted, because many small eager ops would compile one by one."""
    return (
        jax.jit(module.init, static_argnums=1)(jax.random.key(0), config),
        jax.jit(module.make_batch, static_argnums=1)(jax.random.key(1), config),
    )
