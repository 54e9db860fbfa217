"""XLA's CUDA compiler as it is installed here, and the cards that it serves."""

from __future__ import annotations

from importlib import metadata

from hapsynth.cluster.compiler_target import CompilerTarget


class TargetError(RuntimeError):
    """Nothing can be compiled for GPUs here; the text names the way out."""


_PLUGINS = {"jax-cuda12-plugin": (6, 0), "jax-cuda13-plugin": (7, 5)}
"""The least compute capability for which each one's `ptxas` assembles."""
_WAY_OUT = (
    "in a clone of hapsynth, pip install '.[aot12]' (CUDA 12: P100 to H100 and B200) or '.[aot13]' (CUDA 13: T4 and "
    "newer)"
)


def installed_plugin() -> str:
    """The name and version of JAX's CUDA plugin. Raises TargetError where there is none."""
    for name in _PLUGINS:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    raise TargetError(f"XLA's compiler for GPUs is not installed; it needs no GPU: {_WAY_OUT}")


def not_served(target: CompilerTarget, plugin: str) -> str:
    """Why this plugin can't compile for a card; empty where it can."""
    least = _PLUGINS[plugin.split()[0]]
    if target.capability >= least:
        return ""
    have, need = (".".join(map(str, v)) for v in (target.capability, least))
    return (
        f"{target.kind} has compute capability {have}, and {plugin} serves {need} and newer: "
        "pip install '.[aot12]', in a clone of hapsynth, in an environment without CUDA 13"
    )
