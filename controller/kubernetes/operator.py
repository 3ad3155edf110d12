"""Keeps resources, pods and the control plane in step: level-triggered, woken by every change of either side.

Each step looks at everything anew: places of slots, what is wanted of models, pods of pools, labels and gates,
statuses. A write that is refused because its object moved is not repeated: the watch brings the newer one, and the next
step decides anew. Nothing is concluded from what is absent before every cache has been filled once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from relight.controller.accept import Accept
from relight.controller.doctor.case import Severity
from relight.controller.doctor.fleet import model_case
from relight.controller.doctor.judge import judge_model
from relight.controller.kubernetes import marks as slot_marks
from relight.controller.kubernetes import pods as slot_pods
from relight.controller.kubernetes.api import Api, Object
from relight.controller.kubernetes.caches import Caches
from relight.controller.kubernetes.election import Election
from relight.controller.kubernetes.events import Events
from relight.controller.kubernetes.intent import intent
from relight.controller.kubernetes.marks import Mark
from relight.controller.kubernetes.pods import Added
from relight.controller.kubernetes.resources import FINALIZER, MODEL_DEPLOYMENT
from relight.controller.kubernetes.slots import SlotPods
from relight.controller.kubernetes.told import Statuses
from relight.controller.kubernetes.writes import Step, Writes
from relight.controller.loop import Reconciler
from relight.controller.state.catalog import Catalog
from relight.core.clock import Clock
from relight.core.errors import Fenced, RelightError
from relight.core.logs import get_logger
from relight.core.records import Desired, ModelSpec, Placement, Plan, ScaleRequest, Snapshot

RETRY_SECONDS = 1.0
_SAID = {
    Desired.DRAINED: "Draining",
    Desired.DORMANT: "Sleeping",
    Desired.GONE: "Stopping",
}

log = get_logger("controller.kubernetes")


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
        self._caches = Caches(api, self.wake)
        self._writes = Writes(api, election)
        self._slots = SlotPods(self._caches, self._writes, reconciler, self.events, added, clock)
        self._statuses = Statuses(self._caches, self._writes, catalog, reconciler, self.events, clock)
        self._tasks: list[asyncio.Task[None]] = []

    def wake(self) -> None:
        """Asks for a step soon."""
        self._wanted.set()

    def passed(self, snapshot: Snapshot, made: Plan) -> None:
        """The reconcile loop has looked and planned."""
        self._made = made
        self.wake()

    def placed(self, placement: Placement) -> None:
        """A placement was written: an event says so."""
        found = self._caches.models.objects.get(placement.model)
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
        found = self._caches.models.objects.get(key)
        if found is not None:
            metadata = {**found["metadata"], "resourceVersion": scale["metadata"]["resourceVersion"]}
            spec = {**found["spec"], "replicas": scale["spec"].get("replicas", 0)}
            self._caches.models.learned({**found, "metadata": metadata, "spec": spec})
            before = found["spec"].get("replicas", 0)
            self.events.tell(found, "Scaled", f"from {before} to {spec['replicas']}, written by this controller")

    async def open(self) -> None:
        """Returns when every cache was filled once, and the places of slots are known."""
        for cache in self._caches.all:
            self._tasks.append(asyncio.create_task(cache.run(), name=f"watch {cache.kind.plural}"))
        self._tasks.append(asyncio.create_task(self.events.run(), name="events"))
        await self._caches.filled()
        self._set_places()
        # The store may be new: the pods tell where an earlier controller had something running.
        self._reconciler.fleet.expect(
            slot_pods.slot_of(p) for p in self._caches.pods.objects.values() if slot_marks.state_of(p) != Mark().state
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
                # One object that nobody thought of must not end the leader: the rest is kept, and the log tells of it.
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
        caches = self._caches
        wanted = intent(
            caches.models.objects,
            caches.runtimes.objects,
            caches.pools.objects,
            stored,
            snapshot,
            caches.priorities.objects,
        )
        step = Step(snapshot, wanted, self._made)
        await self._keep_intent(step)
        await self._slots.mark(step)
        await self._slots.keep(step)
        await self._statuses.keep(step)
        return step.retry

    def _set_places(self) -> None:
        places = slot_pods.places(self._caches.pods.objects, self._caches.nodes.objects, self._caches.pools.objects)
        self._reconciler.places.set(places)

    async def _keep_intent(self, step: Step) -> None:
        wanted = step.intent
        for found in wanted.hold:
            finalizers = [*(found["metadata"].get("finalizers") or []), FINALIZER]
            await self._finalizers(step, found, finalizers)
        for spec in wanted.put:
            if await self._writes.do(step, f"model {spec.key}", self._accept.put_model, spec, _always) is not None:
                self._advise(step, spec)
        for spec, by in wanted.scale:
            stored = self._catalog.models.get(spec.key)
            if self._numbering[spec.key] or (stored and stored.record.spec.replicas == spec.replicas):
                continue
            request = ScaleRequest(spec.key, spec.replicas, by, self._clock.now())
            operation = await self._writes.do(step, f"scale {spec.key}", self._accept.scale, request)
            if operation is not None:
                before, after = operation.replicas_before, operation.replicas_after
                message = f"from {before} to {after}, written by {by} ({operation.id})"
                self.events.tell(self._caches.models.objects[spec.key], "Scaled", message)
        for key in wanted.delete:
            await self._writes.do(step, f"model {key}", self._accept.delete_model, key, _always)
        for found in wanted.release:
            rest = [f for f in found["metadata"].get("finalizers") or [] if f != FINALIZER]
            await self._finalizers(step, found, rest)
            self.events.forget(found["metadata"].get("uid", ""))
        for key, error in wanted.refused.items():
            self.events.tell(self._caches.models.objects[key], "InvalidSpec", str(error), warning=True)

    def _advise(self, step: Step, spec: ModelSpec) -> None:
        """Tells what the doctor would say of a specification that was just taken, but for small advice."""
        about = self._caches.models.objects.get(spec.key)
        starts = [v.record for v in self._catalog.starts.values()]
        for found in judge_model(model_case(spec, step.snapshot, starts)):
            if about is not None and found.severity is not Severity.ADVICE:
                danger = found.severity is Severity.DANGER
                message = f"{found.title} ({found.evidence}): {found.fix} [{found.rule}]"
                self.events.tell(about, "Advised", message, warning=danger)

    async def _finalizers(self, step: Step, found: Object, finalizers: list[str]) -> None:
        body = {"metadata": {"finalizers": finalizers}}
        await self._writes.patch(step, MODEL_DEPLOYMENT, self._caches.models, found, body)
        self.wake()


def _always(_: int) -> bool:
    return True
