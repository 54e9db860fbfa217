"""A job of some processes for `faults.py`, which has one of them fail at a moment: plans, trains, saves, ends.

What is to happen is in FAULT, as PHASE:FAULT:RANK; faults that the driver makes (a signal to the launcher, a link) wait
for it to say that it has. `at` and `made` in FOLDER are such signs, `began.RANK` is one that a process is there;
`expected.N.npy` is what the N-th checkpoint holds.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["FAULT_FOLDER"])
PHASE, FAULT, WHO = os.environ["FAULT"].split(":")
RANK = os.environ["OMPI_COMM_WORLD_RANK"]
STEPS, TRAINS_AT, SAVES = int(os.environ.get("FAULT_STEPS", "6")), 4, (1, 5)
STEP_S = 3.0
"""Of a step where one process takes ten times as long."""
AGREED = {"begin": 1, "commit": 3}


def at(phase: str) -> None:
    """The process is here now."""
    if phase != PHASE or RANK != WHO or (FOLDER / "at").exists():
        return
    (FOLDER / "now").write_text(repr(time.time()))
    (FOLDER / "now").rename(FOLDER / "at")
    match FAULT:
        case "SIGKILL" | "SIGSTOP":
            os.kill(os.getpid(), signal.Signals[FAULT])
        case "exception":
            raise ValueError("a bad batch")
        case "MemoryError":
            raise MemoryError("no room for a batch")
        case "exit0":
            sys.exit(0)
        case "oom":
            # Another group than it began in, which has little memory.
            Path(os.environ["FAULT_GROUP"], "cgroup.procs").write_text(str(os.getpid()))
            held: list[bytearray] = []
            while True:
                held.append(bytearray(b"x" * (1 << 20)))
        case "disk":
            _fill(FOLDER / "state")
        case "slow":
            time.sleep(float(os.environ["FAULT_SECONDS"]))
        case "none" | "tenfold":
            pass
        case _:
            while not (FOLDER / "made").exists():
                time.sleep(0.02)


def _compute(seconds: float) -> None:
    """So that no other thread of this process gets at Python but by its switches."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(100_000))


def _fill(folder: Path) -> None:
    size = 1 << 16
    with open(folder / "filler", "ab", buffering=0) as file:
        while size:
            try:
                file.write(b"x" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 16


def main() -> None:
    (FOLDER / f"began.{RANK}").touch()
    at("import")
    import jax
    import jax.numpy as jnp
    import numpy as np

    import hapsynth
    from hapsynth.checkpoint import state as saving
    from hapsynth.checkpoint import writer
    from hapsynth.jobs import preflight
    from hapsynth.lower import Fused, Lowered, Staged

    jax.config.update("jax_disable_most_optimizations", True)
    at("initialize")
    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("hap",))
    at("planning")

    def step(state: Any, x: Any) -> Any:
        w, m = state
        m = 0.9 * m + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return (w - 0.1 * m, m), jnp.mean(w)

    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(128, 96)).astype(np.float32), rng.normal(size=(384, 128)).astype(np.float32)
    given = (w, np.zeros_like(w))
    kinds = [
        hapsynth.DeviceKind(f"x{speed}", {"float32": 1e9 * speed}, 1e9 * speed, 1 << 30, overhead=1e-10, efficiency=1.0)
        for speed in (2, 1, 1)
    ]
    cluster = hapsynth.Cluster("unlike", tuple(kinds), (0, 1, 2), hapsynth.Link(1e12, 1e-10))
    asked = functools.partial(hapsynth.synthesize, fixed={"[1]": "S(0)"}, leave_out=False, cache=False)
    plan = asked(step, (given, x), mesh, cluster=cluster)

    def hooked(owner: Any, name: str, phase: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            at(phase)
            return inner(*args, **kwargs)

        setattr(owner, name, outer)

    hooked(preflight, "software", "preflight")
    for form in (Lowered, Staged, Fused):
        hooked(form, "prepare", "compile")
        hooked(form, "__call__", "first")

    state, batch = plan.shard(given, x)
    agreed, count = saving._agreed, 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        for phase, number in AGREED.items():
            if saves == 1 and count == number:
                at(phase)
        count += 1
        return agreed(*args, **kwargs)

    saving._agreed = counted
    part = writer.write_part

    def write_part(file: Path, leaves: Any, fetch: Any) -> Any:
        def slowly(number: int, box: Any) -> Any:
            if saves == 1 and number:
                at("write")
            return fetch(number, box)

        return part(file, leaves, slowly)

    writer.write_part = write_part
    clean = writer.clean

    def cleaned(path: Path) -> None:
        if saves == 1 and count >= max(AGREED.values()):
            at("clean")
        clean(path)

    writer.clean = cleaned
    saves = 0
    for i in range(STEPS):
        if i == TRAINS_AT:
            at("training")
        if FAULT == "tenfold" and i >= TRAINS_AT:
            _compute(STEP_S * (10 if RANK == WHO else 1))
        state, loss = plan(state, batch)
        loss = float(plan.unshard(loss))
        if i in SAVES:
            whole, count = plan.unshard(state), 0
            if RANK == "0":
                np.savez(FOLDER / f"expected.{saves}.npz", *whole)
            plan.save_state(FOLDER / "state", state)
            saves += 1
        if RANK == "0":
            print(f"step {i} loss {loss:.6f}", flush=True)
        time.sleep(float(os.environ.get("FAULT_PAUSE", "0")))
    print("trained", flush=True)
    at("exit")


if __name__ == "__main__":
    main()
