"""Which network card is nearest to which device, which devices reach each other directly, read from what the kernel
shows.

PCI distances come from sysfs, whose root is a parameter: a recorded tree reads like a machine. Each rail is given once,
over all devices of the host and not only those that this process may use: otherwise every rank picks the same card.
Device-to-device links come from the vendor's tool: NVML for NVLink, the matrix of `xpu_smi topo -m` for Kunlun.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import takewhile
from pathlib import Path
from typing import Any

from relight.core.errors import InvalidInput
from relight.core.records import PcieLink

SYSFS = Path("/sys")
DEVFS = Path("/dev")
VENDORS: Mapping[str, str] = {"0x10de": "nvidia", "0x1d22": "kunlun"}
"""PCI vendor ids of accelerators."""
_ACCELERATOR_CLASSES = ("0x03", "0x12")
"""Display controllers and processing accelerators (PCI class codes)."""
_RATE = re.compile(r"([0-9.]+) Gb/sec")
_SPEED = re.compile(r"([0-9.]+) GT/s")
GENERATIONS: Mapping[float, int] = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""PCIe generation by the transfers of a lane, in GT/s."""


class Distance(IntEnum):
    """How far apart two PCI functions are, in the words of the vendors' tools; smaller is nearer."""

    PIX = 1
    PXB = 2
    PHB = 3
    NODE = 4
    SYS = 5


@dataclass(frozen=True, slots=True)
class Function:
    """One PCI function: its address, the bridges above it from the root down, its NUMA node (-1 unknown)."""

    address: str
    bridges: tuple[str, ...]
    numa: int


@dataclass(frozen=True, slots=True)
class Nic:
    """One RDMA card: `why` says what keeps it from being used, "" when nothing does."""

    name: str
    function: Function
    gigabits: float
    link_layer: str
    interface: str
    why: str

    @property
    def usable(self) -> bool:
        return not self.why


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator of the host, whether this process may use it or not."""

    vendor: str
    function: Function


@dataclass(frozen=True, slots=True)
class Rail:
    """The card that carries an accelerator's traffic, how far away it is, and how many share it."""

    nic: str
    distance: Distance
    shared_by: int


def _function(path: Path) -> Function:
    real = path.resolve()
    bridges = [p for p in real.parts if re.fullmatch(r"(pci)?[0-9a-f]{4}:[0-9a-f]{2}(:[0-9a-f]{2}\.[0-7])?", p)]
    return Function(real.name, tuple(bridges[:-1]), int(_read(real / "numa_node", "-1")))


def _read(path: Path, otherwise: str = "") -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return otherwise


def read_nics(sysfs: Path = SYSFS, devfs: Path = DEVFS) -> list[Nic]:
    """All RDMA cards of the host, by name; empty where there is none."""
    found = []
    for entry in sorted((sysfs / "class/infiniband").glob("*")):
        port = entry / "ports/1"
        rate = _RATE.match(_read(port / "rate").replace("Gb/s ", "Gb/sec "))
        interfaces = sorted(p.name for p in (entry / "device/net").glob("*"))
        found.append(
            Nic(
                entry.name,
                _function(entry / "device"),
                float(rate[1]) if rate else 0.0,
                _read(port / "link_layer"),
                interfaces[0] if interfaces else "",
                _trouble(entry, port, devfs),
            )
        )
    return found


def _trouble(entry: Path, port: Path, devfs: Path) -> str:
    state = _read(port / "state").partition(":")[2].strip()
    if state != "ACTIVE":
        return f"its link is {state or 'not there'}"
    verbs = [p.name for p in (entry / "device/infiniband_verbs").glob("uverbs*")]
    if not any(os.access(devfs / "infiniband" / name, os.R_OK | os.W_OK) for name in verbs):
        return f"/dev/infiniband/{verbs[0] if verbs else 'uverbs*'} cannot be opened here"
    return ""


def read_accelerators(sysfs: Path = SYSFS, vendors: Mapping[str, str] = VENDORS) -> list[Accelerator]:
    """All accelerators of the host by these vendors, by PCI address."""
    found = []
    for entry in sorted((sysfs / "bus/pci/devices").glob("*")):
        vendor = vendors.get(_read(entry / "vendor"))
        if vendor and _read(entry / "class").startswith(_ACCELERATOR_CLASSES):
            found.append(Accelerator(vendor, _function(entry)))
    return found


