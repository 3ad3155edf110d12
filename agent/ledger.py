"""Who holds which device's memory, measured. A device is offered only while every holder is explained.

Everything here reads /proc and may take tens of milliseconds: callers run it off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relight.agent.devices.base import DeviceBackend
from relight.agent.procfs import DEVICES, INSTANCE, Procfs
from relight.core.records import DeviceHolder, DeviceReport


@dataclass(frozen=True, slots=True)
class Claim:
    """What the agent knows of an instance: its main process (0: none yet) and devices.

    `unmapped_bytes` are segments that it owns and no process maps.
    """

    instance: str
    pid: int
    devices: tuple[str, ...]
    unmapped_bytes: int = 0


class Ledger:
    """Measures by process tree; `owner` marks the processes that this slot answers for."""

    def __init__(self, backend: DeviceBackend, owner: str, procfs: Procfs | None = None) -> None:
        self._backend, self._owner, self._procfs = backend, owner, procfs or Procfs()

    def tree_bytes(self, instance: str, pid: int) -> int:
        """Measured bytes of one instance's process tree."""
        tree = self._procfs.tree(instance, pid, self._owner)
        return self._backend.held_bytes(s.pid for s in tree)

    def measure(self, claims: Sequence[Claim]) -> tuple[DeviceReport, ...]:
        """Every device with its holders. A holder without a living claim has an empty instance.

        An instance over several devices is counted in equal parts.
        """
        holders: dict[str, list[DeviceHolder]] = {d.id: [] for d in self._backend.enumerate()}
        explained: set[int] = set()
        for claim in claims:
            if claim.pid == 0:
                continue
            tree = self._procfs.tree(claim.instance, claim.pid, self._owner)
            explained.update(s.pid for s in tree)
            held = self._backend.held_bytes(s.pid for s in tree) + claim.unmapped_bytes
            name = next((s.name for s in tree if s.pid == claim.pid), "")
            for device in claim.devices:
                if device in holders and tree:
                    part = held // len(claim.devices)
                    holders[device].append(DeviceHolder(claim.pid, name, part, claim.instance))
        strangers: dict[str, list[str]] = {}
        living = {claim.instance for claim in claims}
        for stat, marks in self._procfs.marked(self._owner):
            if stat.pid in explained or marks[INSTANCE] in living:
                continue
            devices = [d for d in marks.get(DEVICES, "").split(",") if d in holders] or list(holders)
            held = self._backend.held_bytes([stat.pid]) // len(devices)
            for device in devices:
                holders[device].append(DeviceHolder(stat.pid, stat.name, held))
                told = f"process {stat.pid} ({stat.name}) of {marks[INSTANCE]}, which does not run here"
                strangers.setdefault(device, []).append(told)
        return tuple(
            DeviceReport(
                id=device.id,
                kind=device.kind,
                parent=device.parent,
                total_bytes=device.total_bytes,
                used_bytes=sum(h.bytes for h in holders[device.id]),
                holders=tuple(holders[device.id]),
                model_name=device.model_name,
                healthy=device.id not in strangers,
                reason="; ".join(["memory is still held by " + s for s in strangers.get(device.id, [])]),
            )
            for device in self._backend.enumerate()
        )
