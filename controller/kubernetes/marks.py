"""What a slot pod shows of what stands in it: the condition at its gate, and its labels. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relight.controller.kubernetes.api import Object
from relight.controller.kubernetes.resources import MODEL_LABEL, PROVEN_GATE, STATE_LABEL
from relight.core.records import Desired, InstanceView, Snapshot
from relight.core.states import State


def shown(pod: Object) -> str:
    """The model, by key, whose replica the pod's gate says to be there or on its way; empty when none."""
    told = condition(pod, PROVEN_GATE) or {}
    model = told.get("message") if told.get("reason") in _COUNTED else ""
    return f"{pod['metadata']['namespace']}/{model}" if model else ""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a slot pod shows: the model of its awake replica, its state, whether that one is proven, and since when
    (wall seconds) it has been in that state."""

    model: str = ""
    state: str = "idle"
    proven: bool = False
    reason: str = "NoReplica"
    since: float = 0.0

    def early(self, pod: Object, now: float) -> bool:
        """Whether `pod` is better not labelled yet: it shows a guardian, whose wake may be over in a moment.

        A kubelet that takes in changed labels looks at nothing else for up to a second or two, and so at the gate.
        """
        return self.state == "waking" and state_of(pod) == "guardian" and now < self.since + LABELLED_AFTER_SECONDS


def marks(snapshot: Snapshot) -> dict[str, Mark]:
    """By slot; a slot with nothing to show is absent."""
    found: dict[str, Mark] = {s.slot: Mark("", "lost", False, "AgentLost") for s in snapshot.slots if not s.alive}
    for instance in sorted(snapshot.instances, key=lambda i: i.instance):
        if instance.remembered or instance.state is State.GONE or not instance.members:
            continue
        mark = _mark(instance)
        for n, member in enumerate(instance.members):
            # Requests go to the first member; the others hold ranks of it.
            own = mark if n == 0 else Mark("", mark.state, False, "NotTheFirstMember")
            known = found.get(member.slot)
            if known is None or _WEIGHT[own.state] > _WEIGHT[known.state]:
                found[member.slot] = own
    return found


_STATES = ("idle", "failed", "guardian", "preparing", "starting", "waking", "draining", "ready", "lost")
_COUNTED = ("Starting", "Waking", "Proven")
"""Reasons at the gate of what counts as a replica of its model."""
LABELLED_AFTER_SECONDS = 2.0
_WEIGHT = {state: n for n, state in enumerate(_STATES)}
"""Of several instances on one slot the one that counts most is shown."""


def _mark(instance: InstanceView) -> Mark:
    model = instance.model.partition("/")[2]
    state = instance.state
    if instance.desired is Desired.READY and state is State.READY and instance.failure is None:
        return Mark(model, "ready", True, "Proven")
    if state is State.FAILED:
        return Mark("", "failed", False, "Failed")
    if state is State.DRAINING or (state is State.READY and instance.desired is not Desired.READY):
        return Mark(model, "draining", False, "Draining")
    if instance.desired is Desired.READY and state is State.WAKING:
        since = min((m.report.since for m in instance.members if m.report), default=0.0)
        return Mark(model, "waking", False, "Waking", since)
    if instance.desired is Desired.READY and state not in (State.DORMANT, State.SLEEPING):
        return Mark(model, "starting", False, "Starting")
    if state in (State.DORMANT, State.SLEEPING):
        return Mark("", "guardian", False, "Dormant")
    if instance.desired is Desired.DORMANT:
        return Mark("", "preparing", False, "NotAsleepYet")
    return Mark("", "idle", False, "Ending")


def label_patch(pod: Object, mark: Mark) -> Object | None:
    """What makes the pod's labels say `mark`; None when they do."""
    told = labels(pod)
    wanted = {STATE_LABEL: mark.state, MODEL_LABEL: mark.model or None}
    changed = {k: v for k, v in wanted.items() if told.get(k) != v}
    if not changed:
        return None
    return {"metadata": {"resourceVersion": pod["metadata"]["resourceVersion"], "labels": changed}}


def gate_patch(pod: Object, mark: Mark, now: str) -> Object | None:
    """What makes the pod's readiness gate say `mark`, as a strategic merge of its status; None when it does."""
    known = condition(pod, PROVEN_GATE)
    told = {"status": "True" if mark.proven else "False", "reason": mark.reason, "message": mark.model}
    if known is not None and all((known.get(k) or "") == v for k, v in told.items()):
        return None
    changed = known is None or known.get("status") != told["status"]
    gate = {
        "type": PROVEN_GATE,
        **told,
        "lastTransitionTime": now if changed or known is None else known.get("lastTransitionTime"),
    }
    return {
        "metadata": {"resourceVersion": pod["metadata"]["resourceVersion"]},
        "status": {"conditions": [gate]},
    }


def state_of(pod: Object) -> str:
    """What the pod's label says of it."""
    return labels(pod).get(STATE_LABEL, "")


def model_of(pod: Object) -> str:
    """Whose Services the pod's label puts it behind; empty for nobody's."""
    return labels(pod).get(MODEL_LABEL, "")


def is_proven(pod: Object) -> bool:
    """Whether the pod's gate lets requests in, as last seen."""
    known = condition(pod, PROVEN_GATE)
    return known is not None and known.get("status") == "True"


def condition(found: Object, type_: str) -> Object | None:
    """The condition of this type in an object's status; None where it has none."""
    conditions: list[Object] = (found.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c.get("type") == type_), None)


def labels(found: Object) -> Mapping[str, str]:
    """An object's labels."""
    return found["metadata"].get("labels") or {}
