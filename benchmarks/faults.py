"""Injects faults into jobs of three processes, several at once, and makes a table: seconds until all have ended, who is
named, exit code, what is left, whether the checkpoint is whole.

    python benchmarks/faults.py                          # all of them: about an hour on two cores
    python benchmarks/faults.py --only SIGKILL:training  # by a regular expression of FAULT:PHASE:RANK
    python benchmarks/faults.py --sample --json faults.json

Links are those of network namespaces, with a launcher in each, and need root; so do `oom` and `disk`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import permutations
from pathlib import Path

import numpy as np
from emulated import cgroup, network
from emulated.cgroup import Hierarchies
from emulated.spec import Machine
from harness.command import Table, parser, write_json

import hapsynth
from hapsynth.rendezvous.address import free_ports

N = 3
STARTS = ("import", "initialize", "planning", "preflight", "compile")
SAVES = ("begin", "write", "commit", "clean")
RUNS = ("first", "training", *SAVES, "exit")
PHASES = (*STARTS, *RUNS)
OF_RANK = ("SIGKILL", "SIGSTOP", "exception", "exit0", "MemoryError", "oom")
SAYS = {"SIGKILL": "killed by signal 9", "oom": "killed by signal 9", "SIGSTOP": "stopped by a signal"}
"""Of the process that it was done to."""
OF_LAUNCHER = ("launcher-SIGKILL", "launcher-SIGTERM", "launcher-SIGINT")
DEAD = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
"""Of a neighbour that is not there."""
PATIENT = ("slow", "tenfold", "load")
"""No faults, and the job is to finish however long they last."""
WAY_OUT = (
    r"start the job again|restart|start it again|every process must (make|come)|mend|set |give |call the same|open all"
)
OF_LINK = ("link-5", "link-15", "link-for-ever")
LIMIT_S = 150.0
COMES_S = 400.0
"""For a job to come to where the fault is made, on a machine that is busy."""
SLOW_S = 300.0
MEET_S = 2.0
"""For launchers that have started their processes to meet at the first one's rendezvous."""
BURNERS = 16
"""Processes that take all the time of this machine's cores that they can get."""
LEFT_S = 30.0
"""For processes whose launcher has ended."""
ALLOWED_S = {**dict.fromkeys(STARTS, 45.0), **dict.fromkeys(RUNS, 25.0), "first": 45.0}
SAMPLE = (
    *("SIGKILL:training:1", "exit0:initialize:1", "launcher-SIGINT:training:0", "launcher-SIGKILL:planning:0"),
    *("exception:planning:1",),
)
COLUMNS = {"fault:phase:process": -34, "s": 6, "exit": 14, "  checkpoint": -14, "wrong, left, message": -1}


@dataclass(frozen=True)
class Trial:
    fault: str
    phase: str
    rank: int

    def __str__(self) -> str:
        return f"{self.fault}:{self.phase}:{self.rank}"

    @property
    def on_links(self) -> bool:
        return self.fault.startswith(("link", "pair", "walled"))

    @property
    def alone(self) -> bool:
        """Whether it would disturb other trials."""
        return self.fault == "load"

    @property
    def either(self) -> bool:
        """Whether the job may finish or not: process 0 alone commits, and may have written all or not yet."""
        return str(self) == "disk:commit:1"

    @property
    def survives(self) -> bool:
        """Whether the job is to finish all the same."""
        return self.fault in ("none", *PATIENT, "link-5", "link-15") or (self.fault, self.phase) == ("exit0", "exit")


@dataclass(frozen=True)
class Outcome:
    trial: str
    seconds: float
    """From the fault until all processes have ended."""
    codes: list[int]
    message: str
    named: bool
    left: list[str]
    checkpoint: str
    wrong: list[str]
    output: str


