"""What becomes of instances that are too many, drained or failed. Zero I/O: core only.

Order within a retirement: ready -> drained (out of every route table, requests end) -> dormant | gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from relight.controller.plan.capable import no_sleep
from relight.controller.plan.fleet import ModelFleet, retry_at, same_runtime
from relight.controller.plan.rollout import leaving
from relight.core.records import Decision, Desired, InstanceView, Keep, Mode, ModelView, Placement, SlotView
from relight.core.states import State


def move(instance: InstanceView, desired: Desired, reason: str, *, operation: str = "", level: int = 0) -> Placement:
    """The instance where it is, with another desired state and nothing to fetch."""
    return Placement(
        instance=instance.instance,
        model=instance.model,
        desired=desired,
        mode=instance.mode,
        level=level or instance.level,
        slots=tuple(m.slot for m in instance.members),
        devices=tuple(m.devices for m in instance.members),
        rungs=(),
        reason=reason,
        predicted_seconds=None,
        operation=operation or instance.operation,
    )


def asleep_again(instance: InstanceView) -> bool:
    """Whether a failed instance sleeps, and so is a guardian still."""
    return instance.state in (State.DORMANT, State.SLEEPING)


def give_up_failed(lists: ModelFleet) -> list[Placement]:
    """Failed instances go; a guardian that only failed to wake and sleeps again stays a guardian."""
    placements = []
    for instance in lists.failed:
        why = instance.failure.reason if instance.failure else f"it is {instance.state} although it was wanted"
        after = "" if retry_at(instance) is not None else "; not tried again by itself"
        if asleep_again(instance):
            placements.append(move(instance, Desired.DORMANT, f"its wake failed: {why}{after}"))
        else:
            placements.append(move(instance, Desired.GONE, f"failed: {why}{after}"))
    return placements


def settled_since(instance: InstanceView) -> float:
    """When the last of its members came to the state that it is in (wall); infinity where none was heard of."""
    return max((m.report.since if m.report else math.inf for m in instance.members), default=math.inf)


def excess_replicas(view: ModelView | None, lists: ModelFleet, decision: Decision) -> list[Placement]:
    """Takes replicas away until the number is met: the youngest that are not ready, then the least busy."""
    count = len(lists.wanted) - decision.replicas
    if count <= 0:
        return []
    order = sorted(
        lists.wanted,
        key=lambda i: (
            i.state is State.READY,
            i.in_flight if i.state is State.READY else -settled_since(i),
            -settled_since(i),
            i.instance,
        ),
    )
    placements = []
    for instance in order[:count]:
        placements.append(retired(view, instance, f"one too many: {decision.reason}"))
        lists.wanted.remove(instance)
        if placements[-1].desired is Desired.DORMANT:
            lists.guardians.append(instance)
    return placements


def retired(view: ModelView | None, instance: InstanceView, why: str) -> Placement:
    """A replica that shall not be one any more: drained, asleep again, or gone, as far as it had come."""
    if instance.state in (State.READY, State.DRAINING):
        desired, how = Desired.DRAINED, "drained first"
    elif instance.state in (State.WAKING, State.DORMANT, State.SLEEPING):
        desired, how = Desired.DORMANT, "it was not ready yet and sleeps again"
    else:
        desired, how = Desired.GONE, "it was not ready yet"
    return move(instance, desired, f"{why}; {how}", operation=view.operation if view else "")


def guardians_kept(view: ModelView | None, lists: ModelFleet, decision: Decision) -> int:
    """How many guardians may stay: the decided number, at zero replicas the one that the next request wakes, and one
    for each replica that is missing: it may be waiting for somebody to give way.

    Were the one at zero taken from the decided number, each wake from zero would cost a cold start to replace it.
    """
    if view is None:
        return 0
    at_zero = decision.replicas == 0 and view.spec.scale_to_zero.keep is Keep.GUARDIAN
    missing = max(0, decision.replicas - len(lists.wanted) - len(lists.stale))
    return decision.guardians + (1 if at_zero else missing)


def _stays(view: ModelView | None, instance: InstanceView, slots: Mapping[str, SlotView]) -> bool:
    """Whether it may sleep where it is, as a guardian of its model."""
    return view is not None and same_runtime(view.spec, instance.spec) and not leaving(view.spec, instance, slots)


def settle_drained(
    view: ModelView | None, lists: ModelFleet, decision: Decision, slots: Mapping[str, SlotView]
) -> list[Placement]:
    """Puts drained replicas to sleep while guardians are short, and ends the others."""
    kept = guardians_kept(view, lists, decision)
    asleep = sum(i.state in (State.DORMANT, State.SLEEPING) for i in lists.guardians)
    unable = no_sleep(view.spec, slots) if view is not None else {}
    placements = []
    for instance in list(lists.draining):
        if not instance.drained:
            continue
        operation = view.operation if view else ""
        fits = _stays(view, instance, slots)
        why = next((unable[m.slot] for m in instance.members if m.slot in unable), "")
        if view is not None and fits and asleep < kept and not why:
            asleep += 1
            lists.guardians.append(instance)
            reason = f"drained; sleeps as guardian {asleep} of {kept}"
            level = view.spec.guardians.level
            placements.append(move(instance, Desired.DORMANT, reason, operation=operation, level=level))
        else:
            reason = "drained; no guardian is short" if fits else "drained; no longer what its model asks for"
            if fits and asleep < kept:
                reason = f"drained; it stands {why}"
            placements.append(move(instance, Desired.GONE, reason, operation=operation))
        lists.draining.remove(instance)
    return placements


def excess_guardians(
    view: ModelView | None, lists: ModelFleet, decision: Decision, slots: Mapping[str, SlotView]
) -> list[Placement]:
    """Ends guardians that no longer fit their model, then those above the number: first what sleeps least."""
    kept = guardians_kept(view, lists, decision)
    fitting = [i for i in lists.guardians if _stays(view, i, slots)]
    placements = [
        move(i, Desired.GONE, "its model is gone or started otherwise by now, or its slot closes")
        for i in lists.guardians
        if i not in fitting
    ]
    rank = {State.DORMANT: 3, State.SLEEPING: 2, State.DRAINING: 2, State.READY: 2, State.WAKING: 1}
    fitting.sort(key=lambda i: (rank.get(i.state, 0), i.mode is Mode.GUARDIAN, i.instance))
    for instance in fitting[: max(0, len(fitting) - kept)]:
        placements.append(move(instance, Desired.GONE, f"more guardians than the {kept} that are wanted"))
        lists.guardians.remove(instance)
    lists.guardians[:] = [i for i in lists.guardians if i in fitting]
    return placements
