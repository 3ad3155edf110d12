"""Who holds which device's memory, measured. A device is offered only while every holder is explained.

Everything here reads /proc and may take tens of milliseconds: callers run it off the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from relight.agent.devices.base import Device, DeviceBackend, Reading
from relight.agent.procfs import DEVICES, INSTANCE, Procfs
from relight.core.errors import RelightError
from relight.core.records import DeviceHolder, DeviceReport
from relight.transfer.topology import Rail

UNNOTICED = 64 << 20
"""Bytes that a process of nobody's may hold of a device that is still offered: monitoring tools keep a few."""


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

    def __init__(
        self,
        backend: DeviceBackend,
        owner: str,
        procfs: Procfs | None = None,
        rails: Mapping[str, Rail] | None = None,
    ) -> None:
        """`rails` are network cards by the PCI address of their device."""
        self._backend, self._owner, self._procfs = backend, owner, procfs or Procfs()
        self._rails = rails or {}

    def tree_bytes(self, instance: str, pid: int) -> int:
        """Measured bytes of one instance's process tree."""
        tree = self._procfs.tree(instance, pid, self._owner)
        return self._backend.held_bytes(s.pid for s in tree)

    def measure(self, claims: Sequence[Claim]) -> tuple[DeviceReport, ...]:
        """Every device with its holders. A holder without a living claim has an empty instance."""
        devices = self._backend.enumerate()
        try:
            by_device = self._backend.processes()
            readings = {} if by_device is None else {r.device: r for r in self._backend.readings()}
        except RelightError as error:
            # A reader that began anew may refuse by name what fell off its bus, too.
            return tuple(self._report(d, [], f"it does not answer: {error}", None) for d in devices)
        if by_device is None:
            holders, trouble = self._by_trees(claims)
        else:
            holders, trouble = self._by_devices(claims, by_device)
        return tuple(self._report(d, holders[d.id], trouble.get(d.id, ""), readings.get(d.id)) for d in devices)

    def _report(
        self, device: Device, holders: list[DeviceHolder], trouble: str, reading: Reading | None
    ) -> DeviceReport:
        rail = self._rails.get(device.address)
        held = sum(holder.bytes for holder in holders)
        report = DeviceReport(
            id=device.id,
            kind=device.kind,
            parent=device.parent,
            total_bytes=device.total_bytes,
            # A driver counts what no process answers for, too.
            used_bytes=max(held, (reading.used_bytes or 0) if reading else 0),
            holders=tuple(holders),
            model_name=device.model_name,
            healthy=not trouble,
            reason=trouble,
            pcie=reading.pcie if reading else None,
        )
        return replace(report, nic=rail.nic, nic_distance=rail.distance.name) if rail else report

    def _by_trees(self, claims: Sequence[Claim]) -> tuple[dict[str, list[DeviceHolder]], dict[str, str]]:
        """By what processes hold of the host: an instance over several devices is counted in equal parts."""
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
        return holders, _still_held(strangers)

    def _by_devices(
        self, claims: Sequence[Claim], by_device: Mapping[str, Mapping[int, int]]
    ) -> tuple[dict[str, list[DeviceHolder]], dict[str, str]]:
        """By the devices' own word: an instance's share of each, and every process that nobody here answers for."""
        holders: dict[str, list[DeviceHolder]] = {d.id: [] for d in self._backend.enumerate()}
        explained: set[int] = set()
        for claim in claims:
            if claim.pid == 0:
                continue
            tree = self._procfs.tree(claim.instance, claim.pid, self._owner)
            own = {s.pid for s in tree}
            explained |= own
            name = next((s.name for s in tree if s.pid == claim.pid), "")
            for device, by_pid in by_device.items():
                held = sum(bytes_ for pid, bytes_ in by_pid.items() if pid in own)
                if tree and (held or device in claim.devices):
                    holders[device].append(DeviceHolder(claim.pid, name, held, claim.instance))
        marked = {stat.pid: marks for stat, marks in self._procfs.marked(self._owner)}
        strangers: dict[str, list[str]] = {}
        for device, by_pid in by_device.items():
            for pid, held in sorted(by_pid.items()):
                if pid in explained or (held < UNNOTICED and pid not in marked):
                    continue
                stat = self._procfs.stat(pid)
                name = stat.name if stat else ""
                holders[device].append(DeviceHolder(pid, name, held))
                whose = f"of {marked[pid][INSTANCE]}, which does not run here" if pid in marked else "of nobody's here"
                strangers.setdefault(device, []).append(f"process {pid} ({name or 'not seen from here'}) {whose}")
        return holders, _still_held(strangers)


def _still_held(strangers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {d: "; ".join("memory is still held by " + told for told in found) for d, found in strangers.items()}
