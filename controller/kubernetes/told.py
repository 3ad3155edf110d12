"""What resources say of how they stand: gathers the facts for status.py, and writes where they say something else."""

from __future__ import annotations

from typing import Any

from relight.controller.kubernetes import pods as slot_pods
from relight.controller.kubernetes import status as statuses
from relight.controller.kubernetes.api import Kind, Object
from relight.controller.kubernetes.cache import Cache
from relight.controller.kubernetes.caches import Caches
from relight.controller.kubernetes.events import Events, written
from relight.controller.kubernetes.resources import DEVICE_POOL, ENGINE_RUNTIME, MODEL_DEPLOYMENT, Writer
from relight.controller.kubernetes.translate import model_spec
from relight.controller.kubernetes.writers import conflict, last_writer
from relight.controller.kubernetes.writes import Step, Writes
from relight.controller.loop import Reconciler
from relight.controller.state.catalog import Catalog
from relight.core.clock import Clock
from relight.core.records import Desired
from relight.core.states import State


class Statuses:
    """Of all models, pools and runtimes."""

    def __init__(
        self, caches: Caches, writes: Writes, catalog: Catalog, reconciler: Reconciler, events: Events, clock: Clock
    ) -> None:
        self._caches, self._writes, self._catalog = caches, writes, catalog
        self._reconciler, self._events, self._clock = reconciler, events, clock

    async def keep(self, step: Step) -> None:
        """Writes each status that says something else than is so."""
        now, caches = written(self._clock.now()), self._caches
        # Before every slot was heard of, less is seen than runs: what an earlier controller said stands.
        for key, found in list(caches.models.objects.items()) if step.snapshot.synced else ():
            wanted = statuses.model_status(found, self._facts(step, key, found), now)
            await self._write(step, MODEL_DEPLOYMENT, caches.models, found, wanted)
        held = slot_pods.held(step.snapshot)
        alive = {s.slot for s in step.snapshot.slots if s.alive}
        for key, found in list(caches.pools.objects.items()):
            refused = step.refused_pools.get(key, "")
            wanted = statuses.pool_status(found, caches.pods_of(key), alive.__contains__, held, refused, now)
            await self._write(step, DEVICE_POOL, caches.pools, found, wanted)
        for found in list(caches.runtimes.objects.values()):
            wanted = statuses.runtime_status(found, step.snapshot, caches.pools_with(found), now)
            await self._write(step, ENGINE_RUNTIME, caches.runtimes, found, wanted)

    async def _write(self, step: Step, kind: Kind, cache: Cache, found: Object, wanted: dict[str, Any]) -> None:
        if statuses.differs(found, wanted):
            await self._writes.patch(step, kind, cache, found, {"status": wanted}, "status")

    def _facts(self, step: Step, key: str, found: Object) -> statuses.ModelFacts:
        caches, made = self._caches, step.made
        refused = step.intent.refused.get(key)
        spec = None
        if refused is None:
            spec = model_spec(found, caches.runtimes.objects, caches.pools.objects, caches.priorities.objects)
        alive = {s.slot for s in step.snapshot.slots if s.alive}
        instances = tuple(
            i
            for i in step.snapshot.instances
            if i.model == key and not i.remembered and all(m.slot in alive for m in i.members)
        )
        operations = [v.record for v in self._catalog.operations.values() if v.record.model == key]
        scales = [o for o in operations if o.kind == "scale"]
        starts = [v.record for v in self._catalog.starts.values() if v.record.model == key]
        coming = [i for i in instances if i.desired is Desired.READY and i.state is not State.READY]
        times = [t for i in coming if (t := self._reconciler.recorder.expected_in(i.instance)) is not None]
        told = self._conflict(key, found)
        if told:
            self._events.tell(found, "ConflictingWriters", told, warning=True)
        return statuses.ModelFacts(
            spec=spec,
            refused=str(refused) if refused else "",
            conflict=told,
            decision=next((d for d in made.decisions if d.model == key), None) if made else None,
            instances=instances,
            unplaced=tuple(u for u in made.unplaced if u.startswith(f"{key}:")) if made else (),
            operation=max(scales, key=lambda o: o.created_at, default=None),
            starts=tuple(sorted(starts, key=lambda t: t.ended_at, reverse=True)),
            next_ready_seconds=min(times, default=None),
        )

    def _conflict(self, key: str, found: Object) -> str:
        writer = Writer((found.get("spec") or {}).get("writer") or Writer.ANY.value)
        scalers = self._caches.scalers_of(key)
        if len(scalers) > 1:
            return f"several HorizontalPodAutoscalers write its number: {', '.join(scalers)}"
        if scalers and writer in (Writer.KUBECTL, Writer.AUTOSCALER):
            reserved = f"which spec.writer reserves for {writer.value}"
            return f"HorizontalPodAutoscaler {scalers[0]} writes its number, {reserved}"
        return conflict(writer, last_writer(found))
