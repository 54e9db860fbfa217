"""The emulated cluster: what is asked for, what the kernel is told, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from emulated import Machine, SpecError, cgroup, cluster, load, machines, network
from emulated.cgroup import CgroupError, Hierarchies
from emulated.spec import cores_of

TOOL = str(Path(__file__).parents[2] / "benchmarks" / "emulated")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emulated.spec.os.sched_getaffinity", lambda _: {0, 1, 2, 3})


def test_machines_are_given_one_value_for_all_or_one_each() -> None:
    found = machines("1.0:0.3", rate="1Gbit:none", delay="2ms", memory="1GiB:512MiB")
    assert found == [
        Machine("m0", 1.0, 1e9, 2e-3, 1 << 30),
        Machine("m1", 0.3, None, 2e-3, 1 << 29),
    ]


def test_machines_are_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[[machine]]\nname = "fast"\nquota = 1\nrate = "100Mbit"\n[[machine]]\ncount = 2\nquota = 0.25\n')
    assert load(file) == [Machine("fast", 1.0, 1e8), Machine("m1", 0.25), Machine("m2", 0.25)]


@pytest.mark.parametrize(
    ("quotas", "more", "said"),
    [
        ("1.0:x", {}, "quota is 'x'"),
        ("1.0:0", {}, "m1: a quota of 0 cores"),
        ("3.0:0.95", {}, "3.95 cores together, and of the 4 here at most 3.92"),
        ("1:1", {"rate": "1Gbit:1Gbit:1Gbit"}, "3 values for 2 machines"),
        ("1:1", {"rate": "9"}, "9 bit/s; give at least 100kbit"),
        ("1:1", {"delay": "1min"}, "delay is '1min'; give a number with its unit, as 1ms"),
        ("1:1", {"memory": "7"}, "7 bytes of memory"),
        ("1:1", {"processes": "2:0"}, "m1: 0 processes; give at least 1"),
        ("1:1", {"processes": "2:some"}, "processes is 'some'; give a whole number"),
        ("1:1", {"processes": "3:1"}, "4 cores together, and of the 4 here at most 3.92"),
    ],
)
def test_what_can_not_be_is_refused(quotas: str, more: dict[str, str], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        machines(quotas, **more)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("machine = 3", "a .*machine.* table for each"),
        ("[[machine]]\nrate = 1e9", "m0 has no quota"),
        ("[[machine]]\nquota = 1\ncores = 2", "cores; the fields are"),
        ('[[machine]]\nquota = 1\nname = "a/b"', "a name is small letters"),
        ("[[machine]]\nquota = 1\ncount = 0", "count is 0"),
        ("[[machine", "c.toml: "),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(SpecError, match=said):
        load(tmp_path / "c.toml")


def test_each_process_has_one_core_where_the_quotas_can_be_packed() -> None:
    assert cores_of([0.6, 0.6, 0.2, 0.2], [4, 7]) == [[4], [7], [4], [7]]
    assert cores_of([0.7, 0.7, 0.5], [4, 7]) == [[4, 7]] * 3
    assert cores_of([1.9], [4, 7]) == [[4, 7]]


def test_version_2_limits(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    found = Hierarchies.find(f"none {tmp_path} cgroup2 rw 0 0\n", "0::/user.slice\n")
    assert found == Hierarchies(2, tmp_path, tmp_path)
    # A real one makes these files with the folder.
    group = tmp_path / "g"
    make, files = Path.mkdir, ("cpu.max", "memory.swap.max")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda self: (make(self), [(self / name).touch() for name in files]))
        assert found.make("g", Machine("m", 0.3, memory=1 << 30)) == [group]
    read = lambda file: (tmp_path / file).read_text()
    assert (read("cgroup.subtree_control"), read("g/cpu.max")) == ("+cpu +memory", "1500 5000")
    assert (read("g/memory.max"), read("g/cpu.weight")) == (str(1 << 30), "10000")
    assert read("g/memory.swap.max") == "0"
    found.limit("g", None)
    assert (read("g/cpu.max"), read("g/cpu.weight")) == ("max 5000", "100")


def test_version_1_limits(tmp_path: Path) -> None:
    inside = [tmp_path / "cpu", tmp_path / "memory" / "mine"]
    for folder in inside:
        folder.mkdir(parents=True)
    mounts = "".join(f"cgroup {tmp_path / name} cgroup rw,{name} 0 0\n" for name in ("cpu", "memory"))
    # Of the two paths only one is there to be seen.
    found = Hierarchies.find(mounts, "4:memory:/mine\n1:cpu,cpuacct:/elsewhere\n0::/\n")
    assert found == Hierarchies(1, *inside)
    folders = found.make("g", Machine("m", 0.3, memory=1 << 30))
    assert folders == [tmp_path / "cpu" / "g", tmp_path / "memory" / "mine" / "g"]
    assert (folders[0] / "cpu.cfs_quota_us").read_text() == "1500"
    assert (folders[1] / "memory.limit_in_bytes").read_text() == str(1 << 30)


def test_without_controllers_it_says_so() -> None:
    with pytest.raises(CgroupError, match="cpu and memory controllers"):
        Hierarchies.find("tmpfs /tmp tmpfs rw 0 0\n", "0::/\n")


def test_without_tools_the_command_names_them_and_ends_with_2() -> None:
    run = [sys.executable, TOOL, "--quotas", "0.5:0.2", "--", "true"]
    done = subprocess.run(run, env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "the command ip (iproute2" in done.stderr


lacking = ", ".join(network.missing())
root = pytest.mark.skipif(bool(lacking), reason=f"needs {lacking}")
SHOW = """
    import os, pathlib, socket, sys, time
    name, folder = sys.argv[1], pathlib.Path(os.environ["EMULATED_CPU"])
    assert socket.gethostname() == name, socket.gethostname()
    limit = next(p.read_text().split()[0] for n in ("cpu.max", "cpu.cfs_quota_us") if (p := folder / n).exists())
    assert str(os.getpid()) in (folder / "cgroup.procs").read_text().split()
    if name == "m0":
        with socket.create_server((name, 9)) as server, server.accept()[0] as other:
            print("got", other.recv(99).decode(), limit)
    else:
        while True:
            try:
                connection = socket.create_connection(("m0", 9))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        connection.sendall(limit.encode())
