"""What one device can do, read from tables with strict units; the table of known GPUs.

Nothing here touches a backend. `hapsynth.cluster.cluster` puts devices and links together.
"""

import functools
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, cast

from hapsynth.cluster import _units
from hapsynth.cluster.curves import Curve, write_curve
from hapsynth.cluster.granularity import (
    DEFAULT_GRANULARITY,
    GPU_GRANULARITY,
    Granularity,
    read_granularity,
    write_granularity,
)
from hapsynth.cluster.op_classes import OP_CLASSES
from hapsynth.cluster.toml_reader import ClusterError, Table, nearest

# Seconds per op launched on a GPU: the order of a kernel launch plus XLA's thunk. Nominal, no datasheet has it.
DEFAULT_OVERHEAD = 5e-6
# Share of the peak FLOP/s that contractions of ordinary size reach. Nominal: MFU figures published for training
# cluster around 0.4-0.6. It is the same for all kinds, so it moves computation against communication, not one
# device against another. A profile sets it to 1 and measured rates in place of the peaks.
DEFAULT_EFFICIENCY = 0.5
# What float64 costs where a kind doesn't say: the rate of the consumer chips (GA102, AD102), 1/64 of float32's.
_FLOAT64_FRACTION = 1 / 64
# Of a kind that says nothing: collectives take nothing of its time. Known GPUs have a default in devices.toml.
_NO_CONTENTION = 1.0

_RATES = ("float64", "float32", "tf32", "float16", "bfloat16")
# The first rate that the kind has is the one that a contraction of a dtype gets. XLA runs those of float32 on the TF32
# units unless their precision is HIGHEST (`GetBlasComputationType`). All else runs on the ordinary cores.
_FALLBACK = {
    "float32": ("tf32", "float32"),
    "complex64": ("tf32", "float32"),
    "float16": ("float16", "bfloat16", "tf32", "float32"),
    "bfloat16": ("bfloat16", "float16", "tf32", "float32"),
    "float64": ("float64",),
    "complex128": ("float64",),
}

_CONTRACTIONS = ("matmul", "batch_matmul", "convolution")
"""The classes of ops of which tf32 is measured beside float32, which is then of full precision."""
_DIGEST = "[0-9a-f]{12}"
_CONTENTIONS = ("contention", "default_contention")
_AT_LEAST_1 = "is how many times as long computing takes while a collective runs, at least 1"


def _positive(owner: str, what: str, value: float, *, zero: bool = False) -> None:
    try:
        _units.check(value, zero=zero)
    except ValueError as error:
        raise ClusterError(f"{owner}: {what} = {value!r} {error}") from None


def check_name(owner: str, name: Any) -> None:
    """ClusterError for a name that no cluster file could have."""
    if not isinstance(name, str) or not name:
        raise ClusterError(f"{owner}: the name must be a string that is not empty")


@dataclass(frozen=True)
class MeasuredOp:
    """One op by itself: `curve` has its seconds by amount, as those of `DeviceKind.measured` do. `op`: what a person
    knows it by; not compared."""

    op: str = field(compare=False)
    curve: Curve


