"""The command line: `hapsynth search | run | compare | explain`, the same as `python -m hapsynth`.

Exit status: 0 done; 1 nothing fits, or a check failed; 2 bad usage or input, with one line on standard error and
nothing written.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import NoReturn

from hapsynth import _units

DONE, FAILED, MISUSED = 0, 1, 2


class _Parser(argparse.ArgumentParser):
    """Errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISUSED, f"{self.prog}: error: {message} (try {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Arguments by default from sys.argv."""
    parser = _parser()
    try:
        options = parser.parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else MISUSED
    # JAX takes seconds to import: a usage error or --help need not wait for it.
    from hapsynth.cluster import ClusterError
    from hapsynth.plan import PlanError
    from hapsynth.report.commands import COMMANDS
    from hapsynth.report.model_file import UsageError, one_line
    from hapsynth.search.planner import InfeasibleError
    from hapsynth.trace import TraceError

    program = f"hapsynth {options.command}"
    try:
        with _standard_output(json_only=getattr(options, "json", None) == "-"):
            return COMMANDS[options.command](options)
    except (UsageError, ClusterError, PlanError, TraceError) as error:
        print(f"{program}: error: {one_line(error)}", file=sys.stderr)
        return MISUSED
    except InfeasibleError as error:
        print(f"{program}: infeasible: {one_line(error)}", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # The reader of a pipe has gone, as in `| head`: no error of ours, and nothing to flush to.
        sys.stdout = None
        return FAILED
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130
