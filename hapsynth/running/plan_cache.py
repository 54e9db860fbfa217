"""Plans on disk by everything that decides them: what was planned before takes no search.

An entry is a file named after the digest of its key: ops, shapes and constants of the code of each function, the
cluster, what was asked for, hapsynth's own source, and the versions of what it computes with. It holds the key in full
and a digest of its own contents, and the plans pass the checker as those of plan files do; whatever is not as it should
be is as if it were not there. Entries are written aside and renamed, so that processes may write one at the same time.
Not kept are plans that depend on more: on a time budget, on Ctrl-C, or on a rule that is the user's own code.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import numbers
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from hapsynth import _jax
from hapsynth._files import write_text
from hapsynth._gc import gc_paused
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import Traced
from hapsynth.instructions.rules.extension import is_users
from hapsynth.running.plan_file import (
    PlanError,
    function_to_dict,
    number_of,
    plan_from_dict,
    plan_to_dict,
    read_number,
)
from hapsynth.search.result import Result

CACHE_DIR = "HAPSYNTH_CACHE_DIR"
"""The environment variable with the cache's folder; one of `_OFF` for no cache."""
_OFF = ("", "off", "none", "no", "false", "0")
"""Values of the variable, in lower case, that mean no cache."""
_ENTRIES = 512
"""The number of entries that a folder keeps: those used last."""
_COMPUTING = ("jaxlib", "numpy", "ortools", "scipy")
T = TypeVar("T")
logger = logging.getLogger(__name__)


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Where plans are kept: as HAPSYNTH_CACHE_DIR says, or in the user's cache; None where that is off."""
    asked = environment.get(CACHE_DIR)
    if asked is not None:
        return None if asked.lower() in _OFF else Path(os.path.expanduser(asked))
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base, "hapsynth", "plans") if os.path.isabs(base) else None


@dataclass(frozen=True)
class CachedPlan:
    """Where the plans of one task are kept, if it was planned before. `key`: as JSON."""

    file: Path
    key: str

    @staticmethod
    def of(functions: Sequence[Traced], cluster: Cluster, asked: Mapping[str, Any]) -> CachedPlan | None:
        """The cache entry for traced functions, a cluster and `asked`, the options that determine plans, as JSON; None
        where the cache is off, or the plans depend on rules of the user's own."""
        folder = cache_folder()
        if folder is None:
            return None
        own = next((op for traced in functions for op in traced.graph.ops if is_users(op)), None)
        if own is not None:
            logger.info("not kept in the plan cache: the rule of %s is the user's own code", own.name)
            return None
        key = {
            "functions": [function_to_dict(traced) for traced in functions],
            "cluster": cluster.to_dict(defaults=True),
            "asked": dict(asked),
            "numerics": {name: str(getattr(jax.config, name, None)) for name in _jax.NUMERICS},
            "versions": {"hapsynth": _source(), "jax": jax.__version__, "python": sys.version, **_versions()},
            "machine": platform.machine(),
        }
        text = json.dumps(key, sort_keys=True, default=plain)
        return CachedPlan(folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json", text)

    def find(self, read: Callable[[str, Mapping[str, Any]], T]) -> T | None:
        """What `read` makes of the entry's file name and contents; None where it is not there, or damaged."""
        try:
            text = self.file.read_text(encoding="utf-8")
        except FileNotFoundError:
            logger.info("not in the plan cache: %s", self.file)
            return None
        except (OSError, ValueError) as error:
            return self._lost(str(error))
        digest, _, content = text.partition("\n")
        if digest != hashlib.sha256(content.encode()).hexdigest():
            return self._lost("its contents are not what was written")
        with gc_paused():
            entry = json.loads(content)
            if entry["key"] != self.key:
                return self._lost("it is of another task")
            try:
                found = read(str(self.file), entry)
            except PlanError as error:
                return self._lost(str(error))
        with suppress(OSError):
            os.utime(self.file)
        logger.info("found in the plan cache: %s", self.file)
        return found

    def keep(self, found: Mapping[str, Any]) -> None:
        """Write an entry of what was found, as JSON; where that can't be done it is logged, and there is none."""
        content = json.dumps({"key": self.key, **found}, allow_nan=False)
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, f"{hashlib.sha256(content.encode()).hexdigest()}\n{content}")
            _drop_oldest(self.file.parent)
        except OSError as error:
            logger.warning("the plan can't be kept in the plan cache: %s; %s=off does without", error, CACHE_DIR)

    def _lost(self, why: str) -> None:
        logger.warning("%s in the plan cache can't be used, and its plan is searched for anew: %s", self.file, why)


def found_to_dict(traced: Traced, result: Result, cluster: Cluster) -> dict[str, Any]:
    """What a search found, as JSON holds it: the plan, and what plan files leave out."""
    bounds = [[list(devices), number_of(bound)] for devices, bound in result.bounds.items()]
    search = {
        "bounds": bounds,
        "sweeps": result.sweeps,
        "states": result.states,
        "interrupted": result.interrupted,
    }
    return {"plan": plan_to_dict(traced, result, cluster), "search": search}


def read_found(where: str, data: Mapping[str, Any], traced: Traced) -> tuple[Traced, Result]:
    """The inverse of `found_to_dict`, of the function as it was traced here; PlanError, which names `where`, for a plan
    of another one."""
    found, result, _ = plan_from_dict(where, data["plan"], traced)
    search = dict(data["search"])
    search["bounds"] = {tuple(devices): read_number(bound) for devices, bound in search["bounds"]}
    return found, replace(result, **search)


def _drop_oldest(folder: Path) -> None:
    # Nothing else of a folder that is not the cache's alone.
    entries = [file for file in folder.iterdir() if re.fullmatch(r"[0-9a-f]{32}\.json", file.name)]
    if len(entries) <= _ENTRIES:
        return
    age: dict[Path, float] = {}
    for entry in entries:
        # Others may drop it at the same time.
        with suppress(FileNotFoundError):
            age[entry] = entry.stat().st_mtime
    for entry in sorted(age, key=age.__getitem__)[:-_ENTRIES]:
        entry.unlink(missing_ok=True)


def plain(value: Any) -> Any:
    """What JSON does not know: numbers and arrays of NumPy, JAX and others, mappings and sequences that are neither
    dict nor list."""
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        return value.tolist()
    if isinstance(value, numbers.Real):
        return float(value)
    return dict(value) if isinstance(value, Mapping) else list(value)


@functools.cache
def _source() -> str:
    """A digest of hapsynth's source: any of it may decide a plan."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    # In a checkout two rooms are links.
    for folder, below, files in os.walk(package, followlinks=True):
        below.sort()
        for name in sorted(files):
            if name.endswith((".py", ".toml")):
                file = Path(folder, name)
                digest.update(f"{file.relative_to(package)}\n".encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()[:32]


@functools.cache
def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in _COMPUTING}
