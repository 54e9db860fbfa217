"""All measurements on a GPU. docs/gpu.md explains the figures.

    python benchmarks/gpu.py [--only overhead profile shares switch padding flags] [--json gpu.json]
                             [--sizes card|tiny] [--examples mlp transformer cnn] [--set transformer.batch=24]
                             [--rounds 10] [--limit 540]

Each part, and each variant of one (its XLA_FLAGS differ), runs in a process of its own, one after another: this one
never touches the device. Rows are appended to OUT.rows (JSON, one a line) as they come, and put together in OUT at the
end; what `--limit` seconds leave no time for is named. `--sizes tiny` runs all parts on any machine in seconds, where
only the mechanism is tried. Parts that need a GPU and find none are skipped by name.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from harness.command import again, parser, write_json
from on_gpu.settings import DTYPES, SIZES, Row, Settings, parsed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

PARTS = ("overhead", "profile", "shares", "switch", "padding", "flags")
"""Each the name of its module in on_gpu/."""
_TOLD = ("name", "driver_version", "memory.total", "clocks.max.sm", "clocks.max.memory", "power.limit", "pstate")


def module_of(part: str) -> Any:
    return importlib.import_module(f"on_gpu.{part}")


def smi(*fields: str) -> dict[str, str]:
    """Fields of the first GPU, from nvidia-smi; empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.splitlines()[0].split(",") if done.returncode == 0 and done.stdout else []
    return dict(zip(fields, (v.strip() for v in values)))


def machine() -> Row:
    """Without starting JAX."""
    installed = {dist.metadata["Name"]: dist.version for dist in metadata.distributions()}
    wanted = ("jax", "jaxlib", "numpy", "scipy", "optax", "nvidia-cudnn", "nvidia-cublas", "nvidia-nccl", "jax-cuda")
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "packages": {n: v for n, v in sorted(installed.items()) if n and n.startswith(wanted)},
        "gpu": smi(*_TOLD) or "none",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def child(part: str, variant: str, settings: Settings, file: Path) -> None:
    """One variant of one part, in this process; its rows are appended to `file`."""
    import jax

    # The stand-ins of devices that are not here.
    jax.config.update("jax_num_cpu_devices", 8)
    first = jax.devices()[0]
    of = {"part": part, "variant": variant, "platform": first.platform}
    for row in module_of(part).rows(settings, variant):
        append(file, {**of, **row})


def append(file: Path, row: Row) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
    print(line(row), flush=True)


def line(row: Row) -> str:
    """A row for a person: figures to four digits, nothing that is itself a table."""
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items() if not isinstance(v, dict | list)}
    head = " ".join(str(shown.pop(k)) for k in ("part", "variant", "what", "example") if shown.get(k))
    return f"{head}: " + ", ".join(f"{k} {v}" for k, v in shown.items() if k not in ("part", "variant", "platform"))


def start(options: argparse.Namespace, rows: Path) -> None:
    """Runs all variants of all parts, each in a process of its own."""
    ends = time.monotonic() + options.limit
    for part in options.only:
        for variant, flags in module_of(part).VARIANTS.items():
            left = ends - time.monotonic()
            of = {"part": part, "variant": variant}
            if left <= 0:
                append(rows, {**of, "skipped": f"no time left of --limit {options.limit:g}"})
                continue
            env = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
            began, before = time.monotonic(), smi("clocks.sm", "temperature.gpu", "power.draw")
            command = again("--child", part, variant, str(rows))
            try:
                status: Any = subprocess.run(command, env=env, timeout=min(left, options.each)).returncode
            except subprocess.TimeoutExpired:
                status = "out of time"
            ended = {"what": "process", "status": status, "seconds": time.monotonic() - began, "flags": flags}
            append(rows, {**of, **ended, "before": before})


def main() -> None:
    command = parser(__doc__, json_file=Path("gpu.json"))
    command.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    command.add_argument("--sizes", choices=[name for name in SIZES if name != "own"], default="card")
    command.add_argument("--examples", nargs="*", choices=DTYPES, default=list(DTYPES))
    command.add_argument("--set", dest="given", action="append", type=parsed, default=[], metavar="EXAMPLE.FIELD=VALUE")
    command.add_argument("--rounds", type=int, default=10)
    command.add_argument("--limit", type=float, default=540.0, help="seconds in all")
    command.add_argument("--each", type=float, default=300.0, help="seconds for each process")
    command.add_argument("--cluster", type=Path, help="that `profile` writes and `shares` reads (default: OUT.toml)")
    command.add_argument("--child", nargs=3, metavar=("PART", "VARIANT", "ROWS"), help=argparse.SUPPRESS)
    options = command.parse_args()
    cluster = options.cluster or options.json.with_suffix(".toml")
    settings = Settings(options.sizes, tuple(options.examples), tuple(options.given), options.rounds, cluster)
    if options.child:
        part, variant, rows = options.child
        child(part, variant, settings, Path(rows))
        return
    rows = options.json.with_suffix(".rows")
    rows.unlink(missing_ok=True)
    told = machine()
    print(json.dumps(told, indent=1), flush=True)
    start(options, rows)
    appended = [json.loads(text) for text in rows.read_text(encoding="utf-8").splitlines()]
    write_json(options.json, {**told, "rows": appended})
    if any(row.get("what") == "process" and row["status"] for row in appended):
        sys.exit(1)


if __name__ == "__main__":
    main()
