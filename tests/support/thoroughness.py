"""How many cases of what is drawn at random, or combined, a test goes through: as many as its marker `few` says, or
with HAPSYNTH_THOROUGH=1 all. `few(0)` is a test of thorough runs alone; `few("id", ...)` are the cases of these names.

What a few do not find in months is found in one thorough run, before a release or after a change of what they test.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

THOROUGH = bool(os.environ.get("HAPSYNTH_THOROUGH"))


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases of tests marked `few` that are beyond so many, or of other names: always the same ones."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    beyond: list[pytest.Item] = []
    for of in cases.values():
        few: tuple[int | str, ...] = of[0].get_closest_marker("few").args
        if isinstance(few[0], int):
            chosen = random.Random(0).sample(of, min(few[0], len(of)))
        else:
            chosen = [item for item in of if item.nodeid.partition("[")[2][:-1] in few]
            if len(chosen) < len(few):
                raise pytest.UsageError(f"{of[0].nodeid}: not all of {few} are cases of this test")
        beyond += [item for item in of if item not in chosen]
    return beyond
