"""The reconcile loop: woken by events and by the times that the pure core asks for; nothing polls.

Each pass looks at everything anew, so a lost or repeated wake-up does no harm. A pass that fails is
repeated, at once when the state moved under it, later and later otherwise.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from relight.controller.apply.adopt import adopt
from relight.controller.apply.changes import build
from relight.controller.apply.operations import ended, patience_ends_at, slots_behind
from relight.controller.decide.replicas import decide, next_change_at
from relight.controller.flight.recorder import Recorder
from relight.controller.flight.timeline import Timeline
from relight.controller.observe.fleet import Fleet
from relight.controller.observe.gateways import Gateways
from relight.controller.observe.hosts import Hosts
from relight.controller.observe.look import Look
from relight.controller.observe.neighbours import Neighbourhoods
from relight.controller.observe.places import Places
from relight.controller.observe.ring import Rings, remembered
from relight.controller.observe.routes import Router, route_models
from relight.controller.observe.shapes import worth_storing
from relight.controller.observe.snapshot import Observer
from relight.controller.plan.fleet import sort_fleet
from relight.controller.plan.order import waits
from relight.controller.plan.plan import next_retry_at, plan
from relight.controller.state.base import Lease, Write
from relight.controller.state.catalog import Catalog, InstanceStatus, SlotFacts, drop, put
from relight.controller.state.housekeeping import HISTORY, surplus
from relight.core import failpoints, invariants
from relight.core.clock import Clock
from relight.core.errors import Conflict, Fenced, RelightError
from relight.core.ids import new_id
from relight.core.logs import get_logger
from relight.core.records import Desired, InstanceView, Placement, Plan, Snapshot
from relight.core.tenants import strangers

LEASE_NAME = "controller"
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.05, 5.0

log = get_logger("controller.loop")


@dataclass(slots=True)
class Hooks:
    """Who is told of what a pass saw. `broken` hears of each breach of an invariant, by its name; `ended` of each pass,
    how it ended and how many seconds it took."""

    seen: Callable[[Look], None]
    started: Callable[[Timeline], None]
    broken: Callable[[str, str], None]
    ended: Callable[[str, float], None] = lambda *_: None
    passed: list[Callable[[Snapshot, Plan], None]] = field(default_factory=list)
    """After each pass, with what it saw and planned: all who keep others in step with it."""
    placed: Callable[[Placement], None] = lambda _: None
    """For each placement that was written."""
    leads: Callable[[], None] = lambda: None
    """Raises Fenced when another controller may act by now; asked before each pass."""


class Reconciler:
    """The one writer of assignments. `run` ends with Fenced when another controller took over."""

    def __init__(
        self,
        catalog: Catalog,
        clock: Clock,
        lease: Lease,
        *,
        slot_grace_seconds: float,
        gateway_grace_seconds: float,
        hooks: Hooks,
        epochs_below: float = math.inf,
    ) -> None:
        """`epochs_below`: of an election, whose every leader has a range of epochs, the end of this one's."""
        self._catalog, self._clock, self._lease, self._hooks = catalog, clock, lease, hooks
        self._below = epochs_below
        self._wanted = asyncio.Event()
        self._compacted = 0
        self._breaks = 0
        self.recorder = Recorder(catalog, clock)
        self.fleet = Fleet(clock, slot_grace_seconds, self.wake)
        self.gateways = Gateways(clock, gateway_grace_seconds, self.wake, self.recorder.span)
        self.places = Places(self.wake)
        self.observer = Observer(catalog, self.fleet, self.gateways, self.places, clock)
        self.router = Router(self.observer.drains)
        self.rings = Rings()
        self.hosts = Hosts()
        self.neighbours = Neighbourhoods()
        self.fleet.expect(catalog.slots)
        catalog.listen(self._stored)

    @property
    def lease(self) -> Lease:
        """The lease under which assignments are written; its epoch fences earlier controllers."""
        return self._lease

    def wake(self) -> None:
        """Asks for a pass soon; many calls before it begins are one."""
        self._wanted.set()

    def _stored(self, keys: frozenset[str]) -> None:
        broken = self._catalog.breaks != self._breaks
        if broken or any(key.startswith(("models/", "failures/", "activity/")) for key in keys):
            self.wake()

    async def run(self) -> None:
        """Passes until cancelled. Raises Fenced when another controller acts."""
        backoff = FIRST_BACKOFF_SECONDS
        timeout: float | None = 0.0
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), timeout)
            self._wanted.clear()
            begun, outcome = self._clock.monotonic(), "failed"
            try:
                await self.reconcile()
                backoff, timeout = FIRST_BACKOFF_SECONDS, self._next_in()
                outcome = "ok"
            except Fenced:
                log.error("loop.fenced", epoch=self._lease.epoch)
                raise
            except Conflict as error:
                log.info("loop.moved", reason=str(error))
                timeout, outcome = 0.0, "moved"
            except RelightError as error:
                log.error("loop.failed", error=str(error), retry_in=backoff)
                timeout, backoff = backoff, min(backoff * 2, LAST_BACKOFF_SECONDS)
            except Exception:
                log.exception("loop.defect", retry_in=backoff)
                timeout, backoff = backoff, min(backoff * 2, LAST_BACKOFF_SECONDS)
            finally:
                self._hooks.ended(outcome, self._clock.monotonic() - begun)

    def preview(self, snapshot: Snapshot) -> Plan:
        """What would be planned for `snapshot`; nothing is written."""
        return plan(snapshot, decide(snapshot), self.recorder.predictions, new_id)

    def snapshot(self) -> Snapshot:
        """The present snapshot."""
        return self.observer.snapshot(self._lease.epoch)

    async def reconcile(self) -> None:
        """One pass. Raises Conflict when the state moved under it, Unavailable when the store is away."""
        begun_at = self._clock.now()
        self._hooks.leads()
        await self._stay_newest()
        await self._adopt()
        await self._still_lead()
        snapshot = self.snapshot()
        made = self.preview(snapshot)
        self.observer.waits = waits(self.observer.waits, made, snapshot.now)
        changes = build(self._catalog, snapshot, made, self._clock, begun_at)
        if changes.writes:
            failpoints.hit("controller.apply.before-assignment")
            revision = await self._catalog.store.commit(changes.writes, expect=changes.expect, fence=self._lease)
            failpoints.hit("controller.apply.after-assignment")
            await self._catalog.reached(revision)
            for placement in changes.placed:
                log.info(
                    "placed",
                    instance=placement.instance,
                    model=placement.model,
                    desired=placement.desired,
                    mode=placement.mode,
                    operation=placement.operation,
                    reason=placement.reason,
                )
                self._hooks.placed(placement)
            await self._still_lead()
            snapshot = self.snapshot()
        self._route(snapshot, made)
        self.rings.update(self._lease.epoch, snapshot)
        self.hosts.update(snapshot)
        self.neighbours.update(self._lease.epoch, snapshot)
        self._hooks.seen(self._look(snapshot, made, changes.placed))
        for tell in self._hooks.passed:
            tell(snapshot, made)
        self._check(snapshot, made)
        await self._record(snapshot, made)

    def _look(self, snapshot: Snapshot, made: Plan, placed: list[Placement]) -> Look:
        newest = self.router.table.revision
        routed = [seen.report.route_revision for seen in self.gateways.seen.values() if seen.left_at is None]
        return Look(
            snapshot=snapshot,
            decisions=made.decisions,
            placed=tuple(placed),
            expected={name: v.record for name, v in self._catalog.expected.items()},
            rates=self.recorder.predictions.rates(),
            slots_behind=len(self._behind()),
            gateways=len(routed),
            gateways_behind=sum(revision < newest for revision in routed),
        )

    def _behind(self) -> frozenset[str]:
        acknowledged = {name: seen.report.revision for name, seen in self.fleet.seen.items()}
        return slots_behind((v.record for v in self._catalog.assignments.values()), acknowledged)

    def _check(self, snapshot: Snapshot, made: Plan) -> None:
        """Tells of every broken invariant and goes on: what serves must not stop for a wrong count."""
        found = (
            (invariants.no_device_is_claimed_twice, invariants.no_device_is_claimed_twice(snapshot)),
            (invariants.only_ready_is_routable, invariants.only_ready_is_routable(snapshot, self.router.table)),
            (invariants.numbers_are_in_bounds, invariants.numbers_are_in_bounds(snapshot, made.decisions)),
        )
        for rule, breaches in found:
            for breach in breaches:
                log.error("invariant.broken", rule=rule.__name__, breach=breach)
                self._hooks.broken(rule.__name__, breach)

    def _route(self, snapshot: Snapshot, made: Plan) -> None:
        if not snapshot.synced and not self.router.table.revision:
            # Gateways go on by what an earlier controller told them: less is seen now than runs.
            return
        models = route_models(snapshot, made, self.recorder.expected_in)
        draining = {i.instance: i for i in snapshot.instances if i.desired is Desired.DRAINED}
        if self.router.update(self._lease.epoch, models, draining):
            # Only now is it known from which table on the draining are left out: look again.
            self.wake()

    async def _record(self, snapshot: Snapshot, made: Plan) -> None:
        """Writes what others want to read: ended operations, timelines, states. Never before an assignment."""
        running = [v.record for v in self._catalog.operations.values()]
        over = ended(running, snapshot, made, sort_fleet(snapshot), self._behind())
        writes, started = self.recorder.writes(snapshot)
        writes += [put("operations", operation.id, operation) for operation in over]
        writes += (
            self._statuses(snapshot)
            + self._slot_facts()
            + self._shapes(snapshot)
            + surplus(self._catalog, snapshot.now)
        )
        if writes:
            await self._catalog.commit(writes, fence=self._lease)
        for timeline in started:
            self._hooks.started(timeline)
            for rung in timeline.rungs:
                if rung.ok and rung.instead_of:
                    log.warning("path.slow", model=timeline.model, taken=rung.kind, instead_of=rung.instead_of)
        for operation in over:
            log.info("operation.ended", operation=operation.id, state=operation.state, reason=operation.reason)
        if over:
            # An ended operation frees what it held back, such as the rungs that it allowed.
            self.wake()
        if self._catalog.revision - self._compacted > 2 * HISTORY:
            self._compacted = self._catalog.revision - HISTORY
            await self._catalog.store.compact(self._compacted)

    async def _still_lead(self) -> None:
        """Where the history broke off the lease may be gone with it, and what is stored is no ground to act on."""
        while (breaks := self._catalog.breaks) != self._breaks:
            await self.renew(self._lease.expires_at - self._clock.now())
            self._breaks = breaks

    async def _stay_newest(self) -> None:
        """Takes a higher epoch when an agent has seen one: the store was lost or went back in time."""
        highest = max((seen.report.epoch for seen in self.fleet.seen.values()), default=0)
        if highest > self._lease.epoch:
            log.warning("epoch.behind", own=self._lease.epoch, seen=highest)
            if highest >= self._below:
                raise Fenced(f"an agent has seen epoch {highest}, which only a later leader can have")
            self._lease = await self._catalog.store.acquire(
                LEASE_NAME, self._lease.holder, self._lease.expires_at - self._clock.now(), above_epoch=highest
            )

    async def renew(self, ttl_seconds: float) -> None:
        """Prolongs the lease. Raises Fenced when another controller took it."""
        self._lease = await self._catalog.store.renew(self._lease, ttl_seconds)

    async def _adopt(self) -> None:
        specs = {key: v.record.spec for key, v in self._catalog.models.items()}
        writes = []
        for slot, seen in self.fleet.seen.items():
            stored = self._catalog.assignments.get(slot)
            # An agent's word makes no replica of another tenant's model.
            pool = self.places.of(slot).pool
            own = {key: spec for key, spec in specs.items() if not strangers(pool, spec.pool)}
            found = adopt(seen.report, stored.record if stored else None, own, self._lease.epoch)
            if found is not None:
                writes.append(put("assignments", slot, found))
                log.warning("slot.adopted", slot=slot, instances=[i.instance for i in found.instances])
        if writes:
            await self._catalog.commit(writes, fence=self._lease)

    def _statuses(self, snapshot: Snapshot) -> list[Write]:
        known = self._catalog.instances
        present = {i.instance: i for i in snapshot.instances if not i.remembered}
        writes = [drop("instances", name) for name in known if name not in present]
        for name, view in present.items():
            stored = known.get(name)
            status = _status(view, snapshot.now)
            if stored is None or (stored.record.state, stored.record.desired, stored.record.cause) != (
                status.state,
                status.desired,
                status.cause,
            ):
                writes.append(put("instances", name, status))
        return writes

    def _slot_facts(self) -> list[Write]:
        writes = []
        for slot, seen in self.fleet.seen.items():
            report, known = seen.report, self._catalog.slots.get(slot)
            signers = remembered(report.cache, known.record.signers if known else ())
            facts = SlotFacts(slot, report.host, report.boot_id, report.agent_address, signers)
            if known is None or known.record != facts:
                writes.append(put("slots", slot, facts))
        return writes

    def _shapes(self, snapshot: Snapshot) -> list[Write]:
        stored = {key: v.record for key, v in self._catalog.shapes.items()}
        writes = [put("shapes", key, found) for key, found in worth_storing(snapshot, stored).items()]
        return writes + [drop("shapes", key) for key in stored if key not in self._catalog.models]

    def _next_in(self) -> float | None:
        """Seconds until time alone may change something; None when only an event can."""
        snapshot = self.snapshot()
        running = (v.record for v in self._catalog.operations.values())
        at = [next_change_at(snapshot), next_retry_at(snapshot), patience_ends_at(running, snapshot.now)]
        at.append(self.neighbours.due_at(snapshot.now))
        times = [t - snapshot.now for t in at if t is not None]
        times += [t for t in (self.fleet.next_grace_in(), self.gateways.next_grace_in()) if t is not None]
        # A little later than asked for: a timer that fires early would only look and wait again.
        return max(0.0, min(times)) + 0.001 if times else None


def _status(view: InstanceView, now: float) -> InstanceStatus:
    report = view.members[0].report if view.members else None
    cause = view.failure.reason if view.failure else (report.cause if report else "not reported yet")
    return InstanceStatus(
        instance=view.instance,
        model=view.model,
        desired=view.desired,
        state=view.state,
        cause=cause,
        slots=tuple(m.slot for m in view.members),
        at=report.since if report else now,
    )
