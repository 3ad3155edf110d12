"""Kunlun's devices by `xpu_smi`, the kernel's trees and device nodes.

P800, P900 and what comes next are one kind: nothing is concluded from a product's name, everything is what the tool or
the kernel says of this very device. Which processes hold a device is read from their open files, since the tool's
machine-readable output does not say.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from relight.agent.devices.base import Device, Kind, Reading, Wanted, held_by
from relight.agent.devices.host import Host
from relight.agent.devices.visible import Seen, entries, must_equal, select
from relight.agent.devices.xpu_smi import Card, cards, ids, versions
from relight.agent.procfs import Procfs
from relight.core.errors import FieldError, InvalidInput, RelightError, Unavailable
from relight.transfer.topology import parse_xpu_topology, read_accelerators, read_pcie_link

NAME = "kunlun"
VENDOR = "0x1d22"
VISIBLE = ("XPU_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""Both are set: the vendor's runtime reads the first, the CUDA that it stands in for the second."""
TOOLS = ("xpu_smi", "xpu-smi")
"""The second is also the name of Intel's tool, so neither is run where no device of this vendor is."""
_SERIAL = re.compile(r"(?=.*[1-9])[0-9A-Za-z-]{4,}")


class KunlunDevices:
    """The selected devices, each a device node of this container."""

    kind = NAME

    def __init__(self, host: Host, wanted: Wanted) -> None:
        """Raises InvalidInput for devices that cannot be told or are not those allocated, Unavailable when neither
        tool answers."""
        if why := _not_ours(host):
            raise InvalidInput("no Kunlun device", [FieldError("accelerators.kind", why, NAME)])
        self._host, self._procfs = host, Procfs(host.procfs)
        self._tool, there = self._first_answer()
        self._nodes = self._by_address()
        # A tool may list the host's devices: what this container was given are those with a node in it.
        own = [card for card in there if card.address in self._nodes]
        called = _ids(there, self._told_ids())
        seen = [Seen(n, called[card.address], card.model) for n, card in enumerate(own)]
        names = [entries(host.environ[name]) for name in VISIBLE if name in host.environ]
        if wanted.visible is None and len(set(names)) > 1:
            got = ", ".join(f"{name}={host.environ[name]}" for name in VISIBLE)
            raise InvalidInput("devices that cannot be told", [FieldError(VISIBLE[0], f"as {VISIBLE[1]}", got)])
        listed = (names[0] if names else None) if wanted.visible is None else wanted.visible
        chosen = select(seen, listed, VISIBLE[0])
        must_equal(chosen, None, wanted.count, VISIBLE[0])
        self._cards = {s.id: own[s.index].address for s in chosen}
        self._indices = {own[s.index].index: s.id for s in chosen}
        self._firmware = own[chosen[0].index].firmware
        self._devices = tuple(
            Device(
                s.id, NAME, s.id, own[s.index].total_bytes, s.model, address=own[s.index].address,
                visible_as=str(s.index),
            )
            for s in chosen
        )  # fmt: skip

    def boot_id(self) -> str:
        return self._procfs.boot_id()

    def enumerate(self) -> tuple[Device, ...]:
        return self._devices

    def held_bytes(self, pids: Iterable[int]) -> int:
        return held_by(self.processes(), pids)

    def processes(self) -> Mapping[str, Mapping[int, int]]:
        """A device's used memory in equal parts among those that have it open: no tool says more."""
        now = self._now()
        open_by = self._procfs.openers(str(self._host.devfs / "xpu"))
        found = {}
        for id_, address in self._cards.items():
            pids = [pid for pid in sorted(open_by.get(self._nodes[address], ())) if not self._looks(pid)]
            used = now[address].used_bytes if address in now else 0
            found[id_] = {pid: used // len(pids) for pid in pids}
        return found

    def _looks(self, pid: int) -> bool:
        """Whether it is the tool itself: a scrape, or somebody at a terminal, runs it at the same time."""
        stat = self._procfs.stat(pid)
        return stat is not None and stat.name in TOOLS

    def readings(self) -> tuple[Reading, ...]:
        now = self._now()
        return tuple(self._reading(id_, address, now.get(address)) for id_, address in self._cards.items())

    def _reading(self, id_: str, address: str, card: Card | None) -> Reading:
        if card is None:
            raise Unavailable(f"{self._tool} does not list {id_} ({address}) any more")
        return Reading(
            id_, card.utilisation, card.temperature_celsius, card.power_watts, card.used_bytes,
            pcie=read_pcie_link(address, self._host.sysfs),
        )  # fmt: skip

    def links(self) -> Mapping[tuple[str, str], str]:
        try:
            found = parse_xpu_topology(self._host.run((self._tool, "topo", "-m")))
        except RelightError:
            # An older tool has no such command; then nothing is known to be direct.
            return {}
        named = self._indices
        return {(named[a], named[b]): link for (a, b), link in found.items() if a in named and b in named}

    def facts(self) -> Mapping[str, str]:
        driver = runtime = ""
        with suppress(RelightError):
            driver, runtime = versions(self._host.run((self._tool,)))
        module = self._host.sysfs / "module"
        if not driver and (module / "kunlun/version").is_file():
            driver = (module / "kunlun/version").read_text().strip()
        peer = (module / "kunlun_peermem").is_dir()
        return {
            "driver": driver,
            "runtime": runtime,
            "firmware": self._firmware,
            "peer_memory": "kunlun_peermem" if peer else "",
        }

    def _now(self) -> Mapping[str, Card]:
        return {card.address: card for card in self._read((self._tool, "-m"))}

    def _read(self, argv: tuple[str, ...]) -> tuple[Card, ...]:
        try:
            return cards(self._host.run(argv))
        except InvalidInput as error:
            raise Unavailable(f"{argv[0]} prints what is not known here: {error}") from error

    def _first_answer(self) -> tuple[str, tuple[Card, ...]]:
        told = []
        for tool in TOOLS:
            try:
                return tool, self._read((tool, "-m"))
            except Unavailable as error:
                told.append(str(error))
        raise Unavailable("Kunlun devices need xpu_smi of their driver: " + "; ".join(told))

    def _by_address(self) -> Mapping[str, str]:
        """PCI address -> its device node. Asked node by node: their numbers are not the tool's."""
        found = {}
        for node in sorted(self._host.devfs.glob("xpu[0-9]*"), key=lambda p: int(re.sub(r"\D", "", p.name) or 0)):
            with suppress(Unavailable):
                for card in self._read((self._tool, "-m", "-d", str(node))):
                    found[card.address] = str(node)
        return found

    def _told_ids(self) -> Mapping[int, str]:
        with suppress(RelightError):
            return ids(self._host.run((self._tool, "-L")))
        return {}


def _ids(there: Sequence[Card], told: Mapping[int, str]) -> Mapping[str, str]:
    """By address what each device is called: its UUID, else its serial number, else its address, for some products have
    neither, and print a word or a number that all of them share."""
    numbers = Counter(card.serial for card in there)
    own = {c.address: c.serial for c in there if numbers[c.serial] == 1 and _SERIAL.fullmatch(c.serial)}
    return {c.address: told.get(c.index) or own.get(c.address, c.address) for c in there}


def _not_ours(host: Host) -> str:
    """Why this is no host of Kunlun's devices; empty when it is. The vendor's number comes first, then its driver."""
    found = {a.vendor for a in read_accelerators(host.sysfs, {VENDOR: NAME})}
    if NAME not in found:
        return f"a PCI device of vendor {VENDOR} (a tool named xpu-smi may be Intel's)"
    if not (host.devfs / "xpuctrl").exists():
        return f"{host.devfs / 'xpuctrl'}: the container was given none of them, or the module kunlun is not loaded"
    return ""


def _there(host: Host) -> str:
    return "" if _not_ours(host) else f"a device of vendor {VENDOR} and {host.devfs / 'xpuctrl'}"


KIND = Kind(NAME, VISIBLE, _there, KunlunDevices, pci_vendor=VENDOR)
