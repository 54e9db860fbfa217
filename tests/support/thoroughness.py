"""How many cases of what is drawn at random, or combined, a test goes through: a few, or with HAPSYNTH_THOROUGH=1 all.

What a few do not find in months is found in one thorough run, before a release or after a change of what they test.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from typing import TypeVar

Case = TypeVar("Case")
THOROUGH = bool(os.environ.get("HAPSYNTH_THOROUGH"))


def some(cases: Iterable[Case], few: int) -> list[Case]:
    """So many of the cases, always the same ones; all in a thorough run."""
    every = [*cases]
    chosen = range(len(every)) if THOROUGH else sorted(random.Random(0).sample(range(len(every)), few))
    return [every[k] for k in chosen]
