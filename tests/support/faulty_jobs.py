"""Jobs of two real processes that go wrong, each in its own way: faulty_jobs.py FOLDER [JOB...], for
tests/jobs/test_job_faults.py. The jobs named are left out.

JAX takes seconds to import, so it is imported once and the processes are forked, before any backend starts. Each writes
its output to FOLDER/<job>.<process>; statuses.json says how they ended, standard output when.

    HAPSYNTH_REAL_DELAYS=1 python tests/support/faulty_jobs.py FOLDER

has the delays of real jobs, five minutes of them: 40 s to start, 60 s to compile, and the patience that hapsynth has.
"""

import json
import os
import random
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from slow_devices import slow_cluster

import hapsynth
from hapsynth.instructions.staging.options import LoweringOptions
from hapsynth.jobs import process_facts
from hapsynth.lower import Fused
from hapsynth.lower._host_schedule import LocalStage
from hapsynth.lower._staged_form import Run
from hapsynth.plan import Plan
from hapsynth.rendezvous import peers
from hapsynth.rendezvous.address import free_ports
from hapsynth.rendezvous.meeting import meeting

Job = Callable[[int], None]
REAL = os.environ.get("HAPSYNTH_REAL_DELAYS") == "1"
LIMIT_S = 300.0
SILENCE_S, JOIN_S = 4.0, 2.0
STARTS_S, COMPILES_S = (40.0, 60.0) if REAL else (SILENCE_S + 1, SILENCE_S + 1)
W, X = np.eye(8, dtype=np.float32), np.arange(48 * 8, dtype=np.float32).reshape(48, 8) / 1000


def step(w, x):
    y = x @ w
    return w - 0.1 * x.T @ y, (y**2).sum()


def run(
    after_one: Callable[[], object] = lambda: None, calls: int = 2, file: str = "plan.json", overlap: bool = False
) -> None:
    """Calls a plan and checks its results; `after_one` happens after the first call."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("hap",))
    plan = hapsynth.load(file, step, (W, X), mesh, form="staged" if overlap else "auto", overlap=overlap)
    w, x = plan.shard(W, X)
    for call in range(calls):
        w, loss = plan(w, x)
        loss.block_until_ready()
        if call == 0:
            after_one()
    want = W
    for _ in range(calls):
        want, _ = step(want, X)
    np.testing.assert_allclose(plan.unshard(w), want, rtol=1e-5)
    print("right", flush=True)


def late(rank: int) -> None:
    """Process 1 starts and compiles later than the others wait for a sign of life."""
    prepare = Fused.prepare

    def slow(lowered: Fused) -> str:
        if rank == 1:
            time.sleep(COMPILES_S)
            print("compiled late", flush=True)
        return prepare(lowered)

    Fused.prepare = slow
    run()


def killed(rank: int) -> None:
    run(lambda: rank == 1 and os.kill(os.getpid(), signal.SIGKILL))


def first_killed(rank: int) -> None:
    run(lambda: rank == 0 and os.kill(os.getpid(), signal.SIGKILL))


def stopped(rank: int) -> None:
    run(lambda: rank == 1 and os.kill(os.getpid(), signal.SIGSTOP))


def other_plan(rank: int) -> None:
    run(file=("plan.json", "other.json")[rank])


def other_versions(rank: int) -> None:
    if rank == 1:
        process_facts.__version__, jax.__version__ = "9.9", "0.9"
    run()


def sums(w, x):
    return (x @ w).sum(), (x * x).sum()


def other_flags(rank: int) -> None:
    """What is lowered is the same in both, what XLA makes of it is not."""
    if rank == 1:
        passes = "all-reduce-combiner,cpu-all-reduce-combiner"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_disable_hlo_passes={passes}"
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("hap",))
    hapsynth.load("sums.json", sums, (W, X), mesh, form="switch")(W, X)


def raises(rank: int) -> None:
    def bad() -> None:
        if rank == 1:
            raise ValueError("a bad batch")

    run(bad)


def raises_beside_a_collective(rank: int) -> None:
    """In a stage, while a collective is under way."""
    local = Run.local

    def bad(self: Run, stage: LocalStage) -> None:
        if rank == 1 and self.under_way:
            raise ValueError("a bad stage")
        local(self, stage)

    Run.local = bad
    run(overlap=True)


def killed_beside_a_collective(rank: int) -> None:
    """The other hears of it on the thread that waits for it."""
    local = Run.local

    def bad(self: Run, stage: LocalStage) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        local(self, stage)

    run(lambda: setattr(Run, "local", bad), overlap=True)


def raises_early(rank: int) -> None:
    """Before its first plan, while the others wait for it there."""
    jax.devices()
    host, port = os.environ["HAPSYNTH_RENDEZVOUS"].split(":")
    while rank == 1:
        with suppress(OSError), socket.create_connection((host, int(port))):
            raise ValueError("a bad file")
        time.sleep(0.1)
    run()


def fewer_calls(rank: int) -> None:
    run(lambda: rank == 1 and sys.exit())


def exits_in_a_call(rank: int) -> None:
    if rank == 1:
        Fused.__call__ = lambda *_: sys.exit()
    run()


def never_comes(rank: int) -> None:
    if rank == 1:
        jax.devices()
        time.sleep(LIMIT_S)
    run()


def two_devices(rank: int) -> None:
    """A mesh of one device of each process, where process 0 has two."""
    mesh = jax.make_mesh((2,), ("hap",))
    try:
        hapsynth.load("plan.json", step, (W, X), mesh)
    finally:
        print(jax.process_count(), [d.process_index for d in mesh.devices.flat], flush=True)


def walled(_: int) -> None:
    """Who reaches the rendezvous, and no other process."""
    peers._answers = lambda *_: False
    run()


def drawn(rank: int) -> None:
    """No launcher, nothing in the environment: JAX carries where the processes meet, and their secret."""
    if rank == 1:
        time.sleep(SILENCE_S)
    hapsynth.jobs.initialize(COORDINATORS[drawn], 2, rank)
    address = meeting._address
    assert address is not None
    for token, says in (("", "refused"), ("a guess", "refused"), (meeting._agreed, "version")):
        with socket.create_connection(address) as stranger, stranger.makefile() as lines:
            told = {"rank": 1, "pid": 1, "host": "far", "protocol": -1, "token": token}
            stranger.sendall(json.dumps({"hello": told}).encode() + b"\n")
            assert says in lines.readline()
    run()


def port_taken(rank: int) -> None:
    run()


def srun_trains(_: int) -> None:
    """The variables of a batch system are set, and no others: JAX finds its own way by them, and carries ours."""
    assert "HAPSYNTH_RENDEZVOUS" not in os.environ
    run()


def mpirun_trains(_: int) -> None:
    run()


def srun_loading(rank: int) -> None:
    """Between JAX's initialization and planning, while the other loads its data."""
    if rank == 1:
        raise ValueError("a bad disk")
    run()


