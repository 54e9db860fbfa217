"""What XLA's GPU compiler is told of a card, so that it compiles for it where there is none."""

from __future__ import annotations

from dataclasses import dataclass

from hapsynth.cluster.device_kinds import known_kinds, target_entry
from hapsynth.cluster.toml_reader import ClusterError

_OF_CAPABILITY: dict[str, tuple[int, int, int, int]] = {
    "6.0": (65536, 49152, 2048, 64),
    "6.1": (98304, 49152, 2048, 128),
    "7.0": (98304, 98304, 2048, 64),
    "7.5": (65536, 65536, 1024, 64),
    "8.0": (167936, 166912, 2048, 64),
    "8.6": (102400, 101376, 1536, 128),
    "8.9": (102400, 101376, 1536, 128),
    "9.0": (233472, 232448, 2048, 128),
    "10.0": (233472, 232448, 2048, 128),
}
"""By compute capability: bytes of shared memory of an SM, and at most of a block; threads, and float32 units of an SM.
CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" and "Arithmetic Instructions"."""


@dataclass(frozen=True)
class CompilerTarget:
    """A card, by its name in devices.toml, as a compiler sees it. `name`: as `jax.Device.device_kind` has it; `memory`
    and `l2` in bytes, `bandwidth` in bytes/s."""

    kind: str
    name: str
    capability: tuple[int, int]
    sms: int
    clock_ghz: float
    l2: int
    memory: int
    bandwidth: float

    def text(self) -> str:
        """XLA's `GpuTargetConfigProto` in text, for `jax.experimental.topologies.get_topology_desc`.

        cuDNN 9.10 is the last that runs on every card here; without a card XLA only asks whether it may use it.
        """
        major, minor = self.capability
        per_sm, per_block, threads, float32_units = _OF_CAPABILITY[f"{major}.{minor}"]
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {per_sm}
  threads_per_core_limit: {threads}
  core_count: {self.sms}
  fpus_per_core: {float32_units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth:.0f}
  l2_cache_size: {self.l2}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.name}"
"""


def compiler_target(kind: str) -> CompilerTarget:
    """The known GPU of a name in devices.toml, like "V100-16GB". Raises ClusterError with the nearest name."""
    entry, names = target_entry(kind)
    card = known_kinds()[kind]
    capability = entry.text("capability")
    if capability not in _OF_CAPABILITY:
        raise ClusterError(f"devices.toml: {kind}: compute capability {capability!r} is not in compiler_target.py")
    major, minor = map(int, capability.split("."))
    return CompilerTarget(
        kind=kind,
        name=names[0],
        capability=(major, minor),
        sms=entry.count("sms"),
        clock_ghz=entry.number("clock_ghz"),
        l2=int(entry.quantity("l2", "MEMORY")),
        memory=card.memory,
        bandwidth=card.bandwidth,
    )
