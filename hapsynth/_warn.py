"""Warnings about what the user asked for, at the user's line."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path


class OverlapWarning(UserWarning):
    """Collectives were asked to run beside computing where they can't, or not as much as was planned."""


_OWN = str(Path(__file__).parent) + os.sep


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn as of the line that called into hapsynth, however many calls ago."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_OWN):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
