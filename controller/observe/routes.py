"""The route table: ready replicas of each model, and what may be expected where there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from relight.controller.observe.snapshot import Drains
from relight.controller.plan.devices import FreeDevices
from relight.controller.plan.fleet import sort_fleet
from relight.core.records import (
    Decision,
    Desired,
    InstanceView,
    ModelView,
    Plan,
    RouteModel,
    RouteReplica,
    RouteTable,
    Snapshot,
)
from relight.core.states import COMING, State

ExpectedReady = Callable[[str], float | None]
"""Seconds until an instance is expected to be ready; None when nothing is known."""


def routable(instance: InstanceView) -> bool:
    """Ready, wanted ready, and with an endpoint of its first member: nothing else is ever routed."""
    return (
        instance.desired is Desired.READY
        and instance.state is State.READY
        and not instance.remembered
        and bool(instance.members)
        and instance.members[0].report is not None
        and instance.members[0].report.endpoint is not None
    )


def route_models(snapshot: Snapshot, made: Plan, expected: ExpectedReady) -> tuple[RouteModel, ...]:
    """One entry per model, in the order of the keys."""
    alive = {slot.slot for slot in snapshot.slots if slot.alive}
    fleet = sort_fleet(snapshot)
    free = FreeDevices(snapshot)
    decisions = {d.model: d for d in made.decisions}
    found = []
    for view in sorted(snapshot.models, key=lambda m: m.spec.key):
        key = view.spec.key
        lists = fleet[key]
        ready = [i for i in lists.wanted if routable(i) and all(m.slot in alive for m in i.members)]
        # An instance that is told to wake counts as coming from that moment, not from its first report.
        woken = {i.instance for i in lists.wanted if i.state in (State.DORMANT, State.SLEEPING)}
        coming = [i for i in lists.wanted if i.state in COMING or i.instance in woken]
        times = [t for i in coming if (t := expected(i.instance)) is not None]
        can_come, why = _can_come(view, bool(ready or coming), bool(lists.guardians or lists.draining), free)
        found.append(
            RouteModel(
                namespace=view.spec.namespace,
                name=view.spec.name,
                served_names=view.spec.served_names or (view.spec.name,),
                replicas=tuple(r for i in ready if (r := _replica(i)) is not None),
                coming=len(coming),
                can_come=can_come,
                next_ready_seconds=min(times, default=None),
                reason=_reason(decisions.get(key), made, key, why),
                adapters=view.spec.adapter_names,
            )
        )
    return tuple(found)


def _replica(instance: InstanceView) -> RouteReplica | None:
    report = instance.members[0].report
    if report is None or report.endpoint is None:
        return None
    return RouteReplica(instance.instance, report.incarnation, report.endpoint.url, report.endpoint.served_name)


def _can_come(view: ModelView, there: bool, asleep: bool, free: FreeDevices) -> tuple[bool, str]:
    if view.spec.max_replicas <= 0:
        return False, "max_replicas is 0"
    if there or asleep:
        return True, ""
    chosen, why = free.find(view.spec, ())
    return bool(chosen), why


def _reason(decision: Decision | None, made: Plan, key: str, why: str) -> str:
    told = [text for text in made.unplaced if text.startswith(f"{key}: ")]
    return "; ".join(filter(None, [decision.reason if decision else "", *told, why]))


class Router:
    """The present table. Its revision grows over restarts too, because the epoch stands in its upper half."""

    def __init__(self, drains: Drains) -> None:
        self._drains = drains
        self._changed = asyncio.Event()
        self.table = RouteTable(0)
        self._count = 0

    def update(self, epoch: int, models: tuple[RouteModel, ...], draining: Mapping[str, InstanceView]) -> bool:
        """Publishes `models` when they differ; notes from which revision on the draining are left out."""
        changed = self.table.revision >> 32 != epoch or _steady(models) != _steady(self.table.models)
        if changed:
            self._count += 1
            self.table = RouteTable((epoch << 32) + self._count, models)
            event, self._changed = self._changed, asyncio.Event()
            event.set()
        noted = False
        for name in draining:
            if name not in self._drains.removed_at:
                self._drains.removed_at[name] = self.table.revision
                noted = True
        return noted

    async def newer_than(self, revision: int) -> RouteTable:
        """Waits for a table of a higher revision."""
        while self.table.revision <= revision:
            await self._changed.wait()
        return self.table


def _steady(models: tuple[RouteModel, ...]) -> tuple[RouteModel, ...]:
    """Without what changes by the mere passing of time."""
    return tuple(replace(model, next_ready_seconds=None) for model in models)
