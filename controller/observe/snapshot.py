"""Builds the snapshot that deciding and planning look at, from the catalog and what is reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from relight.controller.observe.fleet import Fleet, SlotSeen
from relight.controller.observe.gateways import Gateways
from relight.controller.observe.places import Places
from relight.controller.observe.ring import remembered
from relight.controller.state.catalog import Activity, Catalog, StoredFailure
from relight.core.clock import Clock
from relight.core.records import (
    Assignment,
    Desired,
    Failure,
    InstanceAssignment,
    InstanceReport,
    InstanceView,
    MemberView,
    Mode,
    ModelSpec,
    ModelView,
    Operation,
    OperationState,
    SlotView,
    Snapshot,
)
from relight.core.states import State, group_state
from relight.core.tenants import tenant

VANISHED_RETRY_SECONDS = 5.0
"""How long an instance that ended without a word is not replaced: its cause may be lasting."""


@dataclass(slots=True)
class Drains:
    """Since when instances are being drained, and the table revision that first went without them."""

    removed_at: dict[str, int] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)


class Observer:
    """One snapshot after another; it remembers only how far each drain is."""

    def __init__(self, catalog: Catalog, fleet: Fleet, gateways: Gateways, places: Places, clock: Clock) -> None:
        self._catalog, self._fleet, self._gateways, self._clock = catalog, fleet, gateways, clock
        self._places = places
        self.drains = Drains()
        self.waits: dict[str, float] = {}
        """Since when models wait for devices (plan/order.py); who leads next counts anew."""

    def snapshot(self, epoch: int) -> Snapshot:
        """Everything as of now."""
        now = self._clock.now()
        unadopted = {s for s in self._fleet.seen if not self.may_assign(s)}
        assignments = {slot: v.record for slot, v in self._catalog.assignments.items()}
        names = sorted({*self._fleet.seen, *self._fleet.awaited, *self._catalog.slots, *assignments})
        instances = [*self._instances(assignments, now), *self._strangers(assignments)]
        self._forget_drains({i.instance for i in instances if i.desired is Desired.DRAINED})
        instances += [self._memory(v.record) for v in self._catalog.failures.values()]
        return Snapshot(
            now=now,
            revision=self._catalog.revision,
            epoch=epoch,
            models=tuple(self._models()),
            slots=tuple(self._slot(name, name not in unadopted) for name in names),
            instances=tuple(instances),
            synced=self._fleet.synced(),
        )

    def may_assign(self, slot: str) -> bool:
        """False while a slot runs what nobody could adopt: writing an assignment would end it."""
        seen = self._fleet.seen.get(slot)
        if seen is None or slot in self._catalog.assignments:
            return True
        return all(report.state is State.GONE for report in seen.report.instances)

    def _models(self) -> Iterable[ModelView]:
        open_operations: dict[str, Operation] = {}
        for entry in self._catalog.operations.values():
            operation = entry.record
            if operation.kind == "scale" and operation.state is OperationState.RUNNING:
                open_operations[operation.model] = operation
        for key, stored in self._catalog.models.items():
            activity = self._catalog.activity[key].record if key in self._catalog.activity else Activity()
            running = open_operations.get(key)
            yield ModelView(
                spec=stored.record.spec,
                demand=self._gateways.demand(key),
                operation=running.id if running else "",
                allowed_rungs=running.rungs if running else (),
                changed_at=stored.record.changed_at,
                activated_at=activity.activated_at,
                idled_at=activity.idled_at,
                waits_since=self.waits.get(key),
                burst=activity.burst,
            )

    def _slot(self, name: str, assignable: bool) -> SlotView:
        seen = self._fleet.seen.get(name)
        alive = assignable and self._fleet.alive(name)
        known = self._catalog.slots.get(name)
        before = known.record.signers if known else ()
        place = self._places.of(name)
        if seen is None:
            view = SlotView(name, alive, "", False, {}, (), signers=before)
        else:
            report = seen.report
            view = SlotView(
                name, alive, report.boot_id, report.force_tcp, report.engines, report.devices, report.transports,
                report.cache, remembered(report.cache, before), report.host_tier, facts=report.facts,
                capabilities=report.capabilities, reach=report.reach,
            )  # fmt: skip
        awaited = self._fleet.awaits(name)
        # Nobody else knows what runs there: were it not counted, another would be woken in its stead.
        presumed = place.shows if awaited and name not in self._catalog.assignments else ""
        return replace(
            view,
            pool=place.pool,
            allowed=place.allowed,
            closing=place.closing,
            images_seconds=place.images_seconds,
            # Of one that is lost as much is known as of any: that nobody answers there.
            clear=not awaited and (assignable or not self._fleet.alive(name)),
            presumed=presumed,
        )

    def _instances(self, assignments: Mapping[str, Assignment], now: float) -> Iterable[InstanceView]:
        members: dict[str, list[tuple[Assignment, InstanceAssignment]]] = {}
        for assignment in assignments.values():
            for assigned in assignment.instances:
                members.setdefault(assigned.instance, []).append((assignment, assigned))
        for name, found in members.items():
            found.sort(key=lambda pair: pair[1].rank)
            yield self._view(name, found, now)

    def _view(self, name: str, found: list[tuple[Assignment, InstanceAssignment]], now: float) -> InstanceView:
        first = found[0][1]
        members, states = [], []
        failure, failed_at = None, 0.0
        for assignment, assigned in found:
            seen = self._fleet.seen.get(assignment.slot)
            report = _report_of(seen, name, assigned.rank)
            acknowledged = seen is not None and seen.report.revision >= assignment.revision
            state = report.state if report else State.NONE
            if report is None and acknowledged and assigned.desired is Desired.GONE:
                state = State.GONE
            states.append(state)
            members.append(MemberView(assignment.slot, assigned.rank, assigned.devices, report))
            # A failure that the agent reported before it saw the newest assignment is of an earlier try.
            if acknowledged and report is not None:
                told = _failure(report, assigned.desired)
                if told is not None:
                    failure, failed_at = told, min(now, report.since)
        state = group_state(states, first.members)
        drained, until = self._drain(first, state)
        return InstanceView(
            instance=name,
            model=first.model,
            spec=first.spec,
            members=tuple(members),
            desired=first.desired,
            state=state,
            level=next((m.report.level for m in members if m.report), first.level),
            operation=first.operation,
            mode=first.mode,
            failure=failure,
            failed_at=failed_at,
            drained=drained,
            drain_until=until,
            in_flight=self._gateways.in_flight(name),
            reads=_reads(first, state),
        )

    def _drain(self, assigned: InstanceAssignment, state: State) -> tuple[bool, float | None]:
        if assigned.desired is not Desired.DRAINED:
            return False, None
        now = self._clock.monotonic()
        timeout = assigned.spec.drain.timeout_seconds
        until = self.drains.until.setdefault(assigned.instance, now + timeout)
        removed = self.drains.removed_at.get(assigned.instance)
        if removed is None:
            return False, None
        released = self._gateways.released(assigned.instance, removed) and not self._places.routed(assigned.instance)
        wall_until = self._clock.now() + max(0.0, until - now)
        return released or now >= until, wall_until

    def _forget_drains(self, draining: set[str]) -> None:
        for table in (self.drains.until, self.drains.removed_at):
            for name in [n for n in table if n not in draining]:
                del table[name]

    def _strangers(self, assignments: Mapping[str, Assignment]) -> Iterable[InstanceView]:
        """Instances that agents report and no assignment knows: they hold their devices while they last."""
        assigned = {(slot, i.instance) for slot, a in assignments.items() for i in a.instances}
        tenants = {name: tenant(self._places.of(slot).pool) for slot, name in assigned}
        for slot, seen in self._fleet.seen.items():
            pool = self._places.of(slot).pool
            for report in seen.report.instances:
                if (slot, report.instance) in assigned or report.state is State.GONE:
                    continue
                # Nobody may speak for what is another tenant's.
                if tenants.get(report.instance, tenant(pool)) != tenant(pool):
                    continue
                namespace, _, name = report.model.partition("/")
                if pool and namespace != tenant(pool):
                    # It holds its devices, and counts as nothing of another tenant's model.
                    namespace = tenant(pool)
                model = self._catalog.models.get(f"{namespace}/{name}")
                spec = model.record.spec if model else ModelSpec(namespace, name, "", "", "")
                yield InstanceView(
                    instance=report.instance,
                    model=spec.key,
                    spec=spec,
                    members=(MemberView(slot, report.rank, report.devices, report),),
                    desired=Desired.GONE,
                    state=report.state,
                    level=report.level,
                    operation=report.operation,
                    mode=Mode.COLD,
                )

    def _memory(self, stored: StoredFailure) -> InstanceView:
        model = self._catalog.models.get(stored.model)
        namespace, _, name = stored.model.partition("/")
        return InstanceView(
            instance=stored.instance,
            model=stored.model,
            spec=model.record.spec if model else ModelSpec(namespace, name, "", "", ""),
            members=(),
            desired=stored.desired,
            state=State.GONE,
            level=2,
            operation="",
            mode=stored.mode,
            failure=stored.failure,
            failed_at=stored.at,
            remembered=True,
        )


def _reads(assigned: InstanceAssignment, state: State) -> str:
    """Whom one that comes up was told to read first, as far as can be said from here."""
    coming = assigned.desired in (Desired.READY, Desired.DORMANT) and state in (State.STARTING, State.WAKING)
    source = assigned.rungs[0].source if coming and assigned.rungs else None
    return source.instance if source else ""


def _report_of(seen: SlotSeen | None, instance: str, rank: int) -> InstanceReport | None:
    if seen is None:
        return None
    return next((r for r in seen.report.instances if r.instance == instance and r.rank == rank), None)


def _failure(report: InstanceReport, desired: Desired) -> Failure | None:
    if desired is Desired.GONE:
        return None
    if report.state is State.FAILED:
        return report.failure or Failure("failed without a reason", VANISHED_RETRY_SECONDS)
    if report.state in (State.STOPPING, State.GONE):
        return report.failure or Failure("it ended although it was wanted", VANISHED_RETRY_SECONDS)
    if report.state in (State.DORMANT, State.SLEEPING) and desired is Desired.READY:
        return report.failure
    return None
