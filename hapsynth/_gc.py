"""Python's collector of cyclic garbage, put off while a function is traced or a plan made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

_OBJECTS = 500_000
"""New objects between two collections, instead of the usual 700: planning makes millions, hardly any of them in
cycles, and each full collection walks over all that are alive."""
_lock = threading.Lock()
_usual: list[tuple[int, int, int]] = []
"""One entry per plan that is being made."""


@contextmanager
def gc_paused() -> Generator[None]:
    """Collect seldom until this is left, and by all threads. A threshold that is higher, or 0 for never, stays."""
    with _lock:
        first, second, third = usual = gc.get_threshold()
        _usual.append(_usual[0] if _usual else usual)
        if 0 < first < _OBJECTS:
            gc.set_threshold(_OBJECTS, second, third)
    try:
        yield
    finally:
        with _lock:
            usual = _usual.pop()
            if not _usual:
                gc.set_threshold(*usual)
