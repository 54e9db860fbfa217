"""A benchmark's command: the options that all have, each row in a process of its own, its table, its JSON file."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def parser(doc: str | None, *, json_file: Path | None = None) -> argparse.ArgumentParser:
    """The command line of a benchmark, which its docstring explains. `json_file`: where its rows go by default."""
    command = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--json", type=Path, default=json_file, metavar="OUT", help="the file that all rows go to")
    # For `in_own_process`.
    command.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    return command


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """The type of an option: names with commas between, each of which must be known."""

    def parsed(text: str) -> list[str]:
        given = [name for name in text.split(",") if name]
        for name in given:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return given

    return parsed


def again(*options: str) -> list[str]:
    """This command with its options and more; of an option that stands twice the last counts."""
    return [sys.executable, str(Path(sys.argv[0]).resolve()), *sys.argv[1:], *options]


class RowError(RuntimeError):
    """The process of a row failed. `exit_code`: None where it was stopped. `printed`: the row as far as it came."""

    def __init__(self, row: Row, why: str, exit_code: int | None, printed: Row | None, stderr: str) -> None:
        super().__init__(f"{row}: {why}\n{stderr}".rstrip())
        self.row, self.why, self.exit_code, self.printed, self.stderr = row, why, exit_code, printed, stderr

    def as_row(self) -> Row:
        """For a table that goes on: `status`, and `error` with all that the process wrote."""
        return {**self.row, "status": self.why, **({"error": self.stderr} if self.stderr else {})}


def in_own_process(row: Row, *, timeout_s: float | None = None, env: Mapping[str, str] | None = None) -> Row:
    """The row as this command makes it in another process, so that peak memory is the row's own and no cache is warm.

    The command is started again with the same options and `--row`, and prints the row as JSON in its last line. It may
    print more than one while it gets further. Raises RowError.
    """
    command = again("--row", json.dumps(row))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False)
    except subprocess.TimeoutExpired:
        raise RowError(row, f"stopped after {timeout_s:g} s", None, None, "") from None
    lines = done.stdout.splitlines()
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        printed = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
        raise RowError(row, f"error: {last}", done.returncode, printed, done.stderr)
    return json.loads(lines[-1])


def row_or_failure(row: Row, *, timeout_s: float | None = None) -> Row:
    """As `in_own_process`; where that fails, the row with a `status` that says why."""
    try:
        return in_own_process(row, timeout_s=timeout_s)
    except RowError as error:
        return error.as_row()


class Table:
    """A table of text. `columns`: heads and widths, negative where the cells stand at the left."""

    def __init__(self, columns: Mapping[str, int]) -> None:
        self.widths = list(columns.values())
        self.heads = self.line(columns)

    def line(self, cells: Iterable[str]) -> str:
        pairs = zip(cells, self.widths, strict=True)
        return "".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in pairs)

    def show(self, cells: Iterable[str]) -> None:
        print(self.line(cells), flush=True)


def show_rows(
    heads: Iterable[str], rows: Iterable[Row], cells: Callable[[Row], list[str]], file: Path | None, *, markdown: bool
) -> list[Row]:
    """Rows as they come: their `cells` as a table, `markdown` or with spaces between, and all so far in a file."""
    texts, found = list(heads), list[Row]()
    show = lambda texts: print("| " + " | ".join(texts) + " |" if markdown else "  ".join(texts), flush=True)
    show(texts)
    if markdown:
        show(["---"] * len(texts))
    for row in rows:
        found.append(row)
        show(cells(row))
        write_json(file, found)
    return found


def write_json(file: Path | None, data: Any) -> None:
    """To the file that `--json` named, if it did."""
    if file is not None:
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
