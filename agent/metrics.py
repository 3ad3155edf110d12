"""Prometheus metrics of the agent: its devices in one shape for all kinds, and how long transitions took.

Devices are read when somebody asks. docs/metrics.md lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from relight.agent.devices.base import Reading
from relight.agent.devices.memory import by_kind
from relight.core.errors import RelightError, Unavailable
from relight.core.logs import get_logger
from relight.core.metering import SECONDS_BUCKETS
from relight.core.records import DeviceReport, InstanceReport

_log = get_logger("agent.metrics")
Seen = tuple[tuple[DeviceReport, ...], tuple[InstanceReport, ...]]
Read = Callable[[], tuple[Reading, ...]]
Cards = Callable[[], Mapping[str, float]]
"""Bytes a second that the link of each network card carries, by the card's name."""


def _lanes(reading: Reading) -> float | None:
    pcie = reading.pcie
    return pcie.width / pcie.best_width if pcie and pcie.best_width else None


class _Devices(Collector):
    """`seen` is replaced whole by the agent's loop, and read here by the server's threads."""

    def __init__(self, read: Read, cards: Cards, attached: Callable[[], bool]) -> None:
        self._read, self._cards, self._attached = read, cards, attached
        self.seen: Seen = ((), ())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        devices, instances = self.seen
        readings = {reading.device: reading for reading in self._readings()}
        device = ["device"]
        info = GaugeMetricFamily(
            "relight_device_info", "1 for each device: what it is", labels=["device", "kind", "product"]
        )
        memory = GaugeMetricFamily(
            "relight_device_memory_bytes",
            "The device's memory by what it is held for: weights, kv_cache, runtime, guardian, orphan (processes of"
            " instances that do not run here), other (by the device's own word), free",
            labels=["device", "kind"],
            unit="bytes",
        )
        used = GaugeMetricFamily(
            "relight_device_utilisation_ratio", "Share of time that the device was busy", labels=device, unit="ratio"
        )
        temperature = GaugeMetricFamily(
            "relight_device_temperature_celsius",
            "Temperature, where the device tells it",
            labels=device,
            unit="celsius",
        )
        power = GaugeMetricFamily(
            "relight_device_power_watts", "Power drawn, where the device tells it", labels=device, unit="watts"
        )
        ecc = GaugeMetricFamily(
            "relight_device_ecc_errors",
            "Uncorrected errors of the device's memory since its driver was loaded, where the device tells them",
            labels=device,
        )
        link = GaugeMetricFamily(
            "relight_device_pcie_lanes_ratio",
            "PCIe lanes in use of those that the device could use, where it is told",
            labels=device,
            unit="ratio",
        )
        for found in devices:
            info.add_metric([found.id, found.kind, found.model_name], 1)
            reading = readings.get(found.id, Reading(found.id))
            for kind, held in by_kind(found, instances, reading.used_bytes).items():
                memory.add_metric([found.id, kind], held)
            for family, value in (
                (used, reading.utilisation),
                (temperature, reading.temperature_celsius),
                (power, reading.power_watts),
                (ecc, reading.ecc_errors),
                (link, _lanes(reading)),
            ):
                if value is not None:
                    family.add_metric([found.id], value)
        yield from (info, memory, used, temperature, power, ecc, link)
        capacity = GaugeMetricFamily(
            "relight_card_capacity_bytes_per_second",
            "What the links of the RDMA cards that weights travel by can carry",
            labels=["card"],
            unit="bytes_per_second",
        )
        for name, rate in self._cards().items():
            capacity.add_metric([name], rate)
        yield capacity
        yield GaugeMetricFamily(
            "relight_agent_attached",
            "1 while the controller speaks to this agent, else 0",
            value=float(self._attached()),
        )

    def _readings(self) -> tuple[Reading, ...]:
        try:
            return self._read()
        except RelightError as error:
            # What is known without the devices is worth a scrape all the same.
            _log.warning("devices.unread", reason=str(error))
            return ()


class Metrics:
    """One registry per agent. `read` and `cards` look at the machine, `attached` says whether the controller speaks."""

    def __init__(self, read: Read, cards: Cards, attached: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self._devices = _Devices(read, cards, attached)
        self.registry.register(self._devices)
        self._transitions = Histogram(
            "relight_agent_transition_seconds",
            "Transitions of instances by what they are and how they ended: ok, failed, cut",
            ["kind", "outcome"],
            unit="seconds",
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )

    def measured(self, devices: tuple[DeviceReport, ...], instances: tuple[InstanceReport, ...]) -> None:
        """Takes in the newest measurement, and the instances as they stood then."""
        self._devices.seen = (devices, instances)

    def transitioned(self, kind: str, outcome: str, seconds: float) -> None:
        """Takes in one transition that is over."""
        self._transitions.labels(kind, outcome).observe(seconds)

    def serve(self, host: str, port: int) -> tuple[str, Callable[[], None]]:
        """Answers on `host` in threads of its own. Returns `host:port` and what ends it. Raises Unavailable."""
        try:
            server, thread = start_http_server(port, host, self.registry)
        except OSError as error:
            raise Unavailable(f"cannot serve metrics on {host}:{port}: {error.strerror}") from error

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return f"{host}:{server.server_port}", close
