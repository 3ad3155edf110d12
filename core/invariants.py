"""Rules that must always hold, as functions that tests and the running system call. No I/O.

Each returns what breaks it, one line per breach. In tests a breach is fatal (`enforce`); in production it is
counted and logged, and the system goes on: a wrong count is better than an outage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from relight.core.errors import InvariantViolated
from relight.core.records import Decision, Desired, RouteTable, Snapshot
from relight.core.states import State


def no_device_is_claimed_twice(snapshot: Snapshot) -> list[str]:
    """At every revision a device belongs to at most one instance that is awake, or on its way from or to sleep."""
    owner: dict[tuple[str, str], str] = {}
    found = []
    for instance in snapshot.instances:
        asleep = instance.desired is Desired.DORMANT and instance.state is State.DORMANT
        if instance.state is State.GONE or instance.remembered or asleep:
            continue
        for member in instance.members:
            for device in member.devices:
                other = owner.setdefault((member.slot, device), instance.instance)
                if other != instance.instance:
                    found.append(f"{member.slot}/{device} is claimed by {other} and {instance.instance}")
    return found


def only_ready_is_routable(snapshot: Snapshot, table: RouteTable) -> list[str]:
    """Routable implies ready, in the very incarnation that is routed to."""
    ready = {
        i.instance: next((m.report.incarnation for m in i.members if m.report is not None), 0)
        for i in snapshot.instances
        if i.state is State.READY
    }
    return [
        f"{replica.instance} incarnation {replica.incarnation} of {model.name} is routed and not ready"
        for model in table.models
        for replica in model.replicas
        if ready.get(replica.instance) != replica.incarnation
    ]


def numbers_are_in_bounds(snapshot: Snapshot, decisions: Iterable[Decision]) -> list[str]:
    """0 <= decided replicas <= the model's maximum, and every number is one."""
    most = {m.spec.key: m.spec.max_replicas for m in snapshot.models}
    return [
        f"{d.model}: {d.replicas} replicas decided, 0 to {most.get(d.model, 0)} are allowed"
        for d in decisions
        if not math.isfinite(d.replicas) or not 0 <= d.replicas <= most.get(d.model, 0)
    ]


NAMES: tuple[str, ...] = tuple(
    each.__name__ for each in (no_device_is_claimed_twice, only_ready_is_routable, numbers_are_in_bounds)
)


def enforce(rule: str, breach: str) -> None:
    """Raises InvariantViolated: what tests hang in where production counts and logs."""
    raise InvariantViolated(f"{rule}: {breach}")
