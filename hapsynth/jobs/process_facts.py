"""What each process of a job says of itself, and what is wrong when that is put side by side."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.sharding import Mesh

from hapsynth import _device_memory, _jax
from hapsynth._quantities import nbytes
from hapsynth._version import __version__
from hapsynth._warn import warn_user
from hapsynth._xla_flags import AUTOTUNING
from hapsynth.cluster.cluster import Cluster
from hapsynth.graph.trace import Traced
from hapsynth.hlo.collectives import first_difference
from hapsynth.hlo.text import HloError
from hapsynth.lower import parts
from hapsynth.rendezvous.server import listed
from hapsynth.running.base import Planned
from hapsynth.running.plan_file import plan_to_dict

Facts = dict[str, Any]
"""Of one process, as JSON holds them; `process` names it, `host` its machine."""

_CACHE = (
    "jax_enable_compilation_cache",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
)
_DRIVER = Path("/proc/driver/nvidia/version")
_MOST_TYPES = 64
_SETTLES_S, _GIVES_BACK_S, _RISES = 2.0, 0.05, 1 << 20
"""At most, and between two looks at the memory that is free; bytes by which it must have risen to look again."""
_LONGEST = 200
"""Characters of a collective that are told."""
_SAMPLE, _ROUNDING, _LAST_PLACES, _FETCHED_BYTES = 32, 1e-3, 4, 1 << 22
"""Elements of each replicated argument that are compared, and by how much of the largest they may differ, or by how
many units in its last place where these are more: unlike devices round apart what each has computed. Of arguments
beyond so many bytes these elements alone are fetched."""
# What the runs depend on; how long a plan took to find differs between processes that each found it.
_OF_PLAN = ("function", "devices", "program", "classes", "shares")


def left_out(mesh: Sequence[tuple[int, int]], devices: Sequence[tuple[int, int]]) -> str:
    """What is wrong with a mesh of these devices, (process, id) each, in a job of those; '' if nothing is.

    `jax.make_mesh` and `jax.devices()[:n]` take the first devices of a job: where one process has more than another, a
    mesh of one for each process has two of its and none of the last process's.
    """
    have, held = Counter(p for p, _ in devices), Counter(p for p, _ in mesh)
    without = sorted(have.keys() - held.keys())
    more = [p for p in sorted(held) if held[p] > 1 and any(have[p] > have[q] for q in without)]
    if not without or not more or {*mesh} != {*devices[: len(mesh)]}:
        return ""
    counts = ", ".join(f"process {p} has {have[p]}" for p in sorted(have))
    return (
        f"the processes have unlike numbers of local devices ({counts}), and a mesh of the first {len(mesh)} has "
        f"{', '.join(f'{held[p]} of process {p}' for p in more)} and none of {listed(without)}: give each process as "
        "many (JAX_LOCAL_DEVICE_IDS, CUDA_VISIBLE_DEVICES, jax_num_cpu_devices), or make the mesh of the devices of "
        "all, jax.devices()"
    )


def fingerprint(data: object) -> str:
    """Of what JSON can hold."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


def plan_fingerprint(plan: Planned) -> str:
    """Of all in a plan's file that says what runs."""
    saved = plan_to_dict(plan.traced, plan.result, plan.cluster)
    return fingerprint([plan.cluster.fingerprint(), *(saved[key] for key in _OF_PLAN)])


def of_function(plan: Planned) -> Facts:
    """What a plan is of, in parts: where two processes differ, which of them."""
    return of_functions([plan.traced], plan.cluster)


def of_functions(functions: Sequence[Traced], cluster: Cluster) -> Facts:
    """As `of_function`, of what is planned together."""
    graphs = [traced.graph for traced in functions]
    values = [graph.values[v] for graph in graphs for v in graph.inputs]
    types = Counter(f"{v.dtype}[{','.join(map(str, v.shape))}]" for v in values)
    arguments = dict(sorted(types.items())[:_MOST_TYPES])
    ops = [op for graph in graphs for op in graph.ops]
    # Not the graph's own digest: arguments of other shapes make other shapes of all that is computed.
    code = [[op.name, [o if isinstance(o, int) else "literal" for o in op.operands]] for op in ops]
    paths = [list(traced.in_paths) for traced in functions]
    results = [list(traced.out_paths) for traced in functions]
    return {
        "arguments": {"count": len(values), "paths": fingerprint(paths), "types": arguments},
        "code": {"ops": dict(sorted(Counter(op.name for op in ops).items())), "digest": fingerprint([code, results])},
        "constants": fingerprint([graph.fingerprint for graph in graphs]),
        "cluster": cluster.fingerprint(),
    }


