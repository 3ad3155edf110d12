"""The control plane itself: passes, store, epochs, who lags behind, broken invariants."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from relight.controller.observe.look import Look
from relight.core.invariants import NAMES
from relight.core.metering import SECONDS_BUCKETS


class ControlMetrics:
    """Its methods are the hooks of the loop, of the store and of the sender of traces."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._epoch = Gauge(
            "relight_epoch", "Epoch of the lease under which assignments are written", registry=registry
        )
        self._behind = Gauge(
            "relight_slots_behind", "Slots that have not acted on their newest assignment yet", registry=registry
        )
        self._gateways = Gauge(
            "relight_gateways", "Gateways by whether they route by the newest table", ["current"], registry=registry
        )
        self._passes = Histogram(
            "relight_reconcile_seconds",
            "Passes of the reconcile loop: ok, moved (the state moved under it), failed",
            ["outcome"],
            unit="seconds",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._store = Histogram(
            "relight_store_seconds",
            "Calls of the store by how they ended: ok, conflict, failed",
            ["operation", "outcome"],
            unit="seconds",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._pushed = Counter(
            "relight_trace_exports_total", "Starts sent to the collector of traces", ["outcome"], registry=registry
        )
        self._broken = Counter(
            "relight_invariant_violations_total", "Breaches of core/invariants.py", ["rule"], registry=registry
        )
        for rule in NAMES:
            # A series that is there from the start can be alerted on.
            self._broken.labels(rule)

    def seen(self, look: Look) -> None:
        """Takes in what a reconcile pass saw."""
        self._epoch.set(look.snapshot.epoch)
        self._behind.set(look.slots_behind)
        self._gateways.labels("true").set(look.gateways - look.gateways_behind)
        self._gateways.labels("false").set(look.gateways_behind)

    def broken(self, rule: str, breach: str) -> None:
        """Counts one breach of an invariant."""
        self._broken.labels(rule).inc()

    def passed(self, outcome: str, seconds: float) -> None:
        """Takes in how a pass ended, and how long it took."""
        self._passes.labels(outcome).observe(seconds)

    def stored(self, operation: str, outcome: str, seconds: float) -> None:
        """Takes in one call of the store."""
        self._store.labels(operation, outcome).observe(seconds)

    def pushed(self, outcome: str) -> None:
        """Counts one start that was sent, failed to be, or was dropped."""
        self._pushed.labels(outcome).inc()
