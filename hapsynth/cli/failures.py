"""How a command says, in one line on standard error, why it failed."""

from __future__ import annotations

import sys

from hapsynth._errors import UsageError
from hapsynth._files import discard, say
from hapsynth.cli.options import MISUSED


def fail(name: str, what: str, error: BaseException, status: int) -> int:
    """Say it; the exit status."""
    say(f"{name}: {what}: {' '.join(str(error).split())}")
    return status


def fail_of_system(name: str, error: OSError) -> int:
    """As `fail`. Output files report their own errors; one of no file, though, is about the working directory."""
    where = error.filename or ("the working directory" if isinstance(error, FileNotFoundError) else None)
    if where is not None:
        return fail(name, "error", UsageError(f"{where}: {error.strerror}"), MISUSED)
    # What is left is standard output, which is full. Nothing more is to be written there, not by Python at exit either.
    discard(sys.stdout)
    return fail(name, "standard output", error, MISUSED)