@dataclass(frozen=True)
class DeviceKind:
    """A model of device.

    `flops`: peak FLOP/s for each of float32 (needed), tf32, float16, bfloat16, float64; dense. Not to be changed.
    `bandwidth`: of its own memory, bytes/s. `memory`: bytes. `overhead`: seconds per launched op. `efficiency`:
    fraction of the peak FLOP/s that is reached, in (0, 1]; `efficiencies`: of single rates of `flops` that reach
    another. Not to be changed. `measured`: seconds by FLOPs for a class of ops
    (`OP_CLASSES`) and a dtype, without the overhead; what it has goes before `flops`. Not to be changed. `ops`: by
    signature (`hapsynth.search.analysis.op_signature`), ops of a function that were measured themselves; they go before
    `measured`. Not to be changed. `source`: where the figures stand; not compared. `price_per_hour`: of one device, in
    any currency, None where it is not known; not compared. `granularity`: below which sizes it works for nothing.
    `contention`: how many times as long computing takes while a collective runs, measured or stated; None where it is
    not known, and `default_contention` has to do, which is not compared. `contention_delay`: seconds by which an
    exchange of a collective takes longer while the device computes, as its threads wait for a core first. `card`: the
    known GPU that it is, for compilers, where its name does not say so (`card_of`); not compared.

    Raises ClusterError for a figure that is not finite and positive (`overhead` and `contention_delay` may be 0), a
    contention below 1, or an empty name.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory: int
    overhead: float = DEFAULT_OVERHEAD
    efficiency: float = DEFAULT_EFFICIENCY
    efficiencies: Mapping[str, float] = field(default_factory=dict[str, float])
    measured: Mapping[str, Mapping[str, Curve]] = field(default_factory=dict[str, Mapping[str, Curve]])
    ops: Mapping[str, MeasuredOp] = field(default_factory=dict[str, MeasuredOp])
    source: str = field(default="", compare=False)
    price_per_hour: float | None = field(default=None, compare=False)
    granularity: Granularity = DEFAULT_GRANULARITY
    contention: float | None = None
    default_contention: float = field(default=_NO_CONTENTION, compare=False)
    contention_delay: float = 0.0
    card: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        owner = f"device kind {self.name!r}"
        check_name(owner, self.name)
        for dtype, rate in self.flops.items():
            if dtype not in _RATES:
                raise ClusterError(f"{owner}: flops has no dtype {dtype!r}; {nearest(dtype, _RATES)}")
            _positive(owner, f"flops.{dtype}", rate)
        # In a fixed order, whatever order they came in: equal kinds must hash alike.
        object.__setattr__(self, "flops", {d: float(self.flops[d]) for d in _RATES if d in self.flops})
        if self.efficiencies:
            # All of them, so that equal kinds are equal however they were written.
            full = {**dict.fromkeys(_RATES, self.efficiency), **self.efficiencies}
            object.__setattr__(self, "efficiencies", full)
            object.__setattr__(self, "efficiency", DEFAULT_EFFICIENCY)
        if "float32" not in self.flops:
            raise ClusterError(f"{owner}: flops lacks float32, which the other dtypes fall back to; add it")
        _positive(owner, "bandwidth", self.bandwidth)
        _positive(owner, "memory", self.memory)
        _positive(owner, "overhead", self.overhead, zero=True)
        _positive(owner, "contention_delay", self.contention_delay, zero=True)
        _positive(owner, "efficiency", self.efficiency)
        if self.price_per_hour is not None:
            _positive(owner, "price_per_hour", self.price_per_hour)
        for dtype, fraction in self.efficiencies.items():
            if dtype not in _RATES:
                raise ClusterError(f"{owner}: efficiencies has no dtype {dtype!r}; {nearest(dtype, _RATES)}")
            _positive(owner, f"efficiencies.{dtype}", fraction)
        for fraction in (self.efficiency, *self.efficiencies.values()):
            if fraction > 1:
                raise ClusterError(f"{owner}: efficiency = {fraction!r} is a fraction of the peak, at most 1")
        for key in _CONTENTIONS:
            if (factor := getattr(self, key)) is not None:
                _positive(owner, key, factor)
                if factor < 1:
                    raise ClusterError(f"{owner}: {key} = {factor!r} {_AT_LEAST_1}")
        for op_class, by_dtype in self.measured.items():
            if op_class not in OP_CLASSES:
                raise ClusterError(f"{owner}: measured has no class {op_class!r}; {nearest(op_class, OP_CLASSES)}")
            for dtype in by_dtype:
                if dtype not in _RATES:
                    raise ClusterError(f"{owner}: measured.{op_class}.{dtype}: {nearest(dtype, _RATES)}")
        for signature in self.ops:
            if problem := _no_signature(signature):
                raise ClusterError(f"{owner}: ops.{signature} {problem}")

    def __hash__(self) -> int:
        return hash((self.name, tuple(self.flops.items()), self.bandwidth, self.memory))

    @property
    def slowdown(self) -> float:
        """How many times as long computing takes while a collective runs, as far as that is known."""
        return self.default_contention if self.contention is None else self.contention

    def curve(self, op_class: str, dtype: object, *, ordinary: bool = False) -> Curve | None:
        """Seconds by FLOPs as measured for a class of ops and a dtype, or for what they count as; None where nothing
        was, and `rate` has to do. For a signature those of the op itself, or of its class. `ordinary`: as of `rate`."""
        if op_class in self.ops:
            return self.ops[op_class].curve
        found = self.measured_as(op_class, dtype, ordinary=ordinary)
        return self.measured[found[0]][found[1]] if found else None

    def measured_as(self, op_class: str, dtype: object, *, ordinary: bool = False) -> tuple[str, str] | None:
        """The class and dtype whose curve stands for a class of ops, or a signature's, and a dtype; None where there is
        none. `ordinary`: as of `rate`."""
        own = op_class.partition(":")[0]
        classes = (own, *OP_CLASSES[own].counts_as) if own in OP_CLASSES else ()
        names = _counts_as(dtype)
        if ordinary and own in _CONTRACTIONS:
            names = tuple(name for name in names if name != "tf32")
        return next(((c, d) for c in classes for d in names if d in self.measured.get(c, {})), None)

    def rate(self, dtype: object, *, ordinary: bool = False) -> float:
        """FLOP/s reached by a contraction of `dtype` (a NumPy dtype or its name): `efficiency` x the peak. `ordinary`:
        of what the ordinary cores do, an op that is no contraction or one of full precision.

        float32 counts at tf32's peak where the device has one (XLA's default precision); "tf32" may be asked for by
        name. A missing bfloat16 or float16 falls back to the other, then to float32, a missing float64 to 1/64 of
        float32; 8-bit floats count as float16; integers, bools and whatever is unknown as float32's ordinary cores.
        """
        name = self.counts_as(dtype, ordinary=ordinary)
        peak = self.flops[name] if name else self.flops["float32"] * _FLOAT64_FRACTION
        return self.efficiency_at(name) * peak

    def efficiency_at(self, rate: str | None) -> float:
        """The fraction of the peak that is reached at one of `flops`, as `counts_as` names it."""
        return self.efficiencies.get(rate or "float64", self.efficiency)

    def counts_as(self, dtype: object, *, ordinary: bool = False) -> str | None:
        """Which of `flops` a dtype gets; None for float64 where the kind does not say."""
        names = _counts_as(dtype)
        if ordinary and names != ("float64",):
            return "float32"
        return next((d for d in names if d in self.flops), None)

    def faster(self, speed: float, name: str | None = None) -> "DeviceKind":
        """The same device `speed` times as fast, in computing and in reaching its memory; the memory stays."""
        _positive(f"device kind {self.name!r}", "speed", speed)
        flops = {d: rate * speed for d, rate in self.flops.items()}
        measured = {c: {d: curve.scaled(speed) for d, curve in by.items()} for c, by in self.measured.items()}
        ops = {s: replace(op, curve=op.curve.scaled(speed)) for s, op in self.ops.items()}
        source = f"{self.source}, {speed:g}x as fast" if self.source else ""
        faster = replace(self, name=name or self.name, flops=flops, bandwidth=self.bandwidth * speed)
        return replace(faster, measured=measured, ops=ops, source=source, card=card_of(self) or "")

    def bare(self) -> "DeviceKind":
        """Without what no cost depends on."""
        ops = {s: MeasuredOp("", op.curve) for s, op in self.ops.items()}
        return replace(self, ops=ops, source="", price_per_hour=None, card="")


def _no_signature(text: str) -> str:
    """What is wrong with the signature of an op, or ""."""
    op_class, _, digest = text.partition(":")
    if op_class not in OP_CLASSES:
        return f"is of no class of ops; {nearest(op_class, OP_CLASSES)}"
    return "" if re.fullmatch(_DIGEST, digest) else "is no signature; take those that hapsynth profile --model writes"


def _counts_as(dtype: object) -> tuple[str, ...]:
    """The rates that a dtype (a NumPy dtype or its name) gets, the first that there is."""
    name = str(getattr(dtype, "name", dtype))
    if name == "tf32":
        return _FALLBACK["float32"]
    return _FALLBACK["float16"] if name.startswith("float8") else _FALLBACK.get(name, ("float32",))


_KIND_KEYS = (
    "base",
    "card",
    "flops",
    "bandwidth",
    "memory",
    "overhead",
    "efficiency",
    "measured",
    "ops",
    "speed",
    "source",
    "price_per_hour",
    "granularity",
    *_CONTENTIONS,
    "contention_delay",
)


def find_kind(table: Table, key: str, kinds: Mapping[str, DeviceKind]) -> DeviceKind:
    """The kind that `table[key]` names, out of `kinds`. Raises ClusterError with the nearest name."""
    name = table.text(key, 'the name of a kind, like "V100-16GB"')
    if name not in kinds:
        raise table.error(key, f"= {name!r} is not a known kind; {nearest(name, kinds)} (or define [kinds.{name}])")
    return kinds[name]


def read_kind(name: str, table: Table, kinds: Mapping[str, DeviceKind]) -> DeviceKind:
    """The DeviceKind of one [kinds.NAME] table; `base` is looked up in `kinds`."""
    base = find_kind(table, "base", kinds) if "base" in table else None
    flops = dict(base.flops) if base else {}
    if base is None or "flops" in table:
        rates = table.table("flops", _RATES)
        flops |= {dtype: rates.quantity(dtype, "RATE") for dtype in rates.data}
        if "float32" not in flops:
            raise rates.error("float32", "is missing; the other dtypes fall back to it")

    def figure(key: str, default: float | None, read: Callable[[], float]) -> float:
        return read() if default is None or key in table else default

    efficiency, efficiencies = _read_efficiency(table, base or _NOMINAL)
    for key in _CONTENTIONS:
        if key in table and (factor := table.number(key)) < 1:
            raise table.error(key, f"= {factor!r} {_AT_LEAST_1}")
    # A known GPU in full, as files have it, is still that GPU.
    usual = base or kinds.get(name) or _NOMINAL
    memory = figure("memory", base and base.memory, lambda: table.quantity("memory", "MEMORY"))
    if memory < 1:
        raise table.error("memory", f"= {table.data['memory']!r} is less than one byte")
    kind = DeviceKind(
        name=name,
        flops=flops,
        bandwidth=figure("bandwidth", base and base.bandwidth, lambda: table.quantity("bandwidth", "BANDWIDTH")),
        memory=math.floor(memory),
        overhead=figure("overhead", (base or _NOMINAL).overhead, lambda: table.quantity("overhead", "TIME")),
        efficiency=efficiency,
        efficiencies=efficiencies,
        measured=_read_measured(table) if "measured" in table else (base or _NOMINAL).measured,
        ops=_read_ops(table) if "ops" in table else (base or _NOMINAL).ops,
        source=table.text("source") if "source" in table else _source_on(base, table),
        price_per_hour=table.number("price_per_hour") if "price_per_hour" in table else base and base.price_per_hour,
        granularity=read_granularity(table, usual.granularity),
        contention=table.number("contention") if "contention" in table else base and base.contention,
        default_contention=figure(
            "default_contention", usual.default_contention, lambda: table.number("default_contention")
        ),
        contention_delay=figure(
            "contention_delay",
            (base or _NOMINAL).contention_delay,
            lambda: table.quantity("contention_delay", "TIME"),
        ),
        card=_read_card(table) if "card" in table else (base and card_of(base)) or "",
    )
    return kind.faster(table.number("speed")) if "speed" in table else kind


def _read_efficiency(table: Table, base: DeviceKind) -> tuple[float, dict[str, float]]:
    """One fraction for all rates, which replaces all that the base has, or a table of some rates', which adds to it."""
    if "efficiency" not in table:
        return base.efficiency, dict(base.efficiencies)
    of_rates = table.table("efficiency", _RATES) if isinstance(table.data["efficiency"], dict) else None
    where, keys = (table, ["efficiency"]) if of_rates is None else (of_rates, list(of_rates.data))
    found = {key: where.number(key) for key in keys}
    for key, fraction in found.items():
        if fraction > 1:
            raise where.error(key, f"= {fraction!r} is a fraction of the peak rate, at most 1")
    return (found["efficiency"], {}) if of_rates is None else (base.efficiency, {**base.efficiencies, **found})


