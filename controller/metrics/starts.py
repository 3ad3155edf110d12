"""Starts and wakes: where their time went, against what was predicted; rungs, and the bytes that came by them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from relight.controller.flight.timeline import GATEWAY, Timeline, coverage
from relight.controller.flight.traces import trace_of
from relight.controller.observe.look import Look
from relight.core.metering import SECONDS_BUCKETS

# The cold start of a large model takes longer than any hop.
_START_BUCKETS = (*SECONDS_BUCKETS, 900.0)
_ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)


class StartMetrics:
    """`started` hears of each finished start once; gauges tell of each model's last one while the model is there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._starts = Histogram(
            "relight_start_seconds",
            "From assignment to ready",
            ["model", "mode", "way", "outcome"],
            unit="seconds",
            buckets=_START_BUCKETS,
            registry=registry,
        )
        self._phases = Histogram(
            "relight_start_phase_seconds",
            "Each phase of a start",
            ["mode", "phase"],
            unit="seconds",
            buckets=_START_BUCKETS,
            registry=registry,
        )
        self._errors = Histogram(
            "relight_start_prediction_error_ratio",
            "By which share of a good start's seconds its prediction was wrong",
            ["mode", "way"],
            unit="ratio",
            buckets=_ERROR_BUCKETS,
            registry=registry,
        )
        self._accounted = Gauge(
            "relight_start_accounted_ratio",
            "Share of the last start's wall time that lies in named phases",
            ["model"],
            unit="ratio",
            registry=registry,
        )
        self._last = Gauge(
            "relight_last_start_seconds",
            "The last good start from assignment to ready: measured, and as it was predicted",
            ["model", "figure"],
            unit="seconds",
            registry=registry,
        )
        self._last_phases = Gauge(
            "relight_last_start_phase_seconds",
            "The phases of the last good start",
            ["model", "phase"],
            unit="seconds",
            registry=registry,
        )
        self._rungs = Counter(
            "relight_rungs_total",
            "Rungs that were tried; `cause` says whose fault a failed one was, and is empty for the others",
            ["model", "rung", "outcome", "cause"],
            registry=registry,
        )
        self._slow = Counter(
            "relight_slow_path_total",
            "Wakes whose weights came by a slower path than was expected",
            ["model", "taken", "expected"],
            registry=registry,
        )
        self._moved = Counter(
            "relight_transfer_bytes_total",
            "Bytes of weights that good rungs brought",
            ["model", "rung"],
            unit="bytes",
            registry=registry,
        )
        self._passed_on = Counter(
            "relight_transfer_passed_on_bytes_total",
            "Of those, bytes that came from instances which were being filled themselves",
            ["model", "rung"],
            unit="bytes",
            registry=registry,
        )
        self._moving = Histogram(
            "relight_transfer_seconds",
            "Seconds that good rungs took, proof included",
            ["model", "rung"],
            unit="seconds",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._rates = Gauge(
            "relight_transfer_expected_bytes_per_second",
            "What planning counts on by a rung: the median of what was measured, else a cautious guess",
            ["rung"],
            unit="bytes_per_second",
            registry=registry,
        )
        self._newest: dict[str, Timeline] = {}

    def seen(self, look: Look) -> None:
        """Takes in what a reconcile pass saw."""
        for rung, rate in look.rates.items():
            self._rates.labels(rung).set(rate)
        models = {view.spec.key for view in look.snapshot.models}
        self._newest = {model: timeline for model, timeline in self._newest.items() if model in models}
        self._show()

    def _show(self) -> None:
        for gauge in (self._accounted, self._last, self._last_phases):
            gauge.clear()
        for model, timeline in self._newest.items():
            self._accounted.labels(model).set(coverage(timeline.phases, timeline.begun_at, timeline.ended_at))
            self._last.labels(model, "measured").set(timeline.seconds)
            if timeline.predicted_seconds is not None:
                self._last.labels(model, "predicted").set(timeline.predicted_seconds)
            for name in {phase.name for phase in timeline.phases if phase.detail != GATEWAY}:
                took = sum(p.end - p.start for p in timeline.phases if p.name == name)
                self._last_phases.labels(model, name).set(max(0.0, took))

    def started(self, timeline: Timeline) -> None:
        """Takes in one finished start."""
        outcome = "ok" if timeline.ok else "failed"
        self._starts.labels(timeline.model, timeline.mode, timeline.way, outcome).observe(
            timeline.seconds, {"trace_id": trace_of(timeline)}
        )
        if timeline.ok and not timeline.slept:
            self._newest[timeline.model] = timeline
            self._show()
        if timeline.error is not None:
            self._errors.labels(timeline.mode, timeline.way).observe(timeline.error)
        for phase in timeline.phases:
            self._phases.labels(timeline.mode, phase.name).observe(max(0.0, phase.end - phase.start))
        for rung in timeline.rungs:
            self._rungs.labels(timeline.model, rung.kind, "ok" if rung.ok else "failed", rung.cause).inc()
            if not rung.ok:
                continue
            if rung.bytes > 0:
                self._moved.labels(timeline.model, rung.kind).inc(rung.bytes)
                self._passed_on.labels(timeline.model, rung.kind).inc(rung.passed_on)
                self._moving.labels(timeline.model, rung.kind).observe(max(0.0, rung.seconds))
            if rung.instead_of:
                self._slow.labels(timeline.model, rung.kind, rung.instead_of.partition(":")[0]).inc()
