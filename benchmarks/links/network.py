"""A small network out of namespaces: one per node, each with one link to a bridge, shaped both ways by tc."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

BURST = "128kb"
QUEUE = "20ms"
"""How long a packet may wait in a link's queue: a few round trips of a data centre."""


def require() -> None:
    """Raises SystemExit saying what is missing here."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise SystemExit(f"bench-fanout needs {' and '.join(missing)} (package iproute2)")
    if os.geteuid() != 0:
        raise SystemExit("bench-fanout makes network namespaces: run it as root (sudo make bench-fanout)")


def _run(*command: str) -> None:
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if found.returncode:
        raise SystemExit(f"{' '.join(command)}: {found.stderr.strip()}")


def inside(node: str, command: Sequence[str]) -> list[str]:
    """`command` as it runs in the namespace of `node`."""
    return ["ip", "netns", "exec", node, *command]


@contextmanager
def network(names: Sequence[str], megabits: int) -> Iterator[dict[str, tuple[str, str]]]:
    """{name: (namespace, address)}; every link carries `megabits` per second each way. Gone afterwards."""
    mark = f"relight{os.getpid()}"
    hub = f"{mark}-hub"
    made = [hub]
    try:
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "br0", "up")
        found = {}
        for n, name in enumerate(names):
            space, address = f"{mark}-{name}", f"10.77.0.{n + 1}"
            _run("ip", "netns", "add", space)
            made.append(space)
            _run("ip", "-n", hub, "link", "add", f"v{n}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "-n", hub, "link", "set", f"v{n}", "master", "br0", "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", device, "up")
            for where, device in ((space, "eth0"), (hub, f"v{n}")):
                _run(
                    "tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{megabits}mbit",
                    "burst", BURST, "latency", QUEUE,
                )  # fmt: skip
            found[name] = (space, address)
        yield found
    finally:
        for space in reversed(made):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False, timeout=30)
