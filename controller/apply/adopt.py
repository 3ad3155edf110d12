"""Assignments for what runs when the store does not know it: after it was lost or went back. No I/O.

What serves is never ended because the store was emptied: it is written down as it is, and only then do
deciding and planning say what is one too many.
"""

from __future__ import annotations

from collections.abc import Mapping

from relight.core.records import Assignment, Desired, InstanceAssignment, Mode, ModelSpec, SlotReport
from relight.core.states import State

_DESIRED = {
    State.NONE: Desired.READY,
    State.STARTING: Desired.READY,
    State.WAKING: Desired.READY,
    State.READY: Desired.READY,
    State.DRAINING: Desired.DRAINED,
    State.SLEEPING: Desired.DORMANT,
    State.DORMANT: Desired.DORMANT,
    State.STOPPING: Desired.GONE,
    State.FAILED: Desired.GONE,
}


def adopt(
    report: SlotReport, stored: Assignment | None, specs: Mapping[str, ModelSpec], epoch: int
) -> Assignment | None:
    """The assignment that describes what `report` shows, or None where nothing is to be adopted.

    It is wanted when the slot runs something and has no assignment, or when the agent acts on a revision
    that the store has never heard of. None too while an instance's model is unknown: then the slot is
    left alone altogether.
    """
    if stored is not None and report.revision <= stored.revision:
        return None
    running = [r for r in report.instances if r.state is not State.GONE]
    if not running and stored is None:
        return None
    known = {i.instance: i.spec for i in stored.instances} if stored else {}
    instances = []
    for found in running:
        spec = known.get(found.instance) or specs.get(found.model)
        if spec is None:
            return None
        instances.append(
            InstanceAssignment(
                instance=found.instance,
                model=found.model,
                spec=spec,
                rank=found.rank,
                members=found.members,
                devices=found.devices,
                desired=_DESIRED[found.state],
                level=found.level,
                mode=Mode.COLD,
                content_revision=spec.revision,
                operation=found.operation,
                cause="adopted as it was reported",
                deadline_seconds=spec.start_deadline_seconds,
            )
        )
    return Assignment(report.slot, epoch, report.revision + 1, tuple(instances))
