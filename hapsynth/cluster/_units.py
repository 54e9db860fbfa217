"""Quantities with units, as cluster files write them: `"10 Gbit/s"`, `"16 GiB"`, `"20 us"`, `"15.7 TFLOP/s"`.

The unit is never optional and never guessed. `GB/s` and `Gbit/s` differ by 8, `GB` and `GiB` by 7 %, and a
plan made with the wrong one is wrong in silence; so `Gb/s`, `Gbps` and a bare number are errors.
"""

import numbers
import re
from collections.abc import Mapping
from decimal import Decimal
from types import MappingProxyType

_DECIMAL = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}


def _scaled(suffix: str, prefixes: str, scale: str = "1") -> dict[str, Decimal]:
    return {p + suffix: Decimal(scale).scaleb(_DECIMAL[p]) for p in ["", *prefixes]}


def _binary(suffix: str) -> dict[str, Decimal]:
    return {p + suffix: Decimal(2**e) for p, e in _BINARY.items()}


# What each quantity may be written in, as multiples of its SI unit: bytes/s, bytes, seconds, FLOP/s, FLOP.
BANDWIDTH = MappingProxyType(_scaled("B/s", "kMGT") | _binary("B/s") | _scaled("bit/s", "kMGT", "0.125"))
MEMORY = MappingProxyType(_scaled("B", "kMGT") | _binary("B"))
TIME = MappingProxyType({u: Decimal(f) for u, f in [("s", "1"), ("ms", "1e-3"), ("us", "1e-6"), ("ns", "1e-9")]})
RATE = MappingProxyType(_scaled("FLOP/s", "MGTP"))
WORK = MappingProxyType(_scaled("FLOP", "kMGTP"))

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[+-]?(?:nan|inf(?:inity)?)\b)\s*(.*?)\s*", re.I)


def parse(text: object, units: Mapping[str, Decimal], *, zero: bool = False) -> float:
    """The value of `text` in SI units. `zero` allows 0, for times that a model may leave out.

    Raises ValueError, saying what is wrong and what may be written, for a number without a unit, an unknown
    unit, NaN, an infinity, a negative value and (unless `zero`) zero.
    """
    example = f"write a number and one of {', '.join(units)}"
    if not isinstance(text, str):
        raise ValueError(f"has no unit; {example}, in quotes")
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"is not a number with a unit; {example}")
    number, unit = match.groups()
    if not unit:
        raise ValueError(f"has no unit; {example}")
    if unit not in units:
        raise ValueError(f"has the unknown unit {unit!r} (units are case-sensitive); {example}")
    # Decimal, so that "20 us" is the float nearest to 2e-5: 20 * 1e-6 is not.
    try:
        value = float(Decimal(number) * units[unit])
    except ArithmeticError:
        # An exponent beyond those of Decimal: 0 or infinite as a float.
        value = float(number)
    return check(value, zero=zero)


def check(value: float, *, zero: bool = False) -> float:
    """`value` if it is a number, finite and positive (or zero, where allowed); otherwise raises ValueError."""
    if not isinstance(value, numbers.Real):
        raise ValueError("is no number; units are for cluster files, code gives bytes, seconds, FLOP/s and bytes/s")
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError("is not a finite number")
    if value < 0 or (value == 0 and not zero):
        raise ValueError("must not be negative" if zero else "must be greater than zero")
    return value


def format(value: float, units: Mapping[str, Decimal]) -> str:
    """`value` (SI units) as the shortest text that `parse` reads back as exactly the same float."""
    texts: list[tuple[int, Decimal, str]] = []
    for unit, factor in units.items():
        # NumPy's scalars have their type in their repr.
        number = (Decimal(repr(float(value))) / factor).normalize()
        text = f"{number:f} {unit}"
        # Bits are for reading only: what a file says in Gbit/s comes back in GB/s.
        if "bit" not in unit and (number >= 1 or factor == 1) and parse(text, units, zero=True) == value:
            texts.append((len(f"{number:f}"), -factor, text))
    return min(texts)[2]
