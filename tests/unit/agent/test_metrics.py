"""Devices of every kind are told of in one shape, and what one cannot tell has no series."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from relight.agent.devices.base import Device, Reading
from relight.agent.devices.cpu import CpuDevices
from relight.agent.devices.memory import MemoryKind, by_kind
from relight.agent.metrics import Metrics
from relight.agent.procfs import Procfs
from relight.core.errors import Unavailable
from relight.core.records import DeviceHolder, DeviceReport, InstanceReport, MemoryReading, PcieLink
from relight.core.states import State


def _device(*holders: DeviceHolder, total: int = 100) -> DeviceReport:
    return DeviceReport("d", "cpu", "d", total, sum(h.bytes for h in holders), holders)


def _instance(name: str, state: State, weights: int = 0, cache: int = 0, devices: tuple[str, ...] = ("d",)):
    memory = MemoryReading(0.0, 0, weights, cache)
    return InstanceReport(name, "default/m", 0, 1, devices, state, 0.0, "", 1, memory=memory)


def test_memory_is_told_by_what_it_is_held_for_and_adds_up_to_the_device() -> None:
    holders = (DeviceHolder(1, "p", 40, "awake"), DeviceHolder(2, "p", 7, "asleep"), DeviceHolder(3, "p", 5))
    instances = (_instance("awake", State.READY, 20, 12), _instance("asleep", State.DORMANT))
    found = by_kind(_device(*holders), instances, used_bytes=60)
    assert found == {
        MemoryKind.WEIGHTS: 20, MemoryKind.KV_CACHE: 12, MemoryKind.RUNTIME: 8, MemoryKind.GUARDIAN: 7,
        MemoryKind.ORPHAN: 5, MemoryKind.OTHER: 8, MemoryKind.FREE: 40,
    }  # fmt: skip
    assert sum(found.values()) == 100


def test_an_engine_over_two_devices_is_counted_in_equal_parts_and_never_beyond_what_it_holds() -> None:
    both = _instance("awake", State.READY, 20, 90, devices=("d", "e"))
    found = by_kind(_device(DeviceHolder(1, "p", 30, "awake")), (both,))
    assert (found[MemoryKind.WEIGHTS], found[MemoryKind.KV_CACHE], found[MemoryKind.RUNTIME]) == (10, 20, 0)
    assert found[MemoryKind.OTHER] == 0


def test_what_a_device_cannot_tell_has_no_series() -> None:
    metrics = Metrics(lambda: (Reading("d", utilisation=0.5),), lambda: {"mlx5_0": 25e9}, lambda: True)
    metrics.measured((_device(),), ())
    served, close = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://{served}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    close()
    assert 'relight_device_utilisation_ratio{device="d"} 0.5' in text
    assert 'relight_device_memory_bytes{device="d",kind="free"} 100.0' in text
    assert 'relight_card_capacity_bytes_per_second{card="mlx5_0"} 2.5e+10' in text
    assert "relight_device_temperature_celsius{" not in text
    assert "relight_device_power_watts{" not in text


def test_a_device_that_is_on_no_link_of_its_own_has_no_share_of_lanes_and_hides_nothing() -> None:
    reading = Reading("d", utilisation=0.5, pcie=PcieLink(0, 0, 0, 0))
    metrics = Metrics(lambda: (reading,), dict, lambda: True)
    metrics.measured((_device(),), ())
    text = generate_latest(metrics.registry).decode()
    assert 'relight_device_utilisation_ratio{device="d"} 0.5' in text
    assert "relight_device_pcie_lanes_ratio{" not in text


def test_devices_that_do_not_answer_hide_nothing_else() -> None:
    def unread() -> tuple[Reading, ...]:
        raise Unavailable("the driver hangs")

    metrics = Metrics(unread, dict, lambda: False)
    metrics.measured((_device(DeviceHolder(3, "p", 5)),), ())
    (orphan,) = (
        sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.labels == {"device": "d", "kind": "orphan"}
    )
    assert orphan == 5


def test_a_port_that_is_taken_is_said() -> None:
    metrics = Metrics(tuple, dict, lambda: False)
    served, close = metrics.serve("127.0.0.1", 0)
    with pytest.raises(Unavailable, match="cannot serve metrics on 127"):
        metrics.serve("127.0.0.1", int(served.rpartition(":")[2]))
    close()


def test_cores_are_as_busy_as_the_kernel_says_since_the_last_look(tmp_path: Path) -> None:
    def tell(*cores: tuple[int, int]) -> None:
        lines = [f"cpu{n} {busy} 0 0 {idle} 0 0 0 0 0 0" for n, (busy, idle) in enumerate(cores)]
        (tmp_path / "stat").write_text("\n".join(["cpu 1 1 1 1 1 1 1 1", *lines, "intr 5"]))

    tell((10, 10), (0, 0))
    devices = CpuDevices([Device("one", "cpu", "one", 1, cores=(0,)), Device("all", "cpu", "all", 1)], Procfs(tmp_path))
    assert [r.utilisation for r in devices.readings()] == [None, None]
    tell((13, 11), (0, 4))
    assert devices.readings() == (Reading("one", 0.75), Reading("all", 0.375))


def test_a_kernel_that_tells_nothing_of_its_cores_is_no_fault(tmp_path: Path) -> None:
    devices = CpuDevices([Device("one", "cpu", "one", 1)], Procfs(tmp_path))
    assert devices.readings() == (Reading("one"),)
