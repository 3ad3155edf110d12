"""Routes of what stands where: instances and their logs, slots, devices."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse

from relight.controller.api.callers import Anybody, Caller, Right, only_seen
from relight.controller.api.parts import Id, Parts, Running
from relight.controller.api.problems import documented
from relight.controller.api.schemas import (
    Cursor,
    DeviceOut,
    InstanceOut,
    Limit,
    Page,
    SlotOut,
    paginate,
    show_cache,
    show_devices,
    show_host_tier,
    show_instance,
)
from relight.core.errors import NotFound, Unavailable
from relight.core.records import InstanceView, SlotView

router = APIRouter(prefix="/api/v1", tags=["fleet"])


def _instances(parts: Parts) -> list[InstanceView]:
    return [i for i in parts.reconciler.snapshot().instances if not i.remembered]


async def _find(caller: Caller, parts: Parts, name: str) -> InstanceView:
    for instance in await only_seen(caller, (i for i in _instances(parts) if i.instance == name), lambda i: i.model):
        return instance
    raise NotFound(f"there is no instance {name}")


@router.get("/instances", responses=documented(422), response_model=Page[InstanceOut])
async def list_instances(
    caller: Anybody,
    parts: Running,
    limit: Limit = 100,
    cursor: Cursor = "",
    model: Annotated[str, Query(max_length=127, description="Only of this model, as namespace/name")] = "",
) -> Any:
    """Instances: running, dormant, and in between."""
    seen = await only_seen(caller, _instances(parts), lambda i: i.model)
    found = [(i.instance, i) for i in seen if model in ("", i.model)]
    return paginate(sorted(found, key=lambda pair: pair[0]), limit, cursor, show_instance)


@router.get("/instances/{id}", responses=documented(404, 422), response_model=InstanceOut)
async def get_instance(id: Id, caller: Anybody, parts: Running) -> Any:
    """One instance."""
    return show_instance(await _find(caller, parts, id))


async def _log(
    caller: Caller, parts: Parts, id: str, rank: int, tail_bytes: int, follow: bool
) -> tuple[bytes, AsyncGenerator[bytes, None]]:
    """The first chunk, fetched before a status is sent (an agent that fails is an error, not an end), and the rest."""
    known = next((v for v in _instances(parts) if v.instance == id), None)
    seen = parts.reconciler.fleet.seen
    if known is None:
        # Whose it was nobody knows any more: that takes the right to read every log.
        await caller.require(Right("get", group="", resource="pods", subresource="log"))
        asked = [(slot, s.report.agent_address) for slot, s in seen.items() if s.report.agent_address]
    else:
        member = next((m for m in known.members if m.rank == rank), None)
        if member is None:
            raise NotFound(f"{id} has no member of rank {rank}")
        # Where the cluster decides, an engine's log is as its pod's.
        pod, _, namespace = member.slot.rpartition(".")
        await caller.require(Right("get", namespace, pod, "", "pods", "log"))
        found = seen.get(member.slot)
        if found is None or not found.report.agent_address:
            raise Unavailable(f"the agent of slot {member.slot} is not attached", retry_after=2.0)
        asked = [(member.slot, found.report.agent_address)]
    for slot, address in asked:
        chunks = parts.agents.logs(slot, address, id, tail_bytes, follow=follow)
        try:
            return await anext(chunks, b""), chunks
        except NotFound:
            continue
    raise NotFound(f"there is no instance {id}, and no agent keeps a log of it")


@router.get(
    "/instances/{id}/logs",
    responses=documented(404, 422)
    | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "The log's end"}},
    response_class=Response,
)
async def get_logs(
    id: Id,
    caller: Anybody,
    parts: Running,
    tail_bytes: Annotated[int, Query(ge=0, le=16 << 20)] = 64 << 10,
    follow: Annotated[bool, Query(description="Go on with what is appended, until the caller leaves")] = False,
    rank: Annotated[int, Query(ge=0, le=255, description="Which member's log")] = 0,
) -> Response:
    """The end of an engine's log, by way of its agent; agents keep the newest logs of ended instances too."""
    first, chunks = await _log(caller, parts, id, rank, tail_bytes, follow)

    async def body() -> AsyncIterator[bytes]:
        async with aclosing(chunks):
            yield first
            async for chunk in chunks:
                yield chunk

    return StreamingResponse(body(), media_type="text/plain; charset=utf-8")


@router.get("/slots", responses=documented(422), response_model=Page[SlotOut])
async def list_slots(caller: Anybody, parts: Running, limit: Limit = 100, cursor: Cursor = "") -> Any:
    """Slots and their agents."""
    found = [(s.slot, s) for s in await only_seen(caller, parts.reconciler.snapshot().slots, lambda s: s.pool)]
    return paginate(found, limit, cursor, lambda slot: _show_slot(parts, slot))


def _show_slot(parts: Parts, slot: SlotView) -> SlotOut:
    seen = parts.reconciler.fleet.seen.get(slot.slot)
    facts = parts.catalog.slots.get(slot.slot)
    stored = parts.catalog.assignments.get(slot.slot)
    return SlotOut(
        name=slot.slot,
        alive=slot.alive,
        host=seen.report.host if seen else (facts.record.host if facts else ""),
        boot_id=slot.boot_id,
        agent=seen.report.agent if seen else "",
        agent_address=seen.report.agent_address if seen else "",
        force_tcp=slot.force_tcp,
        transports=dict(slot.transports),
        engines=dict(slot.engines),
        devices=len(slot.devices),
        assigned_revision=stored.record.revision if stored else 0,
        acknowledged_revision=seen.report.revision if seen else 0,
        cache=show_cache(slot.cache),
        host_tier=show_host_tier(slot.host_tier),
    )


@router.get("/devices", responses=documented(422), response_model=Page[DeviceOut])
async def list_devices(caller: Anybody, parts: Running, limit: Limit = 100, cursor: Cursor = "") -> Any:
    """Devices, and who holds their memory."""
    snapshot = parts.reconciler.snapshot()
    own = [i for i in snapshot.instances if not i.remembered]
    slots = await only_seen(caller, snapshot.slots, lambda s: s.pool)
    found = [(f"{d.slot}/{d.id}", d) for slot in slots for d in show_devices(slot, own)]
    return paginate(sorted(found, key=lambda pair: pair[0]), limit, cursor, lambda device: device)
