"""What the status of each resource says, from one snapshot. Pure: the same snapshot gives the same status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from relight.controller.flight.timeline import Timeline
from relight.controller.kubernetes.api import Object
from relight.controller.kubernetes.pods import Held, slot_of
from relight.controller.kubernetes.resources import (
    MODEL_LABEL,
    POOL_LABEL,
    Condition,
    DevicePoolStatus,
    EngineRuntimeStatus,
    GuardiansStatus,
    LastScale,
    LastStart,
    ModelDeploymentStatus,
    SlotCounts,
)
from relight.core.records import Decision, Desired, InstanceView, Mode, ModelSpec, Operation, Snapshot
from relight.core.states import State

LAST_STARTS = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One condition, before it is known since when it holds."""

    type: str
    holds: bool
    reason: str
    message: str = ""


def conditions(found: Sequence[Finding], known: Iterable[Object], generation: int, now: str) -> list[Condition]:
    """As Kubernetes writes them: the time of a transition stays while its status does."""
    since = {c.get("type"): (c.get("status"), c.get("lastTransitionTime") or now) for c in known}
    made = []
    for finding in found:
        status = "True" if finding.holds else "False"
        before, at = since.get(finding.type, ("", now))
        made.append(
            Condition(
                type=finding.type,
                status=status,
                reason=finding.reason,
                message=finding.message[:32_768],
                last_transition_time=at if before == status else now,
                observed_generation=generation,
            )
        )
    return made


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """All that a model's status is made of."""

    spec: ModelSpec | None
    """None while what its owner wrote cannot be run: `refused` says why."""
    refused: str
    conflict: str
    """Why whoever wrote the number may not; empty when it may."""
    decision: Decision | None
    instances: tuple[InstanceView, ...]
    unplaced: tuple[str, ...]
    operation: Operation | None
    """The last change of its number."""
    starts: tuple[Timeline, ...]
    """The newest first."""
    next_ready_seconds: float | None


def model_status(found: Object, facts: ModelFacts, now: str) -> dict[str, Any]:
    """The status of a ModelDeployment, with nulls for what is not there."""
    generation = found["metadata"].get("generation", 0)
    known = (found.get("status") or {}).get("conditions") or []
    wanted = [i for i in facts.instances if i.desired is Desired.READY]
    ready = [i for i in wanted if i.state is State.READY and i.failure is None]
    waking = [i for i in wanted if i.state in (State.WAKING, State.DORMANT, State.SLEEPING) and i.failure is None]
    starting = [i for i in wanted if i.state in (State.STARTING, State.NONE)]
    draining = [i for i in facts.instances if i.desired is Desired.DRAINED or i.state is State.DRAINING]
    asleep = [i for i in facts.instances if i.desired is Desired.DORMANT and i.state is State.DORMANT]
    replicas = len(ready) + len(waking) + len(starting)
    update = facts.spec.revision if facts.spec else ""
    decided = facts.decision.replicas if facts.decision else 0
    serving = {i.spec.revision for i in ready}
    current = update if serving in ({update}, set()) else sorted(serving - {update})[0]
    safe = _unsafe(facts)
    status = ModelDeploymentStatus(
        observed_generation=generation,
        replicas=replicas,
        ready_replicas=len(ready),
        waking_replicas=len(waking),
        starting_replicas=len(starting),
        draining_replicas=len(draining),
        selector=f"{MODEL_LABEL}={found['metadata']['name']}",
        guardians=GuardiansStatus(
            desired=facts.decision.guardians if facts.decision else 0,
            ready=len(asleep),
            hits=sum(t.ok and t.mode is Mode.GUARDIAN for t in facts.starts),
            misses=sum(t.ok and t.mode is not Mode.GUARDIAN and not t.slept for t in facts.starts),
        ),
        current_revision=current,
        update_revision=update,
        next_ready_seconds=None if facts.next_ready_seconds is None else round(facts.next_ready_seconds, 1),
        last_scale=_last_scale(facts.operation),
        last_starts=[_last_start(t) for t in facts.starts[:LAST_STARTS]],
        guardian_safe=None if safe is None else not safe,
        conditions=conditions(
            [*_model_findings(facts, len(ready), replicas, decided), _guardians(facts, len(asleep)), *_safety(facts)],
            known,
            generation,
            now,
        ),
    )
    return _patch(status)


def _model_findings(facts: ModelFacts, ready: int, replicas: int, decided: int) -> list[Finding]:
    why = facts.decision.reason if facts.decision else facts.refused
    missing = "; ".join(facts.unplaced)
    settled = ready == replicas == decided and not missing
    return [
        Finding("Accepted", facts.spec is not None, "Invalid" if facts.spec is None else "Accepted", facts.refused),
        Finding("Available", ready > 0, "Ready" if ready else "NoReplicaReady", f"{ready} of {decided}: {why}"),
        Finding(
            "Progressing",
            not settled,
            "Settled" if settled else ("WaitsForRoom" if missing else "Scaling"),
            missing or why,
        ),
        Finding("ConflictingWriters", bool(facts.conflict), "Conflict" if facts.conflict else "None", facts.conflict),
    ]


