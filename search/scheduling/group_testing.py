"""Which of many changes are for the better: all of them together, else half of them, and so on (Dorfman 1943)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf


def improving(count: int, is_better: Callable[[set[int]], bool], trials: int, in_vain: float = inf) -> set[int]:
    """The changes out of range(`count`) that improve the result, found in at most `trials` trials, and at most
    `in_vain` failures in a row. `is_better(changes)`: whether the result with `changes` is better than the best until
    then."""
    taken: set[int] = set()
    blocks = deque([range(count)] if count else [])
    left = in_vain
    while blocks and trials > 0 and left > 0:
        block, trials, left = blocks.popleft(), trials - 1, left - 1
        if is_better(taken | {*block}):
            taken |= {*block}
            left = in_vain
        elif len(block) > 1:
            middle = len(block) // 2
            blocks += [block[:middle], block[middle:]]
    return taken
