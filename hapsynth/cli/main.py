"""The command line: `hapsynth COMMAND`, of which `hapsynth --help` lists ten.

The same as `python -m hapsynth`. Exit status: 0 done; 1 nothing fits, or a check failed; 2 bad usage or input, with one
line on standard error and nothing written; 130 interrupted before there was any plan; that of `launch` is that of the
process that failed first. Ctrl-C later on ends the search with the best plan so far. Where the reader of standard
output goes away, as `| head` does, the rest of the report is dropped, and the command ends as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence

from hapsynth.cli.options import MISUSED, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` is by default sys.argv[1:]."""
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else MISUSED
    # JAX, and what else commands need, take seconds to import: `--help` does without.
    from hapsynth.cli.commands import run_command

    return run_command(options)
