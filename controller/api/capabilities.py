"""Routes of capabilities: what engines can do on each slot, and which slots reach each other, as agents learned it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from relight.controller.api.callers import Anybody, only_seen
from relight.controller.api.parts import Running
from relight.controller.api.problems import documented
from relight.controller.api.schemas import Cursor, Limit, Page, paginate
from relight.core.records import Verdict

router = APIRouter(prefix="/api/v1", tags=["fleet"])


class CapabilityOut(BaseModel):
    """One capability of one engine on one slot."""

    slot: str
    engine: str
    name: str
    verdict: Verdict
    reason: str
    ranks: int
    at: float


@router.get("/capabilities", responses=documented(422), response_model=Page[CapabilityOut])
async def list_capabilities(caller: Anybody, parts: Running, limit: Limit = 100, cursor: Cursor = "") -> Any:
    """What engines can do on the devices and versions of each slot, and what that rests on."""
    slots = await only_seen(caller, parts.reconciler.snapshot().slots, lambda s: s.pool)
    found = [
        (f"{slot.slot}/{known.engine}/{known.name}/{known.ranks:04}", {"slot": slot.slot, **asdict(known)})
        for slot in slots
        for known in slot.capabilities
    ]
    return paginate(sorted(found, key=lambda pair: pair[0]), limit, cursor, lambda told: told)


class PathOut(BaseModel):
    """One way by which a slot tried to read another one."""

    slot: str
    to: str
    transport: str
    verdict: Verdict
    reason: str
    at: float


@router.get("/paths", responses=documented(422), response_model=Page[PathOut])
async def list_paths(caller: Anybody, parts: Running, limit: Limit = 100, cursor: Cursor = "") -> Any:
    """Which slots reach each other's engines, by what, and what came of trying; absent pairs were not tried."""
    slots = await only_seen(caller, parts.reconciler.snapshot().slots, lambda s: s.pool)
    found = [
        (
            f"{slot.slot}/{way.slot}/{way.transport}",
            {"slot": slot.slot, "to": way.slot, **{n: v for n, v in asdict(way).items() if n != "slot"}},
        )
        for slot in slots
        if slot.alive
        for way in slot.reach
    ]
    return paginate(sorted(found, key=lambda pair: pair[0]), limit, cursor, lambda told: told)
