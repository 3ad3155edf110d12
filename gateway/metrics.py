"""Prometheus metrics of the gateway. Labels are known models only; whatever else clients invent is "other"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from relight.core.metering import SECONDS_BUCKETS

OTHER = "other"

Row = tuple[str, int, int, float]


class _Now(Collector):
    def __init__(self, rows: Callable[[], Iterable[Row]], attached: Callable[[], bool]) -> None:
        self._rows, self._attached = rows, attached

    def collect(self) -> Iterator[GaugeMetricFamily]:
        held = GaugeMetricFamily("relight_gateway_requests_held", "Requests held now", labels=["model"])
        open_ = GaugeMetricFamily("relight_gateway_requests_in_flight", "Requests at engines now", labels=["model"])
        oldest = GaugeMetricFamily(
            "relight_gateway_oldest_held_seconds", "How long the oldest held request has waited", labels=["model"],
            unit="seconds",
        )  # fmt: skip
        for model, waiting, running, waited in self._rows():
            held.add_metric([model], waiting)
            open_.add_metric([model], running)
            oldest.add_metric([model], waited)
        yield held
        yield open_
        yield oldest
        yield GaugeMetricFamily(
            "relight_gateway_attached", "1 while the controller tells this gateway its routes, else 0",
            value=float(self._attached()),
        )  # fmt: skip


class Metrics:
    """One registry per gateway. `rows` gives (model, held, in flight, seconds that the oldest one waits) of the models
    that exist, `attached` whether the controller speaks."""

    def __init__(self, rows: Callable[[], Iterable[Row]], attached: Callable[[], bool]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Now(rows, attached))
        self.requests = Counter(
            "relight_gateway_requests_total", "Requests answered", ["model", "status"], registry=self.registry
        )
        self.retries = Counter(
            "relight_gateway_retries_total", "Requests sent to another replica", ["model"], registry=self.registry
        )
        self.cancelled = Counter(
            "relight_gateway_cancelled_total", "Requests whose client hung up", ["model"], registry=self.registry
        )
        self.held_seconds = Histogram(
            "relight_gateway_hold_seconds", "Time from arrival to a replica", ["model"],
            unit="seconds", buckets=SECONDS_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self.first_byte_seconds = Histogram(
            "relight_gateway_first_byte_seconds", "Time from arrival to the first byte of the answer", ["model"],
            unit="seconds", buckets=SECONDS_BUCKETS, registry=self.registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """In the exposition format."""
        return generate_latest(self.registry)
