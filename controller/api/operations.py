"""Routes of operations."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from relight.controller.api.callers import Anybody, Caller, only_seen
from relight.controller.api.parts import Id, Parts, Running
from relight.controller.api.problems import AsciiJson, documented
from relight.controller.api.schemas import Cursor, Limit, Page, paginate
from relight.core.errors import NotFound
from relight.core.records import Operation, OperationState

router = APIRouter(prefix="/api/v1", tags=["operations"])

MAX_WAIT_SECONDS = 60.0


async def _find(caller: Caller, parts: Parts, name: str) -> Operation:
    stored = parts.catalog.operations.get(name)
    for operation in await only_seen(caller, [stored.record] if stored else [], lambda o: o.model):
        return operation
    raise NotFound(f"there is no operation {name}")


@router.get("/operations", responses=documented(422), response_model=Page[Operation])
async def list_operations(caller: Anybody, parts: Running, limit: Limit = 100, cursor: Cursor = "") -> Response:
    """Operations, newest first."""
    found = [
        # The key grows with age, so that pages go from the newest to the oldest.
        (f"{1e12 - record.created_at:020.6f}-{record.id}", record)
        for record in await only_seen(caller, (v.record for v in parts.catalog.operations.values()), lambda o: o.model)
    ]
    return AsciiJson(paginate(sorted(found, key=lambda pair: pair[0]), limit, cursor, asdict))


@router.get("/operations/{id}", responses=documented(404, 422), response_model=Operation)
async def get_operation(
    id: Id,
    caller: Anybody,
    parts: Running,
    wait: Annotated[
        float, Query(ge=0, le=MAX_WAIT_SECONDS, description="Answer when it ended, or after so many seconds")
    ] = 0.0,
) -> Response:
    """One operation."""
    await _find(caller, parts, id)
    if wait > 0:

        def over() -> bool:
            stored = parts.catalog.operations.get(id)
            return stored is None or stored.record.state is not OperationState.RUNNING

        await parts.operations_changed.wait(id, wait, over)
    return AsciiJson(asdict(await _find(caller, parts, id)))
