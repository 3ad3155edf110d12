"""Routes without an identity: liveness, readiness, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from relight.controller.api.parts import Running
from relight.controller.api.problems import MEDIA_TYPE
from relight.core.errors import Unavailable

router = APIRouter(tags=["system"])

_NOT_READY: dict[int | str, dict[str, Any]] = {
    503: {
        "description": "Not now",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}


class Health(BaseModel):
    """That it is well, and how it stands."""

    status: str
    synced: bool
    revision: int
    epoch: int


def _health(parts: Running) -> Health:
    return Health(
        status="ok",
        synced=parts.reconciler.fleet.synced(),
        revision=parts.catalog.revision,
        epoch=parts.reconciler.lease.epoch,
    )


@router.get("/livez")
async def livez(parts: Running) -> Health:
    """Whether the process works."""
    return _health(parts)


@router.get("/healthz")
async def healthz(parts: Running) -> Health:
    """As /livez."""
    return _health(parts)


@router.get("/readyz", responses=_NOT_READY)
async def readyz(parts: Running) -> Health:
    """Whether it acts: every slot that it knows of was heard of or missed its grace time."""
    health = _health(parts)
    if not health.synced:
        raise Unavailable("not every slot was heard of yet", retry_after=1.0)
    return health


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Metrics"}},
)
async def metrics(request: Request, parts: Running) -> Response:
    """Prometheus text, or OpenMetrics where that is asked for (docs/metrics.md)."""
    text, media_type = parts.metrics.exposition(request.headers.get("accept", ""))
    return Response(text, headers={"content-type": media_type})