def srun_planning(rank: int) -> None:
    def bad(w, x):
        if rank == 1:
            raise ValueError("a bad model")
        return step(w, x)

    mesh = jax.make_mesh((2,), ("hap",))
    plan = hapsynth.synthesize(bad, (W, X), mesh, cluster=slow_cluster((3.0, 1.0)))
    plan(*plan.shard(W, X))


def srun_first_step(rank: int) -> None:
    """In what the first call is given."""
    if rank == 1:
        Plan.shard = lambda *_: data_of_call(0)
    run()


def srun_tenth_step(rank: int) -> None:
    calls = iter(range(10))
    if rank == 1:
        call = Plan.__call__
        Plan.__call__ = lambda plan, *xs: call(plan, *xs) if next(calls) < 9 else data_of_call(9)
    run(calls=12)


def data_of_call(call: int) -> None:
    raise ValueError(f"a bad batch in call {call}")


JOBS = [
    late,
    killed,
    first_killed,
    stopped,
    other_plan,
    other_versions,
    other_flags,
    raises,
    raises_beside_a_collective,
    killed_beside_a_collective,
    raises_early,
    fewer_calls,
    exits_in_a_call,
    never_comes,
    port_taken,
    two_devices,
    walled,
    drawn,
    srun_trains,
    srun_loading,
    srun_planning,
    srun_first_step,
    srun_tenth_step,
    mpirun_trains,
]


SOON = {
    walled: {"SILENCE": SILENCE_S},
    late: {"SILENCE": SILENCE_S},
    stopped: {"SILENCE": SILENCE_S},
    never_comes: {"JOIN": JOIN_S},
}
"""What is waited for, and for how long. Nowhere else is anybody lost who is late on a busy machine."""
TAKEN: list[socket.socket] = []
COORDINATORS: dict[Job, str] = {}
"""Of jobs that begin themselves."""


