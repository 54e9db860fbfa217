"""The command: `python benchmarks/emulated`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import emulated
from emulated import EmulatedCluster, MissingError, SpecError, load, machines


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="emulated", description=emulated.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "spec", nargs="?", help="a TOML file of [[machine]] tables: name, quota, rate, delay, memory, processes"
    )
    parser.add_argument("--quotas", help="cores of each process on each machine, as 1.0:0.3")
    each = "one for all machines, or one for each, as "
    parser.add_argument("--rate", help=f"of its link, {each}1Gbit:100Mbit")
    parser.add_argument("--delay", help=f"of packets on their way out, {each}1ms:0")
    parser.add_argument("--memory", help=f"{each}2GiB:512MiB")
    parser.add_argument("--processes", help="on each machine, joined by its loopback: 3:1, one if not given")
    parser.add_argument("--timeout", type=float, metavar="S", help="end the machines after so many seconds")
    parser.add_argument("--clean", action="store_true", help="only take away the leftovers of runs that are over")
    arguments = sys.argv[1:]
    command = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
    options = parser.parse_args(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    if options.clean:
        print("removed:", ", ".join(emulated.remove_leftovers()) or "nothing was left")
        return 0
    if (options.spec is None) == (options.quotas is None):
        parser.error("give a TOML file or --quotas, one of them")
    if options.spec is not None and (options.rate or options.delay or options.memory or options.processes):
        parser.error("--rate, --delay, --memory and --processes go with --quotas; the TOML file has its own")
    if not command:
        parser.error("give the command to run on every machine after --")
    signal.signal(signal.SIGTERM, _stopped)
    try:
        if options.spec is not None:
            given_machines = load(options.spec)
        else:
            given_machines = machines(
                options.quotas,
                rate=options.rate,
                delay=options.delay or 0,
                memory=options.memory,
                processes=options.processes or 1,
            )
        with EmulatedCluster(given_machines) as cluster:
            codes = cluster.run(command, timeout_s=options.timeout)
    except (MissingError, SpecError) as error:
        print(f"emulated: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _stopped(number: int, _: Any) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
