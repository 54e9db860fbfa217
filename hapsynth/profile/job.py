"""The processes and devices of this job, and how they measure together."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hapsynth._device_memory import free
from hapsynth.profile.op_kernels import Kernel
from hapsynth.profile.sampling import Floats
from hapsynth.rendezvous.cpu_scheduling import as_batch_work
from hapsynth.rendezvous.meeting import from_each


class Job:
    """Some devices of every process, in mesh order: by process, then as JAX lists them.

    `per_process`: how many of each process's devices, the first ones; None for all. Every method that talks to the
    other processes must be called by all of them.
    """

    def __init__(self, per_process: int | None = None) -> None:
        as_batch_work()
        own_devices = jax.local_devices()[:per_process]
        self.first, self.lone = jax.process_index() == 0, jax.process_count() == 1
        described = json.dumps([platform.node(), _place(), [d.id for d in own_devices]])
        rows = [json.loads(text) for text in self.texts(described)]
        by_id = {d.id: d for d in jax.devices()}
        self.devices: list[Any] = [by_id[i] for _, _, ids in rows for i in ids]
        self.machines: list[str] = [machine for machine, _, ids in rows for _ in ids]
        places = [place for _, place, ids in rows for _ in ids]
        number = {place: i for i, place in enumerate(dict.fromkeys(places))}
        self.hosts = tuple(number[place] for place in places)
        """Of each device, whatever process has it."""
        self.local = [i for i, d in enumerate(self.devices) if d.process_index == jax.process_index()]
        self._pool = ThreadPoolExecutor(len(self.local))

    @property
    def n(self) -> int:
        return len(self.devices)

    def fingerprint(self, options: object) -> str:
        """Changes with the devices, the versions and the options."""
        seen = [(d.platform, d.device_kind, d.process_index, m) for d, m in zip(self.devices, self.machines)]
        text = json.dumps([seen, jax.__version__, os.cpu_count(), options])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def agree(self, holds: bool) -> bool:
        """Whether it holds in every process."""
        return self.least(float(holds)) > 0

    def least(self, value: float) -> float:
        """The least number of all processes."""
        return value if self.lone else float(np.min(from_each(np.array([value], np.float32))))

    def gather(self, own_rows: Floats) -> Floats:
        """[local devices, k] of each process -> [devices, k] in all."""
        most = max(sum(d.process_index == p for d in self.devices) for p in range(jax.process_count()))
        if self.lone:
            return own_rows
        padded = np.zeros((most, own_rows.shape[1]), np.float32)
        padded[: len(own_rows)] = own_rows
        rows = from_each(padded).astype(np.float64)
        seen = [0] * jax.process_count()
        gathered = np.zeros((self.n, own_rows.shape[1]))
        for i, device in enumerate(self.devices):
            gathered[i] = rows[device.process_index, seen[device.process_index]]
            seen[device.process_index] += 1
        return gathered

    def shared(self, text: str) -> str:
        """The first process's text, in all."""
        return self.texts(text)[0]

    def texts(self, text: str) -> list[str]:
        """Every process's text."""
        if self.lone:
            return [text]
        data = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        lengths = from_each(np.array(data.size, np.int32))
        rows = from_each(np.pad(data, (0, int(lengths.max()) - data.size)))
        return [bytes(row[:n].astype(np.uint8)).decode() for row, n in zip(rows, lengths, strict=True)]

    def runner(self, kernel: Kernel, only: Sequence[int] | None = None) -> Callable[[], Floats]:
        """Compiles a kernel for the local devices, or `only` some of them by their number, which then run it all at the
        same time as a step would: seconds of each until its result was there."""
        chosen = self.local if only is None else list(only)
        mesh = Mesh(np.array([self.devices[i] for i in chosen]), ("d",))
        spec = PartitionSpec("d")
        args = [_filled(mesh, spec, shape, value, kernel.held_as) for shape, value in kernel.operands]
        one = lambda *xs: kernel.fn(*(x[0] for x in xs))[None]
        mapped = jax.shard_map(one, mesh=mesh, in_specs=(spec,) * len(args), out_specs=spec, check_vma=False)
        run = jax.jit(mapped, donate_argnums=(0,) if kernel.in_place else ()).lower(*args).compile()

        def waited(shard: Any) -> float:
            shard.data.block_until_ready()
            return time.perf_counter()

        def once() -> Floats:
            began = time.perf_counter()
            made = run(*args)
            shards = {s.device: s for s in made.addressable_shards}
            if kernel.in_place:
                args[0] = made
            ends = self._pool.map(waited, [shards[self.devices[i]] for i in chosen])
            return np.array(list(ends)) - began

        return once

    def memory(self) -> list[int]:
        """Bytes that each device can still give out, -1 where that can't be told."""
        here = [self.machines[i] == platform.node() for i in range(self.n)]
        sharing = sum(h and d.platform == "cpu" for h, d in zip(here, self.devices, strict=True))
        most = {i: free(self.devices[i]) for i in self.local}
        own_bytes = [m // sharing if self.devices[i].platform == "cpu" else m for i, m in most.items()]
        # In MiB: numbers cross between processes as float32.
        return [int(m) << 20 for m in self.gather(np.array([[m >> 20] for m in own_bytes], np.float64))[:, 0]]


def _place() -> str:
    """The host of this process: processes that share a running kernel and the loopback of a network namespace reach one
    another without a network. Containers have a namespace each, and NCCL takes them for hosts too."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return platform.node()


def _filled(mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...], value: float, dtype: str) -> jax.Array:
    """A `value`-filled array of `shape` on every device."""
    make = jax.jit(lambda: jnp.full((mesh.size, *shape), value, dtype), out_shardings=NamedSharding(mesh, spec))
    return jax.block_until_ready(make())
