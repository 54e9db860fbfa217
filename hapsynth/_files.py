"""Files that are there whole or not at all, written under a temporary name, then renamed; and standard output and error
when they can't be written."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

_PREFIX = 32
"""Characters of the name in the temporary one, which has eight more: a name may be as long as names can be."""


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file that is there whole or not at all; OSError where that cannot be done. Links stay links, what is
    there keeps its permissions, and devices and pipes are written to."""
    try:
        # Of a pipe the name behind links may be none that can be opened.
        if is_special(Path(path)):
            Path(path).write_text(text, encoding="utf-8")
        else:
            _write_and_rename(resolved(path), text)
    except OSError as error:
        # Name the file that was asked for, not the temporary one.
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def _write_and_rename(target: Path, text: str) -> None:
    handle, temporary = temporary_beside(target)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode_of(target))
        os.replace(temporary, target)
    except BaseException:
        # Ctrl-C may come after the renaming.
        temporary.unlink(missing_ok=True)
        raise


def temporary_beside(target: Path) -> tuple[int, Path]:
    """A new hidden file in the folder of a file, to be renamed to it: its descriptor, open, and its path."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:_PREFIX]}.")
    return handle, Path(name)


def resolved(name: str | os.PathLike[str]) -> Path:
    """The file itself behind symbolic links, so that replacing it keeps them."""
    return Path(os.path.realpath(name))


def is_special(path: Path) -> bool:
    """Devices and pipes, such as /dev/null: written to, never replaced."""
    return path.exists() and not stat.S_ISREG(path.stat().st_mode)


def mode_of(path: Path) -> int:
    """The permissions of a file, or those that the process's umask leaves to a new one: `mkstemp` gives fewer."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def say(text: str) -> None:
    """A line on standard error. Whoever reads it may have gone, its disk be full, or it be closed: then the line is
    dropped, as is what comes after."""
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        discard(sys.stderr)


def discard(stream: IO[str]) -> None:
    """What is written to a standard stream from now on goes nowhere, also what Python still holds of it at exit."""
    # One that a caller has put in its place may be no file.
    with suppress(OSError, ValueError):
        number, nowhere = stream.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
