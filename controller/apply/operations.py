"""When an operation has ended, and how. No I/O. Drawn in docs/states/operation.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from relight.controller.plan.fleet import ModelFleet, due, retry_at
from relight.core.records import (
    Assignment,
    Desired,
    InstanceView,
    Operation,
    OperationState,
    Plan,
    Snapshot,
)
from relight.core.states import COMING, State

PATIENCE_SECONDS = 5.0
"""How long an operation that cannot be placed stays open: a device or an agent may be on its way back."""

_AWAKE = frozenset({State.READY, State.DRAINING, State.WAKING, State.SLEEPING})
_LEAVING = frozenset({State.DRAINING, State.SLEEPING, State.STOPPING})


def ended(
    operations: Iterable[Operation],
    snapshot: Snapshot,
    made: Plan,
    fleet: Mapping[str, ModelFleet],
    behind: frozenset[str],
) -> list[Operation]:
    """The running operations that are over now. `behind` names slots that have not acknowledged yet."""
    instances = {i.instance: i for i in snapshot.instances if not i.remembered}
    models = {view.spec.key for view in snapshot.models}
    found = []
    for operation in operations:
        if operation.state is not OperationState.RUNNING:
            continue
        if operation.kind == "scale":
            lists = fleet.get(operation.model, ModelFleet())
            verdict = _scale(operation, snapshot, made, lists, behind, known=operation.model in models)
        else:
            verdict = _background(operation, instances)
        if verdict is not None:
            state, reason = verdict
            found.append(replace(operation, state=state, reason=reason, finished_at=snapshot.now))
    return found


def patience_ends_at(operations: Iterable[Operation], now: float) -> float | None:
    """The next wall time at which an open operation may lose its patience."""
    ends = [o.created_at + PATIENCE_SECONDS for o in operations if o.state is OperationState.RUNNING]
    return min((end for end in ends if end > now), default=None)


def _scale(
    operation: Operation,
    snapshot: Snapshot,
    made: Plan,
    lists: ModelFleet,
    behind: frozenset[str],
    *,
    known: bool,
) -> tuple[OperationState, str] | None:
    if not known:
        return OperationState.FAILED, "the model was deleted"
    ready = [i for i in lists.wanted if i.state is State.READY]
    surplus = [i for i in (*lists.draining, *lists.guardians, *lists.leaving) if i.state in _AWAKE]
    target = operation.replicas_after
    touched = {m.slot for i in (*lists.wanted, *lists.draining, *lists.leaving) for m in i.members}
    planned = any(p.model == operation.model and p.desired is not Desired.DORMANT for p in made.placements)
    if len(ready) >= target and len(lists.wanted) == len(ready) and not surplus and not planned:
        if not touched & behind:
            return OperationState.DONE, f"{len(ready)} replicas are ready"
        return None
    if len(lists.wanted) >= target or planned or not snapshot.synced:
        return None
    if any(i.state in COMING or i.state in _LEAVING for i in (*lists.wanted, *lists.guardians)):
        return None
    told = [text for text in made.unplaced if text.startswith(f"{operation.model}: ")]
    blocked = [i for i in lists.remembered if i.desired is Desired.READY and not due(i, snapshot.now)]
    if blocked and all(retry_at(i) is None for i in blocked):
        return OperationState.FAILED, f"{len(ready)} of {target} replicas are ready; " + "; ".join(told)
    waits = any(retry_at(i) is not None for i in blocked) or lists.draining or lists.leaving
    if not waits and told and snapshot.now >= operation.created_at + PATIENCE_SECONDS:
        return OperationState.FAILED, f"{len(ready)} of {target} replicas are ready; " + "; ".join(told)
    return None


def _background(operation: Operation, instances: Mapping[str, InstanceView]) -> tuple[OperationState, str] | None:
    wanted = Desired.DORMANT if operation.kind == "replace-guardian" else Desired.READY
    reached = State.DORMANT if wanted is Desired.DORMANT else State.READY
    for name in operation.instances:
        view = instances.get(name)
        if view is None or view.desired is Desired.GONE:
            return OperationState.FAILED, f"{name} is gone"
        if view.failure is not None:
            return OperationState.FAILED, f"{name}: {view.failure.reason}"
        if view.desired is not wanted:
            return OperationState.SUPERSEDED, f"{name} is wanted {view.desired} by now"
        if view.state is not reached:
            return None
    return OperationState.DONE, f"{', '.join(operation.instances)} is {reached}"


def slots_behind(assignments: Iterable[Assignment], acknowledged: Mapping[str, int]) -> frozenset[str]:
    """The slots whose agent has not yet acted on the newest assignment."""
    return frozenset(a.slot for a in assignments if acknowledged.get(a.slot, -1) < a.revision)
