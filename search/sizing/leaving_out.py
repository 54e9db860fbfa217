"""How many of the fastest kinds of devices are worth having, where trying every number would take too long.

Of few kinds every number is tried. Of many some: all, and as many less as powers of two; then halfway between the best
and its neighbours, until these are next to it. That is about 2 log2(kinds) numbers, and finds the best where what a
number comes to falls towards it from both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_RISEN = 1.1
FEW = 6
"""Kinds: of as many all ways to leave some out, and to round to tiles, are tried."""


def ladder(count: int) -> list[int]:
    """Numbers from `count` down, ever fewer, to 1."""
    less = [2**k for k in range(count.bit_length()) if 2**k < count - 1]
    return [count, *(count - k for k in less), 1] if count > 1 else [count]


def between(known: Iterable[int], best: int) -> list[int]:
    """The numbers halfway between the best and its neighbours among those known; none where these are next to it."""
    order = sorted(known)
    at = order.index(best)
    pairs = [(order[i], order[i + 1]) for i in (at - 1, at) if 0 <= i < len(order) - 1]
    return [(low + high) // 2 for low, high in pairs if high - low > 1]


def least_at(first: Sequence[int], merit: Callable[[int], tuple[float, float]]) -> int:
    """The number with the least merit of those tried: `first`, until what the next comes to has risen for good, and
    those between."""
    found: dict[int, tuple[float, float]] = {}
    for number in first:
        found[number] = merit(number)
        over, cost = min(found.values())
        if found[number][0] >= over and found[number][1] > cost * _RISEN:
            break
    while more := between(found, best := min(found, key=lambda n: (found[n], n))):
        found.update((number, merit(number)) for number in more)
    return best
