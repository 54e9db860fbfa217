"""Jobs of many processes: where they meet, what they check before the first step, and how one command starts them.

What needs JAX is imported when it is first asked for: a launcher does without.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hapsynth.rendezvous.address import JobError

if TYPE_CHECKING:
    from hapsynth.jobs.preflight import PreflightError
    from hapsynth.rendezvous.meeting import connect, initialize

__all__ = ["JobError", "PreflightError", "connect", "initialize"]

_NEED_JAX = {
    "PreflightError": "hapsynth.jobs.preflight",
    "connect": "hapsynth.rendezvous.meeting",
    "initialize": "hapsynth.rendezvous.meeting",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_JAX:
        return getattr(importlib.import_module(_NEED_JAX[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_NEED_JAX]
