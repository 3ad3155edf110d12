"""Prometheus metrics of the controller. Labels are models, modes, rungs, states, outcomes and slots: never another id.

What is gone from the fleet is gone from the gauges. docs/metrics.md lists them all.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder

from relight.controller.flight.timeline import Timeline
from relight.controller.metrics.control import ControlMetrics
from relight.controller.metrics.models import ModelMetrics
from relight.controller.metrics.slots import SlotMetrics
from relight.controller.metrics.starts import StartMetrics
from relight.controller.observe.look import Look


class Metrics:
    """One registry per process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.control = ControlMetrics(self.registry)
        self._models = ModelMetrics(self.registry)
        self._slots = SlotMetrics(self.registry)
        self._starts = StartMetrics(self.registry)

    def seen(self, look: Look) -> None:
        """Takes in what a reconcile pass saw."""
        self.control.seen(look)
        self._models.seen(look)
        self._slots.seen(look.snapshot)
        self._starts.seen(look)

    def started(self, timeline: Timeline) -> None:
        """Takes in one finished start."""
        self._starts.started(timeline)

    def text(self) -> bytes:
        """In Prometheus' own format."""
        return generate_latest(self.registry)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """In the format that the header `accept` asks for, and its content type; OpenMetrics alone has exemplars."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type
