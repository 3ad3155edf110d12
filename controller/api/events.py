"""The stream of changes (server-sent events): the id of each is the store revision, by which it resumes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from starlette.responses import Response, StreamingResponse

from relight.controller.api.parts import Parts, Reader, Running
from relight.controller.api.problems import documented
from relight.controller.state.base import Change
from relight.core.errors import TooOld

router = APIRouter(prefix="/api/v1", tags=["events"])

# Assignments carry grants and keys of idempotency are others' business: that they changed is all that is told.
SHOWN = frozenset({"models", "operations", "instances", "starts", "slots", "failures", "activity"})
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
    | {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "Events"}},
    response_class=Response,
)
async def events(
    identity: Reader,
    parts: Running,
    last_event_id: Annotated[
        str | None,
        Header(
            alias="Last-Event-ID",
            pattern=r"^(0|[1-9][0-9]{0,15})$",
            description="Go on after this revision; without it, with what happens from now on",
        ),
    ] = None,
    limit_seconds: Annotated[float | None, Query(ge=0, le=86_400, description="End after so long")] = None,
    limit_events: Annotated[int | None, Query(ge=1, le=1_000_000, description="End after so many")] = None,
) -> Response:
    """Every change of models, operations, instances and starts, in order, each once."""
    start = parts.catalog.revision if last_event_id is None else int(last_event_id)
    await _check(parts, start)
    return StreamingResponse(
        _stream(parts, start, limit_seconds, limit_events),
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


async def _stream(parts: Parts, start: int, seconds: float | None, count: int | None) -> AsyncIterator[bytes]:
    # Sent at once, so that a caller knows that it is listening before anything happens.
    yield _COMMENT
    changes = parts.catalog.store.watch("", start)
    try:
        async with asyncio.timeout(seconds):
            async for change in changes:
                if change.key.partition("/")[0] in ("assignments", "idempotency"):
                    continue
                yield _event(change)
                if count is not None:
                    count -= 1
                    if count <= 0:
                        return
    except (TimeoutError, TooOld):
        return
    finally:
        await changes.aclose()
