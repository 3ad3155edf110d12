"""Slot pods kept as their pools ask, and marked as their replicas come and go: pods.py and marks.py, written down."""

from __future__ import annotations

import asyncio

from relight.controller.kubernetes import marks as slot_marks
from relight.controller.kubernetes import pods as slot_pods
from relight.controller.kubernetes.api import POD, Object
from relight.controller.kubernetes.cache import key_of
from relight.controller.kubernetes.caches import Caches
from relight.controller.kubernetes.events import Events, written
from relight.controller.kubernetes.marks import Mark
from relight.controller.kubernetes.pods import Added
from relight.controller.kubernetes.resources import CLOSING
from relight.controller.kubernetes.translate import pool_spec
from relight.controller.kubernetes.writes import Step, Writes
from relight.controller.loop import Reconciler
from relight.core.clock import Clock
from relight.core.errors import InvalidInput


class SlotPods:
    """All pods of all pools."""

    def __init__(
        self, caches: Caches, writes: Writes, reconciler: Reconciler, events: Events, added: Added, clock: Clock
    ) -> None:
        self._caches, self._writes, self._reconciler = caches, writes, reconciler
        self._events, self._added, self._clock = events, added, clock

    async def mark(self, step: Step) -> None:
        """Labels and gates say what stands in each slot that was heard of; tells what is reached by them."""
        marks = slot_marks.marks(step.snapshot)
        pods = self._caches.pods.objects
        # The store may just have been emptied: what serves must not be unrouted because nobody knows of it yet.
        unclear = slot_pods.unclear(step.snapshot)
        told = [p for p in pods.values() if not p["metadata"].get("deletionTimestamp")]
        told = [p for p in told if slot_pods.slot_of(p) not in unclear]
        await asyncio.gather(*(self._mark(step, p, marks.get(slot_pods.slot_of(p), Mark())) for p in told))
        proven = {slot_pods.slot_of(p) for p in pods.values() if slot_marks.is_proven(p)}
        routed = {
            i.instance
            for i in step.snapshot.instances
            if i.members and not i.remembered and i.members[0].slot in proven
        }
        self._reconciler.places.set_routed(frozenset(routed))

    async def _mark(self, step: Step, pod: Object, mark: Mark) -> None:
        """The gate first, on the way up as on the way down: a kubelet that has just taken in other labels looks at it a
        second later. Only where labels still name another model they go first, lest requests for that one come here.
        """
        foreign = mark.proven and slot_marks.model_of(pod) not in ("", mark.model)
        for write in (self._label, self._gate) if foreign else (self._gate, self._label):
            pod = await write(step, pod, mark)
            if foreign and slot_marks.model_of(pod) != mark.model:
                return

    async def _label(self, step: Step, pod: Object, mark: Mark) -> Object:
        if mark.early(pod, self._clock.now()):
            step.retry = True
            return pod
        body = slot_marks.label_patch(pod, mark)
        return pod if body is None else await self._patch(step, pod, body)

    async def _gate(self, step: Step, pod: Object, mark: Mark) -> Object:
        body = slot_marks.gate_patch(pod, mark, written(self._clock.now()))
        return pod if body is None else await self._patch(step, pod, body, "status")

    async def _patch(self, step: Step, pod: Object, body: Object, subresource: str = "") -> Object:
        return await self._writes.patch(step, POD, self._caches.pods, pod, body, subresource)

    async def keep(self, step: Step) -> None:
        """Makes, closes, reopens and deletes pods until each pool has what it asks for."""
        held = slot_pods.held(step.snapshot)
        for key, pool in self._caches.pools.objects.items():
            if pool["metadata"].get("deletionTimestamp"):
                continue
            try:
                spec, runtime = pool_spec(pool, self._caches.runtimes.objects)
                digest = slot_pods.template_digest(spec, runtime)
                todo = slot_pods.pool_step(spec.replicas, digest, self._caches.pods_of(key), held)
                bodies = [slot_pods.slot_pod(pool, spec, runtime, self._added) for _ in range(todo.create)]
            except InvalidInput as error:
                step.refused_pools[key] = str(error)
                self._events.tell(pool, "InvalidSpec", str(error), warning=True)
                continue
            for body in bodies:
                await self._create(step, pool, body)
            for pod, why in todo.close:
                await self._annotate(step, pool, pod, why)
            for pod in todo.reopen:
                await self._annotate(step, pool, pod, None)
            for pod in todo.delete:
                await self._delete(step, pool, pod)

    async def _create(self, step: Step, pool: Object, body: Object) -> None:
        namespace, create = pool["metadata"]["namespace"], self._writes.api.create
        made = await self._writes.do(step, f"a pod of {key_of(pool)}", create, POD, namespace, body)
        if made is not None:
            self._caches.pods.learned(made)
            self._events.tell(pool, "SlotCreated", f"pod {made['metadata']['name']}")

    async def _annotate(self, step: Step, pool: Object, pod: Object, why: str | None) -> None:
        await self._patch(step, pod, {"metadata": {"annotations": {CLOSING: why}}})
        name = pod["metadata"]["name"]
        reason, message = ("SlotClosing", f"pod {name}: {why}") if why else ("SlotStays", f"pod {name}")
        self._events.tell(pool, reason, message)

    async def _delete(self, step: Step, pool: Object, pod: Object) -> None:
        metadata, delete = pod["metadata"], self._writes.api.delete
        where = metadata["namespace"], metadata["name"]
        await self._writes.do(step, f"pod {key_of(pod)}", delete, POD, *where, uid=metadata["uid"])
        self._events.tell(pool, "SlotDeleted", f"pod {metadata['name']}: nothing serves there")