def of_batch_system(job: Job, number: int, rank: int) -> dict[str, str]:
    """The variables of two processes on this machine that `srun` or `mpirun` started; none for other jobs."""
    if job.__name__.startswith("srun"):
        step = {"JOB_ID": number, "STEP_NODELIST": "localhost", "STEP_NUM_NODES": 1, "NTASKS": 2}
        return {f"SLURM_{name}": str(value) for name, value in {**step, "PROCID": rank, "LOCALID": rank}.items()}
    if job.__name__.startswith("mpirun"):
        world = {"SIZE": 2, "RANK": rank, "LOCAL_RANK": rank}
        uri = {"OMPI_MCA_orte_hnp_uri": f"{number << 12}.0;tcp://127.0.0.1:34911"}
        return {**uri, **{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in world.items()}}
    return {}


def free_job_number() -> int:
    """Of a batch system, by which JAX chooses its port."""
    while True:
        number = random.SystemRandom().randrange(1 << 12, 1 << 18)
        with suppress(OSError), socket.create_server(("", number % (1 << 12) + (1 << 16) - (1 << 12))):
            return number


def start(job: Job) -> dict[int, int]:
    """Fork the job's processes: pid -> number. These leave by raising Child."""
    coordinator, rendezvous = free_ports(2)
    number = free_job_number()
    if job is port_taken:
        TAKEN.append(socket.create_server(("localhost", rendezvous)))
    if job is drawn:
        COORDINATORS[job] = f"localhost:{coordinator}"
    pids: dict[int, int] = {}
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            output = os.open(f"{job.__name__}.{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            batch = of_batch_system(job, number, rank)
            os.environ |= batch
            if job not in COORDINATORS and not batch:
                os.environ["HAPSYNTH_RENDEZVOUS"] = f"localhost:{rendezvous}"
            waits = {} if REAL else {"SILENCE": LIMIT_S, "JOIN": LIMIT_S, **SOON.get(job, {})}
            os.environ |= {f"HAPSYNTH_{name}_S": str(seconds) for name, seconds in waits.items()}
            if job is late:
                time.sleep(rank * STARTS_S)
            if job is two_devices and rank == 0:
                jax.config.update("jax_num_cpu_devices", 2)
            if batch:
                jax.distributed.initialize()
            elif job not in COORDINATORS:
                jax.distributed.initialize(f"localhost:{coordinator}", 2, rank)
            raise Child(job, rank)
        pids[pid] = rank
    return pids


class Child(BaseException):
    """Carries a forked process out of what its parent was doing."""


def main(left_out: Sequence[str]) -> None:
    for file, speeds in (("plan.json", (3.0, 1.0)), ("other.json", (2.0, 1.0))):
        hapsynth.synthesize(step, (W, X), slow_cluster(speeds), leave_out=False).save(file)
    # Each sum is sent alone, so that it is XLA that combines them.
    plan = hapsynth.synthesize(sums, (W, X), slow_cluster((2.0, 1.0)), leave_out=False)
    alone = LoweringOptions(bundled_bytes=0, gloo_gathered_bytes=0)
    Plan(plan.traced, replace(plan.result, lowering=alone), plan.cluster).save("sums.json")
    waiting = [job for job in JOBS if job.__name__ not in left_out]
    statuses = {job.__name__: [0, 0] for job in waiting}
    running: dict[int, tuple[Job, int]] = {}
    began: dict[Job, float] = {}
    while waiting or running:
        while waiting and len({job for job, _ in running.values()}) < 3:
            job = waiting.pop(0)
            began[job] = time.monotonic()
            running |= {pid: (job, rank) for pid, rank in start(job).items()}
        for pid, (job, rank) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                statuses[job.__name__][rank] = os.waitstatus_to_exitcode(status)
                passed = time.monotonic() - began[job]
                print(f"{job.__name__} {rank}: {statuses[job.__name__][rank]} after {passed:.1f} s", flush=True)
                others = [p for p, (j, _) in running.items() if j is job]
                if others and job in (stopped, never_comes):
                    os.kill(others[0], signal.SIGKILL)
            elif time.monotonic() - began[job] > LIMIT_S:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    Path("statuses.json").write_text(json.dumps(statuses))


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    jax.config.update("jax_disable_most_optimizations", True)
    warnings.simplefilter("error")
    child = None
    try:
        main(sys.argv[2:])
    except Child as found:
        child = found.args
    if child is not None:
        job, rank = child
        job(rank)
