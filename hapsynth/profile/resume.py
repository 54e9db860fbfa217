"""The measurements so far, kept in a file so that an interrupted profile goes on where it was."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np

from hapsynth import _files
from hapsynth.profile.sampling import Floats

_FORMAT = 2
"""To be raised where a figure of the same key is measured otherwise."""


class State:
    """Figure -> [devices, (seconds, spread)]; nan where a device could not run it.

    `file`: where it is kept, None for nowhere. `fingerprint`: of the devices and options; a file of others is not used,
    nor one whose figures were measured otherwise (`_FORMAT`).
    """

    def __init__(self, file: Path | None, fingerprint: str) -> None:
        self.file, self.fingerprint = file, f"{_FORMAT}/{fingerprint}"
        self.figures: dict[str, Floats] = {}

    def load(self) -> str:
        """Read the file where there is one; a note about it for a person, or ''."""
        if self.file is None or not self.file.exists():
            return ""
        try:
            data: Any = json.loads(self.file.read_text(encoding="utf-8"))
            if data["fingerprint"] != self.fingerprint:
                return f"{self.file} is of other devices, versions or options: starting anew"
            self.figures = unpacked(data["figures"])
        except (OSError, ValueError, KeyError, TypeError):
            return f"{self.file} can't be read: starting anew"
        return f"{self.file}: going on after {len(self.figures)} figures"

    def add(self, key: str, values: Floats) -> None:
        self.figures[key] = values
        self.save()

    def drop(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.figures.pop(key, None)
        self.save()

    def save(self) -> None:
        if self.file is not None:
            text = json.dumps({"fingerprint": self.fingerprint, "figures": packed(self.figures)})
            _files.write_text(self.file, text)


def packed(figures: dict[str, Floats]) -> dict[str, list[list[float | None]]]:
    """As JSON, which has no nan."""
    rows = lambda values: [[x if math.isfinite(x) else None for x in row] for row in values.tolist()]
    return {key: rows(values) for key, values in figures.items()}


def unpacked(data: object) -> dict[str, Floats]:
    rows = cast(dict[str, list[list[float | None]]], data)
    return {k: np.array([[np.nan if x is None else x for x in row] for row in v], np.float64) for k, v in rows.items()}
