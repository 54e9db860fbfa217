"""A network namespace per machine, on one bridge, each link held to its rate and delay."""

from __future__ import annotations

import os
import shutil
import subprocess

from emulated.spec import Machine

TOOLS = ("ip", "tc", "nsenter", "unshare", "mount", "sh")

_LARGEST_PACKET = 15000
"""Bytes that the kernel hands to the link as one packet at most: tbf cuts a packet that is larger than its burst."""
_LEAST_BURST = 16384
"""Bytes that pass a link at once after a pause, at least: more than one packet."""


class NetworkError(RuntimeError):
    """The network can't be made here."""


def missing() -> list[str]:
    """The tools that it needs and that are not there."""
    lacking = [] if os.geteuid() == 0 else ["root (sudo)"]
    return lacking + [f"the command {tool} (iproute2, util-linux)" for tool in TOOLS if shutil.which(tool) is None]


def address(i: int) -> str:
    """Of machine i. Each namespace sees only its own bridge, so that clusters side by side may use the same."""
    return f"10.201.0.{i + 1}"


def make(name: str, machines: list[Machine]) -> None:
    """The bridge `NAMEb`, in a namespace `NAME` of its own, and namespaces `NAME-0` and so on."""
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", name, "link", "set", "bridge", "up")
    for i, machine in enumerate(machines):
        inside, port = f"{name}-{i}", f"port{i}"
        _run("ip", "netns", "add", inside)
        _run("ip", "-n", inside, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", name)
        _run("ip", "-n", name, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", inside, "addr", "add", f"{address(i)}/24", "dev", "eth0")
        _run("ip", "-n", inside, "link", "set", "lo", "up")
        _run("ip", "-n", inside, "link", "set", "eth0", "up")
        if machine.rate is not None:
            # After a pause a link sends its burst for nothing, so it is as small as a timer's resolution allows.
            burst = max(_LEAST_BURST, int(machine.rate / 8 * 1e-4))
            for where, device in ((inside, "eth0"), (name, port)):
                _run("ip", "-n", where, "link", "set", device, "gso_max_size", str(_LARGEST_PACKET))
                shape = ["tbf", "rate", f"{machine.rate:.0f}bit", "burst", str(burst), "latency", "400ms"]
                _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "handle", "1:", *shape)
        if machine.delay:
            parent = ["root"] if machine.rate is None else ["parent", "1:1"]
            delay = ["netem", "limit", "100000", "delay", f"{machine.delay * 1e6:.0f}us"]
            _run("tc", "-n", inside, "qdisc", "add", "dev", "eth0", *parent, *delay)


def remove(name: str) -> None:
    """Take away the namespaces of `make`, as far as it got. A namespace takes its links with it."""
    for namespace in names():
        if namespace == name or namespace.startswith(f"{name}-"):
            _run("ip", "netns", "del", namespace)


def names() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip() or f"exit {done.returncode}"
        hint = ": this kernel has no such queue (module sch_netem, sch_tbf)" if "qdisc" in command else ""
        raise NetworkError(f"{' '.join(command)}: {why}{hint}")
