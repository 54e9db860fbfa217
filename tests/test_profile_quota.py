"""A profile of two processes of which one is held to half a core sees how unlike they are."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hapsynth.cluster import Cluster

ROOT = Path(__file__).parents[1]
CPU = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 10_000
CODE = """
    import os, sys
    from pathlib import Path
    os.sched_setaffinity(0, {int(sys.argv[2])})
    from hapsynth.cli import main
    from hapsynth.profile import run
    kernels, exchanges, sampled = run.kernels, run.exchanges, run.sampled
    # What starting an op takes, the memory's speed, and matmuls: rates are of these.
    run.kernels = lambda dtypes, quick: list(kernels(dtypes, quick))[:7]
    run.exchanges = lambda *given: [e for e in exchanges(*given) if e.step in ("none", "all_reduce")]
    # A sample goes over many periods of the quota.
    run.sampled = lambda once, least, tolerance, *_: sampled(once, least, tolerance, 0.3, 0.1)
    # All threads there are, and what they start: the imports before this would take long.
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    sys.exit(main(sys.argv[3:]))
"""


@pytest.fixture
def quotas() -> Iterator[list[Path]]:
    """Two cgroups, of 60 % and 30 % of a core, which they get on a busy machine too."""
    if os.geteuid() != 0 or not (CPU / "cpu.cfs_quota_us").exists() or not os.access(CPU, os.W_OK):
        pytest.skip("needs root and a cgroup v1 CPU controller at /sys/fs/cgroup/cpu, to hold a process to a quota")
    made = [CPU / f"hapsynth-test-{os.getpid()}-{i}" for i in range(2)]
    try:
        for group, part in zip(made, (0.6, 0.3), strict=True):
            group.mkdir()
            (group / "cpu.shares").write_text(str(1 << 17))
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(part * PERIOD_US)))
        yield made
    finally:
        for group in filter(Path.exists, made):
            for _ in range(50):
                if not (group / "tasks").read_text().strip():
                    break
                time.sleep(0.1)
            group.rmdir()


@pytest.mark.slow
@pytest.mark.root
def test_half_the_quota_is_half_the_rate(tmp_path: Path, quotas: list[Path]) -> None:
    job = ["--coordinator", f"localhost:{20000 + os.getpid() % 20000}", "--processes", "2"]
    command = ["profile", "-o", str(tmp_path / "c.toml"), "--quick", "--force", "--devices", "1", *job]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    cores = sorted(os.sched_getaffinity(0))
    run = lambda i: [sys.executable, "-c", textwrap.dedent(CODE), str(quotas[i]), str(cores[i % len(cores)]), *command]
    processes = [
        subprocess.Popen(
            [*run(i), "--process", str(i)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        for i in range(2)
    ]
    try:
        said = [p.communicate(timeout=240)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0, 0], said
    fast, slow = Cluster.load(tmp_path / "c.toml").devices
    assert slow.name != fast.name
    curves = [kind.curve("matmul", "float32") for kind in (fast, slow)]
    # The largest size: small ones run within what a period allows.
    took = [curve.points[-1][1] for curve in curves if curve is not None]
    assert 0.35 < took[0] / took[1] < 0.65
