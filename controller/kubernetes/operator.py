"""Keeps resources, pods and the control plane in step: level-triggered, woken by every change of either side.

Each step looks at everything anew: places of slots, what is wanted of models, pods of pools, labels and gates,
statuses. A write that is refused because its object moved is not repeated: the watch brings the newer one, and the next
step decides anew. Nothing is concluded from what is absent before every cache has been filled once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from relight.controller.accept import Accept
from relight.controller.kubernetes import pods as slot_pods
from relight.controller.kubernetes import status as statuses
from relight.controller.kubernetes.api import NODE, POD, Api, Kind, Object
from relight.controller.kubernetes.cache import Cache, key_of
from relight.controller.kubernetes.election import Election
from relight.controller.kubernetes.events import Events, written
from relight.controller.kubernetes.intent import Intent, intent
from relight.controller.kubernetes.pods import Added, Mark
from relight.controller.kubernetes.resources import (
    CLOSING,
    DEVICE_POOL,
    ENGINE_RUNTIME,
    FINALIZER,
    MODEL_DEPLOYMENT,
    POOL_LABEL,
    Writer,
)
from relight.controller.kubernetes.translate import model_spec, pool_spec
from relight.controller.kubernetes.writers import conflict, last_writer
from relight.controller.loop import Reconciler
from relight.controller.state.catalog import Catalog
from relight.core.clock import Clock
from relight.core.errors import Conflict, Fenced, InvalidInput, NotFound, RelightError
from relight.core.logs import get_logger
from relight.core.records import Desired, Placement, Plan, ScaleRequest, Snapshot
from relight.core.states import State

HPA = Kind("autoscaling", "v1", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
PRIORITY_CLASS = Kind("scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False)
RETRY_SECONDS = 1.0
_SAID = {
    Desired.DRAINED: "Draining",
    Desired.DORMANT: "Sleeping",
    Desired.GONE: "Stopping",
}

log = get_logger("controller.kubernetes")


@dataclass(slots=True)
class _Step:
    """What one step found out on its way, for the statuses at its end."""

    snapshot: Snapshot
    intent: Intent
    refused_pools: dict[str, str] = field(default_factory=dict)
    retry: bool = False


class Operator:
    """One controller's part in the cluster. `open`, then `run`."""

    def __init__(
        self, api: Api, election: Election, accept: Accept, catalog: Catalog, reconciler: Reconciler, added: Added,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._api, self._election, self._added, self._clock = api, election, added, clock
        self._accept, self._catalog, self._reconciler = accept, catalog, reconciler
        self._wanted = asyncio.Event()
        self._numbering: Counter[str] = Counter()
        self._made: Plan | None = None
        self.events = Events(api, clock)
        self._models = self._cache(MODEL_DEPLOYMENT)
        self._pools = self._cache(DEVICE_POOL)
        self._runtimes = self._cache(ENGINE_RUNTIME)
        self._pods = self._cache(POD, POOL_LABEL)
        self._nodes = self._cache(NODE)
        self._hpas = self._cache(HPA)
        self._priorities = self._cache(PRIORITY_CLASS)
        self._caches = (
            self._models, self._pools, self._runtimes, self._pods, self._nodes, self._hpas, self._priorities,
        )  # fmt: skip
        self._tasks: list[asyncio.Task[None]] = []

    def _cache(self, kind: Kind, labels: str = "") -> Cache:
        return Cache(self._api, kind, self.wake, labels)

    def wake(self) -> None:
        """Asks for a step soon."""
        self._wanted.set()

    def passed(self, snapshot: Snapshot, made: Plan) -> None:
        """The reconcile loop has looked and planned."""
        self._made = made
        self.wake()

    def placed(self, placement: Placement) -> None:
        """A placement was written: an event says so."""
        found = self._models.objects.get(placement.model)
        if found is None:
            return
        mode = "Waking" if placement.mode == "guardian" else "Starting"
        reason = mode if placement.desired is Desired.READY else _SAID[placement.desired]
        if placement.desired is Desired.DORMANT and placement.rungs:
            reason = "PreparingGuardian"
        where = ", ".join(placement.slots)
        self.events.tell(found, reason, f"{placement.instance} on {where}: {placement.reason}")

    @contextmanager
    def numbering(self, key: str) -> Iterator[Callable[[Object], None]]:
        """While a number is written from here, to the resource and then to the store, it is not copied between them.

        Yields who is to be told of the scale that the server returned: what the watch still has must not undo it.
        """
        self._numbering[key] += 1
        try:
            yield partial(self._numbered, key)
        finally:
            self._numbering[key] -= 1
            self.wake()

    def _numbered(self, key: str, scale: Object) -> None:
        found = self._models.objects.get(key)
        if found is not None:
            metadata = {**found["metadata"], "resourceVersion": scale["metadata"]["resourceVersion"]}
            spec = {**found["spec"], "replicas": scale["spec"].get("replicas", 0)}
            self._models.learned({**found, "metadata": metadata, "spec": spec})
            before = found["spec"].get("replicas", 0)
            self.events.tell(found, "Scaled", f"from {before} to {spec['replicas']}, written by this controller")

    async def open(self) -> None:
        """Returns when every cache was filled once, and the places of slots are known."""
        for cache in self._caches:
            self._tasks.append(asyncio.create_task(cache.run(), name=f"watch {cache.kind.plural}"))
        self._tasks.append(asyncio.create_task(self.events.run(), name="events"))
        for cache in self._caches:
            while not cache.synced.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(cache.synced.wait(), 10)
                if not cache.synced.is_set():
                    log.warning("operator.waits", kind=cache.kind.plural, reason="it could not be listed yet")
        self._set_places()
        # The store may be new: the pods tell where an earlier controller had something running.
        self._reconciler.fleet.expect(
            slot_pods.slot_of(p) for p in self._pods.objects.values() if slot_pods.state_of(p) != Mark().state
        )

    async def close(self) -> None:
        """Ends what `open` began."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def run(self) -> None:
        """Steps until cancelled. Raises Fenced when another controller leads."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                retry = await self.step()
            except Fenced:
                raise
            except RelightError as error:
                log.warning("step.failed", error=str(error))
                retry = True
            except Exception:
                log.exception("step.defect")
                retry = True
            if retry:
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self.wake)

    async def step(self) -> bool:
        """One look at everything. Returns whether something is to be tried again without any change."""
        self._election.require()
        self._set_places()
        snapshot = self._reconciler.snapshot()
        stored = {key: v.record.spec for key, v in self._catalog.models.items()}
        wanted = intent(
            self._models.objects,
            self._runtimes.objects,
            self._pools.objects,
            stored,
            snapshot,
            self._priorities.objects,
        )
        step = _Step(snapshot, wanted)
        await self._keep_intent(step)
        await self._keep_marks(step)
        await self._keep_pods(step)
        await self._keep_statuses(step)
        return step.retry

    def _set_places(self) -> None:
        places = slot_pods.places(self._pods.objects, self._nodes.objects, self._pools.objects)
        self._reconciler.places.set(places)

    async def _do(self, step: _Step, what: str, call: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        """Does one write while this controller leads. None when it was refused: the next step decides anew."""
        self._election.require()
        try:
            return await call(*args, **options)
        except Fenced:
            raise
        except (Conflict, NotFound) as error:
            # The object moved; the watch brings what it is now, if it has not already.
            log.info("write.moved", what=what, reason=str(error))
            step.retry = True
        except InvalidInput as error:
            log.error("write.refused", what=what, error=str(error))
        except RelightError as error:
            log.warning("write.failed", what=what, error=str(error))
            step.retry = True
        return None

    # -- models

    async def _keep_intent(self, step: _Step) -> None:
        wanted = step.intent
        for found in wanted.hold:
            finalizers = [*(found["metadata"].get("finalizers") or []), FINALIZER]
            await self._finalizers(step, found, finalizers)
        for spec in wanted.put:
            await self._do(step, f"model {spec.key}", self._accept.put_model, spec, _always)
        for spec, by in wanted.scale:
            stored = self._catalog.models.get(spec.key)
            if self._numbering[spec.key] or (stored and stored.record.spec.replicas == spec.replicas):
                continue
            request = ScaleRequest(spec.key, spec.replicas, by, self._clock.now())
            operation = await self._do(step, f"scale {spec.key}", self._accept.scale, request)
            if operation is not None:
                before, after = operation.replicas_before, operation.replicas_after
                message = f"from {before} to {after}, written by {by} ({operation.id})"
                self.events.tell(self._models.objects[spec.key], "Scaled", message)
        for key in wanted.delete:
            await self._do(step, f"model {key}", self._accept.delete_model, key, _always)
        for found in wanted.release:
            rest = [f for f in found["metadata"].get("finalizers") or [] if f != FINALIZER]
            await self._finalizers(step, found, rest)
            self.events.forget(found["metadata"].get("uid", ""))
        for key, error in wanted.refused.items():
            self.events.tell(self._models.objects[key], "InvalidSpec", str(error), warning=True)

    async def _finalizers(self, step: _Step, found: Object, finalizers: list[str]) -> None:
        metadata = found["metadata"]
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"], "finalizers": finalizers}}
        done = await self._do(
            step,
            f"finalizers of {key_of(found)}",
            self._api.patch,
            MODEL_DEPLOYMENT,
            metadata["namespace"],
            metadata["name"],
            body,
        )
        if done is not None and not done["metadata"].get("deletionTimestamp"):
            self._models.learned(done)
            self.wake()

    # -- pods

    async def _keep_marks(self, step: _Step) -> None:
        marks = slot_pods.marks(step.snapshot)
        pods = [
            p
            for p in self._pods.objects.values()
            if not p["metadata"].get("deletionTimestamp") and not self._reconciler.fleet.awaits(slot_pods.slot_of(p))
        ]
        await asyncio.gather(*(self._mark(step, p, marks.get(slot_pods.slot_of(p), Mark())) for p in pods))
        proven = {slot_pods.slot_of(p) for p in self._pods.objects.values() if slot_pods.is_proven(p)}
        routed = {
            i.instance
            for i in step.snapshot.instances
            if i.members and not i.remembered and i.members[0].slot in proven
        }
        self._reconciler.places.set_routed(frozenset(routed))

    async def _mark(self, step: _Step, pod: Object, mark: Mark) -> None:
        """Labels say who is coming before the gate opens, and the gate closes before they say that it leaves."""
        for write in (self._label, self._gate) if mark.proven else (self._gate, self._label):
            pod = await write(step, pod, mark)

    async def _label(self, step: _Step, pod: Object, mark: Mark) -> Object:
        body = slot_pods.label_patch(pod, mark)
        return pod if body is None else await self._patch_pod(step, pod, body, "")

    async def _gate(self, step: _Step, pod: Object, mark: Mark) -> Object:
        body = slot_pods.gate_patch(pod, mark, written(self._clock.now()))
        return pod if body is None else await self._patch_pod(step, pod, body, "status")

    async def _patch_pod(self, step: _Step, pod: Object, body: Object, subresource: str) -> Object:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        done = await self._do(
            step,
            f"pod {namespace}/{name}",
            self._api.patch,
            POD,
            namespace,
            name,
            body,
            subresource=subresource,
            strategic=bool(subresource),
        )
        if done is None:
            return pod
        self._pods.learned(done)
        found: Object = done
        return found

    async def _keep_pods(self, step: _Step) -> None:
        held = slot_pods.held(step.snapshot)
        for key, pool in self._pools.objects.items():
            if pool["metadata"].get("deletionTimestamp"):
                continue
            try:
                spec, runtime = pool_spec(pool, self._runtimes.objects)
                digest = slot_pods.template_digest(spec, runtime)
                todo = slot_pods.pool_step(spec.replicas, digest, self._pods_of(key), held)
                bodies = [slot_pods.slot_pod(pool, spec, runtime, self._added) for _ in range(todo.create)]
            except InvalidInput as error:
                step.refused_pools[key] = str(error)
                self.events.tell(pool, "InvalidSpec", str(error), warning=True)
                continue
            for body in bodies:
                await self._create_pod(step, pool, body)
            for pod, why in todo.close:
                await self._annotate(step, pool, pod, why)
            for pod in todo.reopen:
                await self._annotate(step, pool, pod, None)
            for pod in todo.delete:
                await self._delete_pod(step, pool, pod)

    def _pods_of(self, pool: str) -> list[Object]:
        namespace, _, name = pool.partition("/")
        return [
            p
            for p in self._pods.objects.values()
            if p["metadata"]["namespace"] == namespace and p["metadata"]["labels"].get(POOL_LABEL) == name
        ]

    async def _create_pod(self, step: _Step, pool: Object, body: Object) -> None:
        namespace = pool["metadata"]["namespace"]
        made = await self._do(
            step, f"a pod of {key_of(pool)}", self._api.create, POD, namespace, body
        )  # fmt: skip
        if made is not None:
            self._pods.learned(made)
            self.events.tell(pool, "SlotCreated", f"pod {made['metadata']['name']}")

    async def _annotate(self, step: _Step, pool: Object, pod: Object, why: str | None) -> None:
        body = {"metadata": {"resourceVersion": pod["metadata"]["resourceVersion"], "annotations": {CLOSING: why}}}
        await self._patch_pod(step, pod, body, "")
        name = pod["metadata"]["name"]
        reason, message = ("SlotClosing", f"pod {name}: {why}") if why else ("SlotStays", f"pod {name}")
        self.events.tell(pool, reason, message)

    async def _delete_pod(self, step: _Step, pool: Object, pod: Object) -> None:
        metadata = pod["metadata"]
        await self._do(
            step,
            f"pod {key_of(pod)}",
            self._api.delete,
            POD,
            metadata["namespace"],
            metadata["name"],
            uid=metadata["uid"],
        )
        self.events.tell(pool, "SlotDeleted", f"pod {metadata['name']}: nothing serves there")

    # -- statuses

    async def _keep_statuses(self, step: _Step) -> None:
        now = written(self._clock.now())
        # Before every slot was heard of, less is seen than runs: what an earlier controller said stands.
        for key, found in list(self._models.objects.items()) if step.snapshot.synced else ():
            wanted = statuses.model_status(found, self._facts(step, key, found), now)
            await self._write_status(step, MODEL_DEPLOYMENT, self._models, found, wanted)
        held = slot_pods.held(step.snapshot)
        alive = {s.slot for s in step.snapshot.slots if s.alive}
        for key, found in list(self._pools.objects.items()):
            refused = step.refused_pools.get(key, "")
            wanted = statuses.pool_status(found, self._pods_of(key), alive.__contains__, held, refused, now)
            await self._write_status(step, DEVICE_POOL, self._pools, found, wanted)
        for found in list(self._runtimes.objects.values()):
            wanted = statuses.runtime_status(found, step.snapshot, self._pools_with(found), now)
            await self._write_status(step, ENGINE_RUNTIME, self._runtimes, found, wanted)

    def _pools_with(self, runtime: Object) -> frozenset[str]:
        namespace, name = runtime["metadata"]["namespace"], runtime["metadata"]["name"]
        return frozenset(
            key
            for key, pool in self._pools.objects.items()
            if pool["metadata"]["namespace"] == namespace
            and ((pool.get("spec") or {}).get("runtimeRef") or {}).get("name") == name
        )

    async def _write_status(self, step: _Step, kind: Kind, cache: Cache, found: Object, wanted: dict[str, Any]) -> None:
        if not statuses.differs(found, wanted):
            return
        metadata = found["metadata"]
        body = {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": wanted}
        done = await self._do(
            step,
            f"status of {kind.kind} {key_of(found)}",
            self._api.patch,
            kind,
            metadata["namespace"],
            metadata["name"],
            body,
            subresource="status",
        )
        if done is not None:
            cache.learned(done)

    def _facts(self, step: _Step, key: str, found: Object) -> statuses.ModelFacts:
        refused = step.intent.refused.get(key)
        spec = None if refused else model_spec(
            found, self._runtimes.objects, self._pools.objects, self._priorities.objects
        )  # fmt: skip
        alive = {s.slot for s in step.snapshot.slots if s.alive}
        instances = tuple(
            i
            for i in step.snapshot.instances
            if i.model == key and not i.remembered and all(m.slot in alive for m in i.members)
        )
        made = self._made
        operations = [v.record for v in self._catalog.operations.values() if v.record.model == key]
        scales = [o for o in operations if o.kind == "scale"]
        starts = [v.record for v in self._catalog.starts.values() if v.record.model == key]
        coming = [i for i in instances if i.desired is Desired.READY and i.state is not State.READY]
        times = [t for i in coming if (t := self._reconciler.recorder.expected_in(i.instance)) is not None]
        told = self._conflict(key, found)
        if told:
            self.events.tell(found, "ConflictingWriters", told, warning=True)
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
        namespace, _, name = key.partition("/")
        writer = Writer((found.get("spec") or {}).get("writer") or Writer.ANY.value)
        scalers = sorted(
            h["metadata"]["name"] for h in self._hpas.objects.values() if _targets(h, namespace, name)
        )  # fmt: skip
        if len(scalers) > 1:
            return f"several HorizontalPodAutoscalers write its number: {', '.join(scalers)}"
        if scalers and writer in (Writer.KUBECTL, Writer.AUTOSCALER):
            return (
                f"HorizontalPodAutoscaler {scalers[0]} writes its number, which spec.writer reserves for {writer.value}"
            )
        return conflict(writer, last_writer(found))


def _always(_: int) -> bool:
    return True


def _targets(hpa: Mapping[str, Any], namespace: str, name: str) -> bool:
    target = (hpa.get("spec") or {}).get("scaleTargetRef") or {}
    return (
        hpa["metadata"]["namespace"] == namespace
        and target.get("kind") == MODEL_DEPLOYMENT.kind
        and target.get("name") == name
    )
