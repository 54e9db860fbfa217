"""Numbers in place of values that are slow to compare, such as the triples of ops: equal values have one number."""

from __future__ import annotations

from collections.abc import Hashable


class Numbering:
    """Hands out numbers, from 0 on. A value is hashed once for every object that it comes as; the object is kept, so
    that its identity never becomes another's."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Hashable, int]] = {}
        self._number: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._number)

    def of(self, value: Hashable) -> int:
        known = self._seen.get(id(value))
        if known is None:
            known = self._seen[id(value)] = value, self._number.setdefault(value, len(self._number))
        return known[1]
