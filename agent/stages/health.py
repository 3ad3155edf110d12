"""Health: an engine that stopped making progress is failed and its tree reaped, open port or not."""

from __future__ import annotations

import asyncio

from relight.agent.member import Member
from relight.agent.stages import shapes
from relight.agent.stages.common import RETRY_AFTER, Tools, explain
from relight.core.states import State

WATCHED = frozenset({State.READY, State.DRAINING})
LOOK_DEADLINE = 5.0
"""Seconds that one look at an engine may take."""
MISSES = 3
"""Looks in a row that must go unanswered: a busy engine may be late once."""


async def look(member: Member, tools: Tools, misses: dict[str, int]) -> str:
    """The reason why the engine counts as dead, or "" while it does not. `misses` is kept by the caller."""
    try:
        async with asyncio.timeout(LOOK_DEADLINE):
            health = await tools.attach(member).health()
    except Exception as error:  # noqa: BLE001 - any failure to answer is a miss
        misses[member.instance] = misses.get(member.instance, 0) + 1
        if misses[member.instance] < MISSES:
            return ""
        return f"no answer to {MISSES} health checks in a row, the last: {explain(error)}"
    misses.pop(member.instance, None)
    if not health.alive:
        return health.reason or "the engine says that it is dead"
    if member.requests_running != health.requests_running:
        member.requests_running = health.requests_running
        member.changed(False)
    if shapes.due(member, tools):
        await shapes.read(member, tools)
    return ""


async def bury(member: Member, tools: Tools, reason: str) -> None:
    """Ends what is left of the tree at once, then FAILED: the device must be free when others hear of it."""
    await tools.end(member, 0)
    member.pid = member.start_time = 0
    member.requests_running = 0
    if member.handle is not None:
        await member.handle.close()
        member.handle = None
    member.fail(reason, RETRY_AFTER)