def _read_card(table: Table) -> str:
    name, kinds = table.text("card"), known_kinds()
    if name not in kinds:
        raise table.error("card", f"= {name!r} is no known GPU; {nearest(name, kinds)}")
    return name


def _source_on(base: DeviceKind | None, table: Table) -> str:
    """Where a kind's figures stand that gives none itself: those of its base, but for what it replaces."""
    own = [key for key in ("flops", "bandwidth", "overhead", "efficiency", "measured", "ops") if key in table]
    if base is None or not base.source:
        return ""
    return f"{base.source}, but {', '.join(own)} of {table.source}" if own else base.source


def _read_measured(table: Table) -> dict[str, dict[str, Curve]]:
    classes = table.table("measured", OP_CLASSES)
    found: dict[str, dict[str, Curve]] = {}
    for op_class in classes.data:
        by_dtype = classes.table(op_class, _RATES)
        found[op_class] = {dtype: by_dtype.curve(dtype, "WORK") for dtype in by_dtype.data}
    return found


def _read_ops(table: Table) -> dict[str, MeasuredOp]:
    signatures, found = table.table("ops"), dict[str, MeasuredOp]()
    for signature in signatures.data:
        if problem := _no_signature(signature):
            raise signatures.error(signature, problem)
        entry = signatures.table(signature, ("op", "seconds"))
        found[signature] = MeasuredOp(entry.text("op"), entry.curve("seconds", "WORK"))
    return found


