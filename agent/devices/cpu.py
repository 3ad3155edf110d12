"""CPU cores with a memory budget as devices; memory is the proportional set size of process trees."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence

from relight.agent.devices.base import Device, Kind, Reading, Wanted
from relight.agent.devices.host import Host
from relight.agent.procfs import Procfs
from relight.core.errors import FieldError, InvalidInput


class CpuDevices:
    """The configured devices. Several slots of one machine may each own some of its cores."""

    kind = "cpu"

    def __init__(self, devices: Sequence[Device], procfs: Procfs | None = None) -> None:
        """Raises InvalidInput for repeated ids, cores that this process may not use, or no memory."""
        self._devices, self._procfs = tuple(devices), procfs or Procfs()
        allowed = os.sched_getaffinity(0)
        errors = []
        for index, device in enumerate(self._devices):
            where = f"devices.{index}"
            if device.id in [d.id for d in self._devices[:index]]:
                errors.append(FieldError(f"{where}.id", "an id used once", device.id))
            outside = sorted(set(device.cores) - allowed)
            if outside:
                expected = f"cores among {sorted(allowed)}"
                errors.append(FieldError(f"{where}.cores", expected, f"{outside}"))
            if device.total_bytes <= 0:
                errors.append(FieldError(f"{where}.memory_bytes", "more than 0", str(device.total_bytes)))
        if errors:
            raise InvalidInput("bad cpu devices", errors)
        self._reading = threading.Lock()
        self._ticks = self._procfs.core_ticks()

    def boot_id(self) -> str:
        return self._procfs.boot_id()

    def enumerate(self) -> tuple[Device, ...]:
        return self._devices

    def held_bytes(self, pids: Iterable[int]) -> int:
        return sum(self._procfs.pss(pid) for pid in pids)

    def processes(self) -> None:
        """Memory of a host has no owner but the processes' own counts."""
        return

    def readings(self) -> tuple[Reading, ...]:
        """How busy its cores (all of them, where it is bound to none) were since the last call; no more is known."""
        with self._reading:
            before, self._ticks = self._ticks, self._procfs.core_ticks()
            now = self._ticks
        return tuple(Reading(d.id, _busy_share(before, now, d.cores or tuple(now))) for d in self._devices)

    def links(self) -> Mapping[tuple[str, str], str]:
        return {}

    def facts(self) -> Mapping[str, str]:
        return {}


def _busy_share(
    before: Mapping[int, tuple[int, int]], now: Mapping[int, tuple[int, int]], cores: Sequence[int]
) -> float | None:
    """None when no time has passed."""
    both = [core for core in cores if core in before and core in now]
    busy = sum(now[core][0] - before[core][0] for core in both)
    whole = sum(now[core][1] - before[core][1] for core in both)
    return min(1.0, max(0.0, busy / whole)) if whole > 0 else None


def _there(host: Host) -> str:
    """Every host has some, so none is taken for want of anything else."""
    return ""


def _open(host: Host, wanted: Wanted) -> CpuDevices:
    if not wanted.listed:
        expected = "a list of them, each with `id` and `memory_bytes`: how cores are divided nobody else can say"
        raise InvalidInput("no cpu devices", [FieldError("devices", expected, "kind: cpu")])
    return CpuDevices(wanted.listed, Procfs(host.procfs))


KIND = Kind("cpu", (), _there, _open)
