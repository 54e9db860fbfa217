"""Output files: writable before the work starts, there whole or not at all after it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from hapsynth._errors import UsageError
from hapsynth._files import discard, is_special, mode_of, resolved, temporary_beside
from hapsynth.cli.options import STDOUT


class Outputs:
    """The files that one command writes: `claim` each before the work, `write` them after it.

    Used as a context: leaving it removes files that were claimed and not written. `stdout`: where `-` goes; `inputs`:
    the files that the command reads, of which none is written over. `written`: the names of those that are in place.
    """

    def __init__(self, stdout: IO[str] | None = None, inputs: Iterable[Path] = ()) -> None:
        self._stdout = stdout or sys.stdout
        self._inputs = {resolved(path) for path in inputs}
        self._temporary: dict[str, Path] = {}
        self.written: list[str] = []

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._temporary.values():
            with contextlib.suppress(OSError):
                path.unlink()

    def claim(self, option: str, name: str | None) -> None:
        """Check that `name`, given with `option`, can be written. UsageError where it can't be."""
        if name is None or (name == STDOUT and option == "--json"):
            return
        if name == STDOUT:
            raise UsageError(f"{option} {name}: --json alone writes to standard output; give a file name")
        path = resolved(name)
        if name in self._temporary or path in map(resolved, self._temporary):
            raise UsageError(f"{option} {name}: another output is written to the same file")
        if path in self._inputs and not is_special(Path(name)):
            raise UsageError(f"{option} {name}: this command reads that file; give another name")
        if path.is_dir():
            raise UsageError(f"{option} {name}: is a folder; give a file name")
        if is_special(Path(name)):
            return
        if not path.parent.is_dir():
            raise UsageError(f"{option} {name}: the folder {path.parent} does not exist")
        try:
            handle, temporary = temporary_beside(path)
        except OSError as error:
            raise UsageError(f"{option} {name}: can't be written: {error.strerror}") from None
        os.close(handle)
        self._temporary[name] = temporary

    def make_folder(self, option: str, path: Path) -> None:
        """Make the folder `path`, given with `option`, unless it is there. UsageError where nothing can be written."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        except OSError as error:
            why = "is a file" if path.is_file() else f"can't be written: {error.strerror}"
            raise UsageError(f"{option} {path}: {why}; give a folder of your own, or one to be made") from None

    def write(self, name: str | None, save: Callable[[Path], object]) -> None:
        """Let `save` write the file `name`, claimed before, and put it in its place. UsageError where it can't."""
        if name is None:
            return
        path = resolved(name)
        try:
            if name not in self._temporary:
                _write_through(Path(name), save)
            else:
                temporary = self._temporary[name]
                save(temporary)
                os.chmod(temporary, mode_of(path))
                os.replace(temporary, path)
                del self._temporary[name]
            self.written.append(name)
        except OSError as error:
            raise UsageError(f"{name}: can't be written: {error.strerror or error}") from None

    def write_json(self, name: str | None, document: Mapping[str, Any]) -> None:
        """A JSON document to a file, or to standard output for `-`."""
        text = json.dumps(document, indent=2, allow_nan=False) + "\n"
        if name == STDOUT:
            try:
                self._stdout.write(text)
                self._stdout.flush()
            except BrokenPipeError:
                discard(self._stdout)
        else:
            self.write(name, lambda path: path.write_text(text, encoding="utf-8"))


def _write_through(path: Path, save: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / "output"
        save(temporary)
        with path.open("wb") as file:
            file.write(temporary.read_bytes())