def read_kinds(table: Table, known: Mapping[str, DeviceKind]) -> dict[str, DeviceKind]:
    """The kinds of a [kinds] table, in their order: each may build on `known` and on those above it."""
    kinds = dict(known)
    for name in table.data:
        kinds[name] = read_kind(name, table.table(name, _KIND_KEYS), kinds)
    return kinds


def write_kind(kind: DeviceKind, *, defaults: bool = False) -> dict[str, object]:
    """The [kinds.NAME] table that `read_kind` reads back as an equal kind; `defaults`: with what it goes by where
    nothing was measured."""
    curves = lambda by: {dtype: write_curve(curve, _units.WORK) for dtype, curve in by.items()}
    measured = {op_class: curves(by_dtype) for op_class, by_dtype in kind.measured.items()}
    ops = {s: {"op": op.op, "seconds": write_curve(op.curve, _units.WORK)} for s, op in kind.ops.items()}
    base = _known()[0].get(kind.name, _NOMINAL).granularity
    return {
        **({"card": kind.card} if kind.card else {}),
        "flops": {dtype: _units.format(rate, _units.RATE) for dtype, rate in kind.flops.items()},
        "bandwidth": _units.format(kind.bandwidth, _units.BANDWIDTH),
        "memory": _units.format(kind.memory, _units.MEMORY),
        "overhead": _units.format(kind.overhead, _units.TIME),
        "efficiency": dict(kind.efficiencies) or kind.efficiency,
        **({"source": kind.source} if kind.source else {}),
        **({"measured": measured} if measured else {}),
        **({"ops": ops} if ops else {}),
        **({"granularity": granularity} if (granularity := write_granularity(kind.granularity, base)) else {}),
        **({"price_per_hour": kind.price_per_hour} if kind.price_per_hour is not None else {}),
        **({"contention": kind.contention} if kind.contention is not None else {}),
        **({"default_contention": kind.default_contention} if defaults and kind.slowdown != kind.contention else {}),
        **({"contention_delay": _units.format(kind.contention_delay, _units.TIME)} if kind.contention_delay else {}),
    }


