"""The stream of changes (server-sent events): the id of each is the store revision, by which it resumes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.responses import Response, StreamingResponse

from relight.controller.api.callers import Anybody, Caller
from relight.controller.api.parts import Parts, Running
from relight.controller.api.problems import documented
from relight.controller.state.base import Change
from relight.core.errors import Denied, TooOld, Unavailable
from relight.core.tenants import tenant

router = APIRouter(prefix="/api/v1", tags=["events"])

# Of the others not even the change is told: assignments carry grants, keys of idempotency are others' business, and
# expectations come with the start that they were of.
HIDDEN = ("assignments", "idempotency", "expected")
SHOWN = frozenset({"models", "operations", "instances", "starts", "slots", "failures", "activity"})
_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("id", "event", "data")},
    "required": ["id", "event", "data"],
}
_COMMENT = b": open\n\n"


def _event(change: Change) -> bytes:
    kind, _, name = change.key.partition("/")
    data: dict[str, Any] = {"kind": kind, "name": name, "deleted": change.value is None}
    if change.value is not None and kind in SHOWN:
        data["object"] = json.loads(change.value)
    return f"id: {change.revision}\nevent: {kind}\ndata: {json.dumps(data)}\n\n".encode()


@router.get(
    "/events",
    responses=documented(410, 422)
    | {200: {"content": {"text/event-stream": {"schema": _SCHEMA}}, "description": "Events"}},
    response_class=Response,
)
async def events(
    caller: Anybody,
    parts: Running,
    last_event_id: Annotated[
        str,
        Header(
            alias="Last-Event-ID",
            pattern=r"^(0|[1-9][0-9]{0,15})?$",
            max_length=16,
            description="Go on after this revision; without it, with what happens from now on",
        ),
    ] = "",
    limit_seconds: Annotated[float, Query(ge=0, le=86_400, description="End after so long")] = 86_400.0,
    limit_events: Annotated[int, Query(ge=0, le=1_000_000, description="End after so many; 0: no bound")] = 0,
) -> Response:
    """Every change of models, operations, instances and starts, in order, each once."""
    # Whoever may see nothing at all is told so, rather than nothing for an hour.
    await caller.within("list", ())
    start = parts.catalog.revision if not last_event_id else int(last_event_id)
    await _check(parts, start)
    seconds = min(limit_seconds, parts.event_stream_seconds)
    return StreamingResponse(
        _stream(caller, parts, start, seconds, limit_events),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store"},
    )


async def _check(parts: Parts, start: int) -> None:
    """Raises TooOld while it can still be an answer of its own."""
    if start > parts.catalog.revision:
        raise TooOld(f"revision {start} is ahead of this store, which is at {parts.catalog.revision}: list again")
    if start < parts.catalog.revision:
        async with aclosing(parts.catalog.store.watch("", start)) as changes:
            await anext(changes)


class _Tenants:
    """Whose each change is. What is gone can be asked no more, so what was seen is remembered."""

    def __init__(self, parts: Parts) -> None:
        self._places, catalog = parts.reconciler.places, parts.catalog
        self._known = {
            f"{kind}/{name}": tenant(stored.record.model)
            for kind, entries in (
                ("operations", catalog.operations),
                ("instances", catalog.instances),
                ("starts", catalog.starts),
                ("failures", catalog.failures),
            )
            for name, stored in entries.items()
        }

    def of(self, change: Change) -> str:
        """The tenant; empty for nobody's."""
        kind, _, name = change.key.partition("/")
        if kind in ("models", "activity"):
            return tenant(name)
        if kind == "slots":
            return tenant(self._places.of(name).pool)
        if change.value is None:
            return self._known.pop(change.key, "")
        model = json.loads(change.value).get("model") if kind in SHOWN else None
        if not isinstance(model, str):
            return ""
        return self._known.setdefault(change.key, tenant(model))


async def _stream(caller: Caller, parts: Parts, start: int, seconds: float, count: int) -> AsyncIterator[bytes]:
    # Sent at once, so that a caller knows that it is listening before anything happens.
    yield _COMMENT
    sent, tenants = 0, _Tenants(parts)
    changes = parts.catalog.store.watch("", start)
    try:
        async with asyncio.timeout(seconds):
            async for change in changes:
                if change.key.partition("/")[0] in HIDDEN:
                    continue
                # Asked at each change: rights that were taken away end what is told.
                if not await caller.within("list", (tenants.of(change),)):
                    continue
                yield _event(change)
                sent += 1
                if sent == count:
                    return
    except (TimeoutError, TooOld, Denied, Unavailable):
        return
    finally:
        await changes.aclose()
