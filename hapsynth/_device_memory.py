"""Memory of a device: what it can give out now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path("/sys/fs/cgroup")


def free(device: Any) -> int:
    """Bytes that a device can still give out, -1 where that can't be told; a CPU device's are its whole process's."""
    stats: Any = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0))
    if device.platform != "cpu":
        return -1
    return min([*_of_limits(), *_of_machine()], default=-1)


def free_of_limits() -> int:
    """Bytes that this process can still have under the limits of its cgroups, -1 where it has none."""
    return min(_of_limits(), default=-1)


def pool(device: Any) -> int:
    """Bytes that an accelerator's allocator may give out in all, -1 where that can't be told."""
    return int((device.memory_stats() or {}).get("bytes_limit", -1))


def free_on_machine() -> int:
    """Bytes that all processes of this machine can still have, -1 where that can't be told."""
    return min(_of_machine(), default=-1)


def _of_limits() -> list[int]:
    return [max(0, limit - used) for limit, used in _limits()]


def _of_machine() -> list[int]:
    available = [int(line.split()[1]) << 10 for line in _text(Path("/proc/meminfo")) if "MemAvailable" in line]
    pages = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else []
    return available or pages


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that can't be reclaimed) of this process's cgroups, v1 and v2, and of those above them."""
    for line in _text(Path("/proc/self/cgroup")) or ["0::/", "0:memory:/"]:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            base, most, used, total = _ROOT, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, most, used, total = _ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        else:
            continue
        group = base / path.strip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            limit, now = _number(folder / most), _number(folder / used)
            if limit is not None:
                lines = [line.split() for line in _text(folder / "memory.stat")]
                files = [int(n) for name, n in lines if name in (f"{total}inactive_file", f"{total}active_file")]
                yield limit, (now or 0) - sum(files)


def _number(file: Path) -> int | None:
    text = " ".join(_text(file))
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