def software(process: str, host: str, mesh: Mesh) -> Facts:
    """Versions, devices and settings of this process, for a job over `mesh`."""
    # JAX names a folder of its cache only where the user did; folders may differ between machines.
    cache = {name: getattr(jax.config, name, None) for name in _CACHE}
    flags = re.findall(rf"--{AUTOTUNING}(?:=(\w+))?(?=\s|$)", _jax.xla_flags())
    return {
        **gpu_software(mesh.devices.flat[0].platform),
        "process": process,
        "host": host,
        "hapsynth": __version__,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "mesh": [[d.process_index, d.id, d.device_kind] for d in mesh.devices.flat],
        "platform": mesh.devices.flat[0].platform,
        "threads": _jax.cpu_threads() if mesh.devices.flat[0].platform == "cpu" else None,
        "kinds": sorted({d.device_kind for d in mesh.local_devices}),
        "shards_autotuning": not flags or flags[-1].lower() not in ("false", "0"),
        "numerics": {name: getattr(jax.config, name, None) for name in _jax.NUMERICS},
        "cache": {**cache, "a folder": bool(getattr(jax.config, "jax_compilation_cache_dir", None))},
    }


def gpu_software(platform: str) -> Facts:
    """Versions of what runs NVIDIA GPUs here, as far as they are known; nothing of other devices."""
    if platform not in ("gpu", "cuda"):
        return {}
    said: Facts = {"cuda": " ".join(jax.extend.backend.get_backend(platform).platform_version.split())}
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with suppress(metadata.PackageNotFoundError):
            said.setdefault("nccl", metadata.version(package))
    with suppress(OSError):
        if found := re.search(r"Module\S*\s+(?:for \S+\s+)?([\d.]+)", _DRIVER.read_text()):
            said["driver"] = found[1]
    return said


def of_plan(plan: Planned, arguments: Iterable[Any], donate: bool | None = None) -> Facts:
    """What a plan is, what its replicated arguments hold, and the memory that it needs here beside what its arguments
    and constants have already. `donate`: as of `before_call`; None for what the plan does by itself."""
    assert plan.mesh is not None
    arguments = [*arguments]
    constants = plan.lowered_for(plan.donate if donate is None else donate).held_constants
    # What the function closes over may be the very array that is given.
    held = _held({id(x): x for x in (*arguments, *constants)}.values())
    positions = dict(zip(plan.mesh.devices.flat, plan.devices))
    local, held_bytes = plan.mesh.local_devices, plan.held_bytes
    needs = {d: max(0, int(held_bytes[positions[d]]) - held[d]) for d in local}
    if local[0].platform != "cpu":
        rows, machine = _rows(plan, needs), [0, -1]
    else:
        # CPU devices share their machine's memory. What makes the arguments may still run, and hold more.
        jax.block_until_ready(arguments)
        needed, free = sum(needs.values()), _settled(lambda: _device_memory.free(local[0]))
        rows, machine = [["its CPU", needed, free]], [needed, _device_memory.free_on_machine()]
    whole = {
        path: x
        for path, storage, x in zip(plan.traced.in_paths, plan.lowered.inputs, arguments)
        if not storage.cuts and 0 not in storage.shape
    }
    return {
        "plan": plan_fingerprint(plan),
        "form": plan.form,
        **of_function(plan),
        "values": {path: _sample(x) for path, x in whole.items()},
        "memory": rows,
        "machine": machine,
    }


def _held(arrays: Iterable[Any]) -> Counter[Any]:
    """Bytes of stored arrays, by this process's devices."""
    held = Counter[Any]()
    for part in (part for x in arrays for part in parts(x)):
        (device,) = part.devices()
        held[device] += part.nbytes
    return held


def _rows(plan: Planned, needs: Mapping[Any, int]) -> list[list[Any]]:
    """Of each of this process's accelerators its name, the bytes that it needs, those that are free, those that JAX has
    taken, and those that the plan counts on."""
    assert plan.mesh is not None
    has = {d: plan.cluster.devices[i].memory for d, i in zip(plan.mesh.devices.flat, plan.devices)}
    return [[str(d), n, _device_memory.free(d), _device_memory.pool(d), int(has[d])] for d, n in needs.items()]


def _settled(free: Callable[[], int]) -> int:
    """The bytes that are free when they rise no more, or after two seconds: temporaries of a program that has ended are
    given back one after another, of 0.6 GB in 0.15 s."""
    before, now, began = -_RISES, free(), time.monotonic()
    while now >= before + _RISES and time.monotonic() < began + _SETTLES_S:
        time.sleep(_GIVES_BACK_S)
        before, now = now, free()
    return now


