"""Each model as the loop sees it: what is wanted, what is there, what is expected, and from where it could wake."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge

from relight.controller.autoscale.signals import Metric, Reading, count_replicas
from relight.controller.observe.look import Look
from relight.controller.plan.sources import copies_of
from relight.core.records import Desired, Mode, Snapshot
from relight.core.states import COMING, State

_SIGNALS = (
    (Metric.DEMAND, "Requests held and in flight; absent while no gateway tells"),
    (Metric.HELD, "Requests held by gateways; absent while no gateway tells"),
    (Metric.IN_FLIGHT, "Requests in flight; absent while no gateway tells"),
    (Metric.TARGET, "Replicas that the load asks for, within bounds; absent while no gateway tells"),
    (Metric.CURRENT, "Replicas awake or on their way"),
)
HIT, MISS = "hit", "miss"
PEER, HOST_COPY = "peer", "host_copy"


class ModelMetrics:
    """Gauges are cleared and set at each look; counters grow by what is new in it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        model = ["model"]

        def gauge(name: str, told: str, labels: list[str] = model, unit: str = "") -> Gauge:
            made = Gauge(f"relight_{name}", told, labels, unit=unit, registry=registry)
            self._gauges.append(made)
            return made

        self._gauges: list[Gauge] = []
        self._desired = gauge("desired_replicas", "Replicas decided on")
        self._ready = gauge("ready_replicas", "Replicas ready")
        self._instances = gauge("instances", "Instances by state", ["model", "state"])
        self._wanted_guardians = gauge("desired_guardians", "Guardians decided on, by level", ["model", "level"])
        self._guardians = gauge("guardians", "Guardians asleep and ready to be woken, by level", ["model", "level"])
        self._sources = gauge(
            "sources",
            "What a wake could read the weights from: peers, copies in host memory",
            ["model", "kind"],
        )
        self._short_since = gauge(
            "short_since_timestamp_seconds", "Since when fewer replicas are ready than decided on; absent when all are",
            unit="seconds",
        )  # fmt: skip
        self._expected = gauge(
            "ready_expected_timestamp_seconds", "When the next replica on its way is expected; absent while none is",
            unit="seconds",
        )  # fmt: skip
        self._predicted = gauge(
            "start_predicted_seconds", "The longest prediction among replicas on their way; absent while none is",
            unit="seconds",
        )  # fmt: skip
        self._signals = {metric: gauge(metric.value, told) for metric, told in _SIGNALS}
        self._signals[Metric.RATIO] = gauge(
            Metric.RATIO.value, "Target replicas for each that is ready; absent while no gateway tells", unit="ratio"
        )
        self._requests = Counter(
            "relight_guardian_requests_total",
            "Missing replicas of models that keep guardians: hit where one was woken, miss where an engine was started;"
            " a model's very first replicas are neither",
            ["model", "outcome"],
            registry=registry,
        )
        self._modes = Counter(
            "relight_modes_total",
            "Missing replicas by the mode that their model asks for and the one that was taken",
            ["model", "asked", "taken"],
            registry=registry,
        )
        self._placements = Counter(
            "relight_placements_total", "Scale events: what instances were told to become", ["model", "desired"],
            registry=registry,
        )  # fmt: skip
        self._failures = Counter(
            "relight_instance_failures_total", "Instances that failed, by what they were to be", ["model", "desired"],
            registry=registry,
        )  # fmt: skip
        self._since: dict[str, float] = {}
        self._served: set[str] = set()
        self._failed: dict[str, float] | None = None

    def seen(self, look: Look) -> None:
        """Takes in what a reconcile pass saw."""
        for gauge in self._gauges:
            gauge.clear()
        self._count_instances(look)
        self._read_signals(look.snapshot)
        self._count_sources(look.snapshot)
        self._expect(look)
        self._count_placements(look)
        self._count_failures(look.snapshot)

    def _count_instances(self, look: Look) -> None:
        snapshot, specs = look.snapshot, {v.spec.key: v.spec for v in look.snapshot.models}
        for decision in look.decisions:
            level = str(specs[decision.model].guardians.level) if decision.model in specs else ""
            self._desired.labels(decision.model).set(decision.replicas)
            self._ready.labels(decision.model).set(0)
            self._wanted_guardians.labels(decision.model, level).set(decision.guardians)
            self._guardians.labels(decision.model, level).set(0)
        present = [i for i in snapshot.instances if not i.remembered and i.model in specs]
        ready = Tally(i.model for i in present if i.state is State.READY)
        for (model, state), count in Tally((i.model, i.state) for i in present).items():
            self._instances.labels(model, state).set(count)
        for model, count in ready.items():
            self._ready.labels(model).set(count)
        asleep = Tally((i.model, str(i.level)) for i in present if i.state is State.DORMANT)
        for (model, level), count in asleep.items():
            self._guardians.labels(model, level).set(count)
        self._served |= {model for model, count in ready.items() if count}
        # Before every slot was heard of, nobody knows what is ready.
        if snapshot.synced:
            short = {d.model for d in look.decisions if ready[d.model] < d.replicas}
            self._since = {model: self._since.get(model, snapshot.now) for model in short}
        for model, since in self._since.items():
            self._short_since.labels(model).set(since)

    def _read_signals(self, snapshot: Snapshot) -> None:
        counts = count_replicas(snapshot)
        for view in snapshot.models:
            reading = Reading(view.spec, view.demand, counts.get(view.spec.key))
            for metric, gauge in self._signals.items():
                if (value := reading.value(metric)) is not None:
                    gauge.labels(view.spec.key).set(value)

    def _count_sources(self, snapshot: Snapshot) -> None:
        peers = Tally(
            i.model
            for i in snapshot.instances
            if i.state is State.READY and any(m.report is not None and m.report.source is not None for m in i.members)
        )
        copies = Tally(c.report.content.model for c in copies_of(snapshot))
        for view in snapshot.models:
            self._sources.labels(view.spec.key, PEER).set(peers[view.spec.key])
            self._sources.labels(view.spec.key, HOST_COPY).set(copies[view.spec.key])

    def _expect(self, look: Look) -> None:
        coming: dict[str, list[tuple[float, float]]] = {}
        for instance in look.snapshot.instances:
            expectation = look.expected.get(instance.instance)
            on_its_way = instance.state in COMING or instance.state in (State.DORMANT, State.SLEEPING)
            if instance.desired is Desired.READY and on_its_way and expectation is not None:
                at = (expectation.placed_at + expectation.seconds, expectation.seconds)
                coming.setdefault(instance.model, []).append(at)
        for model, found in coming.items():
            self._expected.labels(model).set(min(at for at, _ in found))
            self._predicted.labels(model).set(max(seconds for _, seconds in found))

    def _count_placements(self, look: Look) -> None:
        specs = {v.spec.key: v.spec for v in look.snapshot.models}
        for key, spec in specs.items():
            if spec.guardians.replicas > 0:
                # Series that are there from the start can be divided and alerted on.
                self._requests.labels(key, HIT)
                self._requests.labels(key, MISS)
        for placement in look.placed:
            self._placements.labels(placement.model, placement.desired).inc()
            known = specs.get(placement.model)
            # What has no prediction starts nothing: a replica that is being drained is wanted back.
            if known is None or placement.desired is not Desired.READY or placement.predicted_seconds is None:
                continue
            self._modes.labels(placement.model, known.mode, placement.mode).inc()
            if known.guardians.replicas <= 0:
                continue
            if placement.mode is Mode.GUARDIAN:
                self._requests.labels(placement.model, HIT).inc()
            elif placement.model in self._served:
                self._requests.labels(placement.model, MISS).inc()

    def _count_failures(self, snapshot: Snapshot) -> None:
        failed = [i for i in snapshot.instances if i.failure is not None]
        for instance in failed:
            known = self._failed.get(instance.instance) if self._failed is not None else None
            # What is remembered at the first look failed under an earlier controller.
            old = self._failed is None and instance.remembered
            if known != instance.failed_at and not old:
                self._failures.labels(instance.model, instance.desired).inc()
        self._failed = {i.instance: i.failed_at for i in failed}
