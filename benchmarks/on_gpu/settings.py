"""The models of all parts: the examples, at sizes of a large card, or so small that a CPU runs all parts in seconds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import hapsynth
from hapsynth._jax import memory_first
from hapsynth.cluster.cluster import Cluster, Link
from hapsynth.cluster.device_kinds import DeviceKind
from hapsynth.plan import Form, Plan

Row = dict[str, Any]

DTYPES = {"mlp": "float32", "transformer": "bfloat16", "cnn": "float32"}
"""Of all floats of an example: parameters, moments, activations."""
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    # A step of each takes about 0.1 to 0.3 s on an H200; the transformer has 1.1e9 parameters.
    "card": {
        "mlp": {"batch": 32768, "features": 4096, "hidden": (8192,) * 4, "classes": 1024},
        "transformer": {
            "batch": 16,
            "seq": 1024,
            "vocab": 32768,
            "layers": 12,
            "width": 2560,
            "heads": 20,
            "ff": 10240,
        },
        "cnn": {"batch": 1024, "size": 128, "channels": (64, 128, 256, 512), "classes": 1000},
    },
    # As the examples' files have them: steps so short that their start shows.
    "own": {name: {} for name in DTYPES},
    "tiny": {
        "mlp": {"batch": 32, "features": 8, "hidden": (16,), "classes": 8},
        "transformer": {"batch": 8, "seq": 8, "vocab": 32, "layers": 1, "width": 16, "heads": 2, "ff": 32},
        "cnn": {"batch": 16, "size": 8, "channels": (4,), "classes": 4},
    },
}


@dataclass(frozen=True)
class Example:
    """One of examples/ at one size, its floats all in one dtype."""

    name: str
    config: Any
    dtype: str

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.name)

    def typed(self, tree: Any) -> Any:
        """The tree with all floats in the example's dtype."""
        to = lambda x: x.astype(self.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return jax.tree.map(to, tree)

    def target(self) -> tuple[Callable[..., Any], tuple[Any, Any]]:
        """The step and its arguments as shapes."""
        fn, args = self.module.target_for(self.config)
        return fn, jax.eval_shape(self.typed, args)

    def arguments(self, device: Any) -> tuple[Any, Any]:
        """(state, batch), made on a device."""

        with jax.default_device(device):
            return jax.block_until_ready(_making(self)(jax.random.key(0)))

    def planned(self, device: Any, form: Form = "auto") -> Plan:
        """The step, for one device."""
        return hapsynth.synthesize(*self.target(), Mesh(np.array([device]), ("hap",)), form=form)

    def jitted(self) -> Any:
        """The step under plain `jax.jit`, which consumes its state as a plan does."""
        # No options on a GPU; on a CPU the order of execution that plans ask for, so that bytes can be compared.
        options = memory_first(jax.devices()[0].platform)
        return jax.jit(self.target()[0], donate_argnums=0, compiler_options=options)

    def times(self, factor: float) -> Example:
        """The example with `factor` times the batch."""
        return replace(self, config=replace(self.config, batch=max(1, round(factor * self.config.batch))))

    def told(self) -> Row:
        _, (state, _) = self.target()
        return {
            "example": self.name,
            "batch": self.config.batch,
            "dtype": self.dtype,
            "parameters": sum(x.size for x in jax.tree.leaves(state["params"])),
        }


@cache
def _making(example: Example) -> Callable[[jax.Array], tuple[Any, Any]]:
    """Compiled once, however often an example's arguments are made."""

    def made(key: jax.Array) -> Any:
        one, two = jax.random.split(key)
        return example.typed((example.module.init(one, example.config), example.module.make_batch(two, example.config)))

    return jax.jit(made)


@dataclass(frozen=True)
class Settings:
    """`sizes`: a key of SIZES. `examples`: the names of those to run. `given`: (example, field, value), which replace
    figures of SIZES. `rounds`: timed calls of each function. `cluster`: the file that the part `profile` writes, and
    from which later parts predict. `batches`: the parts of an example's batch that `profile` predicts. `shares`: those
    of the first of two devices, in the part of that name."""

    sizes: str = "card"
    examples: tuple[str, ...] = tuple(DTYPES)
    given: tuple[tuple[str, str, Any], ...] = ()
    rounds: int = 10
    cluster: Path | None = None
    batches: tuple[float, ...] = (0.25, 0.5, 1.0)
    shares: tuple[float, ...] = (1 / 8, 1 / 4, 3 / 8, 1 / 2)

    @property
    def is_tiny(self) -> bool:
        return self.sizes == "tiny"

    def example(self, name: str, sizes: str = "", **other: Any) -> Example:
        """An example at its size. `other`: fields that one part sets; those of `given` go before them."""
        given = {field: value for example, field, value in self.given if example == name}
        config = importlib.import_module(name).Config
        return Example(name, config(**{**SIZES[sizes or self.sizes][name], **other, **given}), DTYPES[name])

    def shallow(self, name: str) -> Example:
        """An example at its size with few layers, for measurements that do not depend on depth: compile time does."""
        few: dict[str, Any] = {"layers": 4} if name == "transformer" and not self.is_tiny else {}
        return self.example(name, **few)

    def kind(self) -> DeviceKind:
        """The kind of this machine's device, from the profile or else from the table of known kinds."""
        if self.cluster is not None and self.cluster.exists():
            return Cluster.load(self.cluster).devices[0]
        if self.is_tiny:
            return slow_kind()
        return Cluster.from_mesh(Mesh(np.array(jax.devices()[:1]), ("one",))).devices[0]


def slow_kind(speed: float = 1.0) -> DeviceKind:
    """A kind of device so slow that even tiny work is worth dividing."""
    return DeviceKind(f"slow{speed:g}", {"float32": 1e9 * speed}, 1e9 * speed, 16 << 30, 1e-9, efficiency=1.0)


def like_cluster(kind: DeviceKind, n: int) -> Cluster:
    """Devices of one kind on one host, joined as by NVLink 4 (NVIDIA H200 datasheet: 900 GB/s, both ways together)."""
    return Cluster(f"{n} x {kind.name}", (kind,) * n, (0,) * n, Link(4.5e11, 2e-6))


def stand_ins(n: int) -> Mesh:
    """A mesh of host devices in place of absent ones: nothing runs on it."""
    return Mesh(np.array(jax.devices("cpu")[:n]), ("hap",))


def is_gpu() -> bool:
    return jax.devices()[0].platform == "gpu"


def skipped(why: str, **of: Any) -> Row:
    """A row that says why a measurement is missing."""
    return {**of, "skipped": why}


def parsed(text: str) -> tuple[str, str, Any]:
    """`transformer.batch=24` as (example, field, value); ValueError names the fault."""
    name, _, rest = text.partition(".")
    field, _, value = rest.partition("=")
    if name not in DTYPES:
        raise ValueError(f"{text!r} names no example; use {', '.join(DTYPES)}")
    types: Mapping[str, Any] = {f.name: f.type for f in fields(importlib.import_module(name).Config)}
    if field not in types:
        raise ValueError(f"{text!r}: {name} has no field {field!r}; it has {', '.join(types)}")
    try:
        numbers = [float(x) if "." in x or "e" in x else int(x) for x in value.split(",") if x]
    except ValueError:
        raise ValueError(f"{text!r}: {value!r} is no number, nor numbers with commas between them") from None
    several = types[field] not in (int, float, "int", "float")
    if not numbers or (len(numbers) > 1 and not several):
        raise ValueError(f"{text!r}: {field} of {name} is one number")
    return name, field, tuple(numbers) if several else numbers[0]


def fitting(example: Example, run: Callable[[Example], Iterator[Row]]) -> Iterator[Row]:
    """The rows of `run(example)`; the batch is halved until the device has room for it."""
    while True:
        try:
            yield from run(example)
            return
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or example.config.batch == 1:
                raise
        yield skipped("no room on the device; half the batch is next", **example.told())
        example = example.times(0.5)