def _sample(stored: Any) -> list[str]:
    """Some elements of what is stored alike on all devices: their dtype and, in Base64, their bytes."""
    # NaN and infinity in an argument are the function's to judge.
    with _jax.no_mesh(), jax.debug_nans(False), jax.debug_infs(False):
        part = parts(stored)[0]
        data = jax.random.key_data(part) if _jax.is_extended(part.dtype) else part
        if data.nbytes > _FETCHED_BYTES:
            chosen = data.size // _SAMPLE * np.arange(_SAMPLE)
            data = data.at[np.unravel_index(chosen, data.shape)].get(mode="promise_in_bounds")
        host = np.asarray(data).reshape(-1)
    some = host[:: max(1, host.size // _SAMPLE)][:_SAMPLE]
    return [some.dtype.name, base64.b64encode(some.tobytes()).decode()]


def _decoded(sample: Sequence[str]) -> np.ndarray:
    """The elements of a sample."""
    dtype, data = sample
    return np.frombuffer(base64.b64decode(data), np.dtype(dtype))


def compiled_facts(plan: Planned, donate: bool, arguments: Iterable[Any] = ()) -> Facts:
    """What came of compiling a plan here: which collectives were lowered, which XLA made of them, and the memory that
    its program needs beside `arguments`, as they are stored, and constants."""
    assert plan.mesh is not None
    lowered = plan.lowered_for(donate)
    # What compiling leaves in a process's memory may be used again.
    free = _device_memory.free_of_limits()
    said: Facts = {"lowered": lowered.prepare()}
    # Of an array that is given twice XLA counts both.
    held, local = _held((*arguments, *lowered.held_constants)), plan.mesh.local_devices
    needs = {d: max(0, in_all - held[d]) for d, in_all in lowered.compiled_bytes.items()}
    # A machine may have swap, or give out more than it has; a limit ends the process.
    on_cpu = local[0].platform == "cpu"
    said["compiled_memory"] = [["its CPU", sum(needs.values()), free]] if on_cpu else _rows(plan, needs)
    try:
        return {**said, "collectives": lowered.compiled_collectives}
    except HloError as error:
        if plan.form == "fused":
            # Nothing else says that the processes' programs fit together.
            raise
        warn_user(f"the collectives that XLA compiled are not compared between processes: {error}", RuntimeWarning)
        return said


VERSIONS = {"hapsynth": "hapsynth", "jax": "jax", "jaxlib": "jaxlib", "cuda": "plugin for CUDA", "nccl": "NCCL"}
"""What must be the same everywhere, and how it is called."""


def notices(facts: Sequence[Facts]) -> list[str]:
    """What may differ in a job and is worth knowing: drivers, which are made to work with older software and not with
    newer, and kinds of GPUs."""
    way_out = "where collectives fail or hang, update the older one first"
    return _alike(facts, "driver", "NVIDIA's driver {}", way_out) + _of_autotuning(facts)


def _of_autotuning(facts: Sequence[Facts]) -> list[str]:
    """hapsynth's own programs never share it out; the user's may."""
    shards = [f["process"] for f in facts if f.get("shards_autotuning")]
    kinds = {kind for f in facts for kind in f.get("kinds", ())}
    if len(kinds) < 2 or not shards or not any(_jax.is_gpu(f["platform"]) for f in facts):
        return []
    return [
        f"the GPUs are of several kinds ({', '.join(sorted(kinds))}), and {_several(shards)} would share out the "
        "autotuning of kernels among them in programs that are not hapsynth's: where your script has a jax.jit over "
        f"several processes, add --{AUTOTUNING}=false to XLA_FLAGS (plans have it by themselves)"
    ]


def problems(facts: Sequence[Facts]) -> list[str]:
    """What is wrong in a job whose processes say `facts`: each names the processes and the way out."""
    found: list[str] = []
    for key, name in VERSIONS.items():
        found += _alike(facts, key, f"{name} {{}}", f"install the same {name} everywhere")
    if found:
        # Another version may say all else in another way.
        return found
    found += _of_plans(facts)
    way_out = f"give form= the same everywhere, or leave it to be chosen{_of_threads(facts)}"
    found += _alike(facts, "form", "a plan in {} form", way_out)
    found += _alike(
        facts,
        "mesh",
        "a mesh of devices {}",
        "make the mesh of the same devices in the same order everywhere, as jax.make_mesh does",
        lambda mesh: ", ".join(f"{i}:{p}" for p, i, _ in mesh),
    )
    found += _alike(facts, "cache", "compilation cache settings {}", "give them all the same", _settings)
    found += _alike(
        facts,
        "lowered",
        "collectives {} in the lowered program",
        "the same function, JAX configuration and XLA_FLAGS must be used everywhere",
    )
    found += of_collectives(facts)
    return found + _of_values(facts) + _of_links(facts) + _of_kinds(facts) + _of_memory(facts)


_PARTS: tuple[tuple[str, str, str], ...] = (
    ("numerics", "{}", "set the same in every process, by jax.config or the environment"),
    ("arguments", "arguments {}", "call the plan with arguments of the same shapes and dtypes everywhere"),
    ("code", "a function of {}", "run the same source with the same options everywhere"),
    ("constants", "parameters or constants of ops {}", "run the same source with the same options everywhere"),
    ("asked", "options {}", "give synthesize the same options everywhere"),
    ("cluster", "cluster {}", "plan for the same cluster everywhere: load one file in all (hapsynth.Cluster.load)"),
    (
        "plan",
        "plan {}",
        "load one plan file in all (`hapsynth.load`), and call plans in the same order",
    ),
)
"""What a plan comes from: what differs first explains what differs after it."""


def _of_plans(facts: Sequence[Facts]) -> list[str]:
    for key, what, way_out in _PARTS:
        text = {"numerics": _settings, "asked": _settings, "arguments": _arguments, "code": _code}.get(key, str)
        if key in ("plan", "asked"):
            way_out += _of_threads(facts)
        found = _alike(facts, key, what, way_out, text, _differing(facts, key) if key in _IN_PARTS else None)
        if found:
            return found
    return []


def _of_threads(facts: Sequence[Facts]) -> str:
    """What else makes plans unlike that were asked for alike: collectives run beside computing where XLA has threads
    for that."""
    alone = [f["process"] for f in facts if f.get("threads") == 1]
    if len(alone) in (0, len(facts)):
        return ""
    return (
        f"; with overlap, XLA needs two threads in each process, and has one in {_several(alone)}: begin with the "
        "environment variable NPROC=2 there"
    )


_IN_PARTS = ("numerics", "arguments", "code", "asked")


def _differing(facts: Sequence[Facts], key: str) -> Callable[[Any], Any]:
    """Of what processes say by names, only that in which they differ; what can't be told apart so, whole."""

    def flat(said: dict[str, Any]) -> dict[str, Any]:
        inner = [name for name, value in said.items() if isinstance(value, dict)]
        rest = {name: value for name, value in said.items() if name not in inner}
        return rest | {f"{name} {k}": v for name in inner for k, v in said[name].items()}

    rows = [flat(f[key]) for f in facts if key in f]
    names = sorted({name for row in rows for name in row})
    unlike = [name for name in names if len({json.dumps(row.get(name)) for row in rows}) > 1]
    return lambda said: {name: flat(said).get(name) for name in unlike}


def _arguments(said: dict[str, Any]) -> str:
    types = [f"{name.removeprefix('types ')} x{n}" for name, n in said.items() if name.startswith("types ") and n]
    if types:
        return ", ".join(types)
    if "count" in said:
        return f"in number {said['count']}"
    return f"of other names (digest {said['paths']})" if "paths" in said else "of none of these"


def _code(said: dict[str, Any]) -> str:
    ops = [f"{n or 'no'} {name.removeprefix('ops ')}" for name, n in said.items() if name.startswith("ops ")]
    return ", ".join(ops[:4]) if ops else f"digest {said['digest']}"


def _of_values(facts: Sequence[Facts]) -> list[str]:
    """Arguments that all processes hold whole, and not the same: each would go on from its own."""
    first, *others = [f for f in facts if "values" in f] or [{}]
    for other in others:
        unlike: list[str] = []
        for path in first["values"].keys() & other["values"].keys():
            said = [f["values"][path] for f in (first, other)]
            if said[0] != said[1] and not _is_near(*map(_decoded, said)):
                unlike.append(path)
        if unlike:
            return [
                f"{first['process']} and {other['process']} have other values in {_several(sorted(unlike))}, which "
                "each holds whole: give all processes the same, drawn from one seed or restored from one checkpoint; "
                "state that unlike devices have rounded apart is made the same by plan.resync"
            ]
    return []


def _is_near(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether unlike devices may have rounded two unlike samples apart: of no counters, and no keys."""
    if not (_jax.is_inexact(a.dtype) and _jax.is_inexact(b.dtype) and a.shape == b.shape):
        return False
    apart = max(_ROUNDING, _LAST_PLACES * float(jax.numpy.finfo(a.dtype).eps))
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    largest = np.max(np.abs(a), initial=0.0, where=np.isfinite(a))
    return np.allclose(a, b, rtol=0, atol=apart * largest, equal_nan=True)


def of_collectives(facts: Sequence[Facts]) -> list[str]:
    """The first collective that XLA did not compile the same in all: there they would wait for each other forever."""
    said = [f for f in facts if "collectives" in f]
    different = first_difference([f["collectives"] for f in said])
    if different is None:
        return []
    number, texts = different
    each = [{"process": f["process"], "text": text} for f, text in zip(said, texts, strict=True)]
    way_out = (
        "XLA would start another in each, and they would wait forever: set XLA_FLAGS and JAX's configuration the same "
        "everywhere; `hapsynth compile` shows what GPUs of other kinds get"
    )
    return _alike(each, "text", f"compiled its collective {number + 1} as {{}}", way_out, _shortened)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _of_links(facts: Sequence[Facts]) -> list[str]:
    """Two that reach each other in neither direction; who may only be called reaches the others, or they him."""
    linked = {f["links"]["rank"]: f for f in facts if "links" in f}
    pairs = [(a, b) for a in linked for b in linked[a]["links"]["never"] if a < b and b in linked]
    return [
        f"{linked[a]['process']} and {linked[b]['process']} do not reach each other, and both reach the rendezvous: "
        "the network between these two is closed (firewall, route, switch); open all its TCP ports to collectives"
        for a, b in pairs
        if a in linked[b]["links"]["never"]
    ]


def _of_kinds(facts: Sequence[Facts]) -> list[str]:
    found: list[str] = []
    for f in facts:
        if len(f.get("kinds", ())) > 1:
            found.append(
                f"{f['process']} holds devices of several kinds ({', '.join(f['kinds'])}): start one process for each "
                "kind, and give each its own with CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS"
            )
    return found


def _of_memory(facts: Sequence[Facts]) -> list[str]:
    way_out = "end what else runs there, or synthesize with a lower memory_limit"
    found: list[str] = []
    for f in facts:
        for key, what in (("memory", "the plan"), ("compiled_memory", "what XLA compiled of the plan")):
            found += [
                f"{f['process']}: {what} needs {nbytes(needed)} more on {device}, where {nbytes(free)} are free"
                f"{_of_pool(free, *pool) or f': {way_out}'}"
                for device, needed, free, *pool in f.get(key, ())
                if 0 <= free < needed
            ]
    hosts: dict[str, list[Facts]] = {}
    for f in facts:
        if f.get("machine", [0, -1])[1] >= 0:
            hosts.setdefault(f["host"], []).append(f)
    for host, there in hosts.items() if not found else ():
        needed, free = sum(f["machine"][0] for f in there), max(f["machine"][1] for f in there)
        if free < needed:
            found.append(
                f"{_several([f['process'] for f in there])} need {nbytes(needed)} more together, and {host} has "
                f"{nbytes(free)} free: {way_out}"
            )
    return found


def _of_pool(free: int, pool: int = -1, card: int = -1) -> str:
    """Of an accelerator whose pool is known. JAX takes it when it begins, three quarters of the card unless the user
    says more, which may be less than the plan counts on; all that is held of it is this process's own."""
    if pool < 0:
        return ""
    planned_for = f" of the {nbytes(card)} planned for" if pool < card else ""
    return (
        f" of the {nbytes(pool)} that JAX has taken{planned_for}: this process's own arrays hold "
        f"{nbytes(pool - free)}; delete those that you have sharded and need no more (del state), set "
        "XLA_PYTHON_CLIENT_MEM_FRACTION (0.75 unless it is set) higher, or synthesize with a lower memory_limit"
    )


def _settings(cache: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in cache.items())


def _alike(
    facts: Sequence[Facts],
    key: str,
    what: str,
    way_out: str,
    text: Callable[[Any], str] = str,
    part: Callable[[Any], Any] | None = None,
) -> list[str]:
    """A problem where the processes do not all say the same of `key`; `part` of what they say is shown."""
    groups: dict[str, list[str]] = {}
    for f in facts:
        if key in f:
            groups.setdefault(json.dumps(f[key], sort_keys=True), []).append(f["process"])
    if len(groups) < 2:
        return []
    shown = lambda said: text(said if part is None else part(said))
    said = [f"{_several(names)} {_verb(names)} {what.format(shown(json.loads(v)))}" for v, names in groups.items()]
    return [f"{', and '.join(said)}: {way_out}"]


def _verb(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _several(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
