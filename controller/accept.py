"""Accepting a change: what is stored, atomically, before a caller hears that it was accepted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from relight.controller.loop import Reconciler
from relight.controller.state.base import ABSENT, Write
from relight.controller.state.catalog import Accepted, Activity, Catalog, StoredModel, drop, put
from relight.core import failpoints
from relight.core.clock import Clock
from relight.core.errors import Conflict, FieldError, InvalidInput, NotFound
from relight.core.ids import new_id
from relight.core.logs import get_logger
from relight.core.records import (
    Desired,
    ModelSpec,
    Operation,
    OperationState,
    Phase,
    Plan,
    ScaleRequest,
)

log = get_logger("controller.accept")

_TRIES = 8
"""How often an accept is repeated when the model moved under it, before the caller is told."""


class PreconditionFailed(Conflict):
    """The model is not at the revision that the caller named: read it again, then decide anew."""

    code = "precondition-failed"


@dataclass(slots=True)
class Accept:
    """The one place where intent is written: models and scale requests."""

    catalog: Catalog
    reconciler: Reconciler
    clock: Clock

    async def put_model(self, spec: ModelSpec, precondition: Callable[[int], bool]) -> tuple[int, bool]:
        """Stores the spec; (its revision, whether it is new). Raises PreconditionFailed, Conflict."""
        stored = self.catalog.models.get(spec.key)
        present = stored.revision if stored else ABSENT
        if not precondition(present):
            raise PreconditionFailed(f"{spec.key} is at revision {present}")
        key = f"models/{spec.key}"
        writes = [*self._fresh_start(spec.key), put("models", spec.key, StoredModel(spec, self.clock.now()))]
        revision = await self.catalog.commit(writes, expect={key: present}, fence=self.reconciler.lease)
        return revision, stored is None

    async def make_known(self, spec: ModelSpec) -> None:
        """Stores a configured model; the replica number of one that is known already is left alone."""
        stored = self.catalog.models.get(spec.key)
        if stored is not None:
            spec = replace(spec, replicas=stored.record.spec.replicas)
            if spec == stored.record.spec:
                return
        await self.put_model(spec, lambda _: True)

    async def delete_model(self, key: str, precondition: Callable[[int], bool]) -> None:
        """Deletes the model; its instances are drained and ended. Raises NotFound, PreconditionFailed."""
        stored = self.catalog.models.get(key)
        if stored is None:
            raise NotFound(f"there is no model {key}")
        if not precondition(stored.revision):
            raise PreconditionFailed(f"{key} is at revision {stored.revision}")
        writes = [*self._fresh_start(key, keep_burst=False), drop("models", key)]
        expect = {f"models/{key}": stored.revision}
        await self.catalog.commit(writes, expect=expect, fence=self.reconciler.lease)

    def preview(self, request: ScaleRequest) -> Plan:
        """What `request` would make of the fleet as it is now; nothing is written."""
        spec = self._wanted(request)
        snapshot = self.reconciler.snapshot()
        models = tuple(
            replace(
                view,
                spec=spec,
                allowed_rungs=request.rungs,
                changed_at=self.clock.now(),
                activated_at=None,
                idled_at=None,
            )
            if view.spec.key == request.model
            else view
            for view in snapshot.models
        )
        # Accepting gives the model's failures another chance, so the preview must too.
        instances = tuple(i for i in snapshot.instances if not (i.remembered and i.model == request.model))
        return self.reconciler.preview(replace(snapshot, models=models, instances=instances))

    async def scale(self, request: ScaleRequest) -> Operation:
        """Stores the number and its operation; a repeat of the same key answers the same operation.

        Raises NotFound, InvalidInput for a key that came with another payload, Conflict above max_replicas.
        """
        for _ in range(_TRIES):
            repeated = self._repeated(request)
            if repeated is not None:
                return repeated
            try:
                operation = await self._scale(request)
            except Conflict:
                if self._settled(request):
                    raise
                continue
            failpoints.hit("controller.accept.after-operation")
            log.info("operation.accepted", operation=operation.id, model=request.model, replicas=request.replicas)
            return operation
        raise Conflict(f"{request.model} is being changed by others; try again")

    def _settled(self, request: ScaleRequest) -> bool:
        stored = self.catalog.models.get(request.model)
        return stored is None or request.replicas > stored.record.spec.max_replicas

    def _wanted(self, request: ScaleRequest) -> ModelSpec:
        stored = self.catalog.models.get(request.model)
        if stored is None:
            raise NotFound(f"there is no model {request.model}")
        spec = stored.record.spec
        if request.replicas > spec.max_replicas:
            raise Conflict(f"{request.model} allows at most {spec.max_replicas} replicas: raise max_replicas first")
        return replace(spec, replicas=request.replicas)

    async def _scale(self, request: ScaleRequest) -> Operation:
        spec = self._wanted(request)
        now = self.clock.now()
        running = [
            v.record
            for v in self.catalog.operations.values()
            if v.record.model == request.model and v.record.kind == "scale" and v.record.state is OperationState.RUNNING
        ]
        before = sum(
            i.desired is Desired.READY and i.rank == 0 and i.model == request.model
            for v in self.catalog.assignments.values()
            for i in v.record.instances
        )
        operation = Operation(
            id=new_id("op"),
            kind="scale",
            model=request.model,
            by=request.by,
            state=OperationState.RUNNING,
            reason=f"{request.by} asked for {request.replicas}",
            created_at=now,
            replicas_before=before,
            replicas_after=request.replicas,
            idempotency_key=request.idempotency_key,
            rungs=request.rungs,
            phases=(Phase("accept", min(request.received_at, now), now),),
        )
        writes = [put("operations", operation.id, operation)]
        writes += [
            put(
                "operations",
                old.id,
                replace(
                    old,
                    state=OperationState.SUPERSEDED,
                    reason=f"superseded by {operation.id}",
                    finished_at=now,
                ),
            )
            for old in running
        ]
        writes += self._fresh_start(request.model)
        expect = {f"models/{request.model}": self.catalog.models[request.model].revision}
        if request.idempotency_key:
            name = _key_name(request)
            stored = self.catalog.idempotency.get(name)
            writes.append(put("idempotency", name, Accepted(_payload(request), operation.id, now)))
            expect[f"idempotency/{name}"] = stored.revision if stored else ABSENT
        writes.append(put("models", request.model, StoredModel(spec, now)))
        await self.catalog.commit(writes, expect=expect, fence=self.reconciler.lease)
        return operation

    def _fresh_start(self, model: str, *, keep_burst: bool = True) -> list[Write]:
        """Somebody asked anew: what failed before and what demand did alone is forgotten, but not what was promised."""
        writes = [drop("failures", n) for n, v in self.catalog.failures.items() if v.record.model == model]
        if model in self.catalog.activity:
            burst = self.catalog.activity[model].record.burst
            kept = burst and keep_burst
            writes.append(put("activity", model, Activity(burst=burst)) if kept else drop("activity", model))
        return writes

    def _repeated(self, request: ScaleRequest) -> Operation | None:
        if not request.idempotency_key:
            return None
        accepted = self.catalog.idempotency.get(_key_name(request))
        if accepted is None:
            return None
        if accepted.record.payload != _payload(request):
            raise InvalidInput(
                "the idempotency key was used before",
                [FieldError("Idempotency-Key", "a key of its own for every other payload", "a used key")],
            )
        stored = self.catalog.operations.get(accepted.record.operation)
        return stored.record if stored else None


def _payload(request: ScaleRequest) -> str:
    return json.dumps([request.replicas, list(request.rungs)])


def _key_name(request: ScaleRequest) -> str:
    # Scoped by who asked: one user's key never answers with another user's operation.
    text = f"{request.by}\n{request.model}\n{request.idempotency_key}"
    return hashlib.sha256(text.encode()).hexdigest()[:40]