def trials() -> list[Trial]:
    """All faults, in each phase in which they mean something, of process 0 and another."""
    ranks = (0, 1)
    # Process 0 alone cleans up after a checkpoint.
    made = [
        Trial(fault, phase, r) for phase in PHASES for fault in OF_RANK for r in ranks if (phase, r) != ("clean", 1)
    ]
    made += [Trial("disk", phase, rank) for phase in SAVES[:3] for rank in ranks]
    made += [Trial(fault, phase, 0) for phase in PHASES for fault in OF_LAUNCHER]
    made += [
        Trial(fault, phase, rank)
        for phase in PHASES
        for fault in OF_LINK
        for rank in ranks
        if phase not in ("exit", "clean")
    ]
    # From the beginning, on.
    made.append(Trial("walled", "import", 0))
    made += [Trial("pair", phase, int(phase != "clean")) for phase in PHASES if phase not in ("exit", "import")]
    # No faults: one that plans, compiles or computes for minutes while the others wait, or takes ten times as long for
    # each step; a machine on which others compute.
    made += [Trial("slow", phase, 1) for phase in ("planning", "compile", "training")]
    return [*made, Trial("tenfold", "training", 1), Trial("load", "import", 0)]


class Run:
    """One trial, in a folder and with ports, namespaces and groups of its own."""

    def __init__(self, trial: Trial, number: int, stack: ExitStack) -> None:
        self.trial, self.name = trial, f"hapf{os.getpid()}x{number}"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-"))
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        (self.folder / "state").mkdir()
        if trial.fault == "disk":
            _run("mount", "-t", "tmpfs", "-o", "size=2m", "none", str(self.folder / "state"))
            stack.callback(_run, "umount", "-l", str(self.folder / "state"))
        paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
        self.env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
            "FAULT": f"{trial.phase}:{trial.fault}:{trial.rank}",
            "FAULT_FOLDER": str(self.folder),
            "FAULT_TRIAL": self.name,
            "FAULT_SECONDS": str(SLOW_S),
            "FAULT_STEPS": "60" if trial.on_links else "7",
            "FAULT_PAUSE": "0.1" if trial.on_links else "0",
        }
        if trial.fault == "oom":
            groups = Hierarchies.here()
            folders = groups.make(self.name, Machine("oom", 1.0, memory=64 << 20))
            stack.callback(cgroup.remove, folders)
            self.env["FAULT_GROUP"] = str(groups.memory / self.name)
        self.launchers: list[subprocess.Popen[str]] = []
        self._burners: list[subprocess.Popen[bytes]] = []
        stack.callback(self._end)
        launch = [sys.executable, "-m", "hapsynth", "launch"]
        job = str(Path(__file__).with_name("_faulty.py"))
        if not trial.on_links:
            self._start([*launch, "-n", str(N), job])
            return
        network.make(self.name, [Machine(f"m{i}", 1.0) for i in range(N)])
        stack.callback(network.remove, self.name)
        self.env["HAPSYNTH_TOKEN"] = self.name
        port = free_ports(2)[0]
        where, self._ports = f"{network.address(0)}:{port}", f"{port}-{port + 1}"
        hosts = self.folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{network.address(i)} m{i}" for i in range(N))]
        hosts.write_text("\n".join(lines) + "\n")
        for i in range(N):
            enter = ["ip", "netns", "exec", f"{self.name}-{i}", "unshare", "--uts", "--mount", "sh", "-c"]
            host = [f'mount --bind {hosts} /etc/hosts; echo m{i} > /proc/sys/kernel/hostname; exec "$@"', "sh"]
            options = ["--coordinator", where, "--processes", str(N), "--process", str(i)]
            self._start([*enter, *host, *launch, *options, job])

    def _start(self, command: Sequence[str]) -> None:
        with open(self.folder / f"out.{len(self.launchers)}", "w") as out:
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, text=True, env=self.env
            )
        self.launchers.append(popen)

    def there(self) -> list[int]:
        """All processes of this trial that still run, whoever started them."""
        mark, found = f"FAULT_TRIAL={self.name}\0".encode(), list[int]()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdecimal() and mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def _end(self) -> None:
        for pid in self.there():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()

    def play(self) -> Outcome:
        until = time.monotonic() + COMES_S
        while not (self.folder / "at").exists() and time.monotonic() < until and self._running():
            time.sleep(0.02)
        if self.trial.on_links and self.trial.phase == "import":
            # Who has not been started is waited for, for minutes: all have been, and their launchers have met.
            while len(list(self.folder.glob("began.*"))) < N and time.monotonic() < until and self._running():
                time.sleep(0.02)
            time.sleep(MEET_S)
        self._make_fault()
        until = time.monotonic() + LIMIT_S + (SLOW_S if self.trial.fault in PATIENT else 0.0)
        while self._running() and time.monotonic() < until:
            time.sleep(0.05)
        for burner in self._burners:
            burner.kill()
            burner.wait()
        until = time.monotonic() + LEFT_S
        while self.there() and time.monotonic() < until:
            time.sleep(0.05)
        ended, left = time.time(), [f"process {pid}" for pid in self.there()]
        left += [f.name for f in (self.folder / "state").glob(".*")]
        began = float((self.folder / "at").read_text()) if (self.folder / "at").exists() else float("nan")
        if self.trial.on_links:
            began = max(began, self._made)
        codes = [launcher.poll() if launcher.poll() is not None else -1 for launcher in self.launchers]
        output = "".join((self.folder / f"out.{i}").read_text() for i in range(len(self.launchers)))
        return self._judge(ended - began, [c for c in codes if c is not None], output, left)

    def _running(self) -> bool:
        return any(launcher.poll() is None for launcher in self.launchers)

    def _make_fault(self) -> None:
        fault, rank = self.trial.fault, self.trial.rank
        if fault.startswith("launcher-"):
            # As Ctrl-C in a terminal does, which is one of the launcher's own process group.
            self.launchers[0].send_signal(signal.Signals[fault.removeprefix("launcher-")])
        elif fault.startswith("link-"):
            self._plug(rank, False)
        elif fault == "pair":
            self._cut(1, 2)
        elif fault == "walled":
            for i, j in permutations(range(N), 2):
                self._wall(i, j)
        elif fault == "load":
            burn = [sys.executable, "-S", "-E", "-c", "while True: pass"]
            # Each in a session of its own: of one session Linux lets all together have as much as another's one.
            self._burners = [subprocess.Popen(burn, env=self.env, start_new_session=True) for _ in range(BURNERS)]
        self._made = time.time()
        (self.folder / "made").touch()
        if fault in ("link-5", "link-15"):
            time.sleep(float(fault.removeprefix("link-")))
            self._plug(rank, True)

    def _plug(self, i: int, plugged: bool) -> None:
        """The cable of a machine, at the switch."""
        how = ["master", "bridge"] if plugged else ["nomaster"]
        _run("ip", "-n", self.name, "link", "set", f"port{i}", *how)

    def _cut(self, a: int, b: int) -> None:
        """What these two send each other goes nowhere."""
        for i, j in ((a, b), (b, a)):
            _run("ip", "-n", f"{self.name}-{i}", "neigh", "replace", network.address(j), *DEAD)

    def _wall(self, a: int, b: int) -> None:
        """Lets nothing from one to the other but what is of the coordinator's and the rendezvous's ports."""
        ip, nowhere = ("ip", "-n", f"{self.name}-{a}"), network.address(N)
        _run(*ip, "neigh", "replace", nowhere, *DEAD)
        _run(*ip, "route", "replace", "default", "via", nowhere, "dev", "eth0", "table", "77")
        for number, selects, table in (
            (1, ["sport", self._ports], "main"),
            (2, ["dport", self._ports], "main"),
            (3, [], "77"),
        ):
            which = ["priority", str(number), "to", network.address(b), "ipproto", "tcp", *selects]
            _run(*ip, "rule", "add", *which, "lookup", table)

    def _judge(self, seconds: float, codes: list[int], output: str, left: list[str]) -> Outcome:
        over = re.findall(r"hapsynth launch: (?:the job is over after [\d.]+ s: )?(.*)", output)
        message = next((m for m in over), "")
        named = bool(re.search(r"process(es)? [\d, ]+ on \S+ \(pid \d+\)|the launcher.* on \S+ \(pid \d+\)", message))
        finished = output.count("trained") == N and not any(codes)
        checkpoint = self._checkpoint(output)
        wrong: list[str] = []
        survives = finished if self.trial.either else self.trial.survives
        if survives != finished:
            wrong.append("did not finish" if survives else "exit 0")
        if not survives:
            if not seconds <= ALLOWED_S[self.trial.phase]:
                wrong.append(f"more than {ALLOWED_S[self.trial.phase]:g} s")
            if not named:
                wrong.append("nobody named")
            if self.trial.fault in OF_RANK and not re.match(
                rf"process {self.trial.rank} on .*{SAYS.get(self.trial.fault, '')}", message
            ):
                wrong.append("another fault is said")
            if not re.search(WAY_OUT, message):
                wrong.append("no way out")
        if checkpoint in ("lost", "half"):
            wrong.append(f"checkpoint {checkpoint}")
        return Outcome(str(self.trial), round(seconds, 1), codes, message, named, left, checkpoint, wrong, output)

    def _checkpoint(self, output: str) -> str:
        """Which of the job's checkpoints is there, bit for bit: first, second, none; lost, half."""
        expected = sorted(self.folder.glob("expected.*.npz"))
        try:
            found = list(hapsynth.load_state(self.folder / "state").values())
        except hapsynth.CheckpointError:
            return "lost" if len(expected) > 1 or "step 1 " in output else "none"
        for number, file in enumerate(expected):
            want = list(np.load(file).values())
            if all(np.array_equal(a, b) for a, b in zip(found, want, strict=True)):
                return ("first", "second")[number]
        return "half"


