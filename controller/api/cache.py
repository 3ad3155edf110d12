"""Routes of the compile-cache rings: bundles, one key in full, the end of a quarantine. Each tenant's ring is asked by
way of one of its agents."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path

from relight.controller.api.callers import Anybody, Caller
from relight.controller.api.parts import Parts, Running
from relight.controller.api.problems import documented
from relight.controller.api.schemas import Cursor, Limit, Page, paginate
from relight.core.errors import Denied, NotFound, Unavailable
from relight.core.records import CacheAnswer, CacheBundle, CacheEntry, CacheQuery, SlotView
from relight.core.tenants import tenant

router = APIRouter(prefix="/api/v1/cache", tags=["cache"])

Key = Annotated[
    str, Path(pattern="^[0-9a-f]{4,32}$", description="A key's digest, or as much of its beginning as is its alone")
]


async def _ask(caller: Caller, parts: Parts, verb: str, query: CacheQuery) -> list[CacheAnswer]:
    """What the rings answer in whose namespaces the caller may do `verb` to models.

    Raises Denied where that is none, and the last of their errors when none answers.
    """
    slots = [s for s in parts.reconciler.snapshot().slots if s.alive and s.cache is not None]
    tenants = {tenant(s.pool) for s in slots}
    allowed = await caller.within(verb, tenants)
    if tenants and not allowed:
        raise Denied(f"{caller.identity.name} may {verb} models nowhere", authenticated=True)
    rings = [[s for s in slots if tenant(s.pool) == whose] for whose in sorted(allowed)]
    found = await asyncio.gather(*(_ask_ring(parts, ring, query) for ring in rings), return_exceptions=True)
    answers = [answer for answer in found if isinstance(answer, CacheAnswer)]
    if answers:
        return answers
    # A key that one ring does not have may be in the one that is away.
    for error in sorted((e for e in found if isinstance(e, BaseException)), key=lambda e: isinstance(e, NotFound)):
        raise error
    raise Unavailable("no agent with a cache node is attached", retry_after=2.0)


async def _ask_ring(parts: Parts, slots: Sequence[SlotView], query: CacheQuery) -> CacheAnswer:
    """The answer of the first agent that gives one: each of them asks all nodes."""
    seen, refused = parts.reconciler.fleet.seen, "no agent with a cache node is attached"
    for slot in slots:
        address = seen[slot.slot].report.agent_address if slot.slot in seen else ""
        if not address:
            continue
        try:
            return await parts.agents.cache(slot.slot, address, query)
        except Unavailable as error:
            refused = str(error)
    raise Unavailable(refused, retry_after=2.0)


@router.get("/bundles", responses=documented(422), response_model=Page[CacheBundle])
async def list_bundles(caller: Anybody, parts: Running, limit: Limit = 100, cursor: Cursor = "") -> Any:
    """Keys of the rings: bundles with the nodes that hold them, and quarantines."""
    answers = await _ask(caller, parts, "list", CacheQuery("list"))
    found = [(f"{b.key}-{b.bundle}", b) for answer in answers for b in answer.bundles]
    return paginate(sorted(found, key=lambda pair: pair[0]), limit, cursor, lambda bundle: bundle)


@router.get("/keys/{key}", responses=documented(404, 422), response_model=CacheEntry)
async def get_key(key: Key, caller: Anybody, parts: Running) -> Any:
    """One key: every component of it, and what its bundle's manifest says."""
    return (await _ask(caller, parts, "list", CacheQuery("show", key)))[0].entry


@router.post("/keys/{key}/release", responses=documented(404, 422), response_model=CacheAnswer)
async def release_key(key: Key, caller: Anybody, parts: Running) -> Any:
    """Ends a key's quarantine on every node; the next start of it compiles anew."""
    answers = await _ask(caller, parts, "patch", CacheQuery("release", key))
    unheard = {node: why for answer in answers for node, why in answer.unheard.items()}
    return CacheAnswer(nodes=tuple(n for answer in answers for n in answer.nodes), unheard=unheard)
