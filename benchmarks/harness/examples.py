"""The examples, the clusters beside them, and the models of tests/zoo, by name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hapsynth

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "examples" / "clusters"
EXAMPLES = ("mlp", "transformer", "cnn")


def cluster(name: str) -> hapsynth.Cluster:
    return hapsynth.Cluster.load(CLUSTERS / f"{name}.toml")


def example(name: str) -> ModuleType:
    """The module of an example."""
    return _imported("examples", name)


def target(name: str) -> tuple[Any, Any]:
    """The function of an example or of a model of tests/zoo, and its arguments."""
    if name in EXAMPLES:
        return example(name).target()
    modules = (_imported("tests", f"zoo.{module}") for module in ("vision", "language", "functional"))
    return next(getattr(module, name) for module in modules if hasattr(module, name))()


def _imported(folder: str, module: str) -> ModuleType:
    if (path := str(ROOT / folder)) not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module(module)
