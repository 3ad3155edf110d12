"""NVIDIA's devices, parts of split ones (MIG) among them, by the driver's own management library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from relight.agent.devices import nvml as library
from relight.agent.devices.base import Device, Kind, Reading, Wanted, held_by
from relight.agent.devices.host import Host
from relight.agent.devices.visible import Seen, entries, must_equal, select
from relight.agent.procfs import Procfs
from relight.core.errors import Unavailable
from relight.core.records import PcieLink
from relight.transfer.topology import nvlink_matrix

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
GIVEN = "NVIDIA_VISIBLE_DEVICES"
"""Set by whoever gave devices to the container: their ids, or a word such as `all`."""
DOES_NOT_TELL = (
    "NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_INVALID_ARGUMENT", "NVML_ERROR_NO_PERMISSION", "NVML_ERROR_NOT_FOUND",
    "NVML_ERROR_FUNCTION_NOT_FOUND", "NVML_ERROR_NO_DATA",
)  # fmt: skip
"""Errors of a device that has no such sensor, of a part of one, or of a caller who may not ask: nothing is broken."""


@dataclass(frozen=True, slots=True)
class _Found:
    seen: Seen
    total_bytes: int
    address: str


class NvidiaDevices:
    """The selected devices. They are looked up anew by each call: a reset changes handles, and never ids."""

    kind = "nvidia"

    def __init__(self, nvml: Any, host: Host, wanted: Wanted) -> None:
        """`nvml` is the module pynvml, initialised. Raises InvalidInput for devices that cannot be told or are not
        those allocated, Unavailable when the driver does not answer."""
        self._nvml, self._procfs, self._host = nvml, Procfs(host.procfs), host
        there = {found.seen.id: found for found in self._all()}
        order = host.environ.get(ORDER, "FASTEST_FIRST")
        told = entries(host.environ.get(VISIBLE)) if wanted.visible is None else wanted.visible
        seen = [found.seen for found in there.values()]
        chosen = select(seen, told, VISIBLE, counts_by_speed=order != "PCI_BUS_ID")
        must_equal(chosen, _given(host), wanted.count, GIVEN)
        self._indices = {found.seen.index: found.seen.id for found in there.values() if found.seen.index >= 0}
        self._devices = tuple(
            Device(
                s.id, self.kind, s.parent or s.id, there[s.id].total_bytes, s.model,
                address=there[s.parent or s.id].address, visible_as=s.id,
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
        found: dict[str, dict[int, int]] = {}
        for device in self._devices:
            handle = self._handle(device.id)
            running = self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
            found[device.id] = {process.pid: process.usedGpuMemory or 0 for process in running}
        return found

    def readings(self) -> tuple[Reading, ...]:
        return tuple(self._reading(device) for device in self._devices)

    def links(self) -> Mapping[tuple[str, str], str]:
        own = {device.id for device in self._devices}
        try:
            matrix = nvlink_matrix(self._nvml)
        except self._nvml.NVMLError as error:
            raise Unavailable(f"NVIDIA's driver does not tell of links: {error}") from error
        named = {(self._indices[a], self._indices[b]): link for (a, b), link in matrix.items()}
        return {pair: link for pair, link in named.items() if own.issuperset(pair)}

    def facts(self) -> Mapping[str, str]:
        nvml = self._nvml
        cuda = self._ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
        first = self._devices[0].parent
        peer = (self._host.sysfs / "module/nvidia_peermem").is_dir()
        return {
            "driver": str(self._ask(nvml.nvmlSystemGetDriverVersion) or ""),
            "runtime": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            "firmware": str(self._ask(nvml.nvmlDeviceGetVbiosVersion, self._handle(first)) or ""),
            "peer_memory": "nvidia_peermem" if peer else "",
        }

    def _reading(self, device: Device) -> Reading:
        nvml, handle = self._nvml, self._handle(device.id)
        # A part has memory and processes of its own; sensors and the link to the host are the whole device's.
        whole = self._handle(device.parent)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = self._ask(nvml.nvmlDeviceGetPowerUsage, whole)
        return Reading(
            device.id,
            busy.gpu / 100 if busy else None,
            self._number(nvml.nvmlDeviceGetTemperature, whole, nvml.NVML_TEMPERATURE_GPU),
            power / 1000 if power is not None else None,
            memory.used if memory else None,
            self._ask(
                nvml.nvmlDeviceGetTotalEccErrors, whole, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            self._link(whole),
        )

    def _number(self, function: Callable[..., Any], *arguments: Any) -> float | None:
        found = self._ask(function, *arguments)
        return None if found is None else float(found)

    def _link(self, handle: Any) -> PcieLink | None:
        nvml = self._nvml
        numbers = [
            self._ask(function, handle)
            for function in (
                nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth,
                nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth,
            )
        ]  # fmt: skip
        return None if None in numbers else PcieLink(*numbers)

    def _handle(self, id_: str) -> Any:
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(id_)
        except self._nvml.NVMLError as error:
            raise Unavailable(f"device {id_} does not answer: {error}") from error

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None where this device cannot tell. Raises Unavailable."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if error.value in {getattr(self._nvml, name) for name in DOES_NOT_TELL}:
                return None
            raise Unavailable(f"NVIDIA's driver does not answer: {error}") from error

    def _all(self) -> Iterable[_Found]:
        nvml = self._nvml
        for index in range(self._ask(nvml.nvmlDeviceGetCount) or 0):
            handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                continue
            asked = (
                nvml.nvmlDeviceGetUUID,
                nvml.nvmlDeviceGetName,
                nvml.nvmlDeviceGetPciInfo,
                nvml.nvmlDeviceGetMemoryInfo,
            )
            told = [self._ask(call, handle) for call in asked]
            if None in told:
                # It fell off its bus since it was counted.
                continue
            (id_, model), address = told[:2], told[2].busId[-12:].lower()
            yield _Found(Seen(index, id_, model), told[3].total, address)
            mode = self._ask(nvml.nvmlDeviceGetMigMode, handle)
            if not mode or not mode[0]:
                continue
            for part in range(self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
                own = self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, part)
                if own is None:
                    continue
                old = [
                    self._ask(f, own)
                    for f in (nvml.nvmlDeviceGetGpuInstanceId, nvml.nvmlDeviceGetComputeInstanceId)
                ]  # fmt: skip
                old_id = f"MIG-{id_}/{old[0]}/{old[1]}" if None not in old else ""
                seen = Seen(-1, nvml.nvmlDeviceGetUUID(own), nvml.nvmlDeviceGetName(own), id_, old_id)
                yield _Found(seen, nvml.nvmlDeviceGetMemoryInfo(own).total, address)


def _given(host: Host) -> tuple[str, ...] | None:
    """The ids that the container was given; None where they are not told as ids."""
    found = entries(host.environ.get(GIVEN))
    return found if found and all(entry.startswith(("GPU-", "MIG-")) for entry in found) else None


def _there(host: Host) -> str:
    control = host.devfs / "nvidiactl"
    return f"{control} is there" if control.exists() else ""


def _open(host: Host, wanted: Wanted) -> NvidiaDevices:
    return NvidiaDevices(library.load(), host, wanted)


KIND = Kind("nvidia", (VISIBLE,), _there, _open, pci_vendor="0x10de")