def play(trial: Trial, number: int) -> Outcome:
    with ExitStack() as stack:
        return Run(trial, number, stack).play()


def _alone(trial: Trial, number: int, others: Sequence[Future[Outcome]]) -> Outcome:
    wait(others)
    return play(trial, number)


def _run(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)


def line(outcome: Outcome) -> list[str]:
    """The cells of an outcome in the table."""
    notes = [*(f"wrong: {w}" for w in outcome.wrong), *(f"left: {name}" for name in outcome.left), outcome.message]
    codes = ",".join(map(str, outcome.codes))
    return [outcome.trial, f"{outcome.seconds:.1f}", codes, f"  {outcome.checkpoint}", "; ".join(filter(None, notes))]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--only", metavar="REGEX", default="", help="trials whose FAULT:PHASE:RANK has it")
    command.add_argument("--sample", action="store_true", help="a few, as CI runs them")
    command.add_argument("--list", action="store_true", help="name the trials")
    command.add_argument("--at-once", type=int, default=6, metavar="N", help="jobs at a time (default 6)")
    options = command.parse_args()
    chosen = [t for t in trials() if re.search(options.only, str(t))]
    if options.sample:
        chosen = [t for t in trials() if str(t) in SAMPLE]
    if options.list:
        print(*chosen, sep="\n")
        return 0
    outcomes: list[Outcome] = []
    table = Table(COLUMNS)
    table.show(COLUMNS)
    with ThreadPoolExecutor(options.at_once) as pool, ThreadPoolExecutor(1) as after:
        made: dict[Trial, Future[Outcome]] = {}
        # Those that take minutes go first; those that are to be alone when the others have ended.
        for number, trial in enumerate(sorted(chosen, key=lambda t: (t.alone, t.fault not in PATIENT))):
            others = list(made.values())
            made[trial] = (
                after.submit(_alone, trial, number, others) if trial.alone else pool.submit(play, trial, number)
            )
        for outcome in (made[trial].result() for trial in chosen):
            outcomes.append(outcome)
            table.show(line(outcome))
            write_json(options.json, [asdict(o) for o in outcomes])
    wrong = sum(bool(o.wrong) for o in outcomes)
    print(f"\n{len(outcomes)} trials, {wrong} not as they are to be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
