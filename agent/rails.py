"""The RDMA cards that this slot's engines use, where they are reached, and what stands in the way of them."""

from __future__ import annotations

import fcntl
import ipaddress
import resource
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from relight.core.errors import LocalFault
from relight.transfer.topology import SYSFS, read_nics
from relight.transfer.transports.preflight import UNLIMITED, Need, Roots, findings
from relight.transfer.transports.verbs import DISTRIBUTION, choose_gid, gid_table

TRANSPORT = "rdma"
_SIOCGIFADDR = 0x8915
_CAP_IPC_LOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class Rails:
    """`cards` may be used: each as `name@address`. `trouble` says what keeps the slot from RDMA, "" when nothing does;
    a slot without any card is not `equipped`, and nobody expects RDMA of it."""

    equipped: bool
    cards: tuple[str, ...] = ()
    trouble: str = ""

    @property
    def transports(self) -> dict[str, str]:
        """As the slot reports it."""
        return {TRANSPORT: self.trouble} if self.equipped else {}


def look(
    names: Sequence[str] | None, memory_bytes: int, roots: Roots | None = None, pyverbs: Path = DISTRIBUTION
) -> Rails:
    """What the kernel shows now of the cards `names`, or of all that there are for None.

    `memory_bytes` is the most that one engine registers.
    """
    at = roots or Roots()
    wanted = sorted(p.name for p in (at.sysfs / "class/infiniband").glob("*")) if names is None else names
    if not wanted:
        return Rails(False)
    if not (pyverbs / "pyverbs").is_dir():
        return Rails(True, trouble=f"RDMA needs pyverbs in {pyverbs}: install the package python3-pyverbs")
    need = Need(memory_bytes, _memlock(at))
    cards, trouble = [], []
    for name in wanted:
        found = findings(name, need, at)
        host = "" if found else _address(name, at)
        if host:
            cards.append(f"{name}@{host}")
        else:
            trouble += [str(f) for f in found] or [f"{name}: it has no IPv4 address; give its interface one"]
    return Rails(True, tuple(cards), "" if cards else "; ".join(trouble))


def capacities(rails: Rails, sysfs: Path = SYSFS) -> Mapping[str, float]:
    """Bytes a second that the links of the usable cards carry, by card; one whose link tells no rate is absent."""
    usable = {card.partition("@")[0] for card in rails.cards}
    if not usable:
        return {}
    return {nic.name: nic.gigabits * 1e9 / 8 for nic in read_nics(sysfs) if nic.name in usable and nic.gigabits > 0}


def memlock() -> str:
    """Bytes that a process started from here may lock, or `unlimited`."""
    limit = _memlock(Roots())
    return "unlimited" if limit == UNLIMITED else str(limit)


def _memlock(at: Roots) -> int:
    """The limit that binds engines started from here."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with suppress(OSError, ValueError, IndexError):
        status = (at.procfs / "self/status").read_text()
        effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
        if int(effective, 16) & _CAP_IPC_LOCK:
            return UNLIMITED
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _address(name: str, at: Roots) -> str:
    """The IPv4 address of a card: that of its RoCE v2 GID, or of the interface on it (IP over InfiniBand)."""
    with suppress(LocalFault):
        mapped = ipaddress.IPv6Address(choose_gid(gid_table(name, at.sysfs)).address).ipv4_mapped
        if mapped is not None:
            return str(mapped)
    for interface in sorted((at.sysfs / "class/infiniband" / name / "device/net").glob("*")):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            asked = struct.pack("256s", interface.name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)[20:24])
    return ""
