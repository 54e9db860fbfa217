"""NVIDIA GPUs of this machine and JAX's plugin for them, as far as they are known without JAX."""

from __future__ import annotations

import importlib.util
import os
import re
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

_PLUGINS = {"jax_plugins.xla_cuda13": "jax-cuda13-plugin", "jax_plugins.xla_cuda12": "jax-cuda12-plugin"}
"""The module of each, and the package that has it."""


def visible_gpus(platforms: str | None = None) -> int:
    """How many there are here; none where JAX is told to use none. `platforms`: as `jax_platforms` says, of the
    environment if None."""
    platforms = os.environ.get("JAX_PLATFORMS", "") if platforms is None else platforms
    if platforms and not {"cuda", "gpu", "rocm"} & {name.strip() for name in platforms.split(",")}:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = [f for f in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", f.name)]
    return len(nodes) if visible is None else listed_gpus(visible)


def listed_gpus(visible: str) -> int:
    """The devices of CUDA_VISIBLE_DEVICES: CUDA heeds none from the first on that is none, such as -1."""
    is_device = lambda part: re.fullmatch(r"\s*(\d+|(GPU|MIG)-.+)\s*", part) is not None
    return len(list(takewhile(is_device, visible.split(","))))


def cuda_plugin() -> str:
    """The package by which JAX here uses GPUs; '' where there is none, and it computes on the CPU."""
    for module, package in _PLUGINS.items():
        # Without any plugin there is no jax_plugins either.
        with suppress(ImportError, ValueError):
            if importlib.util.find_spec(module) is not None:
                return package
    return ""