def _guardians(facts: ModelFacts, asleep: int) -> Finding:
    wanted = facts.decision.guardians if facts.decision else 0
    stand = facts.decision is not None and asleep >= wanted
    return Finding("GuardiansReady", stand, "Dormant" if stand else "Fewer", f"{asleep} of {wanted} sleep")


def _unsafe(facts: ModelFacts) -> str | None:
    """Why engines of the model are no safe guardians, as measured; empty when they are, None when none slept yet."""
    measured = [m.report.memory for i in facts.instances for m in i.members if m.report and m.report.memory]
    slept = [memory for memory in measured if memory.residual_bytes]
    return next((memory.unsafe for memory in slept if memory.unsafe), "") if slept else None


def _safety(facts: ModelFacts) -> list[Finding]:
    unsafe = _unsafe(facts)
    if unsafe is None:
        return []
    return [Finding("GuardianSafe", not unsafe, "KeepsMemory" if unsafe else "Measured", unsafe)]


def _last_scale(operation: Operation | None) -> LastScale | None:
    if operation is None:
        return None
    return LastScale(
        from_=operation.replicas_before,
        to=operation.replicas_after,
        by=operation.by,
        reason=operation.reason,
        operation=operation.id,
    )


def _last_start(timeline: Timeline) -> LastStart:
    predicted = timeline.predicted_seconds
    return LastStart(
        instance=timeline.instance,
        mode=timeline.mode.value.capitalize(),
        seconds=round(timeline.seconds, 3),
        predicted_seconds=None if predicted is None else round(predicted, 3),
        ok=timeline.ok,
        reason=timeline.reason[:1024],
    )


def pool_status(
    found: Object, pods: Sequence[Object], attached: Callable[[str], bool], slots: Mapping[str, Held], refused: str,
    now: str,
) -> dict[str, Any]:  # fmt: skip
    """The status of a DevicePool."""
    generation = found["metadata"].get("generation", 0)
    known = (found.get("status") or {}).get("conditions") or []
    alive = [p for p in pods if not p["metadata"].get("deletionTimestamp")]
    ready = [p for p in alive if attached(slot_of(p))]
    idle = [p for p in ready if not slots.get(slot_of(p), Held()).replicas]
    wanted = int((found.get("spec") or {}).get("replicas") or 0)
    pending = max(0, max(len(alive), wanted) - len(ready))
    whole = not refused and len(ready) == len(alive) == wanted
    findings = [
        Finding("Accepted", not refused, "Invalid" if refused else "Accepted", refused),
        Finding(
            "Ready", whole, "AllSlotsAttached" if whole else "SlotsMissing", f"{len(ready)} of {wanted} slots attached"
        ),
    ]
    status = DevicePoolStatus(
        observed_generation=generation,
        replicas=len(alive),
        slots=SlotCounts(ready=len(ready), idle=len(idle), pending=pending),
        selector=f"{POOL_LABEL}={found['metadata']['name']}",
        conditions=conditions(findings, known, generation, now),
    )
    return _patch(status)


def runtime_status(found: Object, snapshot: Snapshot, pools: frozenset[str], now: str) -> dict[str, Any]:
    """The status of an EngineRuntime: what the agents in `pools` (by key) report of its engine."""
    generation = found["metadata"].get("generation", 0)
    known = (found.get("status") or {}).get("conditions") or []
    engine = str((found.get("spec") or {}).get("engine") or "")
    slots = [s for s in snapshot.slots if s.alive and s.pool in pools]
    versions = sorted({s.engines[engine] for s in slots if engine in s.engines})
    without = sum(engine not in s.engines for s in slots)
    told = "no slot runs it yet" if not slots else f"{without} of {len(slots)} slots do not have it"
    finding = Finding("Usable", bool(versions) and not without, "Reported" if versions else "NotReported", told)
    status = EngineRuntimeStatus(
        observed_generation=generation,
        version=", ".join(versions),
        capabilities=sorted({d.kind for s in slots for d in s.devices}),
        conditions=conditions([finding], known, generation, now),
    )
    return _patch(status)


def differs(found: Object, wanted: dict[str, Any]) -> bool:
    """Whether the object's status says something else; absent and null are the same."""
    return bool(_bare(found.get("status") or {}) != _bare(wanted))


def _patch(status: BaseModel) -> dict[str, Any]:
    """As a merge patch: null takes away. Inside lists, which are replaced whole, what is not there is left out."""
    return {k: _listed(v) for k, v in status.model_dump(by_alias=True, mode="json").items()}


def _listed(value: Any) -> Any:
    if isinstance(value, list):
        return [_bare(v) for v in value]
    if isinstance(value, dict):
        return {k: _listed(v) for k, v in value.items()}
    # Some servers take an empty text for null, and refuse it.
    return None if value == "" else value


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _bare(v) for k, v in value.items() if v not in (None, "")}
    if isinstance(value, list):
        return [_bare(v) for v in value]
    return value
