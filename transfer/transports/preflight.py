"""What stands in the way of RDMA on this machine, card by card, and what to do about it. Reads only what the kernel
shows, below roots that are parameters.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from relight.core.errors import LocalFault
from relight.transfer.transports.verbs import PORT, ROUTABLE, choose_gid, gid_table

UNLIMITED = -1
"""As resource.RLIM_INFINITY has it."""
PEER_MEMORY = {"nvidia": ("nvidia_peermem", "nv_peer_mem"), "kunlun": ("kunlun_peermem",)}
"""By vendor of the accelerator: kernel modules that let a card reach its memory."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing in the way: at which card, what, and how it is put right."""

    nic: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.nic}: {self.what}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the kernel shows what it has."""

    sysfs: Path = Path("/sys")
    devfs: Path = Path("/dev")
    procfs: Path = Path("/proc")


@dataclass(frozen=True, slots=True)
class Need:
    """What is to be registered: how many bytes, under which memlock limit (RLIMIT_MEMLOCK), and whose memory it is.

    The limit does not bind who has CAP_IPC_LOCK: UNLIMITED then. `vendor` is the accelerator's ("nvidia", "kunlun"), ""
    for memory of the host; `dma_buf` says whether its driver hands out DMA buffers, which need no module.
    """

    bytes: int
    memlock: int
    vendor: str = ""
    dma_buf: bool = False


def findings(nic: str, need: Need, roots: Roots | None = None) -> list[Finding]:
    """All that stands in the way of registering and moving `need` through the card `nic`; empty when nothing does."""
    at = roots or Roots()
    card = at.sysfs / "class/infiniband" / nic
    if not card.is_dir():
        return [Finding(nic, "there is no such card", "name one of `ls /sys/class/infiniband`, or load its driver")]
    found = [
        _link(nic, card),
        _address(nic, card, at),
        _verbs(nic, card, at),
        _limit(nic, need),
        _memory(nic, need, at),
    ]
    return [f for f in found if f is not None]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _link(nic: str, card: Path) -> Finding | None:
    state = _read(card / "ports" / str(PORT) / "state").partition(":")[2].strip()
    if state == "ACTIVE":
        return None
    return Finding(nic, f"port {PORT} is {state or 'not there'}, not ACTIVE", "bring its interface up, or check cable")


def _address(nic: str, card: Path, at: Roots) -> Finding | None:
    if _read(card / "ports" / str(PORT) / "link_layer") == "InfiniBand":
        return None
    try:
        chosen = choose_gid(gid_table(nic, at.sysfs))
    except LocalFault:
        return Finding(nic, "it has no address (GID)", "give its interface an IP address")
    if chosen.kind != ROUTABLE:
        return Finding(nic, f"it has no {ROUTABLE} address, only {chosen.kind}", "give its interface an IPv4 address")
    return None


def _verbs(nic: str, card: Path, at: Roots) -> Finding | None:
    # A soft card has no device below it: there the list of all verbs devices says which belongs to it.
    names = sorted(p.name for p in (card / "device/infiniband_verbs").glob("uverbs*")) or sorted(
        p.name for p in (at.sysfs / "class/infiniband_verbs").glob("uverbs*") if _read(p / "ibdev") == nic
    )
    if not names:
        return Finding(nic, "it has no verbs device", "load the module ib_uverbs")
    device = at.devfs / "infiniband" / names[0]
    if os.access(device, os.R_OK | os.W_OK):
        return None
    return Finding(
        nic,
        f"/dev/infiniband/{names[0]} cannot be opened",
        "let this user read and write it, or pass it in a container",
    )


def _limit(nic: str, need: Need) -> Finding | None:
    if need.memlock == UNLIMITED or need.memlock >= need.bytes:
        return None
    return Finding(
        nic, f"{need.bytes} bytes are to be registered, the memlock limit is {need.memlock}",
        "raise it (ulimit -l unlimited; LimitMEMLOCK=infinity; the container's ulimits)",
    )  # fmt: skip


def _memory(nic: str, need: Need, at: Roots) -> Finding | None:
    if not need.vendor or need.dma_buf:
        return None
    modules = PEER_MEMORY.get(need.vendor, ())
    loaded = {line.split()[0] for line in _read(at.procfs / "modules").splitlines() if line}
    if loaded & set(modules):
        return None
    if not modules:
        return Finding(nic, f"it cannot reach memory of {need.vendor}", "transfer through memory of the host")
    return Finding(
        nic, f"it cannot reach the accelerator's memory: {modules[0]} is not loaded, and there is no dma-buf",
        f"modprobe {modules[0]}",
    )  # fmt: skip
