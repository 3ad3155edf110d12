"""Routes of the compile-cache ring: its bundles, one key in full, the end of a quarantine. Asked by way of an agent."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path

from relight.controller.api.parts import Parts, Reader, Running, Writer
from relight.controller.api.problems import documented
from relight.controller.api.schemas import Cursor, Limit, Page, paginate
from relight.core.errors import Unavailable
from relight.core.records import CacheAnswer, CacheBundle, CacheEntry, CacheQuery

router = APIRouter(prefix="/api/v1/cache", tags=["cache"])

Key = Annotated[
    str, Path(pattern="^[0-9a-f]{4,32}$", description="A key's digest, or as much of its beginning as is its alone")
]


async def _ask(parts: Parts, query: CacheQuery) -> CacheAnswer:
    """The answer of the first agent that gives one: each of them asks all nodes."""
    snapshot = parts.reconciler.snapshot()
    seen = parts.reconciler.fleet.seen
    members = [s.slot for s in snapshot.slots if s.alive and s.cache is not None and s.slot in seen]
    refused = "no agent with a cache node is attached"
    for slot in members:
        address = seen[slot].report.agent_address
        if not address:
            continue
        try:
            return await parts.agents.cache(address, query)
        except Unavailable as error:
            refused = str(error)
    raise Unavailable(refused, retry_after=2.0)


@router.get("/bundles", responses=documented(422), response_model=Page[CacheBundle])
async def list_bundles(identity: Reader, parts: Running, limit: Limit = 100, cursor: Cursor = "") -> Any:
    """Keys of the ring: bundles with the nodes that hold them, and quarantines."""
    answer = await _ask(parts, CacheQuery("list"))
    return paginate([(f"{b.key}-{b.bundle}", b) for b in answer.bundles], limit, cursor, lambda bundle: bundle)


@router.get("/keys/{key}", responses=documented(404, 422), response_model=CacheEntry)
async def get_key(key: Key, identity: Reader, parts: Running) -> Any:
    """One key: every component of it, and what its bundle's manifest says."""
    return (await _ask(parts, CacheQuery("show", key))).entry


@router.post("/keys/{key}/release", responses=documented(404, 422), response_model=CacheAnswer)
async def release_key(key: Key, identity: Writer, parts: Running) -> Any:
    """Ends a key's quarantine on every node; the next start of it compiles anew."""
    return await _ask(parts, CacheQuery("release", key))
