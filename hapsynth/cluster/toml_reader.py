"""Tables of a cluster file, read key by key: strict units, and errors that say where they stand."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, cast

from hapsynth.cluster import _units
from hapsynth.cluster.curves import Curve, read_curve

_T = TypeVar("_T")


class ClusterError(ValueError):
    """A cluster, or its file, that can't be used. The text names the file, the key, the value and the way out."""


class Table:
    """One table of a cluster file, read key by key; every error says where it stands (`file: kinds.mycard.memory`)."""

    def __init__(self, data: object, source: str, path: str = "", keys: Iterable[str] | None = None):
        """`data` must be a mapping and hold no key beside `keys` (None: any). Raises ClusterError."""
        self.source, self.path = source, path
        if not isinstance(data, Mapping):
            raise self.error("", f"= {data!r} must be a table")
        self.data = cast(Mapping[str, object], data)
        for key in self.data if keys is not None else ():
            if key not in (known := sorted(keys or ())):
                raise self.error(key, f"= {self.data[key]!r} is not a known key; {nearest(key, known)}")

    def error(self, key: str, problem: str) -> ClusterError:
        where = ".".join(part for part in (self.path, key) if part)
        return ClusterError(f"{self.source}: {where} {problem}" if where else f"{self.source}: {problem}")

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def need(self, key: str, hint: str) -> object:
        if key not in self.data:
            raise self.error(key, f"is missing; add {hint}")
        return self.data[key]

    def table(self, key: str, keys: Iterable[str] | None = None) -> "Table":
        where = ".".join(part for part in (self.path, key) if part)
        return Table(self.need(key, "the table"), self.source, where, keys)

    def _checked(self, key: str, read: Callable[[object], _T], hint: str) -> _T:
        value = self.need(key, hint)
        try:
            return read(value)
        except ValueError as error:
            raise self.error(key, f"= {value!r} {error}") from None

    def quantity(self, key: str, units: str) -> float:
        """A number with a unit out of `_units.{BANDWIDTH,MEMORY,TIME,RATE}`, in SI units."""
        table = cast(Mapping[str, object], getattr(_units, units))
        hint = f'{key} = "<number> <unit>" with one of {", ".join(table)}'
        return self._checked(key, lambda v: _units.parse(v, getattr(_units, units), zero=units == "TIME"), hint)

    def number(self, key: str) -> float:
        def read(value: object) -> float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError("must be a plain number, without unit or quotes")
            return _units.check(value)

        return self._checked(key, read, "a number")

    def count(self, key: str, limit: int = 1 << 16) -> int:
        def read(value: object) -> int:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError("must be a whole number")
            if not 1 <= value <= limit:
                raise ValueError(f"must be from 1 to {limit}")
            return value

        return self._checked(key, read, "a whole number")

    def curve(self, key: str, units: str) -> Curve:
        """A list of points [amount, time]."""
        return self._checked(key, lambda v: read_curve(v, getattr(_units, units)), "the measured points")

    def text(self, key: str, hint: str = "a string") -> str:
        def read(value: object) -> str:
            if not isinstance(value, str) or not value:
                raise ValueError("must be a string that is not empty")
            return value

        return self._checked(key, read, hint)


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint: the known name nearest to `name`, or all of them."""
    known = {n.lower(): n for n in names}
    # A part of a name comes first: "H200" means "H200-141GB", though "B200" is nearer in letters.
    close = [n for n in known if len(name) > 1 and name.lower() in n][:1]
    close = close or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {known[close[0]]!r}?" if close else f"use one of {', '.join(known.values())}"