def read_pcie_link(address: str, sysfs: Path = SYSFS) -> PcieLink | None:
    """The link of one PCI function now and at best; None where the kernel does not tell."""
    entry = sysfs / "bus/pci/devices" / address
    found = []
    for when in ("current", "max"):
        speed = _SPEED.match(_read(entry / f"{when}_link_speed"))
        width = _read(entry / f"{when}_link_width")
        if speed is None or float(speed[1]) not in GENERATIONS or not width.isdigit() or width == "0":
            return None
        found += [GENERATIONS[float(speed[1])], int(width)]
    return PcieLink(*found)


def distance(a: Function, b: Function) -> Distance:
    """By the bridges that both are behind (as `nvidia-smi topo -m` defines its words)."""
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a.bridges, b.bridges, strict=False))))
    if shared == 0:
        return Distance.NODE if a.numa == b.numa >= 0 else Distance.SYS
    if shared == 1:
        return Distance.PHB
    below = max(len(a.bridges), len(b.bridges)) - shared
    return Distance.PIX if below <= 1 else Distance.PXB


def rails(accelerators: Sequence[Accelerator], nics: Sequence[Nic]) -> dict[str, Rail]:
    """By accelerator address its card: every usable card serves as many as any other, the nearest pairs first."""
    usable = [n for n in nics if n.usable]
    if not usable:
        return {}
    most = -(-len(accelerators) // len(usable))
    pairs = sorted(
        (distance(a.function, n.function), abs(i * len(usable) // max(len(accelerators), 1) - j), i, j)
        for i, a in enumerate(accelerators)
        for j, n in enumerate(usable)
    )
    given: dict[int, tuple[int, Distance]] = {}
    load = [0] * len(usable)
    for far, _, i, j in pairs:
        if i not in given and load[j] < most:
            given[i] = j, far
            load[j] += 1
    return {
        accelerators[i].function.address: Rail(usable[j].name, far, load[j]) for i, (j, far) in sorted(given.items())
    }


def parse_xpu_topology(text: str) -> dict[tuple[int, int], str]:
    """(device, device) -> link of the matrix that `xpu_smi topo -m` prints: XL, PIX, PXB, PHB, NODE or SYS.

    Raises InvalidInput when it is no such matrix.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    # Columns of cards and of affinities may follow those of devices.
    header = next(
        (ln for ln in lines if ln[0].startswith("XPU") and [*ln, "XPU"][1][:3] in ("XPU", "NIC", "CPU")), None
    )
    if header is None:
        raise InvalidInput("expected the matrix of `xpu_smi topo -m`: a header with XPU0, XPU1, ...")
    columns = [int(name[3:]) for name in header if name.startswith("XPU")]
    found: dict[tuple[int, int], str] = {}
    for line in lines[lines.index(header) + 1 :]:
        if not re.fullmatch(r"XPU\d+", line[0]) or len(line) <= len(columns):
            continue
        row = int(line[0][3:])
        for column, value in zip(columns, line[1:], strict=False):
            if column != row:
                found[row, column] = value
    if len(found) != len(columns) * (len(columns) - 1):
        raise InvalidInput(f"expected {len(columns)} rows of {len(columns)} devices, got {len(found)} links")
    return found


def direct_groups(links: Mapping[tuple[int, int], str], direct: str = "XL") -> list[frozenset[int]]:
    """Devices that reach each other by direct links, as groups; a device without any is a group of its own."""
    devices = {d for pair in links for d in pair}
    groups: list[frozenset[int]] = []
    while devices:
        group, edge = set[int](), {min(devices)}
        while edge:
            group |= edge
            edge = {b for (a, b), link in links.items() if a in edge and link == direct} - group
        groups.append(frozenset(group))
        devices -= group
    return groups


def nvlink_matrix(nvml: Any) -> dict[tuple[int, int], str]:
    """(device, device) -> NVL where NVML says that peers reach each other over NVLink, else SYS.

    `nvml` is the module pynvml (nvidia-ml-py), initialised by the caller.
    """
    handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    found = {}
    for i, a in enumerate(handles):
        for j, b in enumerate(handles):
            if i != j:
                status = nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
                found[i, j] = "NVL" if status == nvml.NVML_P2P_STATUS_OK else "SYS"
    return found
