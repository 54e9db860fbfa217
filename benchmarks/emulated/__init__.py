"""A cluster of unlike machines on one: processor quotas, network links and memory limits, for real. Needs Linux, root.

    python benchmarks/emulated --quotas 1.0:0.3 --rate 1Gbit -- python train.py
    python benchmarks/emulated cluster.toml -- hapsynth profile -o profiled.toml
        --coordinator {coordinator} --processes {n} --process {i}

The command runs on every machine, as often as `--processes` says, each line of its output after the machine's name.
`jax.distributed.initialize()` finds the others without arguments. In Python: `EmulatedCluster`.
"""

from emulated.cgroup import hold_to, unlimited
from emulated.cluster import EmulatedCluster, MissingError, remove_leftovers
from emulated.spec import Machine, SpecError, load, machines

__all__ = [
    "EmulatedCluster",
    "Machine",
    "MissingError",
    "SpecError",
    "hold_to",
    "load",
    "machines",
    "remove_leftovers",
    "unlimited",
]
