"""A plan as the store's writes: whole assignments per slot, grants, and what is remembered beside them.

No I/O but reading the clock for grants. What is built here is committed at once or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from relight.controller.flight.timeline import Expectation
from relight.controller.observe.shapes import present
from relight.controller.plan.fleet import due
from relight.controller.plan.sources import copies_of, source_for
from relight.controller.state.base import ABSENT, Write
from relight.controller.state.catalog import Activity, Catalog, StoredFailure, drop, put
from relight.core.clock import Clock
from relight.core.errors import InvariantViolated
from relight.core.ids import new_id
from relight.core.logs import get_logger
from relight.core.records import (
    Assignment,
    Decision,
    Desired,
    InstanceAssignment,
    InstanceView,
    MemberView,
    Mode,
    Operation,
    OperationState,
    Phase,
    Placement,
    Plan,
    Rung,
    RungKind,
    Shapes,
    Snapshot,
    SourceRef,
)
from relight.core.shapes import told
from relight.core.states import State
from relight.core.tenants import tenant
from relight.transfer.grants import Claims, mint

log = get_logger("controller.apply")


@dataclass(slots=True)
class Changes:
    """What one commit shall write, the revisions that it rests on, and the placements that it carries out."""

    writes: list[Write] = field(default_factory=list)
    expect: dict[str, int] = field(default_factory=dict)
    placed: list[Placement] = field(default_factory=list)


def check_claims(assignments: Iterable[Assignment]) -> None:
    """Raises InvariantViolated when two instances of these assignments are wanted awake on one device."""
    owner: dict[tuple[str, str], str] = {}
    for assignment in assignments:
        for assigned in assignment.instances:
            if assigned.desired in (Desired.DORMANT, Desired.GONE):
                continue
            for device in assigned.devices:
                claim = f"{assigned.instance}/{assigned.rank}"
                first = owner.setdefault((assignment.slot, device), claim)
                if first != claim:
                    raise InvariantViolated(
                        f"device {device} of slot {assignment.slot} is claimed by {first} and by {claim}"
                    )


def build(catalog: Catalog, snapshot: Snapshot, made: Plan, clock: Clock, begun_at: float) -> Changes:
    """Everything that follows from `made`; `begun_at` is when the reconcile that made it began (wall)."""
    return _Builder(catalog, snapshot, made, clock, begun_at).build()


class _Builder:
    def __init__(self, catalog: Catalog, snapshot: Snapshot, made: Plan, clock: Clock, begun_at: float) -> None:
        self._catalog, self._snapshot, self._made, self._clock = catalog, snapshot, made, clock
        self._begun_at = begun_at
        self._views = {i.instance: i for i in snapshot.instances if not i.remembered}
        self._slots = {
            slot: {(i.instance, i.rank): i for i in stored.record.instances}
            for slot, stored in catalog.assignments.items()
        }
        self._copies = {c.report.copy: c for c in copies_of(snapshot)}
        self._tenants = {s.slot: tenant(s.pool) for s in snapshot.slots}
        self._operations: dict[str, Operation] = {}
        self._changes = Changes()

    def build(self) -> Changes:
        for placement in self._made.placements:
            self._place(placement)
        self._forget_gone()
        self._write_assignments()
        self._remember_failures()
        for operation in self._operations.values():
            self._changes.writes.append(put("operations", operation.id, operation))
        for decision in self._made.decisions:
            self._note_activity(decision)
        return self._changes

    def _place(self, placement: Placement) -> None:
        view = self._views.get(placement.instance)
        stored = self._catalog.models.get(placement.model)
        fetches = bool(placement.rungs)
        if stored is None and (view is None or fetches):
            return
        spec = stored.record.spec if stored is not None and (view is None or fetches) else None
        if spec is None and view is not None:
            spec = view.spec
        if spec is None:
            return
        if fetches:
            self._changes.expect[f"models/{placement.model}"] = stored.revision if stored else ABSENT
        operation = self._operation(placement, view) if fetches else placement.operation
        wakes = placement.mode is Mode.GUARDIAN and placement.desired is Desired.READY
        deadline = spec.wake_deadline_seconds if wakes else spec.start_deadline_seconds
        for rank, (slot, devices) in enumerate(zip(placement.slots, placement.devices, strict=True)):
            self._slots.setdefault(slot, {})[placement.instance, rank] = InstanceAssignment(
                instance=placement.instance,
                model=placement.model,
                spec=spec,
                rank=rank,
                members=len(placement.slots),
                devices=devices,
                desired=placement.desired,
                level=placement.level,
                mode=placement.mode,
                content_revision=spec.revision,
                rungs=tuple(
                    granted
                    for rung in placement.rungs
                    if (granted := self._grant(rung, rank, placement.instance, slot, deadline))
                ),
                operation=operation,
                cause=placement.reason,
                deadline_seconds=deadline,
                shapes=told(self._shapes(placement.model)) if fetches and not wakes else None,
            )
        self._changes.placed.append(placement)
        if placement.predicted_seconds is not None:
            # In the same commit as the assignment: a prediction stands written before its start begins.
            expectation = Expectation(
                instance=placement.instance,
                operation=operation,
                mode=placement.mode,
                reason=placement.reason,
                seconds=placement.predicted_seconds,
                placed_at=self._clock.now(),
                prices=placement.prices,
            )
            self._changes.writes.append(put("expected", placement.instance, expectation))

    def _shapes(self, model: str) -> Shapes | None:
        stored = self._catalog.shapes.get(model)
        return present(self._snapshot, model, stored.record if stored else None)

    def _grant(self, rung: Rung, rank: int, receiver: str, slot: str, lifetime_seconds: float) -> Rung | None:
        """The rung as rank `rank` may use it, or None when its source offers nothing (any more)."""
        if rung.source is None:
            return rung
        found = [
            granted
            for reference in (rung.source, *rung.helpers)
            if (granted := self._granted(rung.kind, reference, rank, receiver, lifetime_seconds))
            # Whatever was planned: no permission goes from one tenant to another.
            and self._tenants.get(granted.slot) == self._tenants.get(slot)
        ]
        if not found or found[0].filling:
            return None
        return replace(rung, source=found[0], helpers=tuple(found[1:]))

    def _granted(
        self, kind: RungKind, planned: SourceRef, rank: int, receiver: str, lifetime_seconds: float
    ) -> SourceRef | None:  # fmt: skip
        """The reference to one member of a source, with a grant; None when it offers nothing (any more)."""
        instance = planned.instance
        member = _member(self._views.get(instance), rank)
        if kind.from_host_tier and not planned.filling:
            copy = self._copies.get(instance)
            if copy is None or rank:
                return None
            reference, key = copy.reference(kind), copy.offer.grant_key
        elif planned.filling:
            relay = member.report.relay if member is not None and member.report is not None else None
            if relay is None or relay.generation != planned.generation:
                return None
            reference, key = planned, relay.grant_key
        else:
            if member is None or member.report is None or member.report.source is None:
                return None
            reference, key = source_for(kind, member, instance), member.report.source.grant_key
        claims = Claims(
            source_instance=reference.instance,
            generation=reference.generation,
            # Of several ranks each has a manifest of its own: which it is, the receiver's ranks check themselves.
            manifest_digest="" if "," in reference.manifest_digest else reference.manifest_digest,
            receiver=receiver,
            expires_at=self._clock.now() + lifetime_seconds,
        )
        try:
            grant = mint(key, claims) if key else ""
        except ValueError:
            # The source refuses an empty grant and says so, and the ladder goes on: a rung never vanishes.
            log.warning("grant.unusable-key", instance=reference.instance)
            grant = ""
        return replace(reference, grant=grant, parts=planned.parts)

    def _operation(self, placement: Placement, view: InstanceView | None) -> str:
        """The operation that this placement is of, with its `decide` phase; a new one where nobody asked."""
        name = placement.operation
        known = self._operations.get(name)
        if known is None and name in self._catalog.operations:
            known = self._catalog.operations[name].record
        now = self._clock.now()
        if known is None:
            wanted = sum(i.model == placement.model and i.desired is Desired.READY for i in self._views.values())
            kind = self._background_kind(placement, wanted)
            known = Operation(
                id=new_id("op"),
                kind=kind,
                model=placement.model,
                by="controller",
                state=OperationState.RUNNING,
                reason=placement.reason,
                created_at=now,
                replicas_before=wanted,
                replicas_after=wanted + (placement.desired is Desired.READY),
            )
            begun = self._begun_at
        else:
            begun = max((p.end for p in known.phases if p.name == "accept"), default=known.created_at)
        predicted = [p for p in (known.predicted_seconds, placement.predicted_seconds) if p is not None]
        self._operations[known.id] = replace(
            known,
            phases=(*known.phases, Phase("decide", begun, max(begun, now), placement.instance)),
            instances=tuple(dict.fromkeys((*known.instances, placement.instance))),
            predicted_seconds=max(predicted, default=None),
        )
        return known.id

    def _background_kind(self, placement: Placement, wanted: int) -> str:
        if placement.desired is Desired.DORMANT:
            return "replace-guardian"
        decision = next((d for d in self._made.decisions if d.model == placement.model), None)
        stored = self._catalog.models.get(placement.model)
        if decision is not None and decision.floor and not wanted:
            return "activate"
        if decision is not None and decision.burst and stored is not None and wanted >= stored.record.spec.replicas:
            return "burst"
        return "replace-replica"

    def _forget_gone(self) -> None:
        for view in self._views.values():
            if view.desired is Desired.GONE and view.state is State.GONE:
                for member in view.members:
                    self._slots.get(member.slot, {}).pop((view.instance, member.rank), None)

    def _write_assignments(self) -> None:
        fresh = []
        for slot, instances in self._slots.items():
            stored = self._catalog.assignments.get(slot)
            content = tuple(instances[key] for key in sorted(instances))
            if stored is not None and content == stored.record.instances:
                fresh.append(stored.record)
                continue
            revision = (stored.record.revision if stored else 0) + 1
            assignment = Assignment(slot, self._snapshot.epoch, revision, content)
            fresh.append(assignment)
            self._changes.writes.append(put("assignments", slot, assignment))
            self._changes.expect[f"assignments/{slot}"] = stored.revision if stored else ABSENT
        if self._changes.writes:
            check_claims(fresh)

    def _remember_failures(self) -> None:
        placed = {p.instance for p in self._changes.placed}
        for view in self._snapshot.instances:
            if view.remembered:
                if due(view, self._snapshot.now) or view.model not in self._catalog.models:
                    self._changes.writes.append(drop("failures", view.instance))
            elif view.failure is not None and view.instance in placed:
                stored = StoredFailure(
                    view.instance, view.model, view.desired, view.failure, view.failed_at, _tried(view)
                )
                self._changes.writes.append(put("failures", view.instance, stored))

    def _note_activity(self, decision: Decision) -> None:
        """Keeps in mind what demand alone did, so that missing demand can hold it there."""
        stored = self._catalog.models.get(decision.model)
        if stored is None or not self._snapshot.synced:
            return
        before = Activity()
        if decision.model in self._catalog.activity:
            before = self._catalog.activity[decision.model].record
        written, now = stored.record.spec.replicas, self._snapshot.now
        after = before
        if written <= 0:
            at = before.activated_at if before.activated_at is not None else now
            after = Activity(activated_at=at if decision.floor else None)
        elif stored.record.spec.max_replicas > 0:
            at = before.idled_at if before.idled_at is not None else now
            after = Activity(idled_at=at if decision.replicas == 0 else None)
        after = replace(after, burst=decision.burst)
        if after != before:
            self._changes.writes.append(put("activity", decision.model, after))


def _member(view: InstanceView | None, rank: int) -> MemberView | None:
    return next((m for m in view.members if m.rank == rank), None) if view is not None else None


def _tried(view: InstanceView) -> Mode:
    """The mode that a failure speaks against; cold, which rules nothing out, when the instance had come up by it."""
    starts = [m.report.start for m in view.members if m.report is not None and m.report.start is not None]
    came_up = bool(starts) and all(start.ok for start in starts)
    return Mode.COLD if came_up else view.mode


def epoch_of(assignment: Assignment, epoch: int) -> Assignment:
    """The assignment under the epoch of the controller that publishes it now."""
    return assignment if assignment.epoch == epoch else replace(assignment, epoch=epoch)
