"""The command line: `hapsynth COMMAND`, of which `hapsynth --help` lists ten.

The same as `python -m hapsynth`. Exit status: 0 done; 1 nothing fits, a check or the run failed, or cards differ; 2 bad
usage or input, with one line on standard error and nothing written; 130 interrupted before all was written; that of
`launch` is that of the process that failed first. Ctrl-C later on ends the search with the best plan so far, and so
does SIGTERM. Where the reader of standard output or standard error goes away, as `| head` does, the rest of it is
dropped, and the command ends as it would have.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

from hapsynth._files import discard, say
from hapsynth.cli.failures import fail_of_system
from hapsynth.cli.options import INTERRUPTED, MISUSED, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` is by default sys.argv[1:]."""
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed, as by `>&-`
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif isinstance(to := getattr(sys, stream), io.TextIOWrapper):
            with suppress(OSError, ValueError):  # of what a caller has printed and nobody reads, or of a closed one
                to.reconfigure(errors="backslashreplace")  # names may have characters that it lacks
    status = _run(argv)
    # Python holds what argparse, a model file or the processes of a job printed, and at exit would end with a status of
    # its own where that can't be written.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:  # a closed one raises the latter
            discard(stream)
            if stream is sys.stdout and isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                status = status or fail_of_system("hapsynth", error)
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        options = parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else MISUSED
    except BrokenPipeError:  # by what prints a completion script
        return 0
    except OSError as error:
        return fail_of_system("hapsynth", error)
    try:
        with _interrupts_deferred():
            # JAX, and what else commands need, take seconds to import: `--help` and a launcher do without.
            if options.command == "launch":
                from hapsynth.cli.launch import run_launch as run
            else:
                from hapsynth.cli.commands import run_command as run
        with _dropped_interrupts_reraised():
            return run(options)
    except KeyboardInterrupt:
        say(f"hapsynth {options.command}: interrupted: nothing written")
        return INTERRUPTED


@contextmanager
def _interrupts_deferred() -> Generator[None]:
    """A Ctrl-C is raised when this is left: imports turn it into other errors, or drop it."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        # Ignored, as by jobs in the background, or with a handler of the caller's.
        yield
        return
    pressed = list[int]()
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@contextmanager
def _dropped_interrupts_reraised() -> Generator[None]:
    """A Ctrl-C, or a SIGTERM that is one, is raised again where Python drops it: an exception in a callback of the
    garbage collector, as JAX has one, is printed and ignored."""
    before = sys.unraisablehook

    def again(dropped: sys.UnraisableHookArgs) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # Here it would be dropped as well. Jobs in the background ignore SIGINT: it was SIGTERM.
            ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            threading.Timer(0.01, signal.raise_signal, [signal.SIGTERM if ignored else signal.SIGINT]).start()
        else:
            before(dropped)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before
