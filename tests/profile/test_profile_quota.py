"""A profile of two processes of which one is held to a small part of a core sees which is the slower."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_processes import run_two

from hapsynth.cluster.cluster import Cluster

CPU = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
CODE = """
    import os, sys
    from pathlib import Path
    os.sched_setaffinity(0, {int(sys.argv[2])})
    from hapsynth.cli.main import main
    from hapsynth.profile import run
    group = Path(sys.argv[1])
    kernels, exchanges, sampled = run.kernels, run.exchanges, run.sampled
    # What starting an op takes, the memory's speed, and matmuls: rates are of these.
    some = ("dispatch", "launch", "stream", "matmul")
    run.kernels = lambda dtypes, quick: [k for k in kernels(dtypes, quick) if k.family in some and k.size <= 1 << 22]
    run.exchanges = lambda *given: [e for e in exchanges(*given) if e.step in ("none", "all_reduce")][:3]

    def held(once, least, tolerance, *_):
        # All threads are, while they measure: compiling takes long enough without. A sample goes over many periods.
        (group / "cgroup.procs").write_text(str(os.getpid()))
        found = sampled(once, least, tolerance, 0.0, 0.1)
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        return found

    run.sampled = held
    sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture
def quotas() -> Iterator[list[Path]]:
    """Two cgroups, of 60 % and 10 % of a core, which they get on a busy machine too."""
    if os.geteuid() != 0 or not (CPU / "cpu.cfs_quota_us").exists() or not os.access(CPU, os.W_OK):
        pytest.skip("needs root and a cgroup v1 CPU controller at /sys/fs/cgroup/cpu, to hold a process to a quota")
    made = [CPU / f"hapsynth-test-{os.getpid()}-{i}" for i in range(2)]
    try:
        for group, part in zip(made, (0.6, 0.1), strict=True):
            group.mkdir()
            (group / "cpu.shares").write_text(str(1 << 17))
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(part * PERIOD_US)))
        yield made
    finally:
        for group in filter(Path.exists, made):
            while (group / "tasks").read_text().strip():
                time.sleep(0.1)
            group.rmdir()


# Modelled processes and calls show as much in test_profile.py (two_processes_profile_each_other, held_to_a_part).
@pytest.mark.few(0)
@pytest.mark.slow
@pytest.mark.root
def test_a_process_that_is_held_is_of_a_slower_kind(tmp_path: Path, quotas: list[Path]) -> None:
    """How much slower is not judged: that depends on what else the machine does."""
    file = tmp_path / "c.toml"
    common = ["profile", "-o", str(file), "--quick", "--force", "--devices", "1", "--processes", "2"]
    cores = sorted(os.sched_getaffinity(0))
    of = lambda i: [str(quotas[i]), str(cores[i % len(cores)]), *common, "--process", str(i)]
    run_two(CODE, lambda address, i: [*of(i), "--coordinator", address])
    free, held = Cluster.load(file).devices
    assert (free.name, held.name) == ("cpu-1", "cpu-2")
    assert free.bandwidth > held.bandwidth
    assert free.rate("float32") > held.rate("float32")
