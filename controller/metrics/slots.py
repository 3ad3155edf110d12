"""Each slot as it reports itself: whether it is there, its devices, its part of the compile cache, its host copies."""

from __future__ import annotations

from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge

from relight.core.records import HostState, SlotView, Snapshot
from relight.core.states import State

ALIVE, AWAITED, LOST, GONE = "alive", "awaited", "lost", "gone"


class SlotMetrics:
    """Gauges are cleared and set at each look; counters go on where an agent was started again."""

    def __init__(self, registry: CollectorRegistry) -> None:
        slot = ["slot"]
        self._slots = Gauge(
            "relight_slots",
            "Slots: alive; awaited (known, and not heard of since this controller began); lost (its agent went away and"
            " left instances); gone (nothing is left there)",
            ["state"],
            registry=registry,
        )
        self._devices = Gauge("relight_devices", "Devices by health", ["kind", "healthy"], registry=registry)
        self._bundles = Gauge(
            "relight_cache_bundles", "Bundles that a slot's cache node holds", slot, registry=registry
        )
        self._bytes = Gauge(
            "relight_cache_bytes", "Bytes of the bundles that a slot's cache node holds", slot, unit="bytes",
            registry=registry,
        )  # fmt: skip
        self._quota = Gauge(
            "relight_cache_quota_bytes",
            "Bytes that a slot's cache node may hold",
            slot,
            unit="bytes",
            registry=registry,
        )
        self._quarantined = Gauge(
            "relight_cache_quarantined",
            "Keys in quarantine, as a slot's cache node knows them",
            slot,
            registry=registry,
        )
        self._starts = Counter(
            "relight_cache_starts_total",
            "Starts that asked for a bundle: hit where the engine loaded it and compiled nothing, else miss",
            ["slot", "outcome"],
            registry=registry,
        )
        self._compiles = Counter(
            "relight_cache_compiles_total", "Starts that asked for a bundle and whose engine compiled", slot,
            registry=registry,
        )  # fmt: skip
        self._copies = Gauge(
            "relight_host_copy_ready", "Copies of weights in host memory that a slot serves", slot, registry=registry
        )
        self._copy_bytes = Gauge(
            "relight_host_copy_bytes", "Bytes of host memory that a slot's copies of weights take", slot, unit="bytes",
            registry=registry,
        )  # fmt: skip
        self._budget = Gauge(
            "relight_host_copy_budget_bytes", "Bytes of host memory that a slot's copies of weights may take", slot,
            unit="bytes", registry=registry,
        )  # fmt: skip
        self._paths = Gauge(
            "relight_paths",
            "Ways by which a slot tried to read another one; `verdict` says whether they are open",
            ["slot", "transport", "verdict"],
            registry=registry,
        )
        self._seen: dict[tuple[str, str], int] = {}

    def seen(self, snapshot: Snapshot) -> None:
        """Takes in what a reconcile pass saw."""
        self._devices.clear()
        standing = Tally(_standing(view, _holding(snapshot)) for view in snapshot.slots)
        for state in (ALIVE, AWAITED, LOST, GONE):
            self._slots.labels(state).set(standing[state])
        devices = Tally((d.kind, d.healthy) for s in snapshot.slots for d in s.devices)
        for (kind, healthy), count in devices.items():
            self._devices.labels(kind, str(healthy).lower()).set(count)
        self._caches(snapshot)
        self._host_copies(snapshot)
        self._paths.clear()
        ways = Tally((s.slot, w.transport, w.verdict) for s in snapshot.slots if s.alive for w in s.reach)
        for (slot, transport, verdict), count in ways.items():
            self._paths.labels(slot, transport, verdict).set(count)

    def _caches(self, snapshot: Snapshot) -> None:
        shown = {"bundles": self._bundles, "bytes": self._bytes, "quota": self._quota, "quarantined": self._quarantined}
        for gauge in shown.values():
            gauge.clear()
        for view in snapshot.slots:
            if view.cache is None or not view.alive:
                continue
            for name, gauge in shown.items():
                gauge.labels(view.slot).set(getattr(view.cache, name))
            self._starts.labels(view.slot, "hit").inc(self._grown(view.slot, "hits", view.cache.hits))
            self._starts.labels(view.slot, "miss").inc(self._grown(view.slot, "misses", view.cache.misses))
            self._compiles.labels(view.slot).inc(self._grown(view.slot, "compiles", view.cache.compiles))

    def _grown(self, slot: str, name: str, now: int) -> int:
        before = self._seen.get((slot, name), 0)
        self._seen[slot, name] = now
        # An agent that was restarted counts from nothing.
        return now - before if now >= before else now

    def _host_copies(self, snapshot: Snapshot) -> None:
        for gauge in (self._copies, self._copy_bytes, self._budget):
            gauge.clear()
        for view in snapshot.slots:
            tier = view.host_tier
            if tier is None or not view.alive:
                continue
            self._copies.labels(view.slot).set(sum(c.state is HostState.READY for c in tier.copies))
            self._copy_bytes.labels(view.slot).set(sum(c.bytes for c in tier.copies))
            self._budget.labels(view.slot).set(tier.budget_bytes)


def _holding(snapshot: Snapshot) -> frozenset[str]:
    return frozenset(
        member.slot
        for instance in snapshot.instances
        if instance.state is not State.GONE and not instance.remembered
        for member in instance.members
    )


def _standing(view: SlotView, holding: frozenset[str]) -> str:
    if view.alive:
        return ALIVE if view.boot_id else AWAITED
    return LOST if view.slot in holding else GONE
