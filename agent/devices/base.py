"""What the agent asks of a kind of device: what there is, what processes hold of it, what it can do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this slot. `parent` owns the memory and carries the transition lock."""

    id: str
    kind: str
    parent: str
    total_bytes: int
    model_name: str = ""
    cores: tuple[int, ...] = ()
    """CPU cores to bind to; empty where that has no meaning or is left to the system."""


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

    def readings(self) -> tuple[Reading, ...]:
        """One of each device, in the order of `enumerate`. Called from threads, once for each scrape of metrics.

        Raises Unavailable when the devices do not answer.
        """
        ...

    def capabilities(self) -> Mapping[str, str]:
        """What this kind can do on this machine, probed: name -> value."""
        ...
