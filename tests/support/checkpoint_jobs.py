"""Saves that are killed, and saves of two real processes: checkpoint_jobs.py kills|processes FOLDER.

For tests/checkpoint/test_checkpoint.py. JAX takes seconds to import, so it is imported once and processes are forked,
before any backend starts. The outcome is printed, as JSON or lines.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from slow_devices import slow_cluster

import hapsynth
from hapsynth.checkpoint import writer
from hapsynth.checkpoint.manifest import Leaf, Manifest, read_manifest
from hapsynth.rendezvous.address import free_ports

KILLS = 10
"""That fall into saving."""


# ---- kills


def state(version: int) -> list[np.ndarray]:
    """Some MiB, every element of which tells the version."""
    return [np.full(shape, version, np.float32) for shape in ((512, 512), (1000,), (), (300, 700))]


def save(path: Path, version: int) -> None:
    arrays = state(version)
    leaves = tuple(Leaf(f"[{i}]", x.shape, str(x.dtype)) for i, x in enumerate(arrays))
    # Held in two shards, where there is something to cut.
    held: list[writer.Holders] = []
    for x in arrays:
        cuts = [((0, len(x) // 3),), ((len(x) // 3, len(x)),)] if x.ndim else [()]
        held.append({(*cut, *((0, n) for n in x.shape[1:])): [0] for cut in cuts})
    fetch = lambda i, box: arrays[i][tuple(slice(*pair) for pair in box)]
    writer.save(path, Manifest("test", "", leaves), held, fetch, 0, lambda work: [work()])


def version_of(path: Path) -> int:
    """Of a whole checkpoint: all its elements are of one."""
    found = hapsynth.load_state(path)
    assert [x.shape for x in found.values()] == [x.shape for x in state(0)]
    versions = {int(v) for x in found.values() for v in np.unique(x)}
    assert len(versions) == 1, versions
    return versions.pop()


def broken_off(path: Path) -> bool:
    """Whether something lies there that is of no whole checkpoint."""
    return {p.name for p in path.iterdir()} != {"hapsynth-state.json", read_manifest(path).folder}


def forked(work: Callable[[], object]) -> int:
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(3)
    return child


def at_random_moments(path: Path, draw: random.Random) -> list[int]:
    """How often the old was found, the new, and left behind something of a save: the child does nothing but save. So
    many kills as it takes: on a busy machine the child may not get to saving before."""
    began = time.perf_counter()
    save(path, 0)
    takes = time.perf_counter() - began
    found = [0, 0, 0]
    while found[2] < KILLS:
        old = version_of(path)
        heard, tells = os.pipe()

        def work(old: int = old, tells: int = tells) -> None:
            os.write(tells, b".")
            for version in itertools.count(old + 1):
                save(path, version)

        child = forked(work)
        os.read(heard, 1)
        time.sleep(draw.uniform(0, 2 * takes))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        os.close(heard)
        os.close(tells)
        new = version_of(path)
        found[0] += new == old
        found[1] += new > old
        found[2] += broken_off(path)
    return found


def at_each_step(path: Path) -> list[tuple[str, int]]:
    """(what was about to be done, whether the new checkpoint was found then) where a save is killed before that."""
    steps: list[tuple[str, int]] = []
    while True:
        save(path, 1)
        heard, tells = os.pipe()

        def work(last: int = len(steps), tells: int = tells) -> None:
            left = [last]

            def step(event: str) -> None:
                if not left[0]:
                    os.write(tells, event.encode())
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

            def hear(event: str, args: tuple) -> None:
                if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"):
                    step(event)

            sync = os.fsync
            os.fsync = lambda handle: (step("fsync"), sync(handle))
            sys.addaudithook(hear)
            save(path, 2)
            os._exit(0)

        child = forked(work)
        status = os.waitpid(child, 0)[1]
        os.close(tells)
        said = os.read(heard, 100).decode()
        os.close(heard)
        found = version_of(path)
        if os.WIFEXITED(status):
            assert (os.WEXITSTATUS(status), found) == (0, 2)
            return steps
        steps.append((said, found - 1))


def kills(folder: Path) -> None:
    random_kills = at_random_moments(folder / "random", random.Random(7))
    steps = at_each_step(folder / "steps")
    # A first save has no old one to fall back on.
    first = folder / "first"
    child = forked(lambda: (setattr(os, "fsync", lambda _: os.kill(os.getpid(), signal.SIGKILL)), save(first, 1)))
    os.waitpid(child, 0)
    try:
        said = str(version_of(first))
    except hapsynth.CheckpointError as error:
        said = str(error)
    for path in (folder / "random", folder / "steps", first):
        save(path, 99)
        assert version_of(path) == 99
        assert not broken_off(path)
    print(json.dumps({"random": random_kills, "steps": steps, "first": said}))


# ---- two processes


def step(state, x):
    w, m = state["w"], state["m"]
    m = 0.9 * m + x.T @ (x @ w)
    return {**state, "w": w - 0.1 * m, "m": m, "n": state["n"] + 1, "b": state["b"] + m.sum(0)}, (m**2).sum()


def values() -> dict:
    draw = np.random.default_rng(0)
    w, m = draw.normal(size=(2, 24, 12)).astype(np.float32)
    return {"w": w, "m": m, "n": np.int32(3), "b": w[0], "key": jax.random.key(5, impl="rbg")}


FIXED = {"[0]['w']": "S(0)", "[0]['m']": "S(0)", "[0]['b']": "R"}


def planned(speeds: tuple[float, ...], mesh: object = None, **options: object) -> hapsynth.Plan:
    """With state that is cut by rows, as unlike as the devices, and replicated state."""
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), values())
    batch = np.zeros((48, 24), np.float32)
    cluster = slow_cluster(speeds)
    return hapsynth.synthesize(step, (example, batch), mesh, cluster=cluster, fixed=FIXED, leave_out=False, **options)


def both(folder: Path, rank: int, address: str) -> None:
    """The work of each of two processes."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, 2, rank)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("hap",))
    plan = planned((3.0, 1.0), mesh)
    given = plan.shard(values())
    assert isinstance(given["w"], hapsynth.ShardedArray)
    plan.save_state(folder / "two", given)
    if rank == 0:
        wrote = [(folder / "two" / read_manifest(folder / "two").folder / f"{i}.bin").stat().st_size for i in range(2)]
        print("wrote", *wrote, flush=True)
    # One of the two sees another folder.
    try:
        plan.save_state(folder / ("two" if rank == 0 else "elsewhere"), given)
    except hapsynth.CheckpointError as error:
        print("refused", rank, error, flush=True)
    even = planned((1.0, 1.0), mesh)
    back = even.restore_state(folder / "two")
    assert back["w"].addressable_data(0).shape == (12, 12)
    even.save_state(folder / "again", back)
    # Without a rendezvous collectives do.
    os.environ["HAPSYNTH_PREFLIGHT"] = "off"
    even.save_state(folder / "off", even.restore_state(folder / "again"))
    os.environ["HAPSYNTH_PREFLIGHT"] = "on"
    print("right", rank, flush=True)


def processes(folder: Path) -> None:
    address = f"localhost:{free_ports(2)[0]}"
    os.environ["JAX_COORDINATOR_ADDRESS"] = address

    def work(rank: int) -> None:
        both(folder, rank, address)
        os._exit(0)

    children = [forked(lambda rank=rank: work(rank)) for rank in range(2)]
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    {"kills": kills, "processes": processes}[sys.argv[1]](Path(sys.argv[2]))
