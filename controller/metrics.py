"""Prometheus metrics of the controller. Labels are models, modes, states, outcomes and slots: never another id."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from relight.controller.autoscale.signals import Metric, Reading, count_replicas
from relight.controller.flight.timeline import Timeline, coverage
from relight.core.invariants import NAMES
from relight.core.records import Decision, HostState, Snapshot
from relight.core.states import State

# From a wake by shared memory to a cold start of a large model.
_START_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900)
_ERROR_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)


class Metrics:
    """One registry per process; what is gone from the fleet is gone from the metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        model = ["model"]
        self._desired = Gauge("relight_desired_replicas", "Replicas decided on", model, registry=self.registry)
        self._ready = Gauge("relight_ready_replicas", "Replicas ready", model, registry=self.registry)
        self._instances = Gauge("relight_instances", "Instances by state", ["model", "state"], registry=self.registry)
        self._slots = Gauge("relight_slots", "Slots by liveness", ["alive"], registry=self.registry)
        self._devices = Gauge("relight_devices", "Devices by health", ["kind", "healthy"], registry=self.registry)
        self._held = Gauge("relight_held_requests", "Requests held by gateways", model, registry=self.registry)
        self._signals = {
            metric: Gauge(f"relight_{metric}", told, model, registry=self.registry)
            for metric, told in (
                (Metric.DEMAND, "Requests held and in flight; absent while no gateway tells"),
                (Metric.IN_FLIGHT, "Requests in flight; absent while no gateway tells"),
                (Metric.TARGET, "Replicas that the load asks for, within bounds; absent while no gateway tells"),
                (Metric.CURRENT, "Replicas awake or on their way"),
                (Metric.RATIO, "Target replicas for each that is ready; absent while no gateway tells"),
            )
        }
        self._starts = Histogram(
            "relight_start_seconds",
            "Seconds from assignment to ready",
            ["model", "mode", "way", "outcome"],
            buckets=_START_BUCKETS,
            registry=self.registry,
        )
        self._phases = Histogram(
            "relight_start_phase_seconds",
            "Seconds of each phase of a start",
            ["mode", "phase"],
            buckets=_START_BUCKETS,
            registry=self.registry,
        )
        self._errors = Histogram(
            "relight_start_prediction_error_ratio",
            "By which share of a good start's seconds its prediction was wrong",
            ["mode", "way"],
            buckets=_ERROR_BUCKETS,
            registry=self.registry,
        )
        self._pushed = Counter(
            "relight_trace_exports_total", "Starts sent to the collector of traces", ["outcome"], registry=self.registry
        )
        self._slow = Counter(
            "relight_slow_path_total",
            "Wakes whose weights came by a slower path than was expected",
            ["model", "taken", "expected"],
            registry=self.registry,
        )
        self._accounted = Gauge(
            "relight_start_accounted_ratio",
            "Share of the last start's wall time that lies in named phases",
            model,
            registry=self.registry,
        )
        self._broken = Counter(
            "relight_invariant_violations_total", "Breaches of core/invariants.py", ["rule"], registry=self.registry
        )
        for rule in NAMES:
            # A series that is there from the start can be alerted on.
            self._broken.labels(rule)
        slot = ["slot"]
        self._cache = {
            name: Gauge(f"relight_cache_{name}", told, slot, registry=self.registry)
            for name, told in (
                ("bundles", "Bundles that a slot's cache node holds"),
                ("bytes", "Bytes of the bundles that a slot's cache node holds"),
                ("quota", "Bytes that a slot's cache node may hold"),
                ("quarantined", "Keys in quarantine, as a slot's cache node knows them"),
            )
        }
        self._cache_starts = {
            name: Counter(f"relight_cache_{name}_total", told, slot, registry=self.registry)
            for name, told in (
                ("hits", "Starts whose engine loaded a bundle and compiled nothing"),
                ("misses", "Starts that asked for a bundle and did not come by with it"),
                ("compiles", "Starts that asked for a bundle and whose engine compiled"),
            )
        }
        self._host = {
            name: Gauge(f"relight_host_copy_{name}", told, slot, registry=self.registry)
            for name, told in (
                ("bytes", "Bytes of host memory that a slot's copies of weights take"),
                ("budget_bytes", "Bytes of host memory that a slot's copies of weights may take"),
                ("ready", "Copies of weights in host memory that a slot serves"),
            )
        }
        self._cache_seen: dict[tuple[str, str], int] = {}
        self.passes = Counter("relight_reconcile_total", "Reconcile passes that ended well", registry=self.registry)

    def broken(self, rule: str, breach: str) -> None:
        """Counts one breach of an invariant."""
        self._broken.labels(rule).inc()

    def seen(self, snapshot: Snapshot, decisions: tuple[Decision, ...]) -> None:
        """Takes in what a reconcile pass saw."""
        self.passes.inc()
        shown = (self._desired, self._ready, self._instances, self._slots, self._devices, self._held)
        for gauge in (*shown, *self._signals.values()):
            gauge.clear()
        for decision in decisions:
            self._desired.labels(decision.model).set(decision.replicas)
            self._ready.labels(decision.model).set(0)
        known = {view.spec.key for view in snapshot.models}
        tally = Tally((i.model, i.state) for i in snapshot.instances if not i.remembered and i.model in known)
        for (model, state), count in tally.items():
            self._instances.labels(model, state).set(count)
            if state is State.READY:
                self._ready.labels(model).set(count)
        counts = count_replicas(snapshot)
        for view in snapshot.models:
            if view.demand is not None:
                self._held.labels(view.spec.key).set(view.demand.held)
            reading = Reading(view.spec, view.demand, counts.get(view.spec.key))
            for metric, gauge in self._signals.items():
                if (value := reading.value(metric)) is not None:
                    gauge.labels(view.spec.key).set(value)
        for alive, count in Tally(slot.alive for slot in snapshot.slots).items():
            self._slots.labels(str(alive).lower()).set(count)
        devices = Tally((d.kind, d.healthy) for s in snapshot.slots for d in s.devices)
        for (kind, healthy), count in devices.items():
            self._devices.labels(kind, str(healthy).lower()).set(count)
        self._caches(snapshot)
        self._host_copies(snapshot)

    def _host_copies(self, snapshot: Snapshot) -> None:
        for gauge in self._host.values():
            gauge.clear()
        for view in snapshot.slots:
            tier = view.host_tier
            if tier is None or not view.alive:
                continue
            self._host["bytes"].labels(view.slot).set(sum(c.bytes for c in tier.copies))
            self._host["budget_bytes"].labels(view.slot).set(tier.budget_bytes)
            self._host["ready"].labels(view.slot).set(sum(c.state is HostState.READY for c in tier.copies))

    def _caches(self, snapshot: Snapshot) -> None:
        for gauge in self._cache.values():
            gauge.clear()
        for view in snapshot.slots:
            if view.cache is None or not view.alive:
                continue
            for name, gauge in self._cache.items():
                gauge.labels(view.slot).set(getattr(view.cache, name))
            for name, counter in self._cache_starts.items():
                now = getattr(view.cache, name)
                before = self._cache_seen.get((view.slot, name), 0)
                # An agent that was restarted counts from nothing.
                counter.labels(view.slot).inc(now - before if now >= before else now)
                self._cache_seen[view.slot, name] = now

    def started(self, timeline: Timeline) -> None:
        """Takes in one finished start."""
        outcome = "ok" if timeline.ok else "failed"
        self._starts.labels(timeline.model, timeline.mode, timeline.way, outcome).observe(timeline.seconds)
        if timeline.error is not None:
            self._errors.labels(timeline.mode, timeline.way).observe(timeline.error)
        for phase in timeline.phases:
            self._phases.labels(timeline.mode, phase.name).observe(max(0.0, phase.end - phase.start))
        for rung in timeline.rungs:
            if rung.ok and rung.instead_of:
                self._slow.labels(timeline.model, rung.kind, rung.instead_of.partition(":")[0]).inc()
        share = coverage(timeline.phases, timeline.begun_at, timeline.ended_at)
        self._accounted.labels(timeline.model).set(share)

    def pushed(self, outcome: str) -> None:
        """Counts one start that was sent, failed to be, or was dropped."""
        self._pushed.labels(outcome).inc()

    def text(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