_NOMINAL = DeviceKind("nominal", {"float32": 1e12}, 1e11, 1 << 30)


@functools.cache
def _table() -> Table:
    file = resources.files("hapsynth.cluster") / "devices.toml"
    return Table(tomllib.loads(file.read_text(encoding="utf-8")), "devices.toml")


@functools.cache
def _known() -> tuple[dict[str, DeviceKind], dict[str, str]]:
    """devices.toml: kinds by name, and names by what `jax.Device.device_kind` says."""
    table = _table()
    kinds: dict[str, DeviceKind] = {}
    names: dict[str, str] = {}
    for name in table.data:
        entry = table.table(name, (*_KIND_KEYS, "jax", "target"))
        kinds[name] = replace(read_kind(name, entry, kinds), granularity=GPU_GRANULARITY)
        names |= dict.fromkeys(cast(list[str], entry.data["jax"]), name)
    return kinds, names


def known_kinds() -> Mapping[str, DeviceKind]:
    """The known GPUs by name (`hapsynth/cluster/devices.toml`, where the source of every figure stands)."""
    return dict(_known()[0])


def models_by_jax_name() -> Mapping[str, str]:
    """The names of the known GPUs by what `jax.Device.device_kind` says."""
    return dict(_known()[1])


def target_entry(kind: str) -> tuple[Table, list[str]]:
    """The `target` of a known GPU in devices.toml, and what JAX calls it. Raises ClusterError with the nearest name."""
    kinds, _ = _known()
    if kind not in kinds:
        raise ClusterError(
            f"{kind!r} is no GPU of the table of known ones (devices.toml); {nearest(kind, kinds)}; a kind of a "
            "cluster file says by its `card` which of them it is"
        )
    entry = _table().table(kind)
    return entry.table("target", ("capability", "sms", "clock_ghz", "l2")), cast(list[str], entry.data["jax"])


def card_of(kind: DeviceKind) -> str | None:
    """The known GPU that a kind is, by its name in devices.toml: the one that it was described by or is called like, or
    whose devices `hapsynth profile` found; None where that is none."""
    kinds, names = _known()
    if kind.card or kind.name in kinds:
        return kind.card or kind.name
    # A profile calls kinds as JAX does.
    return names.get(kind.name) or names.get(_unnumbered(kind.name))


def model_of(kind: DeviceKind) -> str:
    """What a kind's devices are: the known GPU, by its name in devices.toml, or what JAX calls them in a profile."""
    return card_of(kind) or _unnumbered(kind.name)


def _unnumbered(name: str) -> str:
    """A profile numbers kinds of one model."""
    return re.sub(r"-\d+$", "", name)


def kind_of(device_kind: str) -> DeviceKind:
    """The known GPU that JAX calls `device_kind`, like "NVIDIA H200". Raises ClusterError for another."""
    kinds, names = _known()
    if device_kind not in names:
        raise ClusterError(
            f"device kind {device_kind!r} is not in the table of known GPUs ({nearest(device_kind, names)}); "
            f"describe it under [kinds] of a cluster file and pass hapsynth.Cluster.load(FILE)"
        )
    return kinds[names[device_kind]]
