"""Routes of operations."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from relight.controller.api.parts import Id, Parts, Reader, Running
from relight.controller.api.problems import AsciiJson, documented
from relight.controller.api.schemas import Cursor, Limit, Page, paginate
from relight.core.errors import NotFound
from relight.core.records import Operation, OperationState

router = APIRouter(prefix="/api/v1", tags=["operations"])

MAX_WAIT_SECONDS = 60.0


def _find(parts: Parts, name: str) -> Operation:
    stored = parts.catalog.operations.get(name)
    if stored is None:
        raise NotFound(f"there is no operation {name}")
    return stored.record


@router.get("/operations", responses=documented(422), response_model=Page[Operation])
async def list_operations(identity: Reader, parts: Running, limit: Limit = 100, cursor: Cursor = "") -> Response:
    """Operations, newest first."""
    found = [
        # The key grows with age, so that pages go from the newest to the oldest.
        (f"{1e12 - v.record.created_at:020.6f}-{name}", v.record)
        for name, v in parts.catalog.operations.items()
    ]
    return AsciiJson(paginate(sorted(found, key=lambda pair: pair[0]), limit, cursor, asdict))


@router.get("/operations/{id}", responses=documented(404, 422), response_model=Operation)
async def get_operation(
    id: Id,
    identity: Reader,
    parts: Running,
    wait: Annotated[
        float, Query(ge=0, le=MAX_WAIT_SECONDS, description="Answer when it ended, or after so many seconds")
    ] = 0.0,
) -> Response:
    """One operation."""
    _find(parts, id)
    if wait > 0:
        waiters = parts.operations_changed
        await waiters.wait(id, wait, lambda: _find(parts, id).state is not OperationState.RUNNING)
    return AsciiJson(asdict(_find(parts, id)))
