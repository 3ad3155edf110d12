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

    def capabilities(self) -> Mapping[str, str]:
        """What this kind can do on this machine, probed: name -> value."""
        ...
