"""NVIDIA's management library as drivers of recorded machines answer: values of nvidia-smi, errors of their own kinds.

H100 80GB HBM3 (https://github.com/wilicc/gpu-burn/issues/114), A100-SXM4-40GB in parts of 1g.5gb (nvidia-smi -L in
issues of https://github.com/NVIDIA/k8s-device-plugin). Only what is asked is there: a call that is not recorded is one
that the driver does not support, as on older ones.
"""

# ruff: noqa: N802 - the names are the library's
from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20


@dataclass
class Part:
    """A device in itself or a part of one (MIG): its memory and who holds it."""

    uuid: str
    name: str
    total_mib: int
    used_mib: int = 0
    processes: dict[int, int | None] = field(default_factory=dict)
    """MiB by process; None where the driver does not tell."""
    busy: int | None = None
    instance: int = 0


@dataclass
class Gpu(Part):
    """A whole device."""

    bus: str = "00000000:1B:00.0"
    celsius: int | None = None
    milliwatts: int | None = None
    ecc: int | None = None
    link: tuple[int, int, int, int] | None = None
    mig: bool = False
    parts: list[Part] = field(default_factory=list)


class RecordedError(Exception):
    """NVMLError, with the library's number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class RecordedNvml:
    """Stands in for the module pynvml of an initialised driver. `lost` makes every device fall off its bus."""

    NVMLError = RecordedError
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 2, 3, 4
    NVML_ERROR_NOT_FOUND, NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_NO_DATA = 6, 13, 21
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_TEMPERATURE_GPU, NVML_VOLATILE_ECC, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 0, 1
    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0

    def __init__(self, gpus: list[Gpu], driver: str = "550.54.15", nvlinks: bool = True) -> None:
        self.gpus, self.driver, self.nvlinks, self.lost = gpus, driver, nvlinks, False

    def __getattr__(self, name: str) -> Any:
        def unsupported(*_: Any) -> Any:
            raise RecordedError(self.NVML_ERROR_NOT_SUPPORTED)

        if name.startswith("nvml"):
            return unsupported
        raise AttributeError(name)

    def _tell(self, value: Any) -> Any:
        if self.lost:
            raise RecordedError(self.NVML_ERROR_GPU_IS_LOST)
        if value is None:
            raise RecordedError(self.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self._tell(self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Part:
        every = [part for gpu in self.gpus for part in (gpu, *gpu.parts)]
        return self._tell(next((part for part in every if part.uuid == uuid), None))

    def nvmlDeviceGetUUID(self, part: Part) -> str:
        return part.uuid

    def nvmlDeviceGetName(self, part: Part) -> str:
        return part.name

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(busId=gpu.bus)

    def nvmlDeviceGetMemoryInfo(self, part: Part) -> Any:
        return self._tell(SimpleNamespace(total=part.total_mib * MIB, used=part.used_mib * MIB))

    def nvmlDeviceGetUtilizationRates(self, part: Part) -> Any:
        return SimpleNamespace(gpu=self._tell(part.busy))

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        return self._tell(gpu.celsius)

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:
        return self._tell(gpu.milliwatts)

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        assert (kind, counter) == (1, 0)
        return self._tell(gpu.ecc)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu: Gpu) -> int:
        return self._tell(gpu.link and gpu.link[0])

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: Gpu) -> int:
        return self._tell(gpu.link and gpu.link[1])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: Gpu) -> int:
        return self._tell(gpu.link and gpu.link[2])

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: Gpu) -> int:
        return self._tell(gpu.link and gpu.link[3])

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        return [int(gpu.mig), int(gpu.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Part:
        if index >= len(gpu.parts):
            raise RecordedError(self.NVML_ERROR_NOT_FOUND)
        return gpu.parts[index]

    def nvmlDeviceGetGpuInstanceId(self, part: Part) -> int:
        return part.instance

    def nvmlDeviceGetComputeInstanceId(self, part: Part) -> int:
        return 0

    def nvmlDeviceGetComputeRunningProcesses(self, part: Part) -> list[Any]:
        held = self._tell(part.processes)
        return [SimpleNamespace(pid=p, usedGpuMemory=None if m is None else m * MIB) for p, m in held.items()]

    def nvmlDeviceGetP2PStatus(self, a: Gpu, b: Gpu, index: int) -> int:
        assert index == self.NVML_P2P_CAPS_INDEX_NVLINK
        return self.NVML_P2P_STATUS_OK if self.nvlinks else 4


def h100(index: int, **told: Any) -> Gpu:
    """One of eight on a board, as its nvidia-smi shows it at rest."""
    known = {
        "celsius": 39, "milliwatts": 145_000, "ecc": 0, "busy": 0, "link": (5, 16, 5, 16),
        "bus": f"00000000:{index + 1:X}3:00.0", **told,
    }  # fmt: skip
    return Gpu(f"GPU-{index}c5fe5e8-6b3d-4d6a-9a0e-2f4b8a0c1d2e", "NVIDIA H100 80GB HBM3", 81559, **known)


def split_a100(parts: int = 7) -> Gpu:
    """An A100 in parts of 1g.5gb: sensors are the whole device's, a part has memory and processes alone."""
    made = [
        Part(f"MIG-{n}c5876e6-d3b9-524a-9eb4-664fcfbd4de2", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864, instance=7 + n)
        for n in range(parts)
    ]
    return Gpu(
        "GPU-c9297a60-5079-9a56-b935-51e08dc0f65e", "NVIDIA A100-SXM4-40GB", 40960, mig=True, parts=made,
        celsius=31, milliwatts=55_000, ecc=0, link=(4, 16, 4, 16), bus="00000000:B7:00.0",
    )  # fmt: skip
