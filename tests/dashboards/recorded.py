"""Accelerators and cards as the agent's own exposition tells of them, from readings that others published.

    python -m tests.dashboards.recorded > tests/dashboards/recorded.prom

Readings (temperature, power, utilisation, memory in use and in all, uncorrected errors; lanes of the P800 are those of
a "PCIe Gen5 x16" that reports of it name):
    gpu0, gpu1   NVIDIA H100 80GB HBM3: the nvidia-smi table in https://github.com/wilicc/gpu-burn/issues/114
    xpu0, xpu1   Kunlun P800 OAM: `xpu_smi -m` in https://github.com/xyDong0223/infer-forge-harness,
                 tests/unit/test_memory_budget.py
    mlx5_0, _1   RDMA cards of an H20: ibstatus in https://github.com/deepseek-ai/DeepEP/issues/17
Holders of memory are made up: an engine awake, a guardian and an orphan, within what the readings leave room for.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import generate_latest

from relight.agent.devices.base import Reading
from relight.agent.metrics import Metrics
from relight.core.records import DeviceHolder, DeviceReport, InstanceReport, MemoryReading, PcieLink
from relight.core.states import State

FILE = Path(__file__).with_suffix(".prom")
MIB = 1 << 20
H100, P800 = "NVIDIA H100 80GB HBM3", "P800 OAM"

READINGS = (
    Reading("gpu0", 0.0, 39.0, 145.0, 72790 * MIB, 0),
    Reading("gpu1", 0.04, 32.0, 140.0, 72790 * MIB, 0),
    Reading("xpu0", 0.0, 36.0, 86.0, 90440 * MIB, pcie=PcieLink(5, 16, 5, 16)),
    Reading("xpu1", 0.0, 39.0, 86.0, 90440 * MIB, pcie=PcieLink(5, 16, 5, 16)),
)
CARDS = {"mlx5_0": 200e9 / 8, "mlx5_1": 400e9 / 8}
_HOLDERS = {
    "gpu0": (DeviceHolder(10, "VLLM::Worker", 72000 * MIB, "i-awake"),),
    "gpu1": (DeviceHolder(11, "VLLM::Worker", 2400 * MIB, "i-asleep"), DeviceHolder(12, "VLLM::Worker", 69000 * MIB)),
    "xpu0": (DeviceHolder(13, "python", 90000 * MIB, "i-xpu"),),
    "xpu1": (DeviceHolder(14, "python", 90000 * MIB, "i-xpu"),),
}


def _device(name: str) -> DeviceReport:
    gpu = name.startswith("gpu")
    holders = _HOLDERS[name]
    return DeviceReport(
        id=name,
        kind="nvidia" if gpu else "kunlun",
        parent=name,
        total_bytes=(81559 if gpu else 98304) * MIB,
        used_bytes=sum(h.bytes for h in holders),
        holders=holders,
        model_name=H100 if gpu else P800,
        healthy=all(h.instance for h in holders),
    )


def _instance(name: str, devices: tuple[str, ...], state: State, weights: int, cache: int) -> InstanceReport:
    memory = MemoryReading(0.0, 0, weights * MIB, cache * MIB)
    return InstanceReport(name, "default/m", 0, 1, devices, state, 0.0, "", 1, memory=memory)


def exposition() -> str:
    """What an agent with these devices serves."""
    metrics = Metrics(lambda: READINGS, lambda: CARDS, lambda: True)
    instances = (
        _instance("i-awake", ("gpu0",), State.READY, 16000, 50000),
        _instance("i-asleep", ("gpu1",), State.DORMANT, 0, 0),
        _instance("i-xpu", ("xpu0", "xpu1"), State.READY, 64000, 100000),
    )
    metrics.measured(tuple(_device(reading.device) for reading in READINGS), instances)
    return generate_latest(metrics.registry).decode()


if __name__ == "__main__":
    print(exposition(), end="")
