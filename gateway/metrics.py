"""Prometheus metrics of the gateway. Labels are known models only; whatever else clients invent is "other"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

OTHER = "other"
_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

Row = tuple[str, int, int]


class _Now(Collector):
    def __init__(self, rows: Callable[[], Iterable[Row]]) -> None:
        self._rows = rows

    def collect(self) -> Iterator[GaugeMetricFamily]:
        held = GaugeMetricFamily("relight_gateway_requests_held", "Requests held now", labels=["model"])
        open_ = GaugeMetricFamily("relight_gateway_requests_in_flight", "Requests at engines now", labels=["model"])
        for model, waiting, running in self._rows():
            held.add_metric([model], waiting)
            open_.add_metric([model], running)
        yield held
        yield open_


class Metrics:
    """One registry per gateway. `rows` gives (model, held, in flight) of the models that exist."""

    def __init__(self, rows: Callable[[], Iterable[Row]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(rows))
        self.requests = Counter(
            "relight_gateway_requests_total", "Requests answered", ["model", "status"], registry=self._registry
        )
        self.retries = Counter(
            "relight_gateway_retries_total", "Requests sent to another replica", ["model"], registry=self._registry
        )
        self.cancelled = Counter(
            "relight_gateway_cancelled_total", "Requests whose client hung up", ["model"], registry=self._registry
        )
        self.held_seconds = Histogram(
            "relight_gateway_hold_seconds", "Time from arrival to a replica", ["model"],
            buckets=_BUCKETS, registry=self._registry,
        )  # fmt: skip
        self.first_byte_seconds = Histogram(
            "relight_gateway_first_byte_seconds", "Time from arrival to the first byte of the answer", ["model"],
            buckets=_BUCKETS, registry=self._registry,
        )  # fmt: skip

    def text(self) -> bytes:
        """In the exposition format."""
        return generate_latest(self._registry)
