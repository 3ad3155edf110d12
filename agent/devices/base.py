"""What the agent asks of a kind of device: what there is, what processes hold of it, what it can do.

One file of this folder is one kind, by a constant `KIND` in it (kinds.py finds it; docs/adr/0021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from relight.agent.devices.host import Host
from relight.core.records import PcieLink


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this slot. `parent` owns the memory and carries the transition lock."""

    id: str
    """Unique on the host for accelerators (UUID or serial number): two slots that report one share it."""
    kind: str
    parent: str
    total_bytes: int
    model_name: str = ""
    cores: tuple[int, ...] = ()
    """CPU cores to bind to; empty where that has no meaning or is left to the system."""
    address: str = ""
    """Of its PCI function, as sysfs writes it; empty where there is none, or it cannot be told."""
    visible_as: str = ""
    """What an engine's visibility variables call it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one device says of itself now. None stands for what this kind of device, or this one, cannot tell."""

    device: str
    utilisation: float | None = None
    """From 0 to 1, over a while before now that the kind chooses."""
    temperature_celsius: float | None = None
    power_watts: float | None = None
    used_bytes: int | None = None
    """By the device's own word, whoever holds it: drivers and processes of nobody's included."""
    ecc_errors: int | None = None
    """Uncorrected ones of its memory since the driver was loaded."""
    pcie: PcieLink | None = None


class DeviceBackend(Protocol):
    """One kind of device. Every call reads the machine and may take tens of milliseconds: never on a loop."""

    kind: str

    def boot_id(self) -> str:
        """Equal on two slots means the same host."""
        ...

    def enumerate(self) -> tuple[Device, ...]:
        """The devices of this slot, in a stable order."""
        ...

    def held_bytes(self, pids: Iterable[int]) -> int:
        """Measured bytes of device memory that these processes hold together."""
        ...

    def processes(self) -> Mapping[str, Mapping[int, int]] | None:
        """By device, bytes by process that holds some, whoever's it is; None where devices do not tell.

        Raises Unavailable when the devices do not answer.
        """
        ...

    def readings(self) -> tuple[Reading, ...]:
        """One of each device, in the order of `enumerate`. Called from threads, once for each scrape of metrics.

        Raises Unavailable when the devices do not answer.
        """
        ...

    def links(self) -> Mapping[tuple[str, str], str]:
        """How each device reaches each other one, in the words of the vendor's tool; empty where nobody says."""
        ...

    def facts(self) -> Mapping[str, str]:
        """What capabilities and version locks depend on: `driver`, `firmware`, `runtime`, and what the kind adds."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which devices of a kind a slot shall have, as its configuration says."""

    visible: tuple[str, ...] | None = None
    """Ids as in a visibility variable; None: what the environment's own variable says, else all that are visible."""
    count: int | None = None
    """How many were allocated; None: not said."""
    listed: tuple[Device, ...] = ()
    """Devices that the configuration describes itself, for the kind that has no other word for them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of device: all that the agent has to know before it opens one."""

    name: str
    variables: tuple[str, ...]
    """By which an engine is told its devices; each is set."""
    there: Callable[[Host], str]
    """What shows that this host has some, for people; empty when nothing does. Opens nothing."""
    open: Callable[[Host, Wanted], DeviceBackend]
    """Raises InvalidInput for devices that are not there or cannot be told apart, Unavailable for a driver that does
    not answer."""
    pci_vendor: str = ""
    """As sysfs writes it; empty for what is no PCI device. Network cards are dealt over all devices of it."""


def held_by(processes: Mapping[str, Mapping[int, int]], pids: Iterable[int]) -> int:
    """Bytes that these processes hold together, out of bytes by process by device."""
    own = set(pids)
    return sum(held for by_pid in processes.values() for pid, held in by_pid.items() if pid in own)


def environment(kind: Kind, devices: Sequence[Device]) -> Mapping[str, str]:
    """The variables that show exactly `devices` to an engine."""
    return dict.fromkeys(kind.variables, ",".join(d.visible_as for d in devices))