"""


def _left(name: str) -> list[str]:
    made = Hierarchies.here()
    folders = [*made.cpu.iterdir(), *made.memory.iterdir(), cluster._folder(name)]
    return [n for n in (*network.names(), *(str(f) for f in folders if f.exists())) if name in n]


@pytest.mark.waits
@pytest.mark.root
@root
def test_machines_are_limited_meet_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("if True:" + SHOW)
    run = [sys.executable, TOOL, "--quotas", "1.0:0.8", "--rate", "1Gbit", "--timeout", "500", "--"]
    process = subprocess.Popen([*run, sys.executable, str(tmp_path / "show.py"), "{name}"], stdout=subprocess.PIPE)
    said = process.communicate()[0].decode()
    assert process.returncode == 0, said
    assert "[m0] got 4000 5000" in said
    assert not _left(f"{cluster.PREFIX}{process.pid}")


@pytest.mark.waits
@pytest.mark.root
@root
def test_processes_of_a_machine_share_its_network() -> None:
    run = [sys.executable, TOOL, "--quotas", "0.6:0.6", "--processes", "2:1", "--", "sh", "-c"]
    code = "echo {i} of {n} on $(hostname) in $(readlink /proc/self/ns/net), $(cat /proc/self/cgroup | md5sum)"
    done = subprocess.run([*run, code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(line.split(" ", 1) for line in sorted(done.stdout.splitlines()))
    words = {label: text.replace(",", "").split() for label, text in said.items()}
    assert {label: (w[0], w[2], w[4]) for label, w in words.items()} == {
        "[m0.0]": ("0", "3", "m0"),
        "[m0.1]": ("1", "3", "m0"),
        "[m1]": ("2", "3", "m1"),
    }
    spaces = [w[6] for w in words.values()]
    assert spaces[0] == spaces[1] != spaces[2]
    assert len({w[7] for w in words.values()}) == 3, "each has a control group of its own"


@pytest.mark.waits
@pytest.mark.root
@root
def test_a_machine_runs_no_longer_than_its_part_of_a_period() -> None:
    """Else whatever runs in it stands still for several periods: between ticks Linux looks at no quota."""
    code = """if True:
        import statistics, time
        begun = last = since = time.perf_counter()
        ran = []
        while last < begun + 1:
            now = time.perf_counter()
            if now > last + 1e-3:
                ran.append(last - since)
                since = now
            last = now
        print("ran", statistics.median(ran))
    """
    run = [sys.executable, TOOL, "--quotas", "0.2", "--", sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True)
    assert float(done.stdout.rpartition("ran ")[2]) < 2e-3, done.stdout + done.stderr


@pytest.mark.few(2)
@pytest.mark.waits
@pytest.mark.root
@root
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_ends_nothing_is_left(how: signal.Signals) -> None:
    run = [sys.executable, TOOL, "--quotas", "1.0:0.8", "--", "sh", "-c", "echo here; sleep 1000"]
    # What starts these tests in the background may have had them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(run, stdout=subprocess.PIPE)
    signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    # The first machine's, whose processes are looked at.
    while (line := process.stdout.readline()) != b"[m0] here\n":
        assert line == b"[m1] here\n"
    name = f"{cluster.PREFIX}{process.pid}"
    inside = [int(p) for f in Hierarchies.here().folders(f"{name}-0") for p in (f / "cgroup.procs").read_text().split()]
    assert inside
    with process:
        process.send_signal(how)
        assert process.wait() != 0
    while _left(name):
        time.sleep(0.05)
    # Only what nobody waited for yet may still be listed.
    assert not [p for p in inside if Path(f"/proc/{p}/cmdline").exists() and Path(f"/proc/{p}/cmdline").read_bytes()]


@pytest.mark.waits
@pytest.mark.root
@root
def test_what_an_earlier_run_left_is_removed() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    name = f"{cluster.PREFIX}{dead.pid}"
    Hierarchies.here().make(f"{name}-0", Machine("m0", 0.1))
    sleeper = subprocess.Popen(["sleep", "1000"])
    (Hierarchies.here().cpu / f"{name}-0" / "cgroup.procs").write_text(str(sleeper.pid))
    network.make(name, [Machine("m0", 0.1)])
    assert name in cluster.remove_leftovers()
    assert not _left(name)
    assert sleeper.wait() == -signal.SIGKILL


@pytest.mark.waits
@pytest.mark.root
@root
def test_a_process_over_its_memory_is_named() -> None:
    code = "import sys, time; x = bytearray(200 << 20); time.sleep(1000 if sys.argv[1] == 'm0' else 0)"
    run = [sys.executable, TOOL, "--quotas", "1.0:0.8", "--memory", "1GiB:64MiB", "--", sys.executable, "-c", code]
    done = subprocess.run([*run, "{name}"], capture_output=True, text=True)
    assert done.returncode == 128 + 9
    assert f"m1 was killed at its memory limit of {64 << 20} bytes" in done.stdout


@pytest.mark.parametrize(("rate", "at_once_s"), [(1e8, 1.5e-3), (1e9, 0.15e-3), (1e10, 0.11e-3)])
def test_a_link_gives_little_for_nothing_after_a_pause(
    rate: float, at_once_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(network, "_run", lambda *command: ran.append(command))
    network.make("n", [Machine("m0", 0.5, rate)])
    bursts = [int(command[command.index("burst") + 1]) for command in ran if "burst" in command]
    packets = [int(command[-1]) for command in ran if "gso_max_size" in command]
    assert len(bursts) == len(packets) == 2
    assert max(bursts) * 8 / rate < at_once_s
    # What is larger than that tbf cuts into single packets.
    assert max(packets) < min(bursts)


def test_limits_are_lifted_for_a_block_and_only_in_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").touch()
    monkeypatch.setenv("EMULATED_CPU", str(tmp_path))
    monkeypatch.setenv("EMULATED_QUOTA", "0.2")
    with cgroup.unlimited():
        assert (tmp_path / "cpu.max").read_text() == "max 5000"
    assert (tmp_path / "cpu.max").read_text() == "1000 5000"
    cgroup.hold_to(0.4)
    with cgroup.unlimited():
        pass
    assert (tmp_path / "cpu.max").read_text() == "2000 5000"
    monkeypatch.delenv("EMULATED_CPU")
    before = os.listdir(tmp_path)
    with cgroup.unlimited():
        assert os.listdir(tmp_path) == before
